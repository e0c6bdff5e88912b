"""The runner of one process per device, as ``torchrun`` starts them with the user's script.

In: a program and the model's whole state, which every rank has. Out: a runner with the methods of
`autopar.runtime.runners.local.LocalRunner`, whose state is DTensors.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.base.accelerators import cpu_by_default, is_accelerator, module_of, selected
from autopar.base.closing import closed_error
from autopar.base.errors import DeviceError, InputError
from autopar.lowering.types import RankProgram
from autopar.runtime.faults.step_limit import StepLimit
from autopar.runtime.host.heap import keep_freed_memory
from autopar.runtime.host.peak_memory import PeakMemory, PeakTensors
from autopar.runtime.runners import membership
from autopar.runtime.runners.alike import (
    FORWARD,
    TRAINING,
    AlikeBatches,
    alike_state,
    check_alike,
)
from autopar.runtime.state.checkpoint_paths import Path, check_exists, check_writable
from autopar.runtime.state.model_optimizers import ModelState
from autopar.runtime.state.optimizers import HyperParameters
from autopar.runtime.state.shards import local_part
from autopar.runtime.step.array import array_of, loop_of, make_runtime
from autopar.runtime.step.begun_call import BegunCall
from autopar.runtime.step.diagnosis import StepRefused
from autopar.runtime.step.rank_options import RankOptions
from autopar.runtime.step.recovery import error_of_step
from autopar.runtime.step.timing import RankTimes, Timing

T = TypeVar("T")
COMPILE = "compile()"
_POLL_S = 0.2


def is_spmd() -> bool:
    """Whether this process is one of several that run the same script."""
    return dist.is_initialized() or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def rank_device(device_type: str) -> torch.device:
    """This rank's device: the CPU, or the accelerator of its ``LOCAL_RANK``, made current."""
    if not is_accelerator(device_type):
        return torch.device("cpu")
    module = module_of(device_type)
    count = module.device_count()
    index = int(os.environ.get("LOCAL_RANK", module.current_device() if count else 0))
    if index >= count:
        raise DeviceError(
            f"LOCAL_RANK={index}, but this machine has {count} {device_type} device(s); start "
            f"torchrun --nproc-per-node={count}"
        )
    module.set_device(index)
    return torch.device(device_type, index)


