"""Orders found for a given placement: never longer, within the memory, bounded, and proved."""

import itertools
import random
from dataclasses import replace

import pytest

from autopar.base.errors import ScheduleError
from autopar.schedules import (
    Action,
    Durations,
    Kind,
    Links,
    Memory,
    Schedule,
    build,
    simulate,
    verify,
)
from autopar.schedules.generators.oracle import optimal_schedule
from autopar.schedules.generators.refine import Costs, refine
from autopar.schedules.generators.shapes import chain_shape
from autopar.schedules.schedule import schedule_of
from tests.schedules.test_schedule_search import every_order

STARTS = (
    ("1f1b", 1, {}),
    ("gpipe", 1, {}),
    ("zb_h1", 1, {}),
    ("dualpipe", 1, {}),
    ("chimera", 1, {}),
    ("chimera", 1, {"num_pipelines": 4, "concatenation": "merged"}),
    ("interleaved", 2, {}),
    ("zb_v", 2, {}),
    ("fast_forward", 2, {}),
)


def drawn(seed: int, num_microbatches: int = 8) -> tuple[Schedule, Costs]:
    """A generator's schedule with drawn costs, under the memory that it takes itself."""
    rng = random.Random(seed)
    name, per_device, options = STARTS[seed % len(STARTS)]
    if per_device > 1 and name != "zb_v":
        options = {**options, "num_devices": 4}
    start = build(name, num_stages=4 * per_device, num_microbatches=num_microbatches, **options)
    stages = range(start.shape.num_stages)
    times = {kind: tuple(rng.randint(1, 9) for _ in stages) for kind in "FIW"}
    durations = Durations(**times)
    memory = Memory(activation_bytes=1.0, after_input_gradient_bytes=rng.choice((None, 0.25)))
    links = Links(latency_s=rng.choice((0.0, 1.0)))
    peaks = simulate(start, durations, links, memory=memory).peak_memory_bytes
    return start, Costs(durations=durations, links=links, memory=memory, max_bytes=peaks)


@pytest.mark.parametrize("seed", range(18))
def test_a_refined_schedule_is_no_longer_within_the_same_memory(seed: int) -> None:
    start, costs = drawn(seed)
    found = refine(start, costs, num_moves=400, seed=seed)
    verify(found.schedule)
    assert found.schedule.shape == start.shape
    timeline = simulate(found.schedule, costs.durations, costs.links, memory=costs.memory)
    assert timeline.makespan_s == pytest.approx(found.makespan_s)
    assert found.lower_bound_s <= found.makespan_s <= costs.seconds(start)
    for peak, cap in zip(timeline.peak_memory_bytes, costs.max_bytes):
        assert peak <= cap * (1 + 1e-9)


@pytest.mark.parametrize("seed", [0, 2, 4])
def test_what_is_called_optimal_is_cp_sats_optimum(seed: int) -> None:
    start, costs = drawn(seed, 4)
    found = refine(start, costs, num_moves=200, exact_time_s=20.0)
    optimum = optimal_schedule(
        start.shape,
        costs.durations,
        links=costs.links,
        memory=costs.memory,
        max_bytes=costs.max_bytes,
        time_limit_s=20.0,
        seed=1,
    )
    assert optimum.optimal
    assert found.gap == 0
    assert found.makespan_s == pytest.approx(optimum.makespan_s)


@pytest.mark.parametrize("cap", [1.25, 1.5, 2.0])
def test_the_oracle_knows_what_an_input_gradient_frees(cap: float) -> None:
    """A quarter of an activation is held between I and W; every order is tried."""
    costs = Durations(F=(3, 2), I=(2, 5), W=(4, 1))
    memory = Memory(activation_bytes=1.0, after_input_gradient_bytes=0.25)
    shape = chain_shape(2, 2)
    lists = [
        every_order([Action(stage, kind, m) for kind in (Kind.F, Kind.I, Kind.W) for m in (0, 1)])
        for stage in (0, 1)
    ]
    best = float("inf")
    for first, second in itertools.product(*lists):
        played = schedule_of("all", shape, [first, second])
        try:
            timeline = simulate(played, costs, memory=memory)
        except ScheduleError:  # a deadlock
            continue
        if max(timeline.peak_memory_bytes) <= cap:
            best = min(best, timeline.makespan_s)
    found = optimal_schedule(shape, costs, memory=memory, max_bytes=[cap] * 2, time_limit_s=10)
    assert found.optimal
    assert found.makespan_s == best == found.lower_bound_s


def test_backwards_stay_whole_where_nothing_waits_for_their_input_gradients() -> None:
    start = build("1f1b", num_stages=2, num_microbatches=4)
    costs = Costs(
        durations=Durations(F=(1, 3), I=(1, 3), W=(1, 3)), links=None, memory=Memory(),
        max_bytes=(2.0, 2.0),
    )  # fmt: skip
    found = refine(start, costs, num_moves=2000, exact_time_s=5.0).schedule
    assert simulate(found, costs.durations).makespan_s < costs.seconds(start)
    kinds = [{item.action.kind for item in steps} for steps in found.devices]
    assert kinds == [{Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W}]


def test_what_cannot_be_refined_is_refused() -> None:
    doubled = build("chimera", num_stages=4, num_microbatches=8, concatenation="forward_doubling")
    _, costs = drawn(0)
    with pytest.raises(ScheduleError, match="cannot be refined"):
        refine(doubled, costs, num_moves=1)
    start, costs = drawn(1)
    with pytest.raises(ScheduleError, match="cannot be refined"):
        refine(start, replace(costs, max_bytes=(1.0,) * 4), num_moves=1)
