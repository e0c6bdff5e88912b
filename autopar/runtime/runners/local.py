"""The runner of one process, or a notebook, that drives local workers: the parent's side.

In: a program, whole state, batches. Out: losses, outputs and whole state. Whole tensors are sent
once for all workers through shared memory, in portions, and each worker copies only its own shard.
For one CPU the only rank is in this process (`autopar.runtime.runners.own_process`), and is called
in the same way.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from autopar.base.accelerators import backend_of, is_accelerator
from autopar.base.errors import InputError
from autopar.ir.placement import local_shape
from autopar.lowering.types import RankProgram
from autopar.runtime.faults.step_limit import StepLimit
from autopar.runtime.runners.own_process import OwnProcess
from autopar.runtime.runners.rank_service import RankService, Step
from autopar.runtime.state.checkpoint_paths import Path, check_exists, check_writable
from autopar.runtime.state.checks import check_state
from autopar.runtime.state.model_optimizers import ModelState, check_models
from autopar.runtime.state.optimizers import (
    HyperParameters,
    is_like_parameter,
    joined_groups,
    make_optimizer,
)
from autopar.runtime.state.shards import gather, holder, needed_state, portions
from autopar.runtime.state.wire import pack
from autopar.runtime.step.begun_call import BegunCall
from autopar.runtime.step.rank import no_optimizer
from autopar.runtime.step.rank_options import RankOptions
from autopar.runtime.step.recovery import error_of_step
from autopar.runtime.step.timing import RankTimes, Timing
from autopar.runtime.workers.group import WorkerGroup


class LocalRunner:
    """The parent's side; it never changes the caller's tensors."""

    def __init__(
        self,
        program: RankProgram,
        state: Mapping[str, Tensor],
        options: RankOptions,
        start_group: Callable[[], WorkerGroup | OwnProcess],
        *,
        owns_group: bool = True,
    ) -> None:
        self.program = program
        self.options = options
        self.grad_norm: Tensor | None = None
        self.num_steps = self.num_skipped_steps = 0
        self._owns_group = owns_group
        self._parameters = {p.name: p for p in program.parameters}
        check_optimizer_here(program, options)
        self.group = start_group()
        self._trainings = {0: (program, self._new_limit())}
        try:
            self.group.call("prepare", self._sent(program))
            for portion in portions(needed_state(program, state)):
                self.group.call("receive", portion)
            by_rank: list[list[str]] = self.group.call("start", options)
        except BaseException:
            self.close()
            raise
        self.not_compiled = list(dict.fromkeys(itertools.chain.from_iterable(by_rank)))

    def _sent(self, program: RankProgram) -> RankProgram | bytes:
        return program if isinstance(self.group, OwnProcess) else pack(program)

    @staticmethod
    def start_workers(devices: Sequence[torch.device], **limits: Any) -> WorkerGroup:
        """Start one worker per device; ``limits`` as in `WorkerGroup`."""
        kind = devices[0].type
        return WorkerGroup(
            len(devices),
            service=RankService,
            backend=backend_of(kind),
            device_type=kind,
            device_indices=[d.index or 0 for d in devices] if is_accelerator(kind) else None,
            **limits,
        )

    def _new_limit(self) -> StepLimit:
        on_cpu = self.program.device_type == "cpu"
        return StepLimit(self.group.call_timeout_s, on_cpu=on_cpu)

    def train_step(
        self, tensors: Sequence[Tensor], *, local: bool = False, slot: int = 0
    ) -> Tensor:
        _refuse_local(local)
        return self._loss_of("train_step", slot, list(tensors), slot)

    def training_pass(
        self,
        tensors: Sequence[Tensor],
        number: int,
        dropped: Sequence[int],
        *,
        local: bool = False,
        slot: int = 0,
    ) -> Tensor:
        _refuse_local(local)
        return self._loss_of("training_pass", slot, list(tensors), slot, number, list(dropped))

    def _loss_of(self, method: str, slot: int, *args: Any) -> Tensor:
        """Run a step, or a pass, on the workers, within the time that steps may take."""
        program, step_limit = self._trainings[slot]
        started_s = time.monotonic()
        step: Step = self.group.call(
            method, *args, timeout_s=step_limit.limit_s, idle_limit_s=step_limit.idle_limit_s
        )[0]
        step_limit.note(time.monotonic() - started_s)
        self._note(step)
        if step.refused is not None:
            raise error_of_step(step.refused, program)
        assert step.loss is not None
        return step.loss

    def _note(self, step: Step) -> None:
        self.grad_norm = step.grad_norm
        self.num_steps, self.num_skipped_steps = step.num_steps, step.num_skipped_steps

    def check_open(self) -> None:
        self.group.check_open("the optimizer")

    def accumulate(self, number: int, factor: float) -> None:
        self.group.call("in_loop", "accumulate", number, factor)

    def update(self, changes: HyperParameters) -> bool:
        is_finite, step = self.group.call("update", changes)[0]
        self._note(step)
        return bool(is_finite)

    def zero_gradients(self, to_none: bool) -> None:
        self.group.call("in_loop", "zero_gradients", to_none)

    def set_gradients(self, given: Mapping[str, Tensor]) -> None:
        for portion in portions(given):
            self.group.call("in_loop", "set_gradients", portion)

    def clip_gradients(self, limit: float) -> Tensor:
        norm: Tensor = self.group.call("in_loop", "clip_gradients", limit)[0]
        return norm

    def hyper_parameters(self) -> HyperParameters | None:
        by_rank = self.group.call("in_loop", "hyper_parameters")
        return next((found for found in by_rank if found is not None), None)

    def set_hyper_parameters(self, changes: HyperParameters) -> None:
        self.group.call("in_loop", "set_hyper_parameters", changes)

    @property
    def loss_scale(self) -> float:
        found: float = self.group.call("loss_scale")[0]
        return found

    def set_training_program(self, slot: int, program: RankProgram) -> None:
        self.group.call("set_training_program", slot, self._sent(program))
        self._trainings[slot] = program, self._new_limit()

    def begin_call(self, begun: BegunCall) -> bool:
        _refuse_local(begun.local)
        return begun.has_full_masks

    def set_forward_program(self, slot: int, program: RankProgram) -> None:
        self.group.call("set_forward_program", slot, self._sent(program))

    def watched(self, _name: str) -> AbstractContextManager[None]:
        """Nothing to do: the parent watches the workers in each call."""
        return contextlib.nullcontext()

    def forward(
        self,
        slot: int,
        tensors: Sequence[Tensor],
        *,
        local: bool = False,
        as_training_pass: bool = False,
    ) -> list[Tensor]:
        _refuse_local(local)
        found = self.group.call("forward", slot, list(tensors), as_training_pass)
        outputs: list[Tensor] = found[0]
        return outputs

    def state_dict(self) -> dict[str, Tensor]:
        return self.full_state_dict()

    def full_state_dict(self) -> dict[str, Tensor]:
        """The state as whole tensors under the model's own keys."""
        named = self._gathered("state")
        return {key: named[name] for key, name in self.options.keys}

    def gradients(self) -> dict[str, Tensor]:
        """The last step's gradients, whole, by parameter name."""
        return self._gathered("gradients")

    def _gathered(self, what: str) -> dict[str, Tensor]:
        by_rank = self.group.call("held", what)
        names = dict.fromkeys(name for held in by_rank for name in held)
        return {name: self._whole(name, [h.get(name) for h in by_rank]) for name in names}

    def _whole(self, name: str, parts: Sequence[Tensor | None]) -> Tensor:
        """Assemble a tensor from the shards of the ranks that sent theirs."""
        mesh, parameter = self.program.mesh, self._parameters.get(name)
        if parameter is None:
            return next(part for part in parts if part is not None)
        stored, first = parameter.stored, parameter.devices[0] * mesh.num_devices
        full = [parts[first + holder(stored, mesh, rank)] for rank in range(mesh.num_devices)]
        return gather([p for p in full if p is not None], stored, parameter.shape, mesh)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        check_state(state, self.options.keys, self.program)
        named = {name: state[key].detach() for key, name in reversed(self.options.keys)}
        for portion in portions(named):
            self.group.call("load", portion)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """As `RankRuntime.optimizer_state_dict`, with whole tensors."""
        self._require_optimizer()
        by_rank = self.group.call("held_optimizer_state")
        mesh = self.program.mesh
        shapes = {p.name: local_shape(p.shape, p.stored, mesh) for p in self.program.parameters}
        state: dict[str, dict[str, Any]] = {}
        # One holder's entries; all holders of a split parameter have the same keys.
        held = {name: e for r in reversed(by_rank) for name, e in r["state"].items()}
        for name, entries in held.items():
            reference = torch.empty(shapes[name], device="meta")
            state[name] = {
                key: self._whole(name, [r["state"].get(name, {}).get(key) for r in by_rank])
                if is_like_parameter(value, reference)
                else value
                for key, value in entries.items()
            }
        groups = joined_groups([r["param_groups"] for r in by_rank], self.program.parameters)
        return {"state": state, "param_groups": groups}

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        self._require_optimizer()
        self._checked_call("load_optimizer_state_dict", state)

    def model_states(self) -> list[ModelState]:
        states: list[ModelState] = self.group.call("model_states")[0]
        return states

    def load_model_states(self, states: Sequence[ModelState]) -> None:
        self.group.call("load_model_states", list(states))

    def _require_optimizer(self) -> None:
        if self.options.optimizer is None:
            raise no_optimizer()

    def _checked_call(self, method: str, *args: Any) -> None:
        """Call a method; raises InputError if the workers refused it, and stays usable."""
        refusals = [text for text in self.group.call(method, *args) if text is not None]
        if refusals:
            raise InputError(refusals[0])

    def save(self, path: Path, *, allow_nonfinite: bool = False) -> None:
        check_writable(path)
        self._checked_call("save_checkpoint", os.path.abspath(path), allow_nonfinite)

    def load(self, path: Path) -> None:
        check_exists(path)
        self._checked_call("load_checkpoint", os.path.abspath(path))
        self.num_steps, self.num_skipped_steps = self.group.call("step_counts")[0]

    def begin_save(self, path: str, keep: int) -> None:
        self._checked_call("begin_save", path, keep, self._write_limit_s)

    @property
    def _write_limit_s(self) -> float:
        return self.group.call_timeout_s / 2

    def save_outcomes(self, *, wait: bool, alone: bool = False) -> list[str | None]:
        if self.group.closed:  # by a call that said why
            return []
        return list(self.group.call("save_outcome", self._write_limit_s if wait else 0.0))

    def give_up_save(self) -> None:
        self.group.call("give_up_save")

    def allow_graphs(self, is_allowed: bool) -> None:
        if self.program.device_type != "cpu" and not self.group.closed:
            self.group.call("allow_graphs", is_allowed)

    def graph_notes(self) -> list[str]:
        if self.program.device_type == "cpu" or self.group.closed:
            return []
        notes: list[list[str]] = self.group.call("graph_notes")
        return notes[0]

    def memory_growth_bytes(self) -> list[int]:
        return [int(grown) for grown in self.group.call("memory_growth_bytes")]

    def start_counting_tensors(self) -> None:
        self.group.call("start_counting_tensors")

    def counted_tensor_bytes(self) -> list[int]:
        return [int(held) for held in self.group.call("counted_tensor_bytes")]

    def set_timing(self, timing: Timing) -> None:
        self.group.call("set_timing", timing)

    def step_times(self) -> list[RankTimes]:
        return list(self.group.call("step_times"))

    def close(self) -> None:
        if self._owns_group:
            self.group.close()


def check_optimizer_here(program: RankProgram, options: RankOptions) -> None:
    """Refuse optimizers before anything is sent, by building them over unwritten memory."""
    if options.optimizer is None:
        return
    if options.array is not None:  # each model's optimizer, of its own rows
        check_models(options.array, program.parameters, program.mesh)
        return
    parameters = {
        p.name: nn.Parameter(
            torch.empty(local_shape(p.shape, p.stored, program.mesh), dtype=p.dtype)
        )
        for p in program.parameters
        if p.trainable
    }
    optimizer = make_optimizer(options.optimizer, parameters, program.parameters, program.mesh)
    if options.lr_scheduler is not None:
        options.lr_scheduler(optimizer)


def _refuse_local(local: bool) -> None:
    if local:
        raise InputError(
            "local=True is for torchrun, where every process has its own part; one process alone "
            "passes the global batch: leave local=True out"
        )
