"""Searched schedules against every generator, brute force and CP-SAT's optimum."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import PLAIN, schedules, stage_durations

from autopar.base.errors import ScheduleError
from autopar.schedules import (
    Action,
    Durations,
    Kind,
    Links,
    Memory,
    Schedule,
    SearchProblem,
    build,
    search_schedule,
    simulate,
    verify,
    with_reductions,
)
from autopar.schedules.generators.fixed_order import FixedOrder
from autopar.schedules.generators.list_scheduler import Policy, kind_priority, list_schedule
from autopar.schedules.generators.oracle import optimal_schedule
from autopar.schedules.generators.search import balanced_sizes, lower_bound_s
from autopar.schedules.generators.shapes import chain_shape, looped_shape, v_shape
from autopar.schedules.schedule import schedule_of

ONE_COPY = ("gpipe", "1f1b", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "interleaved")


def drawn_problem(
    seed: int, most_devices: int = 4, most_batches: int = 8, one_block: bool = False
) -> SearchProblem:
    """Unequal costs of blocks, sometimes slow links, and a memory cap from tight to none."""
    rng = random.Random(seed)
    devices = rng.randint(2, most_devices)
    blocks = devices * (1 if one_block else rng.choice((1, 1, 2)))
    batches = rng.randint(1, most_batches)

    def costs(low: int) -> tuple[int, ...]:
        return tuple(rng.randint(low, 12) for _ in range(blocks))

    links = Links(latency_s=1.0, bandwidth_bytes_per_s=2.0, message_bytes=1.0)
    activations = tuple(rng.randint(1, 3) for _ in range(blocks))
    least = max(sum(activations), 1)
    return SearchProblem(
        num_devices=devices,
        num_microbatches=batches,
        num_blocks=blocks,
        durations=Durations(F=costs(3), I=costs(3), W=costs(1)),
        links=rng.choice((None, links)),
        memory=Memory(activation_bytes=activations),
        max_memory_bytes=rng.choice((least, 1.5 * least, 3.0 * least, float("inf"))),
    )


def generated(problem: SearchProblem) -> list[tuple[str, Schedule, tuple[int, ...]]]:
    """Every generator with every parameter, built independently of the search."""
    table = problem.durations.table(problem.num_blocks)
    work = [sum(parts) for parts in zip(table[Kind.F], table[Kind.I], table[Kind.W])]
    devices = problem.num_devices
    wanted: list[tuple[str, int, dict]] = [
        (name, 1, {}) for name in ("gpipe", "1f1b", "zb_h1", "zb_h2", "dualpipe")
    ]
    wanted += [(name, 2, {}) for name in ("zb_v", "v_half", "v_min")]
    wanted += [("interleaved", 2, {"num_devices": devices})]
    wanted += [
        ("chimera", 1, {"num_pipelines": 2 * f, "concatenation": way})
        for f in range(1, devices // 2 + 1)
        for way in ("direct", "forward_doubling")
    ]
    wanted += [
        ("fast_forward", 2, {"num_devices": devices, "group_size": g, "in_flight": limit})
        for g in (1, 2)
        for limit in (devices, 2 * devices)
    ]
    found = []
    for name, per_device, options in wanted:
        if per_device * devices > problem.num_blocks:
            continue
        sizes = balanced_sizes(work, per_device * devices)
        if name == "fast_forward":
            options = {
                **options,
                "durations": problem.durations.grouped(sizes),
                "links": problem.links.grouped(sizes) if problem.links else None,
            }
        try:
            built = build(
                name, num_stages=len(sizes), num_microbatches=problem.num_microbatches, **options
            )
        except ScheduleError:
            continue
        found.append((name, built, sizes))
    return found


@pytest.mark.parametrize("block", range(10))
def test_the_search_is_never_worse_than_any_generator_under_the_cap(block: int) -> None:
    """20 drawn cases per block, 200 in all."""
    for seed in range(20 * block, 20 * block + 20):
        problem = drawn_problem(seed, most_devices=5)
        result = search_schedule(problem, num_moves=300, num_starts=1, num_restarts=1)
        best = result.best
        verify(best.schedule)
        sizes = best.sizes
        played = simulate(
            best.schedule,
            problem.durations.grouped(sizes),
            problem.links.grouped(sizes) if problem.links else None,
            memory=problem.memory.grouped(sizes),
        )
        assert played.makespan_s == best.makespan_s
        assert max(played.peak_memory_bytes) <= problem.max_memory_bytes
        assert best.makespan_s >= result.lower_bound_s * (1 - 1e-9)
        compared = 0
        for name, schedule, sizes in generated(problem):
            other = simulate(
                schedule,
                problem.durations.grouped(sizes),
                problem.links.grouped(sizes) if problem.links else None,
                memory=problem.memory.grouped(sizes),
            )
            if max(other.peak_memory_bytes) <= problem.max_memory_bytes:
                compared += 1
                assert best.makespan_s <= other.makespan_s * (1 + 1e-9), (seed, name)
        assert compared or problem.max_memory_bytes < float("inf")


@pytest.mark.parametrize("seed", range(16))
def test_the_search_is_within_two_percent_of_the_optimum(seed: int) -> None:
    """On one copy of the weights, and again on the shape that the open search chose.

    Up to 4 stages and 8 micro-batches, where CP-SAT proves its optimum.
    """
    problem = drawn_problem(1000 + seed, one_block=True)
    if seed % 4 == 0:
        problem = replace(problem, num_microbatches=8)
    for generators in (ONE_COPY, None):
        result = search_schedule(replace(problem, generators=generators))
        best, sizes = result.best, result.best.sizes
        if best.schedule.shape.recomputed:
            continue
        optimum = optimal_schedule(
            best.schedule.shape,
            problem.durations.grouped(sizes),
            links=problem.links.grouped(sizes) if problem.links else None,
            memory=problem.memory.grouped(sizes),
            max_bytes=[problem.max_memory_bytes] * problem.num_devices,
            time_limit_s=30.0,
            start_from=best.schedule,
        )
        assert optimum.schedule is not None
        assert optimum.optimal
        verify(optimum.schedule)
        assert optimum.lower_bound_s <= best.makespan_s * (1 + 1e-9)
        assert best.makespan_s <= 1.02 * optimum.makespan_s


@pytest.mark.parametrize("seed", [3, 10])
def test_cp_sat_finishes_what_the_local_search_leaves(seed: int) -> None:
    """Two stages per device under a tight cap: the hardest of the drawn cases for local moves."""
    problem = drawn_problem(1000 + seed)
    assert problem.num_blocks == 2 * problem.num_devices
    problem = replace(problem, num_microbatches=4, generators=ONE_COPY)
    plain = search_schedule(problem, num_moves=3000)
    exact = search_schedule(problem, num_moves=3000, exact_time_s=20.0)
    verify(exact.best.schedule)
    assert exact.best.makespan_s <= plain.best.makespan_s <= 1.05 * exact.best.makespan_s
    assert plain.lower_bound_s <= exact.lower_bound_s <= exact.best.makespan_s
    assert exact.gap <= plain.gap
    assert exact.best.peak_memory_bytes <= problem.max_memory_bytes


@pytest.mark.parametrize("seed", range(3))
def test_an_optimum_is_called_proved_though_cp_sat_rounds_times(seed: int) -> None:
    rng = random.Random(seed)
    problem = SearchProblem(
        num_devices=2,
        num_microbatches=4,
        num_blocks=2,
        durations=Durations(**{kind: (rng.random(), rng.random()) for kind in "FIW"}),
        memory=Memory(activation_bytes=1.0),
        max_memory_bytes=2.0,
        generators=("gpipe",),
    )
    found = search_schedule(problem, num_moves=1, exact_time_s=10.0)
    assert 0 < found.gap < 1e-4
    assert [each.options["proved"] for each in found.candidates if each.name == "cp_sat"] == [True]


def test_on_a_larger_case_the_oracle_bounds_the_search() -> None:
    costs = Durations(F=(3, 5, 4, 6, 3, 4), I=(4, 5, 5, 6, 4, 4), W=(2, 5, 3, 6, 2, 4))
    problem = replace(
        drawn_problem(7),
        num_devices=6,
        num_blocks=6,
        num_microbatches=12,
        durations=costs,
        memory=Memory(),
        max_memory_bytes=7.0,
        generators=ONE_COPY,
    )
    best = search_schedule(problem, num_moves=3000, num_starts=1).best
    oracle = optimal_schedule(
        best.schedule.shape,
        costs,
        links=problem.links,
        memory=Memory(),
        max_bytes=[7.0] * 6,
        time_limit_s=3.0,
        start_from=best.schedule,
    )
    assert lower_bound_s(best.schedule.shape, costs) <= best.makespan_s
    assert 0 < oracle.lower_bound_s <= best.makespan_s
    assert best.makespan_s <= 1.02 * oracle.makespan_s


def every_order(actions: list[Action]) -> list[list[Action]]:
    """All orders of a device's actions that keep F before I before W and micro-batches in turn."""
    kept = []
    for order in itertools.permutations(actions):
        place = {action: number for number, action in enumerate(order)}
        if all(
            place[a] < place[b]
            for a in actions
            for b in actions
            if (a.kind is b.kind and a.microbatch < b.microbatch)
            or (a.microbatch == b.microbatch and "FIW".index(a.kind) < "FIW".index(b.kind))
        ):
            kept.append(list(order))
    return kept


