"""The runtime of one rank: its program, shards of parameters, buffers and optimizer.

In: a rank program, this rank's shards of the parameters, and the user's optimizer. Out: training
steps and forward passes; the state as DTensors under the model's own names, or as whole tensors.
The same class runs under ``torchrun`` and in local workers.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.base.accelerators import is_accelerator, kept_generators
from autopar.base.errors import OptimizerError
from autopar.comm.groups import Communicator
from autopar.lowering.pipeline import has_late_updates
from autopar.lowering.types import ParameterProgram, RankProgram, TensorMeta
from autopar.runtime.faults.progress import encoded, report
from autopar.runtime.host.heap import FreedMemory
from autopar.runtime.machine.cuda_graphs import recorder_of
from autopar.runtime.machine.links import ProcessLinks
from autopar.runtime.machine.process import ProcessMachine, labels_of
from autopar.runtime.machine.randomness import Seeds
from autopar.runtime.state.checks import check_state
from autopar.runtime.state.dtensors import DTensorConverter
from autopar.runtime.state.optimizer_state import OptimizerState
from autopar.runtime.state.optimizers import (
    MakeOptimizer,
    MakeScheduler,
    check_early_optimizer,
    make_optimizer,
)
from autopar.runtime.state.shards import check_local_inputs, local_part, microbatch_of
from autopar.runtime.step.agreement import Agreement, NonFinite
from autopar.runtime.step.bound import Bound
from autopar.runtime.step.clipping import Clipper
from autopar.runtime.step.diagnosis import Probe, RefusedStep, StepRefused, refused_step
from autopar.runtime.step.executor import ActionSpan, Executor, StepResult
from autopar.runtime.step.graphs import Batches, StepGraphs
from autopar.runtime.step.loss_scale import LossScale
from autopar.runtime.step.moving import mover_of, moving, on_host_at_first, without_memory
from autopar.runtime.step.rank_options import RankOptions
from autopar.runtime.step.recovery import Recovery
from autopar.runtime.step.reductions import Updater
from autopar.runtime.step.timing import RankTimes, StepClock
from autopar.runtime.step.updates import Updates

_UPDATE = encoded("the update of the weights")
_DIAGNOSIS = encoded("the search for the first value that is not finite")


class RankRuntime:
    """Runs one rank of a program. Making it, and every method, is collective.

    ``state`` has, by name, this rank's shard of each parameter (contiguous, on ``device`` or on the
    host, owned by the runtime from now on) and each buffer whole. ``not_compiled`` has the graphs
    that should be compiled and cannot be here, with the reasons.
    """

    def __init__(
        self,
        program: RankProgram,
        state: Mapping[str, Tensor],
        options: RankOptions,
        device: torch.device,
    ) -> None:
        self.program = program
        self.options = options
        self.device = device
        self.num_steps = 0
        self._num_forwards = 0  # since the last training pass
        self._freed_memory = FreedMemory()
        self.communicator = Communicator(
            program.mesh,
            device,
            labels_of(program),
            num_devices=program.pipeline.num_devices,
            device_sets={
                *(p.devices for p in program.parameters if len(p.devices) > 1),
                *(b.shared for b in program.buffers if len(b.shared) > 1),
            },
            reduces_late=has_late_updates(program),
        )
        self.machine = ProcessMachine(self.communicator, Seeds(program.mesh, options.seed))
        self.links = ProcessLinks(self.communicator)
        self.dtensors = DTensorConverter(self.communicator)
        here = self.communicator.pipeline_device
        self._programs = {p.name: p for p in program.parameters if here in p.devices}
        movement = options.movement[here] if options.movement else None
        away = on_host_at_first(movement, options.optimizer)
        self._place(state, away)
        # A buffer that training changes is up to date only on the device that changes it.
        self._owned = {b.name for b in program.buffers if b.following is None or b.device == here}
        self._training = self._bound(program, self._new_agreement(program))
        self._trainings = {0: self._training}
        self.not_compiled = self.machine.compile(program, self._training.executor.route)
        self._forwards: dict[int, Bound] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        self.lr_scheduler: Any = None
        if options.optimizer is not None:
            self._make_optimizer(options.optimizer, options.lr_scheduler)
        self.num_skipped_steps = 0
        self.mover = mover_of(movement, device, self._training.parameters, self.optimizer)
        if self.mover is not None:
            for name, p in self._programs.items():
                if p.value in away:
                    self.mover.take(p.value, state[name])
        self.updates = self._make_updates()
        recorder = recorder_of(device) if options.cuda_graphs else None
        is_alone = self.communicator.world.num_devices == 1
        self.graphs = None if recorder is None else StepGraphs(recorder, is_alone=is_alone)
        is_agreed = options.nonfinite is not NonFinite.IGNORE
        self.recovery = Recovery(program, self.communicator, self.updates, is_able=is_agreed)
        self.clock = StepClock(self.machine, self.recovery)

    def _place(self, state: Mapping[str, Tensor], away: Collection[int]) -> None:
        """Have parameters and buffers on the device; those ``away`` get no memory there yet."""
        self._parameters = {
            name: nn.Parameter(
                without_memory(state[name], self.device)
                if p.value in away
                else state[name].to(self.device),
                requires_grad=p.trainable,
            )
            for name, p in self._programs.items()
        }
        constants = dict(self.program.constants)
        self._buffers = {
            b.name: state[b.name].to(self.device)
            for b in self.program.buffers
            if b.name not in constants
        }

    def _trainable(self) -> list[ParameterProgram]:
        return [p for p in self._programs.values() if p.trainable]

    def _make_optimizer(self, make: MakeOptimizer, scheduler: MakeScheduler | None) -> None:
        trainable = {p.name: self._parameters[p.name] for p in self._trainable()}
        if not trainable and any(p.trainable for p in self.program.parameters):
            return  # the stages of this device have nothing to train
        self.optimizer = make_optimizer(make, trainable, self.program.parameters, self.program.mesh)
        if scheduler is not None:
            self.lr_scheduler = scheduler(self.optimizer)

    def _make_updates(self) -> Updates:
        program, options, clipper = self.program, self.options, None
        if program.early is not None and self.optimizer is not None:
            check_early_optimizer(self.optimizer)
        precision = options.precision
        if options.max_grad_norm is not None:
            trained = [p for p in program.parameters if p.trainable]
            clipper = Clipper(options.max_grad_norm, trained, self.communicator)
        return Updates(
            self.optimizer,
            self.lr_scheduler,
            {p.value: self._parameters[p.name] for p in self._trainable()},
            {p.value: p.name for p in self._trainable()},
            clipper=clipper,
            agreement=self._training.agreement,
            nonfinite=options.nonfinite,
            is_late=has_late_updates(program),
            scale=None if precision is None or not precision.is_scaled else LossScale(precision),
            cast={p.value for p in self._trainable() if p.used_dtype is not p.dtype},
            early=program.early,
            knows_loss=program.pipeline.num_devices == 1,
            mover=self.mover,
            at_once=is_accelerator(self.device),
        )

    def _new_agreement(self, program: RankProgram) -> Agreement | None:
        """The ranks' agreement on a step, unless they need none, or agree by the clipped norm."""
        options = self.options
        agrees = options.max_grad_norm is None or program.early is not None
        if agrees and options.nonfinite is not NonFinite.IGNORE and program.loss is not None:
            return Agreement(program, self.communicator)
        return None

    def _settle(self, *, states: bool = False) -> None:
        """Wait for pending updates, and have the parameters on the device, with the optimizer's
        ``states`` if they are asked for."""
        self.updates.settle()
        if self.mover is not None:
            self.mover.bring_back(states=states)

    @property
    def grad_norm(self) -> Tensor | None:
        return self.updates.grad_norm

    def _bound(self, program: RankProgram, agreement: Agreement | None = None) -> Bound:
        executor = Executor(program, self.machine, self.links, self.communicator.pipeline_device)
        return Bound.of(executor, self._parameters, self.device, agreement)

    # --- running ---------------------------------------------------------------------------

    @torch.no_grad()
    def train_step(
        self, tensors: Sequence[Tensor], *, local: bool = False, slot: int = 0
    ) -> Tensor:
        """Run forward, backward and update on one global batch; the loss, equal on all ranks.

        ``tensors`` are the inputs of the program in ``slot``, whole; with ``local`` this rank's own
        shards. A step whose loss or gradients are not finite, or in which an op raises on any rank,
        changes nothing: it is skipped and counted, or StepRefused is raised, on all ranks alike.
        Under an early update it may have changed weights, which the error says.
        """
        self._check_optimizer()
        self._num_forwards = 0
        bound, norm_before = self._select(slot), self.grad_norm
        batches = [
            self.inputs(bound.program, tensors, index, local=local)
            for index in range(bound.program.num_microbatches)
        ]
        self.updates.begin_step()
        self.recovery.begin_step()
        with moving(self.mover, self.machine):
            result, is_usable = self._passes(batches)
            loss, reductions, buffers = result.loss.reshape(()), result.reductions, result.buffers
            del result
            report(_UPDATE)
            is_updated = is_usable and self.updates.end_step(reductions, loss)
        if is_updated:
            self.num_steps += 1
            self._take(bound, buffers)
        elif (failed := self.recovery.failed_step(self.num_steps + 1)) is not None:
            bound.executor.fixed.clear()
            failed = dataclasses.replace(failed, is_partial=self.updates.is_partial)
            self.updates.begin_step()
            self.updates.grad_norm = norm_before
            raise StepRefused(failed)
        elif self.updates.is_partial:
            raise StepRefused(
                RefusedStep(
                    number=self.num_steps + 1, loss=loss.item(), found=(), given=(),
                    num_ranks=self.communicator.num_ranks, is_partial=True,
                )
            )  # fmt: skip
        elif self.updates.backs_off(loss) or self.options.nonfinite is NonFinite.SKIP:
            self.num_skipped_steps += 1
        else:
            del reductions, buffers
            raise StepRefused(self._diagnosed(batches, loss))
        if self.device.type == "cpu":
            self._freed_memory.after_step()
        return loss

    def _passes(self, batches: Batches) -> tuple[StepResult[Tensor], bool]:
        """The results of a step, and whether it may update: not if a pass before was not finite."""
        norm_pass, spans = self.updates.norm_pass(), self._training.executor.spans
        earlier: list[ActionSpan] = []
        if norm_pass is not None:
            result = self._pass(batches, norm_pass)
            earlier = [*spans]
            if not self.updates.end_norm_pass(norm_pass, result.reductions, result.loss):
                return result, False
            del result
            if self.mover is not None:
                self.mover.begin_again()
        found = self._pass(batches, self.updates)
        spans[:0] = earlier
        return found, True

    def _pass(self, batches: Batches, updater: Updater[Tensor]) -> StepResult[Tensor]:
        """Run forward and backward; all passes of a step draw the same random numbers."""
        bound = self._training

        def launch() -> StepResult[Tensor]:
            with self._seeded_run(bound.is_random), self._run_by(self.recovery):
                return bound.executor.step(
                    bound.parameters, bound.held(self._buffers), batches, updater
                )

        return launch() if updater is not self.updates else self._replayed(bound, batches, launch)

    def _replayed(
        self, bound: Bound, batches: Batches, launch: Callable[[], StepResult[Tensor]]
    ) -> StepResult[Tensor]:
        """A pass with the step's updater: replayed if it is recorded, else run by ``launch``."""
        if self.graphs is None:
            return launch()
        result = self.graphs.run(bound, self._buffers, batches, self.updates, launch)
        # What they computed from buffers may be views of memory that a replay has written.
        self._forget_fixed(self._forwards.values())
        return result

    def allow_graphs(self, is_allowed: bool) -> None:
        """Whether passes may be recorded and replayed from now on; if not, graphs are dropped."""
        if self.graphs is not None:
            self.graphs.allow(is_allowed)

    def graph_notes(self) -> list[str]:
        """As `StepGraphs.notes`; nothing where there are no graphs."""
        return [] if self.graphs is None else self.graphs.notes()

    def _diagnosed(self, batches: Sequence[Mapping[int, Tensor]], loss: Tensor) -> RefusedStep:
        """Run a step that was not finite once more, to find the cause; the same on all ranks."""
        report(_DIAGNOSIS)
        bound = self._training
        probe = Probe(bound.program, self.communicator.world_rank)
        with (
            moving(self.mover, self.machine),
            self._seeded_run(bound.is_random),
            self._run_by(probe),
        ):
            bound.executor.step(bound.parameters, bound.held(self._buffers), batches)
        given = {
            f"input {i.name!r}": batch[i.value] for batch in batches for i in bound.program.inputs
        }
        given |= {f"parameter {name!r}": p for name, p in self._parameters.items()}
        given |= {f"buffer {name!r}": b for name, b in self._buffers.items()}
        return refused_step(
            probe, self.communicator, given, number=self.num_steps + 1, loss=loss.item()
        )

    @contextlib.contextmanager
    def _run_by(self, probe: Probe | Recovery) -> Iterator[None]:
        """Let a probe run the graphs."""
        self.machine.probe = probe
        try:
            yield
        finally:
            self.machine.probe = None

    def step_times(self) -> RankTimes:
        """The times of the last training step on this rank."""
        return self.clock.read(self._training.executor)

    def _take(self, bound: Bound, buffers: Mapping[int, Tensor]) -> None:
        """Take over the next buffers that a training program computed."""
        if buffers:
            self._buffers.update((bound.buffers[v], x) for v, x in buffers.items())
            others = [b for b in self._trainings.values() if b.changed != bound.changed]
            self._forget_fixed([*others, *self._forwards.values()])

    def _forget_fixed(self, programs: Iterable[Bound]) -> None:
        """Drop values computed from buffers alone, as the buffers have changed."""
        for bound in programs:
            bound.executor.fixed.clear()

    def _select(self, slot: int) -> Bound:
        """The training program in a slot, which steps run from now on."""
        bound = self._trainings[slot]
        if bound is not self._training:
            self.updates.settle()
            self._training, self.recovery.program = bound, bound.program
            self.updates.agreement, self.updates.early = bound.agreement, bound.program.early
        self.communicator.num_microbatches = bound.program.num_microbatches
        return bound

    def set_training_program(self, slot: int, program: RankProgram) -> None:
        """Set the program that ``train_step(..., slot=slot)`` runs from now on; 0 is the own one.

        It names, numbers and stores parameters as the own program does.
        """
        own = {p.name: p.value for p in self.program.parameters}
        assert slot > 0
        assert own == {p.name: p.value for p in program.parameters}
        self._prepare(program, self._trainings.get(slot))
        self._trainings[slot] = self._bound(program, self._new_agreement(program))

    def set_forward_program(self, slot: int, program: RankProgram) -> None:
        """Set the program that ``forward(slot, ...)`` runs from now on.

        It reads the parameters, as training stores them, and the buffers, both by name.
        """
        self._prepare(program, self._forwards.get(slot))
        self._forwards[slot] = self._bound(program)

    def _prepare(self, program: RankProgram, replaced: Bound | None) -> None:
        """Make the groups of a program, and release the one that it replaces."""
        for parameter in program.parameters:
            own = self._programs.get(parameter.name, parameter)
            assert parameter.stored == own.stored, parameter.name
        for label in sorted(labels_of(program)):
            self.communicator.group(label)
        if replaced is not None:
            self.machine.release(replaced.program)
            if self.graphs is not None:
                self.graphs.forget(replaced)

    @torch.no_grad()
    def forward(
        self,
        slot: int,
        tensors: Sequence[Tensor],
        *,
        local: bool = False,
        as_training_pass: bool = False,
    ) -> list[Tensor]:
        """The model's output tensors, whole, on every rank.

        Random operators draw other numbers in each call, in the first one after a training pass
        and ``as_training_pass`` those of the next.
        """
        self._settle()
        bound = self._forwards[slot]
        self.communicator.num_microbatches = bound.program.num_microbatches
        inputs = self.inputs(bound.program, tensors, 0, local=local)
        with self._seeded_run(bound.is_random):
            if bound.is_random and not as_training_pass:
                if self._num_forwards:
                    self.machine.seeds.begin_pass(-self._num_forwards)
                self._num_forwards += 1
            values = bound.executor.forward(bound.parameters, bound.held(self._buffers), inputs)
        found = [values[output.value] for output in bound.program.outputs]
        if self.graphs is None:
            return found
        held = {x.untyped_storage().data_ptr() for x in self._buffers.values()}
        return [x.clone() if x.untyped_storage().data_ptr() in held else x for x in found]

    @contextlib.contextmanager
    def _seeded_run(self, is_random: bool) -> Any:
        if not is_random:
            yield
            return
        self.machine.seeds.begin_step(self.num_steps)
        with kept_generators(self.device):
            yield

    def inputs(
        self, program: RankProgram, tensors: Sequence[Tensor], index: int, *, local: bool
    ) -> dict[int, Tensor]:
        """This rank's shard of each input in micro-batch ``index``, on its device."""
        mesh, rank = program.mesh, self.communicator.rank
        if local:
            check_local_inputs(program, tensors)
        parts = {}
        for i, tensor in zip(program.inputs, tensors):
            part = microbatch_of(tensor, i, program.num_microbatches, index)
            if not local:
                part = local_part(part, i.placements, mesh, rank)
            parts[i.value] = part.to(self.device, non_blocking=True)
        return parts

    # --- state -----------------------------------------------------------------------------

    def parameters(self) -> dict[str, Tensor]:
        """Each parameter as a DTensor, by name."""
        self._settle()
        return {
            name: self.dtensors.out(self._parameters[name], p.stored, p.shape)
            for name, p in self._programs.items()
        }

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the last step as DTensors; those that have one."""
        self.updates.settle()
        return {
            p.name: self.dtensors.out(grad, p.stored, p.shape)
            for p in self._trainable()
            if (grad := self._parameters[p.name].grad) is not None
        }

    def state_dict(self) -> dict[str, Tensor]:
        """The state under the model's own keys: parameters as DTensors, buffers whole.

        In a pipeline, the state of this device's stages.
        """
        named = {**self.parameters(), **self.buffers()}
        return {key: named[name] for key, name in self.options.keys if name in named}

    def buffers(self) -> dict[str, Tensor]:
        return {name: held for name, held in self._buffers.items() if name in self._owned}

    def full_state_dict(self) -> dict[str, Tensor]:
        """Copies of the state as whole tensors under the model's own keys, on every rank."""
        self._settle()
        here, named = self.communicator.pipeline_device, {}
        for p in self.program.parameters:
            own = None
            if here == p.devices[0]:
                own = self.dtensors.whole(self._parameters[p.name], p.stored, p.shape)
            meta = TensorMeta.contiguous(p.shape, p.dtype)
            named[p.name] = self.links.share(p.devices, own, meta)
        for b in self.program.buffers:
            if b.name in self._buffers:
                own = self._buffers[b.name].clone()
                meta = TensorMeta.contiguous(b.shape, b.dtype)
                named[b.name] = own
                if b.following is not None:
                    named[b.name] = self.links.share((b.device,), own, meta)
        return {key: named[name] for key, name in self.options.keys}

    def held_parts(self) -> dict[str, Tensor]:
        """This rank's shards of the parameters, and buffers, without copying them."""
        self._settle()
        return {**{n: p.detach() for n, p in self._parameters.items()}, **self.buffers()}

    def held_gradients(self) -> dict[str, Tensor]:
        """This rank's shards of the last step's gradients, which never move."""
        self.updates.settle()
        return self.updates.gradients()

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that it holds between steps, each at least once."""
        yield from (t for p in self._parameters.values() for t in (p, p.grad) if t is not None)
        yield from self._buffers.values()
        yield from dict(self.program.constants).values()
        for bound in (*self._trainings.values(), *self._forwards.values()):
            yield from bound.executor.fixed.values()
        for optimizer in self._optimizers():
            for entries in optimizer.state.values():
                yield from (value for value in entries.values() if isinstance(value, Tensor))

    def _optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return [] if self.optimizer is None else [self.optimizer]

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load whole tensors or DTensors (on any mesh) under the model's own keys."""
        pairs = [(key, name) for key, name in self.options.keys if self._is_here(name)]
        check_state(state, self.options.keys, self.program, needed=[key for key, _ in pairs])
        self.load_named({name: state[key] for key, name in reversed(pairs)})

    def _is_here(self, name: str) -> bool:
        return name in self._programs or name in self._owned

    @torch.no_grad()
    def load_named(self, state: Mapping[str, Tensor]) -> None:
        """As `load_state_dict`, for some tensors, by their names in the program.

        Tensors of other pipeline devices are ignored.
        """
        self._settle()
        for name, source in state.items():
            if self._is_here(name):
                self._load(name, source)

    def _load(self, name: str, source: Tensor) -> None:
        if name in self._programs:
            self.dtensors.into(self._parameters[name], source, self._programs[name].stored)
        else:
            whole = source.full_tensor() if hasattr(source, "full_tensor") else source
            held = self._buffers[name]
            self._buffers[name] = whole.detach().to(device=held.device, dtype=held.dtype, copy=True)
            self._forget_fixed([*self._trainings.values(), *self._forwards.values()])

    @property
    def seed(self) -> int:
        """The seed of the random operators."""
        return self.machine.seeds.seed

    def take_progress(
        self,
        num_steps: int | None,
        seed: int | None,
        loss_scale: Mapping[str, Any] | None,
        grad_norm: float | None,
    ) -> None:
        """Continue after so many steps with this seed and scale; None leaves each as it is.

        ``grad_norm`` is that of the last of them, if known, for clipping the next step by it.
        """
        self.num_steps = self.num_steps if num_steps is None else num_steps
        self.machine.seeds.seed = self.seed if seed is None else seed
        if self.updates.scale is not None and loss_scale is not None:
            self.updates.scale.load(loss_scale)
        if self.updates.clipping is not None:
            self.updates.clipping.load(grad_norm)

    # --- optimizer state -------------------------------------------------------------------

    def _check_optimizer(self) -> None:
        if self.options.optimizer is None:
            raise no_optimizer()

    @property
    def optimizer_state(self) -> OptimizerState:
        """The state of the optimizer, after all pending updates."""
        self._check_optimizer()
        self._settle(states=True)
        return OptimizerState(
            self.program, self.optimizer, self._parameters, self._programs, self.dtensors
        )

    def optimizer_state_dict(self, *, local: bool = False) -> dict[str, Any]:
        """As `OptimizerState.state_dict`."""
        return self.optimizer_state.state_dict(local=local)

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `OptimizerState.load_state_dict`."""
        self.optimizer_state.load_state_dict(state)


def no_optimizer() -> OptimizerError:
    return OptimizerError(
        "there is no optimizer: autopar.compile(..., "
        "optimizer=functools.partial(torch.optim.AdamW, lr=3e-4))"
    )
