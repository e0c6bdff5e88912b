"""Training in lockstep with early updates: weights change within the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.frontend.capture import Captured
from autopar.lowering.types import RankProgram
from autopar.runtime.state.partial_steps import PartialSteps
from autopar.runtime.step.reductions import Arrived, Reductions
from autopar.testing.lockstep import LockstepRank, LockstepRun, gather
from tests.oracles import MakeOptimizer, Trained


class LockstepUpdates:
    """The updater of a pipeline rank whose values are lists of shards, one per rank of its mesh.

    ``most`` is the largest number of bytes of gradients that it was handed at once.
    """

    agrees, loss_scale = False, 1.0

    def __init__(self, rank: LockstepRank, program: RankProgram, make: MakeOptimizer) -> None:
        own = [p.value for p in program.parameters if p.trainable and p.value in rank.parameters]
        places = range(program.mesh.num_devices)
        self.shards = [{v: nn.Parameter(rank.parameters[v][i]) for v in own} for i in places]
        self.steps = [PartialSteps(make(list(shards.values()))) for shards in self.shards if shards]
        self.most = self.num_early = 0

    def inspect(self, gradient: list[Tensor], dtype: torch.dtype) -> None:
        pass

    def update_early(self, arrived: Arrived[list[Tensor]], loss: Any) -> None:
        self.num_early += len(arrived.gradients)
        self.apply(arrived.gradients)
        for place, (shards, steps) in enumerate(zip(self.shards, self.steps)):
            for rows in arrived.rows:
                self.most = max(self.most, rows.gradient[place].nbytes)
                steps.step_rows(shards[rows.value], rows.first, rows.end, rows.gradient[place])

    def apply(self, gradients: dict[int, list[Tensor]]) -> None:
        for place, (shards, steps) in enumerate(zip(self.shards, self.steps)):
            for value, gradient in gradients.items():
                shards[value].grad = gradient[place]
                self.most = max(self.most, gradient[place].nbytes)
            if gradients:
                steps.step([shards[value] for value in gradients])
            for value in gradients:
                shards[value].grad = None

    def update(self, values: Sequence[int], gradients: Reductions[list[Tensor]]) -> None:
        pass


def train_early(
    program: RankProgram,
    captured: Captured,
    state: dict[str, Tensor],
    batches: Sequence[dict[str, Tensor]],
    make_optimizer: MakeOptimizer,
) -> tuple[Trained, list[LockstepUpdates]]:
    """As `tests.oracles.train_program`, but for the gradients, which are gone."""
    run = LockstepRun(program, captured.graph, state)
    updaters = [LockstepUpdates(rank, program, make_optimizer) for rank in run.ranks]
    losses = []
    for batch in batches:
        results = run.steps(captured.signature.flatten((), batch), updaters)
        losses.append(results[0].loss[0].item())
        for result, updater in zip(results, updaters):
            for arrived in result.reductions.arrivals():
                updater.apply(arrived)
    trained = Trained(
        losses=losses,
        gradients={},
        weights={
            p.name: gather(run.parameters[p.value], p.stored, p.shape, program.mesh)
            for p in program.parameters
        },
        buffers={b.name: run.buffers[b.value][-1] for b in program.buffers},
    )
    return trained, updaters