@pytest.mark.parametrize(
    ("costs", "cap"),
    [
        (Durations(F=(3, 2), I=(2, 5), W=(4, 1)), 2.0),
        (Durations(F=(3, 2), I=(2, 5), W=(4, 1)), 1.0),
        (Durations(F=(1, 4), I=(6, 2), W=(3, 3)), 2.0),
    ],
)
def test_the_oracle_is_brute_forces_best(costs: Durations, cap: float) -> None:
    shape = chain_shape(2, 2)
    links = Links(latency_s=1.0)
    lists = [
        every_order([Action(stage, kind, m) for kind in (Kind.F, Kind.I, Kind.W) for m in (0, 1)])
        for stage in (0, 1)
    ]
    best = float("inf")
    for first, second in itertools.product(*lists):
        played = schedule_of("all", shape, [first, second])
        try:
            timeline = simulate(played, costs, links)
        except ScheduleError:  # a deadlock
            continue
        if max(timeline.peak_activations) <= cap:
            best = min(best, timeline.makespan_s)
    found = optimal_schedule(shape, costs, links=links, max_bytes=[cap, cap], time_limit_s=10)
    assert found.optimal
    assert found.makespan_s == best == found.lower_bound_s


def test_the_oracle_says_when_nothing_fits() -> None:
    with pytest.raises(ScheduleError, match="no schedule fits"):
        optimal_schedule(
            v_shape(4, 2), Durations(F=1, I=1, W=1), max_bytes=[1.0, 1.0], time_limit_s=5
        )


