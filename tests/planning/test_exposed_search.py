"""The search by exposed communication finds the fastest step, and its bounds hold for all."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from msgspec import structs
from torch import nn

from autopar.cost_models import Cluster, RooflineModel
from autopar.cost_models.communication import CommunicationModel
from autopar.frontend.capture import capture
from autopar.ir.mesh import Mesh
from autopar.passes.prepare import prepare
from autopar.planning.constraints import Pin
from autopar.planning.exposed_search import proofs, search_exposures, sharding_bound_s
from autopar.planning.planner import make_setting
from autopar.planning.ranking import cheapest
from autopar.planning.setting import Setting
from autopar.planning.sharding_search import (
    BUDGET_GAP,
    search_meshes,
    search_nearby,
    search_within,
)
from autopar.pricing.candidate import Candidate
from autopar.pricing.exposed_shares import exposure_of
from autopar.pricing.exposure import Exposure, least_exposed
from autopar.pricing.problem import PricedGraph, price_graph
from autopar.pricing.slopes import slopes_of
from autopar.pricing.step_time import step_costs, time_parts
from autopar.pricing.tables import Pricing
from autopar.search import Solution, Status
from tests.models.zoo import build

ROUNDING = 1e-9
MODELS = ["mlp", "gpt2", "lstm"]
FORMS = [(1, False, False), (4, False, False), (4, True, False), (4, False, True), (1, True, False)]
"""Micro-batches, whether parameters are released, and whether gradients are scattered in each."""


def priced_graph(
    name: str, num: int = 1, sizes: tuple[int, ...] = (2,), slowdown: float = 1.15
) -> PricedGraph:
    model, make_batch = build(name)
    cluster = Cluster.preset("v100", nodes=2, devices_per_node=sizes[-1])
    cluster = structs.replace(cluster, overlap_slowdown=slowdown)
    _, analysis, microbatches = prepare(capture(model, make_batch(0))).cut(num)
    mesh = Mesh(tuple("xy"[: len(sizes)]), sizes)
    return price_graph(
        Pricing(
            analysis, mesh, cluster, RooflineModel(cluster.device), CommunicationModel(cluster),
            microbatches,
        )
    )  # fmt: skip


def with_picks(
    priced: PricedGraph, picks: Sequence[int], *, released: bool = False, scattered: bool = False
) -> Candidate:
    solution = Solution(
        assignment=tuple(picks), cost=0.0, status=Status.FEASIBLE, bound=0.0, gap=0.0, time_s=0.0,
        method="given",
    )  # fmt: skip
    parameters, none = priced.parameters(), frozenset[int]()
    return Candidate(
        priced=priced, solution=solution,
        released=parameters if released else none, scattered=parameters if scattered else none,
    )  # fmt: skip


def drawn(priced: PricedGraph, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(len(cost)) for cost in priced.costs]


def slopes(candidate: Candidate) -> Exposure:
    return slopes_of(
        step_costs(candidate),
        candidate.num_microbatches,
        candidate.priced.pricing.communication.cluster.overlap_slowdown,
        released=bool(candidate.released),
        scattered=bool(candidate.scattered),
    )


@pytest.mark.parametrize("slowdown", [1.0, 1.15, 2.0])
@pytest.mark.parametrize(("num", "released", "scattered"), FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_no_step_is_below_its_sum_of_slopes(
    name: str, num: int, released: bool, scattered: bool, slowdown: float
) -> None:
    """However a strategy is drawn, by the slopes of every other, by means of them, and by the least
    exposure."""
    priced = priced_graph(name, num, slowdown=slowdown)
    found = [
        with_picks(priced, drawn(priced, seed), released=released, scattered=scattered)
        for seed in range(8)
    ]
    steps = [time_parts(each).step_s for each in found]
    least = least_exposed(len(priced.pricing.graph.blocks), 1 - 1 / slowdown)
    own = list(map(slopes, found))
    means = [one.blended(two, 0.3) for one, two in itertools.pairwise(own)]
    for exposed in (least, *own, *means):
        problem = priced.problem(exposed=exposed, released=released, scattered=scattered)
        for each, step_s in zip(found, steps):
            assert problem.cost(each.solution.assignment) <= step_s * (1 + ROUNDING)


@pytest.mark.parametrize("num", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_its_own_sum_of_slopes(name: str, num: int) -> None:
    priced = priced_graph(name, num)
    for seed in range(8):
        found = with_picks(priced, drawn(priced, seed))
        cost = priced.problem(exposed=slopes(found)).cost(found.solution.assignment)
        assert cost == pytest.approx(time_parts(found).step_s, rel=1e-9)


def all_strategies(slowdown: float) -> tuple[Setting, PricedGraph, list[Candidate]]:
    """All strategies of two layers on two devices."""
    layers = nn.Linear(256, 256, bias=False), nn.ReLU(), nn.Linear(256, 64, bias=False)
    batch = torch.randn(64, 256), torch.zeros(64, dtype=torch.long)
    captured = capture(nn.Sequential(*layers), batch, loss_fn=nn.functional.cross_entropy)
    cluster = Cluster.preset("v100", nodes=1, devices_per_node=2)
    setting = make_setting(captured, structs.replace(cluster, overlap_slowdown=slowdown))
    priced = price_graph(setting.pricing(setting.prepared.cut(1), Mesh(("x",), (2,))))
    picks = itertools.product(*(range(len(cost)) for cost in priced.costs))
    return setting, priced, [with_picks(priced, each) for each in picks]


@pytest.mark.parametrize("slowdown", [1.0, 1.15, 2.0])
def test_no_other_strategy_is_faster(slowdown: float) -> None:
    """All strategies of a small model, each priced as a step."""
    setting, priced, every = all_strategies(slowdown)
    found = list(search_exposures(setting, priced))
    found += proofs(setting, found)
    best_s = time_parts(cheapest(found)).step_s
    fastest_s = min(time_parts(each).step_s for each in every)
    assert best_s == pytest.approx(fastest_s, rel=1e-3)
    assert sharding_bound_s(found) <= fastest_s * (1 + ROUNDING)


@pytest.mark.parametrize("share", [0.7, 0.4, 0.2])
@pytest.mark.parametrize("slowdown", [1.0, 1.15, 2.0])
def test_no_other_strategy_within_less_memory_is_faster(slowdown: float, share: float) -> None:
    """All strategies of a small model that take less memory by estimate."""
    setting, priced, every = all_strategies(slowdown)
    least, *_, most = sorted(each.estimated_bytes() for each in every)
    budget = least + share * (most - least)
    fastest_s = min(time_parts(each).step_s for each in every if each.estimated_bytes() <= budget)
    found = search_within(setting, list(search_exposures(setting, priced)), budget)
    found += search_nearby(setting, cheapest(found), budget)
    assert all(each.estimated_bytes() <= budget * (1 + ROUNDING) for each in found)
    best_s = time_parts(cheapest(found)).step_s
    assert fastest_s * (1 - ROUNDING) <= best_s <= fastest_s * (1 + 2 * BUDGET_GAP)
    assert found[-1].solution.bound <= fastest_s * (1 + ROUNDING)  # that by slopes


@pytest.mark.parametrize("name", ["mlp", "gpt2", "bert"])
def test_changes_of_one_decision_do_not_beat_the_bound(name: str) -> None:
    model, make_batch = build(name)
    cluster = Cluster.preset("v100", nodes=2, devices_per_node=2)
    setting = make_setting(capture(model, make_batch(0)), cluster)
    priced = price_graph(setting.pricing(setting.prepared.cut(1), Mesh(("x", "y"), (2, 2))))
    found = list(search_exposures(setting, priced))
    found += proofs(setting, found)
    picks = list(cheapest(found).solution.assignment)
    bound_s, draw = sharding_bound_s(found), random.Random(0)
    for node in draw.sample(range(len(picks)), min(len(picks), 40)):
        for pick in range(len(priced.costs[node])):
            other = [*picks[:node], pick, *picks[node + 1 :]]
            assert time_parts(with_picks(priced, other)).step_s >= bound_s * (1 - ROUNDING)


def test_a_pin_does_not_beat_the_plan() -> None:
    """Where some of the communication is overlapped, and some is not: a search by either price
    alone misses what a pin of the first layer finds."""
    with torch.device("meta"):
        layers = [layer for _ in range(3) for layer in (nn.Linear(8192, 8192), nn.ReLU())]
        model = nn.Sequential(*layers, nn.Linear(8192, 10))
        batch = torch.zeros(4096, 8192), torch.zeros(4096, dtype=torch.long)
    prepared = prepare(capture(model, batch, loss_fn=nn.functional.cross_entropy))
    cluster = Cluster.preset("v100", nodes=2, devices_per_node=4)

    def step_s(*constraints: Pin) -> float:
        setting = make_setting(prepared, cluster, constraints=constraints)
        found = search_meshes(setting, setting.prepared.cut(1), [Mesh(("x", "y"), (2, 4))])
        return time_parts(cheapest(found)).step_s

    free_s = step_s()
    for name, choice in (("0", "n n"), ("0", "k k"), ("2", "k k"), ("4", "n n")):
        assert free_s <= step_s(Pin(name, choice=choice)) * (1 + ROUNDING)


def test_exposed_fractions_are_those_of_the_step() -> None:
    """The gradients of the first block, which the end of the step waits for, are exposed."""
    priced = priced_graph("mlp", slowdown=1.15)
    for seed in range(20):
        found = with_picks(priced, drawn(priced, seed))
        costs, exposed = step_costs(found), exposure_of(found)
        with_reductions = [n for n, block in enumerate(costs.blocks) if block.reduce_s]
        if with_reductions and with_reductions[0] == 0:
            assert exposed.of(0).reductions == 1.0
        for number in range(len(costs.blocks)):
            each = exposed.of(number)
            assert 0 < each.gathers <= 1
            assert 0 < each.reductions <= 1
