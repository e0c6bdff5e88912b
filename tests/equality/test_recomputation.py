"""Blocks recompute in their backward pass what they computed in their forward pass, bit for bit.

Drawn combinations with meshes, micro-batches and schedules are in ``test_drawn_plans``.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.base.errors import PlanError
from autopar.frontend.capture import capture
from autopar.ir.mesh import Mesh
from autopar.lowering.program import Traces, lower
from autopar.lowering.training import lower_training
from autopar.lowering.types import RankProgram
from autopar.passes.prepare import prepare
from autopar.sharding.strategy import Strategy
from autopar.testing.lockstep import LockstepRun
from tests.equality.case import ALONE, Case
from tests.oracles import random_assignment, state_of

NUM_STEPS = 5


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["mlp", "gpt2", "bert", "resnet", "llama", "lstm"])
def test_five_steps_equal_eager(kind: str, share: float) -> None:
    case = Case(kind, num_joined=2, num_steps=NUM_STEPS)
    case.check(case.lowered(1, ALONE, 7, share))


class Noisy(nn.Module):
    """Layers with dropout, one after another in two blocks, and in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        mixed = F.dropout(F.gelu(self.first(F.dropout(x, 0.3))), 0.5)
        heads = F.dropout(self.second(mixed), 0.2)
        return torch.tanh(x + heads) * F.dropout(x, 0.1).sigmoid()


def gradients(program: RankProgram, graph: object, state: dict[str, Tensor], x: Tensor):
    run = LockstepRun(program, graph, state, seed=3)  # type: ignore[arg-type]
    results = [run.step([x]) for _ in range(2)]
    return [shard for r in results for _, g in sorted(r.gradients.items()) for shard in g]


@pytest.mark.parametrize("mesh", [ALONE, Mesh(("x",), (2,))])
def test_dropout_draws_the_same_numbers_again(mesh: Mesh) -> None:
    """To the last bit: with other masks in the backward pass gradients would be far off."""
    torch.manual_seed(0)
    model, x = Noisy(), torch.randn(8, 4, 8)
    captured = capture(model, (x,))
    analysis = prepare(captured).analysis
    strategy, traces = Strategy(analysis, random_assignment(analysis, mesh, 5)), Traces()
    plain = lower(strategy, traces=traces)
    names = [b.name for b in plain.blocks if b.role.has_stage]
    again = lower(strategy, kept=dict.fromkeys(names, ()), traces=traces)
    expected, got = (gradients(p, captured.graph, state_of(model), x) for p in (plain, again))
    drawn = [
        node.target
        for kernel in again.kernels
        if kernel.backward_input is not None
        for node in kernel.backward_input.graph.nodes
        if "dropout" in str(node.target) or "bernoulli" in str(node.target)
    ]
    assert drawn, "nothing random is recomputed"
    assert len(expected) == len(got) > 4
    for left, right in zip(expected, got):
        assert torch.equal(left, right)


def test_traces_of_a_strategy_serve_what_it_releases_and_scatters() -> None:
    """A program with traces is the same as one without."""
    case, mesh = Case("gpt2", num_steps=1), Mesh(("x",), (2,))
    strategy, traces = case.strategy(2, mesh, 7), Traces()
    every = frozenset(value.index for value in strategy.graph.parameters)
    for released, scattered in ((frozenset(), every), (every, frozenset()), (every, every)):
        leaner = strategy.keeping(released=released, scattered=scattered)
        again = lower_training(leaner, 2, traces=traces)
        assert str(again) == str(lower_training(leaner, 2))
        for name, chosen in (("released", released), ("scattered", scattered)):
            assert any(getattr(p, name) for p in again.parameters) == bool(chosen)


def test_results_of_collectives_are_kept_but_for_all_to_alls() -> None:
    """No backward graph repeats other communication of a forward graph."""
    case = Case("gpt2", num_steps=1)
    mesh = Mesh(("x",), (2,))
    plain, again = (case.lowered(1, mesh, 11, share) for share in (None, 0.0))

    def calls(program: RankProgram, *phases: str) -> Counter[tuple[str, str, int]]:
        found = (c for c in program.collectives() if c.phase in phases)
        return Counter((c.where, c.kind, c.size_bytes) for c in found)

    assert calls(plain, "F") == calls(again, "F")
    backward = calls(plain, "I", "W"), calls(again, "I", "W")  # one may go from one to the other
    assert backward[0] <= backward[1]
    assert {kind for _, kind, _ in backward[1] - backward[0]} == {"all_to_all"}


def test_unknown_blocks_and_values_are_refused() -> None:
    case = Case("mlp", num_steps=1)
    strategy = case.strategy(1, ALONE, 0)
    names = [b.name for b in lower(strategy).blocks if b.role.has_stage]
    with pytest.raises(PlanError, match=r"no block is called 'layer'"):
        lower(strategy, kept={"layer": ()})
    with pytest.raises(PlanError, match=r"'gelu_7' is no value that the backward pass can read"):
        lower(strategy, kept={names[0]: ("gelu_7",)})