def test_the_search_says_when_nothing_fits_and_what_would() -> None:
    problem = replace(drawn_problem(3), max_memory_bytes=0.5)
    with pytest.raises(ScheduleError, match="the least that any needs is"):
        search_schedule(problem, num_moves=10)


def test_a_problem_with_more_devices_than_blocks_is_refused() -> None:
    with pytest.raises(ScheduleError, match="at least one block"):
        replace(drawn_problem(3), num_devices=9, num_blocks=8)


@settings(deadline=None, max_examples=60)
@given(schedules(PLAIN), st.sampled_from((None, 0.5)), st.data())
def test_the_inner_loop_agrees_with_the_simulator(
    schedule: Schedule, latency_s: float | None, data: st.DataObject
) -> None:
    costs = data.draw(stage_durations(schedule.shape.num_stages))
    links = None if latency_s is None else Links(latency_s=latency_s)
    if any(item.action.kind is Kind.B for row in schedule.devices for item in row) and any(
        item.action.kind is Kind.I for row in schedule.devices for item in row
    ):
        return  # dualpipe mixes whole and split backwards; the search splits them first
    memory = Memory(activation_bytes=2.0, weight_bytes=3.0)
    inner = FixedOrder(schedule, costs, links, memory)
    played = simulate(schedule, costs, links, memory=memory)
    assert inner.seconds(inner.initial) == pytest.approx(played.makespan_s)
    peaks = [inner.peak_bytes(d, order) for d, order in enumerate(inner.initial)]
    assert peaks == pytest.approx(list(played.peak_memory_bytes))
    assert inner.schedule(inner.initial) == schedule


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 6), st.booleans(), st.integers(0, 4), st.data())
def test_a_list_schedule_is_valid_and_keeps_its_cap(
    devices: int, batches: int, split: bool, room: int, data: st.DataObject
) -> None:
    shape = data.draw(
        st.sampled_from(
            (
                chain_shape(devices, batches),
                looped_shape(3 * devices, batches, devices),
                v_shape(2 * devices, batches),
            )
        )
    )
    costs = data.draw(stage_durations(shape.num_stages))
    caps = [len(shape.stages_on(device)) + room for device in range(devices)]
    first = (Kind.I, Kind.F, Kind.W) if split else (Kind.B, Kind.F)
    policy = Policy(
        priority=kind_priority(data.draw(st.permutations(first))),
        split=split,
        max_activations=caps,
        patience=data.draw(st.sampled_from((0.0, 1.0))),
    )
    schedule = list_schedule("list", shape, costs, policy)
    verify(schedule)
    unit = shape.num_devices / shape.num_stages
    peaks = simulate(schedule, costs).peak_activations
    assert all(peak <= cap * unit + 1e-9 for peak, cap in zip(peaks, caps))


