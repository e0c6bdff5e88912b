"""The service of a worker: its rank's runtime, which answers the calls of the parent's runner.

In: the calls of `autopar.runtime.runners.local.LocalRunner`, which reach all workers alike. Out:
what a rank holds, and the result of each step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.base.accelerators import with_index
from autopar.base.errors import InputError
from autopar.comm.groups import release_message_buffers
from autopar.lowering.types import RankProgram
from autopar.runtime.host.peak_memory import PeakMemory, PeakTensors
from autopar.runtime.state.model_optimizers import ModelState
from autopar.runtime.state.optimizers import (
    HyperParameters,
)
from autopar.runtime.state.shards import holder, local_part
from autopar.runtime.state.wire import unpack
from autopar.runtime.step.array import array_of, loop_of, make_runtime
from autopar.runtime.step.diagnosis import RefusedStep, StepRefused
from autopar.runtime.step.rank import RankRuntime
from autopar.runtime.step.rank_options import RankOptions
from autopar.runtime.step.recovery import FailedStep
from autopar.runtime.step.timing import RankTimes, Timing


class Step(NamedTuple):
    """The result of one training step: the loss, or why it was refused; and counters."""

    loss: Tensor | None
    refused: RefusedStep | FailedStep | None
    grad_norm: Tensor | None
    num_steps: int
    num_skipped_steps: int


class RankService:
    """The workers' side: one `RankRuntime` that answers the calls of `LocalRunner`.

    With ``is_guest`` the process is the caller's, not one of its own: what it returns of the state
    are copies, and counts of tensors leave out those that others hold.
    """

    def __init__(self, rank: int, world_size: int, *, is_guest: bool = False) -> None:
        self.is_guest = is_guest
        self.rank = rank
        self.runtime: RankRuntime | None = None
        self._state: dict[str, Tensor] = {}
        self._save: Any = None

    def prepare(self, program: RankProgram | bytes) -> None:
        """Receive a new program; what the old one holds is released first."""
        self.runtime = self._save = None
        self._state = {}
        release_message_buffers()
        self.program: RankProgram = _program(program)
        self.device = with_index(torch.device(self.program.device_type))
        self.peak_memory = PeakMemory(self.device)

    def receive(self, whole: Mapping[str, Tensor]) -> None:
        """Keep this rank's shard of some whole tensors, on the host until the runtime is made."""
        programs = {p.name: p for p in self.program.parameters}
        device, rank = self.program.place(self.rank)
        for name, tensor in whole.items():
            if name in programs:
                if device not in programs[name].devices:
                    continue
                tensor = local_part(tensor, programs[name].stored, self.program.mesh, rank)
            self._state[name] = tensor.detach().to("cpu", copy=True)

    def start(self, options: RankOptions) -> list[str]:
        """Make the runtime; returns the graphs that cannot be compiled here, with the reasons."""
        release_message_buffers()  # those that other ranks gave up when they prepared
        torch.set_default_dtype(options.default_dtype)
        self.runtime = make_runtime(self.program, self._state, options, self.device)
        self._state = {}
        self.peak_memory.forget_peak()
        return self.runtime.not_compiled

    @property
    def running(self) -> RankRuntime:
        assert self.runtime is not None
        return self.runtime

    def train_step(self, tensors: Sequence[Tensor], slot: int) -> Step | None:
        """Run a step; rank 0 returns its result."""
        return self._step(lambda: self.running.train_step(tensors, slot=slot))

    def training_pass(
        self, tensors: Sequence[Tensor], slot: int, number: int, dropped: Sequence[int]
    ) -> Step | None:
        """Run a pass of the classic loop; rank 0 returns its result."""
        run = loop_of(self.running).training_pass
        return self._step(lambda: run(tensors, number, dropped, slot=slot))

    def update(self, changes: HyperParameters) -> tuple[bool, Step | None]:
        """Whether the accumulated gradients were finite, and the counters, of rank 0."""
        is_finite = loop_of(self.running).update(changes)
        return is_finite, self._step(lambda: None)

    def in_loop(self, method: str, *args: Any) -> Any:
        """Call a method of `autopar.runtime.step.loop.LoopRuntime`."""
        result = getattr(loop_of(self.running), method)(*args)
        return result.cpu() if isinstance(result, Tensor) else result

    def _step(self, run: Callable[[], Tensor | None]) -> Step | None:
        runtime, loss, refused = self.running, None, None
        try:
            loss = run()
            loss = None if loss is None else loss.cpu()
        except StepRefused as error:
            refused = error.step
        if self.rank != 0:
            return None
        norm = None if runtime.grad_norm is None else runtime.grad_norm.cpu()
        return Step(
            loss=loss,
            refused=refused,
            grad_norm=norm,
            num_steps=runtime.num_steps,
            num_skipped_steps=runtime.num_skipped_steps,
        )

    def loss_scale(self) -> float:
        return self.running.updates.loss_scale

    def allow_graphs(self, is_allowed: bool) -> None:
        self.running.allow_graphs(is_allowed)

    def graph_notes(self) -> list[str]:
        return self.running.graph_notes()

    def memory_growth_bytes(self) -> int:
        return self.peak_memory.growth_bytes()

    def start_counting_tensors(self) -> None:
        held = self.running.tensors if self.is_guest else None
        self.peak_tensors = PeakTensors(self.device, held)
        self.peak_tensors.start()

    def counted_tensor_bytes(self) -> int:
        return self.peak_tensors.stop()

    def set_timing(self, timing: Timing) -> None:
        self.running.clock.set(timing)

    def step_times(self) -> RankTimes:
        return self.running.step_times()

    def set_training_program(self, slot: int, program: RankProgram | bytes) -> None:
        self.running.set_training_program(slot, _program(program))

    def set_forward_program(self, slot: int, program: RankProgram | bytes) -> None:
        self.running.set_forward_program(slot, _program(program))

    def forward(
        self, slot: int, tensors: Sequence[Tensor], as_training_pass: bool
    ) -> list[Tensor] | None:
        outputs = self.running.forward(slot, tensors, as_training_pass=as_training_pass)
        return [self._given(x) for x in outputs] if self.rank == 0 else None

    def held(self, what: str) -> dict[str, Tensor]:
        """Shards of parameters, gradients and buffers that no lower rank holds."""
        runtime = self.running
        parts = runtime.held_parts() if what == "state" else runtime.held_gradients()
        return {n: self._given(t) for n, t in parts.items() if self._is_holder(n)}

    def _given(self, value: Any) -> Any:
        """A tensor as it is returned; anything else as it is."""
        if not isinstance(value, Tensor):
            return value
        return value.detach().to("cpu", copy=self.is_guest)

    def _is_holder(self, name: str) -> bool:
        device, rank = self.program.place(self.rank)
        parameter = next((p for p in self.program.parameters if p.name == name), None)
        if parameter is not None:
            first = holder(parameter.stored, self.program.mesh, rank)
            return device == parameter.devices[0] and rank == first
        buffer = next(b for b in self.program.buffers if b.name == name)
        return (device, rank) == (buffer.device, 0)

    def held_optimizer_state(self) -> dict[str, Any]:
        """As `RankRuntime.optimizer_state_dict`, with the shards that no lower rank holds."""
        state = self.running.optimizer_state_dict(local=True)
        state["param_groups"] = [
            {key: self._given(value) for key, value in group.items()}
            for group in state["param_groups"]
        ]
        state["state"] = {
            name: {k: self._given(v) for k, v in entries.items()}
            for name, entries in state["state"].items()
            if self._is_holder(name)
        }
        return state

    def load(self, whole: Mapping[str, Tensor]) -> None:
        self.running.load_named(whole)

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Load; returns None or why it was refused, the same on all ranks."""
        return _refusal(self.running.load_optimizer_state_dict, state)

    def model_states(self) -> list[ModelState] | None:
        states = array_of(self.running).model_states()
        return [self._model_state(state) for state in states] if self.rank == 0 else None

    def _model_state(self, state: ModelState) -> ModelState:
        entries = {
            place: {k: self._given(v) for k, v in held.items()}
            for place, held in state.optimizer["state"].items()
        }
        return replace(state, optimizer={**state.optimizer, "state": entries})

    def load_model_states(self, states: Sequence[ModelState]) -> None:
        array_of(self.running).load_model_states(states)

    def save_checkpoint(self, path: str, allow_nonfinite: bool) -> str | None:
        """Save; returns None or why it was refused, the same on all ranks."""
        from autopar.runtime.state import checkpoint  # brings torch.distributed.checkpoint

        return _refusal(
            functools.partial(checkpoint.save, allow_nonfinite=allow_nonfinite), self.running, path
        )

    def begin_save(self, path: str, keep: int, limit_s: float) -> str | None:
        """Begin a save; returns None or why it was refused, the same on all ranks."""
        from autopar.runtime.state import checkpoint  # brings torch.distributed.checkpoint

        def begin() -> None:
            self._save = checkpoint.begin_save(self.running, path, keep, limit_s)

        return _refusal(begin)

    def save_outcome(self, wait_s: float) -> str | None:
        """As `autopar.runtime.state.background.BackgroundSave.outcome`, of the last save begun."""
        return "" if self._save is None else self._save.outcome(wait_s)

    def give_up_save(self) -> None:
        if self._save is not None:
            self._save.give_up()

    def load_checkpoint(self, path: str) -> str | None:
        """Load; returns None or why it was refused, the same on all ranks."""
        from autopar.runtime.state import checkpoint  # brings torch.distributed.checkpoint

        return _refusal(checkpoint.load, self.running, path)

    def step_counts(self) -> tuple[int, int]:
        """Steps done, and steps skipped."""
        return self.running.num_steps, self.running.num_skipped_steps


def _program(given: RankProgram | bytes) -> RankProgram:
    """A program, which another process has packed."""
    program: RankProgram = unpack(given) if isinstance(given, bytes) else given
    return program


def _refusal(take_over: Callable[..., None], *args: Any) -> str | None:
    try:
        take_over(*args)
    except InputError as error:
        return str(error)
    return None
