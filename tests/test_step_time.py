"""A step without a pipeline takes the time of two queues: computation and communication."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
from msgspec import structs

from autopar.cost_models import Cluster, RooflineModel
from autopar.cost_models.communication import CommunicationModel
from autopar.frontend.capture import capture
from autopar.ir.mesh import Mesh
from autopar.lowering.training import lower_training
from autopar.lowering.types import collectives_of
from autopar.passes.prepare import prepare
from autopar.planning.constraints import Force, narrow
from autopar.planning.planner import make_planned
from autopar.pricing.candidate import Candidate
from autopar.pricing.problem import price_graph
from autopar.pricing.step_time import _beyond, time_parts
from autopar.pricing.tables import Pricing
from autopar.search import solve
from tests.models.zoo import build

A100 = Cluster.preset("a100-80", nodes=1, devices_per_node=2)
SLOWDOWNS = [1.0, 1.15, 2.0, 50.0]


def candidate_of(
    slowdown: float,
    plan: str = "data_parallel",
    num: int = 1,
    name: str = "gpt2",
    cluster: Cluster = A100,
) -> Candidate:
    model, make_batch = build(name)
    cluster = structs.replace(cluster, overlap_slowdown=slowdown)
    _, analysis, microbatches = prepare(capture(model, make_batch(0))).cut(num)
    compute, communication = RooflineModel(cluster.device), CommunicationModel(cluster)
    mesh = Mesh(("x",), (2,))
    priced = price_graph(Pricing(analysis, mesh, cluster, compute, communication, microbatches))
    costs = narrow(priced, [Force(plan)])
    return Candidate(priced=priced, solution=solve(priced.problem(costs)))


def stepped_s(candidate: Candidate) -> float:
    """The passes of one micro-batch, simulated in small time steps."""
    times = candidate.times
    graph, pricing = candidate.priced.pricing.graph, candidate.priced.pricing
    first_user = {
        p.index: next(
            b.name
            for b in graph.blocks
            if any(p.index in op.inputs for op in graph.block_ops(b)) and b.name in times.blocks
        )
        for p in graph.parameters
    }
    names = list(times.blocks)
    step_s = time_parts(candidate).step_s / 40_000
    slowdown = pricing.cluster.overlap_slowdown
    queue: deque[list[float]] = deque()  # seconds that are left of each collective, in order
    now = 0.0

    def compute(seconds: float) -> None:
        nonlocal now
        while seconds > 0:
            seconds -= step_s / (slowdown if queue else 1.0)
            communicate()

    def communicate() -> None:
        nonlocal now
        now += step_s
        if queue:
            queue[0][0] -= step_s
            if queue[0][0] <= 0:
                queue.popleft()

    fetch = [times.blocks[name].fetch_s for name in names]
    awaited = [fetch[0]]
    queue.extend([awaited] if fetch[0] else [])
    for position, name in enumerate(names):
        while queue:
            communicate()
        if position + 1 < len(names) and fetch[position + 1]:
            queue.append([fetch[position + 1]])
        compute(times.blocks[name].forward_s - fetch[position])
    gathers = [[times.blocks[name].fetch_back_s] for name in names]
    queue.extend([gathers[-1]] if gathers[-1][0] else [])
    for position in range(len(names))[::-1]:
        name = names[position]
        while any(waiting is gathers[position] for waiting in queue):
            communicate()
        if position and gathers[position - 1][0]:
            queue.append(gathers[position - 1])
        compute(times.blocks[name].backward_s - times.blocks[name].fetch_back_s)
        queue.extend([s] for p, s in times.move_s.items() if s and first_user[p] == name)
    while queue:
        communicate()
    return now + sum(times.update_s.values())


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("plan", ["data_parallel", "zero3"])
@pytest.mark.parametrize("slowdown", SLOWDOWNS)
def test_a_step_takes_what_two_queues_take(plan: str, slowdown: float, released: bool) -> None:
    """With parameters that are released, also gathered again in the backward pass."""
    candidate = candidate_of(slowdown, plan)
    if released:
        candidate = replace(candidate, released=candidate.priced.parameters())
    assert time_parts(candidate).step_s == pytest.approx(stepped_s(candidate), rel=5e-3)


def test_a_difference_that_rounding_makes_is_no_time() -> None:
    """It may be negative, and would be reported as -0.0 us."""
    longer_s, shorter_s = 0.3, 0.1 + 0.2
    assert longer_s < shorter_s
    assert str(_beyond(longer_s, shorter_s)) == "0.0"
    assert _beyond(0.3 + 1e-9, 0.3) == pytest.approx(1e-9)
    assert _beyond(0.3, 0.4) == pytest.approx(-0.1)


@pytest.mark.parametrize("slowdown", SLOWDOWNS)
def test_scattering_in_every_micro_batch_is_priced_as_the_search_does(slowdown: float) -> None:
    """All but the first reduction of each gradient come on top."""
    once = candidate_of(slowdown, "zero3", num=2)
    each = replace(once, scattered=once.priced.parameters())
    picks = once.solution.assignment
    parts = time_parts(each)
    whole_s = each.priced.problem(scattered=True).cost(picks)
    assert parts.step_s + parts.hidden_s == pytest.approx(whole_s, rel=1e-6)
    added_s = whole_s - once.priced.problem().cost(picks)
    assert added_s == pytest.approx(sum(once.times.move_s.values()), rel=1e-6)
    assert sum(each.times.scatter_s.values()) == pytest.approx(added_s, rel=1e-6)
    assert parts.step_s > time_parts(once).step_s


@pytest.mark.parametrize("num", [1, 2])
def test_what_is_not_hidden_is_waited_for(num: int) -> None:
    """Reported parts and hidden time add up to the sum of all prices, at any slow-down."""
    whole_s = candidate_of(1.0, num=num).solution.cost
    hidden = []
    for slowdown in SLOWDOWNS:
        parts = time_parts(candidate_of(slowdown, num=num))
        assert parts.step_s + parts.hidden_s == pytest.approx(whole_s, rel=1e-6)
        hidden.append(parts.hidden_s)
    assert hidden == sorted(hidden, reverse=True)
    assert hidden[0] > 0
    assert hidden[-1] < 0.05 * hidden[0]


def test_the_plan_is_the_fastest_by_the_step_it_predicts() -> None:
    """The search does not avoid communication that is hidden and so costs nothing."""
    model, make_batch = build("gpt2")
    captured = capture(model, make_batch(0))
    for slowdown in SLOWDOWNS:
        cluster = structs.replace(A100, overlap_slowdown=slowdown)
        plan = make_planned(captured, cluster).plan
        known = [k.time_s for k in plan.search.baselines.values()]
        assert plan.prediction.step_time_s <= min(known) * (1 + 1e-9)
        assert plan.prediction.step_time_s <= min(plan.search.considered.values())
        assert plan.search.bound_s <= plan.prediction.step_time_s
        assert (" overlapped" in str(plan)) == (plan.prediction.hidden_s > 0)


def test_running_statistics_are_priced_as_the_message_they_travel_in() -> None:
    """With a start-up cost per collective only, the price counts messages."""
    launch_s = 1e3
    cluster = structs.replace(A100, collective_launch_s=launch_s)
    candidate = candidate_of(1.0, "tensor_parallel", name="resnet", cluster=cluster)
    times = candidate.times
    priced_s = sum(times.move_s.values()) + sum(
        b.forward_communication_s + b.backward_communication_s for b in times.blocks.values()
    )
    program = lower_training(candidate.strategy())
    moved = [b for b in program.buffers if b.following is not None and b.following.kernel]
    assert len(moved) > 2
    in_program = len(list(collectives_of(program)))
    assert priced_s / launch_s == pytest.approx(in_program + len(moved) / len(program.buffers))