def test_a_list_schedule_without_room_is_refused() -> None:
    policy = Policy(priority=kind_priority((Kind.I, Kind.F, Kind.W)), max_activations=[1.0, 1.0])
    with pytest.raises(ScheduleError, match="allow at least one activation"):
        list_schedule("list", v_shape(4, 2), Durations(F=1, I=1, W=1), policy)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(1, 5))
def test_balanced_sizes_have_the_least_largest_sum(costs: list[int], stages: int) -> None:
    stages = min(stages, len(costs))
    sizes = balanced_sizes(costs, stages)
    assert sum(sizes) == len(costs)
    assert len(sizes) == stages

    def largest(cut: tuple[int, ...]) -> int:
        edges = (0, *cut, len(costs))
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(edges))

    best = min(largest(cut) for cut in itertools.combinations(range(1, len(costs)), stages - 1))
    assert largest(tuple(itertools.accumulate(sizes))[:-1]) == best


def test_reductions_are_eager_only_where_a_bubble_hides_them() -> None:
    """Chimera: the deepest stage ends early on the edge devices, the middle ones have no bubble."""
    costs = Durations(F=1, B=2, G=1.0)
    plain = build("chimera", num_stages=8, num_microbatches=8)
    reduced = with_reductions(plain, costs)
    verify(reduced)
    lists = [[str(item.action) for item in steps] for steps in reduced.devices]
    assert lists[0].index("7.1G") < lists[0].index("0B0")
    assert lists[7].index("7G") < lists[7].index("0.1B1")
    for device in (3, 4):
        assert all(text.endswith("G") for text in lists[device][-2:])
    late = with_all_reductions_last(reduced)
    verify(late)
    assert simulate(reduced, costs).makespan_s <= simulate(late, costs).makespan_s
    with pytest.raises(ScheduleError, match="already reduces"):
        with_reductions(reduced, costs)


def with_all_reductions_last(schedule: Schedule) -> Schedule:
    devices = tuple(
        tuple(sorted(steps, key=lambda item: item.action.kind is Kind.G))
        for steps in schedule.devices
    )
    return replace(schedule, devices=devices)


def test_replicas_must_reduce_in_one_order() -> None:
    reduced = with_all_reductions_last(
        with_reductions(
            build("chimera", num_stages=4, num_microbatches=4), Durations(F=1, B=2, G=1)
        )
    )
    steps = list(reduced.devices[1])
    steps[-1], steps[-2] = steps[-2], steps[-1]
    devices = (reduced.devices[0], tuple(steps), *reduced.devices[2:])
    crossed = replace(reduced, devices=devices)
    with pytest.raises(ScheduleError, match="in a different order"):
        verify(crossed)
    with pytest.raises(ScheduleError, match="deadlocks"):
        simulate(crossed, Durations(F=1, B=2, G=1))


def test_a_reduction_starts_on_all_replicas_at_once() -> None:
    costs = Durations(F=1, B=2, G=(3, 1, 1, 2))
    reduced = with_reductions(
        build("chimera", num_stages=4, num_microbatches=8, num_pipelines=4), costs
    )
    starts: dict[int, set[float]] = {}
    for item in simulate(reduced, costs).intervals:
        if item.action.kind is Kind.G:
            starts.setdefault(item.action.stage, set()).add(item.start_s)
    assert {stage: len(times) for stage, times in starts.items()} == dict.fromkeys(range(4), 1)


def test_the_search_can_weigh_reductions() -> None:
    problem = replace(drawn_problem(11), durations=Durations(F=3, I=3, W=3, G=5), reduces=True)
    result = search_schedule(problem, num_moves=200)
    verify(result.best.schedule)
    assert result.best.schedule.shape.reduces
    bare = search_schedule(replace(problem, reduces=False), num_moves=200)
    assert result.best.makespan_s >= bare.best.makespan_s
