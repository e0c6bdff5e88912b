"""Random operators: equal on replicas, different on shards, the same in lockstep and processes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.frontend.capture import Captured, capture
from autopar.ir.choice import Choice
from autopar.ir.mesh import Mesh
from autopar.ir.placement import R, S
from autopar.lowering.program import lower
from autopar.lowering.types import RankProgram
from autopar.rules.choice import enumerate_choices
from autopar.runtime.machine.randomness import mixed
from autopar.runtime.state.wire import pack, unpack
from autopar.sharding.strategy import Analysis, Assignment, Strategy
from autopar.testing.lockstep import LockstepRun, gather
from tests.oracles import random_assignment, sgd, state_of
from tests.runtime.conftest import Groups
from tests.runtime.processes import runner_of

BATCH, WIDTH = 8, 64


class Dropped(nn.Module):
    """Its output shows which elements were dropped: twice in a row, then inside attention."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.first = nn.Dropout(0.5)
        self.second = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = self.first(x * self.weight)
        second = self.second(x + 0 * first)
        heads = (x + self.weight).view(BATCH, 4, 4, WIDTH // 16)
        attended = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)
        return {"first": first, "second": second, "attended": attended.sum(), "loss": first.sum()}


MESH = Mesh(("dp", "tp"), (2, 2))
X = torch.ones(BATCH, WIDTH)


@pytest.fixture(scope="module")
def captured() -> Captured:
    return capture(Dropped(), (X,))


def rows_over_dp(captured: Captured) -> Strategy:
    """Dropout split by rows over axis dp, the same on both ranks of axis tp."""
    analysis = Analysis(captured.graph)
    choices = []
    for op, space, bases in zip(captured.graph.ops, analysis.spaces, analysis.bases):
        wanted = "d0 -" if "dropout" in op.target_name else "- -"
        found = [c for c in enumerate_choices(space, MESH, bases) if str(c) == wanted]
        choices.append(found[0] if found else Choice((None, None)))
        assert found or "dropout" not in op.target_name, enumerate_choices(space, MESH, bases)
    stored = {captured.graph.inputs[0]: (S(0), R)}
    relays = dict.fromkeys(analysis.relayed, (R, R))
    strategy = Strategy(
        analysis, Assignment(mesh=MESH, choices=tuple(choices), stored=stored, relays=relays)
    )
    strategy.verify()
    return strategy


def outputs(
    program: RankProgram, captured: Captured, *, seed: int = 0, steps: int = 0
) -> list[dict[str, Tensor]]:
    """Each rank's outputs in lockstep, after some further steps."""
    run = LockstepRun(program, captured.graph, state_of(Dropped()), seed=seed)
    run.num_steps = steps
    values = run.forward([X])
    found = [values[o.value] for o in program.outputs]
    return [
        {str(i): shards[rank] for i, shards in enumerate(found)} for rank in range(MESH.num_devices)
    ]


def dropped(out: dict[str, Tensor], which: int = 0) -> Tensor:
    return out[str(which)] == 0


