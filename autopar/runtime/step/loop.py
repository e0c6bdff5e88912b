"""The classic loop on one rank: passes that compute gradients, backward() and updates apart.

In: a training pass, which runs the whole program of a step but its update. Out: the loss, and this
rank's gradients of the pass, which wait for ``backward()``. That adds them, times its factor, to
the gradients that parameters have, and an update uses the sum. Only passes, clipping and the check
of a sum communicate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.faults.progress import encoded, report
from autopar.runtime.state.optimizers import HyperParameters
from autopar.runtime.step.agreement import Agreement, NonFinite, Verdict
from autopar.runtime.step.bound import Bound
from autopar.runtime.step.clipping import Clipper
from autopar.runtime.step.diagnosis import StepRefused
from autopar.runtime.step.executor import StepResult
from autopar.runtime.step.rank import RankRuntime
from autopar.runtime.step.reductions import Arrived, Gradients
from autopar.runtime.step.updates import Updates

_UPDATE = encoded("the update of the weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Computed:
    """The gradients of one pass by value, None where they are not finite and shall be skipped."""

    loss: Tensor
    gradients: Mapping[int, Tensor] | None


class _NoUpdate:
    """The updater of a pass: it agrees with the other ranks, and updates nothing."""

    def __init__(self, agreement: Agreement | None, updates: Updates) -> None:
        self.loss_scale = updates.loss_scale
        self._agreement = agreement
        self._updates = updates
        if agreement is not None:
            agreement.begin_step()

    @property
    def agrees(self) -> bool:
        return self._agreement is not None

    def inspect(self, gradients: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> None:
        if self._agreement is not None:
            self._agreement.inspect(gradients, dtypes)

    def total_loss(self, part: Tensor | None) -> Tensor:
        assert self._agreement is not None
        if self._updates.is_void:
            self._agreement.refuse()
        return self._agreement.total_loss(part)

    def may_update(self, arrived: Arrived[Tensor], loss: Tensor | None) -> bool:
        raise AssertionError("a program that updates early runs whole steps only")

    def update_early(self, arrived: Arrived[Tensor]) -> None:
        raise AssertionError("a program that updates early runs whole steps only")

    def update(self, values: Any, gradients: Gradients[Tensor]) -> None:
        pass

    def update_last(self, values: Any) -> None:
        pass

    def is_finite(self, gradients: Iterable[Tensor]) -> bool:
        """Whether the pass is finite on all ranks, as far as they agree on it."""
        if self._agreement is None:
            return True
        if self._agreement.verdict is Verdict.DOUBTFUL:
            return self._agreement.are_finite(gradients)
        return self._agreement.verdict is Verdict.FINITE


class LoopRuntime(RankRuntime):
    """A rank that also runs the classic loop; all methods are called on all ranks alike."""

    _computed: dict[int, _Computed]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._computed = {}
        self._agreements: dict[int, tuple[Bound, Agreement]] = {}
        self._clipper = self.updates.clipper
        self._num_passes = 0  # since the last update
        self._last_loss: Tensor | None = None
        self._agreement: Agreement | None = None
        self._start_again()

    def _start_again(self) -> None:
        """Forget what is known of the accumulated gradients."""
        self._is_accumulating = self._is_void = False
        self._is_sure = True

    @torch.no_grad()
    def train_step(
        self, tensors: Sequence[Tensor], *, local: bool = False, slot: int = 0
    ) -> Tensor:
        """As `RankRuntime.train_step`, whose gradients replace the accumulated ones."""
        self._num_passes = 0
        self._start_again()
        return super().train_step(tensors, local=local, slot=slot)

    @contextlib.contextmanager
    def _seeded_run(self, is_random: bool) -> Iterator[None]:
        """Each pass of an update draws its own numbers, the first those of a training step."""
        with super()._seeded_run(is_random):
            if is_random and self._num_passes:
                self.machine.seeds.begin_pass(self._num_passes)
            yield

    @torch.no_grad()
    def training_pass(
        self,
        tensors: Sequence[Tensor],
        number: int,
        dropped: Sequence[int],
        *,
        local: bool = False,
        slot: int = 0,
    ) -> Tensor:
        """Run forward and backward on one global batch; the loss, equal on all ranks.

        The gradients are kept as pass ``number``, and those of ``dropped`` passes are released. A
        pass that is not finite is refused as `train_step` refuses such a step, or is skipped, as
        where scaled gradients overflow: then the update that would use it is skipped.
        """
        self._check_optimizer()
        for each in dropped:
            self._computed.pop(each, None)
        self._num_forwards = 0
        bound = self._select(slot)
        self.updates.settle()
        batches = [
            self.inputs(bound.program, tensors, index, local=local)
            for index in range(bound.program.num_microbatches)
        ]
        self._agreement = self._agreement_of(slot)
        self.updates.is_void = False
        self.recovery.begin_step()
        updater = _NoUpdate(self._agreement, self.updates)
        with self._seeded_run(bound.is_random), self._run_by(self.recovery):
            result = bound.executor.step(
                bound.parameters, bound.held(self._buffers), batches, updater
            )
        loss = result.loss.reshape(())
        gradients = _gradients(result)
        if updater.is_finite(gradients.values()):
            if updater.loss_scale != 1:
                gradients = {v: g * (1 / updater.loss_scale) for v, g in gradients.items()}
            self._take(bound, result.buffers)
            computed = _Computed(loss=loss, gradients=gradients)
        elif (failed := self.recovery.failed_step(self.num_steps + 1)) is not None:
            bound.executor.fixed.clear()
            raise StepRefused(failed)
        elif self.updates.backs_off(loss) or self.options.nonfinite is NonFinite.SKIP:
            computed = _Computed(loss=loss, gradients=None)
        else:
            del result, gradients
            raise StepRefused(self._diagnosed(batches, loss))
        self._computed[number] = computed
        self._num_passes += 1
        if self.device.type == "cpu":
            self._freed_memory.after_step()
        return loss

    def _agreement_of(self, slot: int) -> Agreement | None:
        """The ranks' agreement on a pass of this program, unless they need none."""
        bound = self._trainings[slot]
        if self.options.nonfinite is NonFinite.IGNORE:
            return None
        if bound.agreement is not None:
            return bound.agreement
        if slot not in self._agreements or self._agreements[slot][0] is not bound:
            self._agreements[slot] = bound, Agreement(bound.program, self.communicator)
        return self._agreements[slot][1]

    @torch.no_grad()
    def accumulate(self, number: int, factor: float) -> None:
        """Add the gradients of a pass, times a factor, to those of the parameters."""
        computed = self._computed.pop(number)
        if not self._is_accumulating:
            self.zero_gradients()
        self._is_sure = self._is_sure and not self._is_accumulating and abs(factor) <= 1
        self._is_accumulating = True
        self._last_loss = computed.loss
        if computed.gradients is None:
            self._is_void = True
            return
        for value, gradient in computed.gradients.items():
            parameter = self.updates.trained[value]
            # Not in place: two parameters may share one gradient.
            if parameter.grad is not None:
                parameter.grad = torch.add(parameter.grad, gradient, alpha=factor)
            else:
                parameter.grad = gradient if factor == 1 else gradient * factor

    @torch.no_grad()
    def update(self, changes: HyperParameters) -> bool:
        """Update the weights with the accumulated gradients, which stay as they are.

        False, and nothing has changed, if a sum of gradients is not finite. An update with a pass
        that was skipped is skipped too, and counted.
        """
        assert self._last_loss is not None
        report(_UPDATE)
        self.set_hyper_parameters(changes)
        if self._is_void:
            self.num_skipped_steps += 1
            return True
        self.updates.is_void = False
        self.updates.measure()
        if not self._is_finite():
            is_skipped = self.options.nonfinite is NonFinite.SKIP
            self.num_skipped_steps += is_skipped
            return is_skipped
        self.updates.use_gradients(self._last_loss)
        if self.updates.scale is not None:
            self.updates.scale.grow()
        self.num_steps += 1
        self._num_passes = 0
        return True

    def _is_finite(self) -> bool:
        if self.options.nonfinite is NonFinite.IGNORE:
            return True
        if self.updates.clipper is not None and self.updates.grad_norm is not None:
            return bool(self.updates.grad_norm.isfinite())
        assert self._agreement is not None
        return self._is_sure or self._agreement.are_finite(self.updates.gradients().values())

    @torch.no_grad()
    def zero_gradients(self, to_none: bool = True) -> None:
        """Drop the accumulated gradients, or set them to zero."""
        self._start_again()
        for parameter in self.updates.trained.values():
            is_kept = not to_none and parameter.grad is not None
            parameter.grad = torch.zeros_like(parameter) if is_kept else None

    @torch.no_grad()
    def set_gradients(self, given: Mapping[str, Tensor]) -> None:
        """Replace some accumulated gradients, by whole tensors or DTensors. Collective.

        Those of parameters of other pipeline devices are ignored.
        """
        self._is_sure = False
        for name, gradient in given.items():
            if name in self._programs:
                own = torch.empty_like(self._parameters[name], requires_grad=False)
                self.dtensors.into(own, gradient, self._programs[name].stored)
                self._parameters[name].grad = own

    @torch.no_grad()
    def clip_gradients(self, limit: float) -> Tensor:
        """Scale the accumulated gradients to at most this global 2-norm; the norm before."""
        if self._clipper is None:
            trained = [p for p in self.program.parameters if p.trainable]
            self._clipper = Clipper(limit, trained, self.communicator)
        norm = self._clipper.norm(self.updates.gradients(), is_void=self._is_void)
        self.updates.scale_gradients(self._clipper.factor(norm, limit))
        self._is_sure = self._is_sure and bool(norm.isfinite())
        return norm

    def hyper_parameters(self) -> HyperParameters | None:
        """The hyper-parameters of each parameter group; None without an optimizer here."""
        if self.optimizer is None:
            return None
        return [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]

    def set_hyper_parameters(self, changes: HyperParameters) -> None:
        """Set some of the hyper-parameters of each parameter group."""
        if self.optimizer is not None:
            for group, changed in zip(self.optimizer.param_groups, changes):
                group.update(changed)


def _gradients(result: StepResult[Tensor]) -> dict[int, Tensor]:
    """All gradients of a pass, once they have arrived."""
    gradients: dict[int, Tensor] = {}
    for arrived in result.reductions.arrivals():
        gradients.update(arrived)
    return gradients
