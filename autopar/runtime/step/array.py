"""The runtime of one rank of an array: several models in one program, each trained independently.

In: as for `autopar.runtime.step.rank.RankRuntime`, and how each model trains. A step returns a row
of numbers with one entry per model instead of a loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from autopar.base.accelerators import kept_generators
from autopar.lowering.types import RankProgram
from autopar.runtime.state.model_optimizers import ModelOptimizers, ModelState
from autopar.runtime.state.model_options import ArrayOptions
from autopar.runtime.state.optimizers import MakeOptimizer, MakeScheduler
from autopar.runtime.step.diagnosis import StepRefused
from autopar.runtime.step.executor import StepResult
from autopar.runtime.step.loop import LoopRuntime
from autopar.runtime.step.model_updates import ModelUpdates
from autopar.runtime.step.rank import RankRuntime
from autopar.runtime.step.rank_options import RankOptions
from autopar.runtime.step.updates import Updates

LOSS, NORM, UPDATED = 0, 1, 2
"""The rows of a step's result (float64), each with one number per model."""


class ArrayRuntime(RankRuntime):
    """Runs one rank of an array's program; ``options.array`` is given."""

    updates: ModelUpdates

    @property
    def array(self) -> ArrayOptions:
        assert self.options.array is not None
        return self.options.array

    def _make_optimizer(self, make: MakeOptimizer, scheduler: MakeScheduler | None) -> None:
        self.model_steps = [0] * self.array.num_models
        self.models = ModelOptimizers(
            self.array, self._programs, self._parameters, self.communicator
        )

    def _make_updates(self) -> Updates:
        trained = self._trainable()
        return ModelUpdates(
            self.models,
            {p.value: self._parameters[p.name] for p in trained},
            {p.value: p.name for p in trained},
            self.communicator,
            trained,
            self.options.nonfinite,
        )

    @torch.no_grad()
    def train_step(
        self, tensors: Sequence[Tensor], *, local: bool = False, slot: int = 0
    ) -> Tensor:
        """Run one step of all models: ``[3, models]``, with the rows LOSS, NORM, UPDATED."""
        batches = [
            self.inputs(self.program, tensors, index, local=local)
            for index in range(self.program.num_microbatches)
        ]
        bound = self._trainings[slot]
        self.updates.begin_step()
        self.recovery.begin_step()

        def launch() -> StepResult[Tensor]:
            with self._seeded_models(bound.is_random), self._run_by(self.recovery):
                return bound.executor.step(
                    bound.parameters, bound.held(self._buffers), batches, self.updates
                )

        result = self._replayed(bound, batches, launch)
        following = {bound.buffers[v]: x for v, x in result.buffers.items()}
        losses = following[self.array.losses]
        has_updated = self.updates.end_models(result.reductions, losses)
        failed = None if has_updated else self.recovery.failed_step(self.num_steps + 1)
        if failed is not None:
            bound.executor.fixed.clear()
            self.updates.begin_step()
            raise StepRefused(failed)
        updated = self.updates.updated
        if has_updated:
            self.num_steps += 1
            self.model_steps = [n + u for n, u in zip(self.model_steps, updated)]
            self._take_buffers(following)
            self._forget_fixed(self._forwards.values())
        self.num_skipped_steps += len(updated) - sum(updated)
        if self.device.type == "cpu":
            self._freed_memory.after_step()
        norms = self.updates.norms
        assert norms is not None
        rows = [losses.double().cpu(), norms, torch.tensor(updated, dtype=torch.float64)]
        return torch.stack(rows)

    def _take_buffers(self, following: Mapping[str, Tensor]) -> None:
        """The next buffers; models that were not updated keep theirs."""
        held = [model for model, took in enumerate(self.updates.updated) if not took]
        kept = {ref.name for m in held for ref in self.array.models[m].buffers}
        for name, new in following.items():
            self._buffers[name] = self._without(name, new, held) if name in kept else new

    def _without(self, name: str, new: Tensor, held: Sequence[int]) -> Tensor:
        old, merged = self._buffers[name], new.clone()
        for model in held:
            for ref in self.array.models[model].buffers:
                if ref.name == name and ref.row is None:
                    return old
                if ref.name == name:
                    merged[ref.row] = old[ref.row]
        return merged

    def _optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return self.models.optimizers

    @contextlib.contextmanager
    def _seeded_models(self, is_random: bool) -> Iterator[None]:
        if not is_random:
            yield
            return
        self.machine.seeds.begin_step(self.num_steps)
        self.machine.seeds.begin_models([m.seed for m in self.array.models], self.model_steps)
        with kept_generators(self.device):
            yield

    def model_states(self) -> list[ModelState]:
        """The state of each model's training besides its tensors, on every rank. Collective."""
        return self.models.states(self.model_steps, self.dtensors)

    def load_model_states(self, states: Sequence[ModelState]) -> None:
        """Continue from what `model_states` returned."""
        self.models.load(states)
        self.model_steps = [state.num_steps for state in states]


def make_runtime(
    program: RankProgram,
    state: Mapping[str, Tensor],
    options: RankOptions,
    device: torch.device,
) -> RankRuntime:
    """Make the runtime of a rank, of one model's program or of an array's."""
    kind = LoopRuntime if options.array is None else ArrayRuntime
    return kind(program, state, options, device)


def array_of(runtime: RankRuntime) -> ArrayRuntime:
    """The runtime, which must be an array's."""
    assert isinstance(runtime, ArrayRuntime)
    return runtime


def loop_of(runtime: RankRuntime) -> LoopRuntime:
    """The runtime, which must be one model's."""
    assert isinstance(runtime, LoopRuntime)
    return runtime