def test_shards_differ_and_replicas_agree(captured: Captured) -> None:
    ranks = outputs(lower(rows_over_dp(captured), training=False), captured)
    for out in ranks[1:]:  # made whole: every rank sees all rows, as every other does
        for key, tensor in out.items():
            assert torch.equal(tensor, ranks[0][key])
    for which in (0, 1):
        mask = dropped(ranks[0], which)
        assert 0.3 < mask.float().mean() < 0.7
        assert not torch.equal(mask[: BATCH // 2], mask[BATCH // 2 :])
    assert not torch.equal(dropped(ranks[0], 0), dropped(ranks[0], 1))


def test_a_redundant_operator_is_the_same_on_all_ranks(captured: Captured) -> None:
    """Otherwise the ranks' copies of its result would diverge."""
    analysis = Analysis(captured.graph)
    redundant = Assignment(
        mesh=MESH,
        choices=tuple(Choice((None, None)) for _ in captured.graph.ops),
        stored={},
        relays=dict.fromkeys(analysis.relayed, (R, R)),
    )
    program = lower(Strategy(analysis, redundant), training=False)
    ranks = outputs(program, captured)
    assert all(torch.equal(out["0"], ranks[0]["0"]) for out in ranks)
    assert all(torch.equal(out["2"], ranks[0]["2"]) for out in ranks)


def test_steps_and_seeds_differ_and_repeat(captured: Captured) -> None:
    program = lower(rows_over_dp(captured), training=False)
    masks = {
        (seed, step): dropped(outputs(program, captured, seed=seed, steps=step)[0])
        for seed in (0, 1)
        for step in (0, 1)
    }
    again = dropped(outputs(program, captured, seed=1, steps=1)[0])
    assert torch.equal(masks[1, 1], again)
    different = list(masks.values())
    for i, one in enumerate(different):
        assert not any(torch.equal(one, other) for other in different[:i])


@pytest.mark.parametrize("draw", range(3))
def test_processes_draw_what_lockstep_draws(captured: Captured, groups: Groups, draw: int) -> None:
    analysis = Analysis(captured.graph)
    strategy = Strategy(analysis, random_assignment(analysis, MESH, draw))
    model = Dropped()
    program = lower(strategy)
    runner = runner_of(groups(4), captured, program, model, optimizer=sgd, seed=5)
    runner.set_forward_program(0, lower(strategy, training=False))
    run = LockstepRun(program, captured.graph, state_of(model), seed=5)
    forward = LockstepRun(lower(strategy, training=False), captured.graph, state_of(model), seed=5)
    expected = forward.forward([X])
    got = runner.forward(0, [X])
    for output, tensor in zip(forward.program.outputs, got, strict=True):
        torch.testing.assert_close(tensor, expected[output.value][0])
    losses = [runner.train_step([X]).item() for _ in range(2)]
    result = run.step([X])
    assert losses[0] == pytest.approx(result.loss[0].item())
    (weight,) = program.parameters
    whole = gather(result.gradients[weight.value], weight.stored, weight.shape, MESH)
    run2 = runner_of(groups(4), captured, program, model, optimizer=sgd, seed=5)
    run2.train_step([X])
    torch.testing.assert_close(run2.gradients()["weight"], whole)
    assert losses[1] != losses[0]


@pytest.mark.parametrize("draw", range(3))
def test_backward_drops_what_forward_dropped(captured: Captured, groups: Groups, draw: int) -> None:
    """The loss is the sum of ``dropped(x * weight)``, so it is its gradient times the weights."""
    analysis = Analysis(captured.graph)
    program = lower(Strategy(analysis, random_assignment(analysis, MESH, draw)))
    runner = runner_of(groups(4), captured, program, Dropped(), optimizer=sgd, seed=draw)
    loss = runner.train_step([X])
    gradient = runner.gradients()["weight"]
    assert gradient.sum().item() == pytest.approx(loss.item())
    kept = gradient / 2  # an element that is kept counts 1 / (1 - p)
    assert torch.equal(kept, kept.round())
    assert len(kept.unique()) > 2


def test_replicas_stay_alike_while_they_train(captured: Captured, groups: Groups) -> None:
    group = groups(4)
    runner = runner_of(group, captured, lower(rows_over_dp(captured)), Dropped(), optimizer=sgd)
    for _ in range(3):
        runner.train_step([X])
    parts = group.call("all_parts")
    assert not torch.equal(parts[0]["weight"], torch.ones(WIDTH))
    assert all(torch.equal(part["weight"], parts[0]["weight"]) for part in parts)


class Attended(nn.Module):
    """Every head attends to the same positions, so only dropout distinguishes them."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(2, 1, 8, 16).expand(2, 4, 8, 16)
        return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)


def test_attention_drops_differently_in_each_shard_of_heads() -> None:
    captured = capture(Attended(), (torch.randn(2, 8, 16),))
    analysis = Analysis(captured.graph)
    mesh = Mesh(("tp",), (2,))
    choices = []
    for op, space, bases in zip(captured.graph.ops, analysis.spaces, analysis.bases):
        options = enumerate_choices(space, mesh, bases)
        by_heads = [c for c in options if "attention" in op.target_name and str(c) == "h"]
        choices.append(by_heads[0] if by_heads else Choice((None,)))
    assert any(not choice.is_redundant for choice in choices)
    strategy = Strategy(
        analysis,
        Assignment(
            mesh=mesh, choices=tuple(choices), stored={},
            relays=dict.fromkeys(analysis.relayed, (R,)),
        ),
    )  # fmt: skip
    program = lower(strategy, training=False)
    run = LockstepRun(program, captured.graph, {})
    values = run.forward([torch.randn(2, 8, 16)])
    on_first, on_second = values[program.outputs[0].value]
    assert torch.equal(on_first, on_second)
    for one in range(4):
        for other in range(one):
            assert not torch.allclose(on_first[:, one], on_first[:, other])


def test_the_users_own_random_numbers_go_on_as_before(captured: Captured, groups: Groups) -> None:
    group = groups(4)
    runner = runner_of(group, captured, lower(rows_over_dp(captured)), Dropped(), optimizer=sgd)
    torch.manual_seed(7)
    expected = (torch.rand(1), torch.rand(1), torch.rand(1), torch.rand(1))
    group.call("seed", 7)
    before = group.call("drawn")[0]
    runner.train_step([X])
    after = group.call("drawn")[0]
    assert (*before, *after) == expected


def test_the_axes_travel_with_the_program(captured: Captured) -> None:
    program = lower(rows_over_dp(captured), training=False)
    sent = unpack(pack(program))
    for out, expected in zip(outputs(sent, captured), outputs(program, captured)):
        assert torch.equal(dropped(out), dropped(expected))
    assert dataclasses.replace(sent, kernels=()) == dataclasses.replace(program, kernels=())
    for got, kernel in zip(sent.kernels, program.kernels, strict=True):
        assert got.forward.code == kernel.forward.code
        assert dataclasses.asdict(got).keys() == dataclasses.asdict(kernel).keys()


def test_mixed_seeds_do_not_collide() -> None:
    seeds = {mixed(a, b, c) for a in range(20) for b in range(20) for c in range(20)}
    assert len(seeds) == 8000
    assert all(0 <= seed < 1 << 63 for seed in seeds)
