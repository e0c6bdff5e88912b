"""Weights updated within the backward pass are those of eager PyTorch, in lockstep.

``make exhaustive`` draws twenty times as many.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from autopar.frontend.capture import Captured, capture
from autopar.ir.mesh import Mesh
from autopar.lowering.early import with_early_update
from autopar.lowering.training import lower_training
from autopar.lowering.types import RankProgram
from autopar.sharding.strategy import Analysis, Strategy
from autopar.testing.lockstep import LockstepRun, gather
from autopar.testing.lockstep_updates import LockstepUpdates, MakeOptimizer
from tests.effort import EXHAUSTIVE
from tests.equality.case import ALONE, Case
from tests.equality.drawn_plans import drawn_programs
from tests.oracles import (
    Trained,
    assert_same,
    random_assignment,
    reference_steps,
    sgd,
    state_of,
)

FACTOR = 20 if EXHAUSTIVE else 1
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2),
}


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


@functools.cache
def case_of(kind: str) -> Case:
    return Case(kind, num_joined=2, num_steps=2)


def without_gradients(trained: Trained) -> Trained:
    return dataclasses.replace(trained, gradients={})


@pytest.mark.parametrize("kind", ["mlp", "gpt2", "bert", "resnet", "llama"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_five_steps_equal_eager(kind: str, optimizer: str) -> None:
    case = Case(kind, num_steps=5)
    case.optimizer = OPTIMIZERS[optimizer]
    program = case.lowered(1, ALONE, 0)
    early = with_early_update(program, tile_bytes=256)
    got, (updater,) = train_early(
        early, case.captured, state_of(case.model), case.batches, case.optimizer
    )
    # The difference of two roundings is divided by a small square root, and grows.
    tolerance = case.tolerance * (1 if optimizer == "sgd" else 1e3)
    assert_same(got, without_gradients(case.expected(1)), tolerance=tolerance)
    assert updater.num_early


@pytest.mark.parametrize("kind", ["mlp", "gpt2", "bert", "resnet", "llama", "lstm", "t5"])
@pytest.mark.parametrize("number", range(2 * FACTOR))
def test_drawn_plans_and_schedules_equal_eager(kind: str, number: int) -> None:
    case = case_of(kind)
    for drawn in drawn_programs(case, 1000 + number, 4):
        early = with_early_update(drawn.program, tile_bytes=256)
        try:
            got, _ = train_early(
                early, case.captured, state_of(case.model), case.batches, case.optimizer
            )
            expected = case.expected(early.num_microbatches)
            assert_same(got, without_gradients(expected), tolerance=case.tolerance)
        except Exception as error:
            error.add_note(drawn.text)
            raise


def test_every_part_of_the_mesh_updates_rows() -> None:
    """The rows of a gradient that is summed over data-parallel ranks."""
    case = case_of("mlp")
    for seed in range(20):
        program = with_early_update(case.lowered(1, Mesh(("x",), (2,)), seed), tile_bytes=256)
        got, _ = train_early(
            program, case.captured, state_of(case.model), case.batches, case.optimizer
        )
        assert_same(got, without_gradients(case.expected(1)), tolerance=case.tolerance)


class Read(nn.Module):
    """Reads a weight that others train, in its derivative too."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(8, 8), weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.relu(self.linear(x)) @ self.weight.detach()).sin() + x


class Train(Read):
    """The same, and trains it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.relu(self.linear(x)) @ self.weight).sin() + x


class ReadAfterItsGradient(nn.Module):
    """The gradient of a weight is complete before an earlier layer's derivative reads it."""

    def __init__(self) -> None:
        super().__init__()
        weight = nn.Parameter(torch.randn(8, 8))
        self.layers = nn.ModuleList(kind(weight) for kind in (Read, Read, Train))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_a_weight_is_updated_after_its_last_read() -> None:
    torch.manual_seed(0)
    model = ReadAfterItsGradient().double()
    batches = [{"x": torch.randn(4, 8, dtype=torch.float64)} for _ in range(3)]
    captured = capture(model, batches[0])
    assert len(captured.graph.blocks) >= 3
    analysis = Analysis(captured.graph)
    program = lower_training(Strategy(analysis, random_assignment(analysis, ALONE, 0)))
    expected = reference_steps(model, batches, sgd)
    got, _ = train_early(with_early_update(program), captured, state_of(model), batches, sgd)
    assert_same(got, without_gradients(expected), tolerance=1e-9)
