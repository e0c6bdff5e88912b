"""Updates within a step in lockstep: optimizers for the shards of all ranks of a mesh.

In: gradients as the executor hands them to an early update. Out: updated shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.lowering.types import RankProgram
from autopar.runtime.state.partial_steps import PartialSteps
from autopar.runtime.step.reductions import Arrived, Gradients
from autopar.testing.lockstep import LockstepRank

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class LockstepUpdates:
    """The updater of a pipeline rank whose values are lists of shards, one per rank of its mesh.

    ``num_early`` counts the gradients that it was handed within backward passes.
    """

    agrees, loss_scale = False, 1.0

    def __init__(self, rank: LockstepRank, program: RankProgram, make: MakeOptimizer) -> None:
        own = [p.value for p in program.parameters if p.trainable and p.value in rank.parameters]
        places = range(program.mesh.num_devices)
        self.shards = [{v: nn.Parameter(rank.parameters[v][i]) for v in own} for i in places]
        self.steps = [PartialSteps(make(list(shards.values()))) for shards in self.shards if shards]
        self.num_early = 0

    def inspect(self, gradients: Sequence[list[Tensor]], dtypes: Sequence[torch.dtype]) -> None:
        pass

    def may_update(self, arrived: Arrived[list[Tensor]], loss: Any) -> bool:
        return True

    def update_early(self, arrived: Arrived[list[Tensor]]) -> None:
        self.num_early += len(arrived.gradients)
        self.apply(arrived.gradients)
        for place, (shards, steps) in enumerate(zip(self.shards, self.steps)):
            for rows in arrived.rows:
                steps.step_rows(shards[rows.value], rows.first, rows.end, rows.gradient[place])

    def apply(self, gradients: dict[int, list[Tensor]]) -> None:
        for place, (shards, steps) in enumerate(zip(self.shards, self.steps)):
            for value, gradient in gradients.items():
                shards[value].grad = gradient[place]
            if gradients:
                steps.step([shards[value] for value in gradients])
            for value in gradients:
                shards[value].grad = None

    def total_loss(self, part: list[Tensor] | None) -> list[Tensor]:
        raise AssertionError("it agrees with nobody")

    def update_last(self, values: Sequence[int]) -> None:
        raise AssertionError("a program that updates early has no update in the next step")

    def update(self, values: Sequence[int], gradients: Gradients[list[Tensor]]) -> None:
        pass