def from_first_rank(make: Callable[[], T], what: str) -> T:
    """Call ``make`` on rank 0 and return its result on every rank; alone, just call it."""
    if not is_spmd():
        return make()
    box: list[T | None] = [None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            box[0] = make()
        except Exception as error:  # raised again below, once the other ranks know
            failure = error
    dist.broadcast_object_list(box, src=0)
    if failure is not None:
        raise failure
    if box[0] is None:
        raise InputError(f"rank 0 could not make {what}; its own error says why")
    return box[0]


@contextlib.contextmanager
def watched_compile(device_type: str, timeout_s: float) -> Iterator[None]:
    """Run a compilation as a member of the job, watched from the first moment; alone, just run."""
    if not is_spmd():
        yield
        return
    watch = membership.join(rank_device(device_type), timeout_s)
    try:
        with watch.call(COMPILE):
            yield
    finally:
        membership.leave(watch)


class SpmdRunner:
    """A `RankRuntime` in this process, with the methods that `Compiled` calls."""

    def __init__(
        self,
        program: RankProgram,
        state: Mapping[str, Tensor],
        options: RankOptions,
        *,
        timeout_s: float = 600.0,
    ) -> None:
        self.device = device = rank_device(program.device_type)
        if device.type == "cpu":
            keep_freed_memory()
        self.watch = membership.join(device, timeout_s)
        self.step_limit = StepLimit(timeout_s, on_cpu=device.type == "cpu")
        self._trainings = {0: (program, self.step_limit)}
        self._forwards: dict[int, RankProgram] = {}
        self._batches = AlikeBatches(device)
        self.peak_memory, self.peak_tensors = PeakMemory(device), PeakTensors(device)
        try:
            with self.watch.call(COMPILE):
                parts = own_parts(program, alike_state(program, state, device))
                self.runtime = make_runtime(program, parts, agreed(options, device), device)
        except BaseException:
            membership.leave(self.watch)
            raise
        self.peak_memory.forget_peak()
        self._save: Any = None
        self._closed = False

    def train_step(
        self, tensors: Sequence[Tensor], *, local: bool = False, slot: int = 0
    ) -> Tensor:
        program, step_limit = self._trainings[slot]
        with self.watched("train_step()", step_limit):
            if not local:
                self._batches.check(TRAINING, slot, program, tensors)
            try:
                return self.runtime.train_step(tensors, local=local, slot=slot)
            except StepRefused as error:  # raised on all ranks, so it is no fault of this one
                refused = error.step
        raise error_of_step(refused, program)

    def training_pass(
        self,
        tensors: Sequence[Tensor],
        number: int,
        dropped: Sequence[int],
        *,
        local: bool = False,
        slot: int = 0,
    ) -> Tensor:
        program, step_limit = self._trainings[slot]
        with self.watched("a training pass", step_limit):
            if not local:
                self._batches.check(TRAINING, slot, program, tensors)
            try:
                return loop_of(self.runtime).training_pass(
                    tensors, number, dropped, local=local, slot=slot
                )
            except StepRefused as error:  # raised on all ranks, so it is no fault of this one
                refused = error.step
        raise error_of_step(refused, program)

    def accumulate(self, number: int, factor: float) -> None:
        with self.watched("backward()"):
            loop_of(self.runtime).accumulate(number, factor)

    def update(self, changes: HyperParameters) -> bool:
        with self.watched("optimizer.step()", self.step_limit):
            return loop_of(self.runtime).update(changes)

    def zero_gradients(self, to_none: bool) -> None:
        with self.watched("zero_grad()"):
            loop_of(self.runtime).zero_gradients(to_none)

    def set_gradients(self, given: Mapping[str, Tensor]) -> None:
        with self.watched("set_gradients()"):
            check_alike("set_gradients()", given)
            loop_of(self.runtime).set_gradients(given)

    def clip_gradients(self, limit: float) -> Tensor:
        with self.watched("clip_grad_norm_()", self.step_limit):
            return loop_of(self.runtime).clip_gradients(limit)

    def hyper_parameters(self) -> HyperParameters | None:
        return loop_of(self.runtime).hyper_parameters()

    def set_hyper_parameters(self, changes: HyperParameters) -> None:
        loop_of(self.runtime).set_hyper_parameters(changes)

    @property
    def not_compiled(self) -> list[str]:
        return self.runtime.not_compiled

    def allow_graphs(self, is_allowed: bool) -> None:
        self.runtime.allow_graphs(is_allowed)

    def graph_notes(self) -> list[str]:
        return self.runtime.graph_notes()

    @property
    def num_skipped_steps(self) -> int:
        return self.runtime.num_skipped_steps

    @property
    def loss_scale(self) -> float:
        return self.runtime.updates.loss_scale

    @property
    def grad_norm(self) -> Tensor | None:
        return self.runtime.grad_norm

    def set_training_program(self, slot: int, program: RankProgram) -> None:
        self.runtime.set_training_program(slot, program)
        limit = StepLimit(self.step_limit.ceiling_s, on_cpu=self.step_limit.on_cpu)
        self._trainings[slot] = program, limit
        self._batches.forget(TRAINING, slot)

    def begin_call(self, begun: BegunCall) -> bool:
        with self.watched("the comparison of batches"):
            return self._batches.begin(begun)

    def set_forward_program(self, slot: int, program: RankProgram) -> None:
        self.runtime.set_forward_program(slot, program)
        self._forwards[slot] = program
        self._batches.forget(FORWARD, slot)

    def check_open(self) -> None:
        if self._closed:
            raise closed_error("close() was called")

    @contextlib.contextmanager
    def watched(self, name: str, limit: StepLimit | None = None) -> Iterator[None]:
        """Watch a call, which may consist of several; ``limit`` if it may hang.

        The rank's device is the current one meanwhile, in whatever thread: torch sends objects from
        the current device where a process group is of GPUs alone.
        """
        self.check_open()
        with cpu_by_default(), selected(self.device), self.watch.call(name, limit):
            yield

    def forward(
        self,
        slot: int,
        tensors: Sequence[Tensor],
        *,
        local: bool = False,
        as_training_pass: bool = False,
    ) -> list[Tensor]:
        if not local:
            self._batches.check(FORWARD, slot, self._forwards[slot], tensors)
        return self.runtime.forward(slot, tensors, local=local, as_training_pass=as_training_pass)

    def state_dict(self) -> dict[str, Tensor]:
        with self.watched("state_dict()"):
            return self.runtime.state_dict()

    def full_state_dict(self) -> dict[str, Tensor]:
        with self.watched("full_state_dict()"):
            return self.runtime.full_state_dict()

    def gradients(self) -> dict[str, Tensor]:
        with self.watched("gradients()"):
            return self.runtime.gradients()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        with self.watched("load_state_dict()"):
            check_alike("load_state_dict()", state)
            self.runtime.load_state_dict(state)

    def optimizer_state_dict(self) -> dict[str, Any]:
        with self.watched("optimizer_state_dict()"):
            return self.runtime.optimizer_state_dict()

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        with self.watched("load_optimizer_state_dict()"):
            check_alike("load_optimizer_state_dict()", state)
            self.runtime.load_optimizer_state_dict(state)

    def model_states(self) -> list[ModelState]:
        with self.watched("model_states()"):
            return array_of(self.runtime).model_states()

    def load_model_states(self, states: Sequence[ModelState]) -> None:
        with self.watched("load_model_states()"):
            array_of(self.runtime).load_model_states(states)

    def save(self, path: Path, *, allow_nonfinite: bool = False) -> None:
        from autopar.runtime.state import checkpoint  # brings torch.distributed.checkpoint

        check_writable(path)
        with self.watched("save()"):
            checkpoint.save(self.runtime, path, allow_nonfinite=allow_nonfinite)

    def load(self, path: Path) -> None:
        from autopar.runtime.state import checkpoint  # brings torch.distributed.checkpoint

        check_exists(path)
        with self.watched("load()"):
            checkpoint.load(self.runtime, path)

    @property
    def num_steps(self) -> int:
        return self.runtime.num_steps

    @property
    def _write_limit_s(self) -> float:
        return self.step_limit.ceiling_s / 2

    def begin_save(self, path: str, keep: int) -> None:
        from autopar.runtime.state import checkpoint  # brings torch.distributed.checkpoint

        with self.watched("a periodic checkpoint"):
            self._save = checkpoint.begin_save(self.runtime, path, keep, self._write_limit_s)

    def save_outcomes(self, *, wait: bool, alone: bool = False) -> list[str | None]:
        if self._save is None or self._closed or self.watch.has_fault:  # which a call has raised
            return []
        wait_s = self._write_limit_s if wait else 0.0
        if not alone:
            with self.watched("a periodic checkpoint"):
                return self.runtime.communicator.from_all_ranks(self._save.outcome(wait_s))
        deadline_s = time.monotonic() + wait_s
        own: str | None = self._save.outcome(0.0)
        while own is None and time.monotonic() < deadline_s:
            if self.watch.has_fault:  # the files of all ranks may never be there
                return []
            own = self._save.outcome(_POLL_S)
        return [own]

    def give_up_save(self) -> None:
        if self._save is not None:
            self._save.give_up()

    def memory_growth_bytes(self) -> list[int]:
        with self.watched("memory_growth_bytes()"):
            return self.runtime.communicator.from_all_ranks(self.peak_memory.growth_bytes())

    def start_counting_tensors(self) -> None:
        self.peak_tensors.start()

    def counted_tensor_bytes(self) -> list[int]:
        with self.watched("peak_tensor_bytes()"):
            return self.runtime.communicator.from_all_ranks(self.peak_tensors.stop())

    def set_timing(self, timing: Timing) -> None:
        self.runtime.clock.set(timing)

    def step_times(self) -> list[RankTimes]:
        with self.watched("action_times()"):
            return self.runtime.communicator.from_all_ranks(self.runtime.step_times())

    def close(self) -> None:
        """Leave the job, and with the last runner the process group, if autopar joined it."""
        if not self._closed:
            membership.leave(self.watch, destroy_group=True)
        self._closed = True


def own_parts(program: RankProgram, needed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of this rank's shards of the whole state that the program needs, on its devices."""
    device_here, rank = program.place(dist.get_rank())
    programs = {p.name: p for p in program.parameters}
    parts = {}
    for name, tensor in needed.items():
        if name in programs:
            if device_here not in programs[name].devices:
                continue
            tensor = local_part(tensor, programs[name].stored, program.mesh, rank)
        parts[name] = tensor.to(tensor.device, copy=True)
    return parts


def agreed(options: RankOptions, device: torch.device) -> RankOptions:
    """The options with rank 0's seed, as the ranks' own generators may differ."""
    seed = torch.tensor(options.seed, dtype=torch.int64, device=device)
    dist.broadcast(seed, 0)
    return replace(options, seed=int(seed))
