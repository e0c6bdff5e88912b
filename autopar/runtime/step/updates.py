"""Updates of the weights: all at once after a step, or stage by stage, also in the next step.

In: the optimizer, and a step's gradients as they arrive. Out: updated parameters. An element-wise
optimizer updates some parameters without the others; one that may combine several, and clipping by
global norm, wait for all gradients. A step whose loss or gradients are not finite updates nothing,
on any rank (`autopar.runtime.step.agreement`). If the schedule updates a stage just before its next
forward (U of the last step), a step's last reductions and updates are still pending when it ends;
whoever reads parameters must call `settle`, which waits for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.lowering.types import EarlyUpdate
from autopar.movement.execution import Update
from autopar.runtime.faults.progress import encoded, report
from autopar.runtime.machine.mover import Mover
from autopar.runtime.state.optimizers import is_elementwise, update
from autopar.runtime.state.partial_steps import PartialSteps
from autopar.runtime.step.agreement import Agreement, NonFinite, Verdict
from autopar.runtime.step.clipping import Clipper
from autopar.runtime.step.early_clipping import EarlyClipping, NormPass
from autopar.runtime.step.loss_scale import LossScale
from autopar.runtime.step.reductions import Arrived, Gradients

_LATE = encoded("the last step's reductions and updates")


class Updates:
    """The updates of one rank. ``trained`` are its parameters by value, ``names`` their names.

    With a ``clipper`` gradients are clipped before each update, and ``grad_norm`` is their norm
    before that. With ``is_late`` the schedule runs the last step's updates. Unless ``nonfinite`` is
    to ignore it, the ``agreement`` says whether a step is finite before anything is updated; with
    clipping the global norm, equal on all ranks, says it. ``is_void`` refuses this rank's step as
    one that is not finite. Gradients of a loss that was multiplied by a ``scale`` are divided by it
    when they are complete; ``cast`` are the parameters that are used in another dtype.

    With ``early`` parameters are updated within the backward pass. The ranks agree on the loss
    before the first of these updates, unless the loss is computed elsewhere in a pipeline
    (``knows_loss``), and on the gradients after the last. ``is_partial`` says that a step which is
    not finite had updated something. With a ``clipper`` too, they are clipped as the program says:
    if `norm_pass` gives one, the step has a pass for its norm first, after which it may be refused.
    A ``mover`` is told what each update needs. With ``at_once`` all parameters are updated in one
    step of the optimizer, where nothing asks for more: many small ones cost a GPU's host more than
    the overlap of some with the last reductions saves.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        lr_scheduler: Any,
        trained: Mapping[int, nn.Parameter],
        names: Mapping[int, str],
        *,
        clipper: Clipper | None,
        agreement: Agreement | None,
        nonfinite: NonFinite,
        is_late: bool,
        scale: LossScale | None = None,
        cast: Collection[int] = (),
        early: EarlyUpdate | None = None,
        knows_loss: bool = True,
        mover: Mover | None = None,
        at_once: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.trained = trained
        self.names = names
        self.clipper = clipper
        self.agreement = agreement
        self.nonfinite = nonfinite
        self.scale = scale
        self.cast = cast
        self._scaled_by = 1.0
        self.grad_norm: Tensor | None = None
        self.mover = mover
        self.by_stage = (
            clipper is None
            and optimizer is not None
            and is_elementwise(optimizer)
            and mover is None
            and (is_late or not at_once)
        )
        self.is_late = is_late and self.by_stage
        self.early = early
        self.clipping: EarlyClipping | None = None
        if early is not None and clipper is not None:
            assert early.clipping is not None
            self.clipping = EarlyClipping(clipper, names, early.clipping)
        self.knows_loss = knows_loss
        self._has_begun = False
        self._is_refused = False
        self._partial = None if optimizer is None else PartialSteps(optimizer)
        self.is_void = False
        self._held_back: list[Sequence[int]] = []
        self._due: Gradients[Tensor] | None = None
        self._loss: Tensor | None = None

    def begin_step(self) -> None:
        """Drop the gradients of the last step, except for pending ones."""
        self.is_void = self._has_begun = self._is_refused = False
        self._held_back.clear()
        if self.agreement is not None:
            self.agreement.begin_step()
        if self.early is not None:
            self._scaled_by = self.loss_scale
        if self.clipping is not None:
            self.clipping.begin_step()
        for parameter in self.trained.values():
            parameter.grad = None

    @property
    def agrees(self) -> bool:
        return self.agreement is not None

    @property
    def loss_scale(self) -> float:
        return 1.0 if self.scale is None else self.scale.value

    @property
    def is_partial(self) -> bool:
        if self.early is None or self._is_refused:
            return False
        return not self.knows_loss or self._has_begun

    def norm_pass(self) -> NormPass | None:
        """The updater of a pass for the norm of this step's gradients, if it needs one."""
        if self.clipping is None or not self.clipping.needs_pass:
            return None
        return NormPass(self.clipping.clipper, self.names, self.loss_scale)

    def end_norm_pass(
        self, norm_pass: NormPass, gradients: Gradients[Tensor], loss: Tensor
    ) -> bool:
        """Take the norm; False, and the step is over, if it is not finite. Collective."""
        assert self.clipping is not None
        self.grad_norm = norm_pass.norm(gradients, is_void=self.is_void)
        self.clipping.measured(self.grad_norm)
        if self.nonfinite is not NonFinite.IGNORE:
            self._is_refused = not bool(self.grad_norm.isfinite() & loss.isfinite())
        return not self._is_refused

    def inspect(self, gradients: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> None:
        if self.agreement is not None and self.early is None:
            self.agreement.inspect(gradients, dtypes)

    def total_loss(self, part: Tensor | None) -> Tensor:
        assert self.agreement is not None
        if self.is_void:
            self.agreement.refuse()
        return self.agreement.total_loss(part)

    def update(self, values: Sequence[int], gradients: Gradients[Tensor]) -> None:
        """U: update those of these parameters whose gradients are complete.

        If the ranks must agree on the step first, this waits until its end.
        """
        if self.early is not None:
            return
        if self.by_stage and self.agrees:
            self._held_back.append(values)
        elif self.by_stage:
            self.settle()
            self._apply(gradients.take(values))

    def may_update(self, arrived: Arrived[Tensor], loss: Tensor | None) -> bool:
        if not self._has_begun:
            self._has_begun = True
            if self.agreement is not None and self.knows_loss:
                self.total_loss(loss)
                self._is_refused = self.agreement.verdict is Verdict.NONFINITE
        if self._is_refused or self._partial is None:
            return False
        if self.agreement is not None:
            for gradient in arrived.values:
                self.agreement.inspect_sum(gradient)
        if self.clipping is not None:
            self.clipping.add(arrived)
        return True

    def update_early(self, arrived: Arrived[Tensor]) -> None:
        assert self._partial is not None
        self._apply_early(arrived.gradients)
        factor = self._multiplier()
        for rows in arrived.rows:
            gradient = rows.gradient if factor is None else rows.gradient.mul_(factor)
            self._partial.step_rows(self.trained[rows.value], rows.first, rows.end, gradient)

    def _apply_early(self, gradients: dict[int, Tensor]) -> None:
        """Update these parameters alone and release their gradients, which are taken from the
        dictionary; one after the other if tensors move."""
        assert self.early is not None
        if self.mover is not None:
            for value in tuple(gradients):
                self.mover.before(Update((value,)))
                self.mover.check_present(self._updated([value]))
                self._apply({value: gradients.pop(value)})
                self._release([value])
                self.mover.after()
            return
        self._apply(gradients)
        self._release(gradients)
        gradients.clear()

    def _release(self, values: Iterable[int]) -> None:
        """Release gradients after an early update, unless they are kept."""
        assert self.early is not None
        if not self.early.keeps_gradients:
            for value in values:
                self.trained[value].grad = None

    def _updated(self, values: Iterable[int]) -> Iterator[Tensor]:
        """The parameters and the optimizer states that an update of these parameters changes."""
        for value in values:
            parameter = self.trained[value]
            yield parameter
            state = {} if self.optimizer is None else self.optimizer.state.get(parameter, {})
            yield from (s for s in state.values() if isinstance(s, Tensor))

    def update_last(self, values: Sequence[int]) -> None:
        """U of the previous step, whose gradients nobody can read any more."""
        if self._due is None:
            return
        taken = self._due.take(values)
        self._apply(taken)
        for value in taken:
            self.trained[value].grad = None

    def end_step(self, gradients: Gradients[Tensor], loss: Tensor) -> bool:
        """Update what has not been updated, or leave it pending if the schedule will do it.

        False, and nothing is updated, if the step is not finite; the same on all ranks.
        """
        self.settle()
        self._scaled_by = self.loss_scale
        is_updated = self._end(gradients, loss)
        if is_updated and self.scale is not None:
            self.scale.grow()
        return is_updated

    def backs_off(self, loss: Tensor) -> bool:
        """Halve the loss scale if it may have made a step not finite; whether it was halved."""
        return self.scale is not None and bool(loss.isfinite()) and self.scale.back_off()

    def _end(self, gradients: Gradients[Tensor], loss: Tensor) -> bool:
        if self.early is not None:
            return self._end_early(gradients, loss)
        is_sure = self.agreement is None or self.agreement.verdict is Verdict.FINITE
        if not self.by_stage or not is_sure:
            return self._end_at_once(gradients, loss)
        self._due, self._loss = gradients, loss
        for values in self._held_back:
            self._apply(gradients.take(values))
        if not self.is_late:
            self.settle()
        return True

    def _end_early(self, gradients: Gradients[Tensor], loss: Tensor) -> bool:
        """Update the parameters that could not be updated early."""
        rest: dict[int, Tensor] = {}
        for arrived in gradients.arrivals():
            rest.update(arrived)
        assert self.early is not None
        if self.agreement is not None:
            is_finite = self.agreement.verdict is Verdict.FINITE
            if is_finite and self.early.at_end:
                is_finite = self.agreement.are_finite(rest.values())
            if not is_finite:
                return False
        if self.clipping is not None:
            self.clipping.add(Arrived(gradients=rest, rows=[]))
            self.grad_norm = self.clipping.end_step(self.grad_norm)
        self._apply_early(rest)
        self._step_scheduler(loss)
        return True

    def settle(self) -> None:
        """Wait for pending reductions, and run their updates."""
        gradients, loss = self._due, self._loss
        if gradients is None or loss is None:
            return
        self._due = self._loss = None
        if self.is_late:
            report(_LATE)
        for arrived in gradients.arrivals():
            self._apply(arrived)
        self._step_scheduler(loss)

    def _end_at_once(self, gradients: Gradients[Tensor], loss: Tensor) -> bool:
        """Wait for all gradients, and update with them unless one is not finite."""
        for arrived in gradients.arrivals():
            self._keep(arrived)
            arrived.clear()  # parameters alone hold them, so that clipping replaces one by one
        self.measure()
        if not self._is_finite(loss):
            return False
        self.use_gradients(loss)
        return True

    def measure(self) -> None:
        """Compute the norm of all gradients, if they are clipped. Collective."""
        if self.clipper is not None:
            self.grad_norm = self.clipper.norm(self.gradients(), is_void=self.is_void)

    def use_gradients(self, loss: Tensor) -> None:
        """Clip the gradients that the parameters have, update with them, and schedule."""
        if self.clipper is not None and self.grad_norm is not None:
            self.scale_gradients(self.clipper.factor(self.grad_norm))
        if self.mover is not None:
            self._update_moved(self.mover)
        elif self.optimizer is not None:
            update(self.optimizer)
        self._step_scheduler(loss)

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply all gradients by a factor; not in place, as two may be one tensor."""
        for parameter in self.trained.values():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * factor

    def _update_moved(self, mover: Mover) -> None:
        """Update in the order of a movement plan: what each update needs is on the device."""
        if self.optimizer is None or self._partial is None:
            return
        for values in mover.updates:
            parameters = [self.trained[value] for value in values]
            mover.before(Update(values))
            mover.check_present(self._updated(values))
            if is_elementwise(self.optimizer):
                self._partial.step(parameters)
            else:
                update(self.optimizer)
            mover.after()

    def _is_finite(self, loss: Tensor) -> bool:
        if self.nonfinite is NonFinite.IGNORE:
            return True
        if self.agreement is None:  # the global norm and the loss are equal on all ranks
            assert self.grad_norm is not None
            return bool(self.grad_norm.isfinite() & loss.isfinite())
        if self.agreement.verdict is Verdict.DOUBTFUL:
            return self.agreement.are_finite(self.gradients().values())
        return self.agreement.verdict is Verdict.FINITE

    def gradients(self) -> dict[str, Tensor]:
        """The last step's gradients that have arrived, by parameter name."""
        return {
            self.names[value]: parameter.grad
            for value, parameter in self.trained.items()
            if parameter.grad is not None
        }

    def _multiplier(self) -> Tensor | float | None:
        """The factor of gradients before use, from clipping and the loss scale; None for 1."""
        if self.clipping is not None and self.clipping.factor is not None:
            return self.clipping.factor / self._scaled_by
        return None if self._scaled_by == 1 else 1 / self._scaled_by

    def _keep(self, gradients: dict[int, Tensor]) -> None:
        factor = self._multiplier()
        for value in gradients:
            if factor is not None:
                # In place if its cast allocated it; other gradients may share memory.
                is_own = value in self.cast
                gradients[value] = (
                    gradients[value].mul_(factor) if is_own else gradients[value] * factor
                )
            self.trained[value].grad = gradients[value]

    def _apply(self, gradients: dict[int, Tensor]) -> None:
        """Update these parameters alone."""
        self._keep(gradients)
        if self._partial is not None and gradients:
            self._partial.step([self.trained[value] for value in gradients])

    def _step_scheduler(self, loss: Tensor) -> None:
        if isinstance(self.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.lr_scheduler.step(loss.item())
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step()
