"""The simulator against longest paths computed independently, and cases solved by hand."""

import itertools
from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import PLAIN, VARIANTS, schedules, stage_durations, variant

from autopar.base.errors import ScheduleError
from autopar.schedules import (
    Action,
    CoRun,
    Durations,
    Interval,
    Kind,
    Link,
    Links,
    Memory,
    Resource,
    Schedule,
    Timeline,
    build,
    parse_schedule,
    simulate,
    with_communication,
    with_reductions,
)

HEADER = "name: hand\nnum_microbatches: {batches}\nplacement: {placement}\n"


def by_hand(placement: str, *devices: str, batches: int = 1, extra: str = "") -> Schedule:
    lines = [f"device {number}: {steps}" for number, steps in enumerate(devices)]
    header = HEADER.format(batches=batches, placement=placement) + extra
    return parse_schedule(header + "\n".join(lines) + "\n")


def spans(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {str(item.action): (item.start_s, item.end_s) for item in timeline.intervals}


def longest_path_s(schedule: Schedule, costs: Durations, latency_s: float) -> float:
    """The makespan as a longest path over device order and data dependencies."""
    graph = nx.DiGraph()
    where = {}
    for device, steps in enumerate(schedule.devices):
        for item in steps:
            where[item.action] = device
        for before, after in itertools.pairwise(item.action for item in steps):
            graph.add_edge(before, after, delay=0.0)
    for action in where:
        graph.add_node(action)
        upper = [action._replace(stage=action.stage + 1, kind=kind) for kind in (Kind.I, Kind.B)]
        needs = {
            Kind.F: [action._replace(stage=action.stage - 1)],
            Kind.W: [action._replace(kind=Kind.I)],
            Kind.I: [action._replace(kind=Kind.F), *upper],
            Kind.B: [action._replace(kind=Kind.F), *upper],
        }[action.kind]
        for needed in needs:
            if needed in where:
                delay = latency_s if where[needed] != where[action] else 0.0
                graph.add_edge(needed, action, delay=delay)

    def cost(action: Action) -> float:
        if action.kind is Kind.B:
            return costs.I[action.stage] + costs.W[action.stage]
        return getattr(costs, action.kind.value)[action.stage]

    ends: dict[Action, float] = {}
    for action in nx.topological_sort(graph):
        ready = [ends[p] + graph.edges[p, action]["delay"] for p in graph.predecessors(action)]
        ends[action] = max(ready, default=0.0) + cost(action)
    return max(ends.values())


@settings(deadline=None, max_examples=120)
@given(schedules(PLAIN), st.sampled_from((0.0, 0.5, 3.0)), st.data())
def test_the_makespan_is_the_longest_path(
    schedule: Schedule, latency_s: float, data: st.DataObject
) -> None:
    costs = data.draw(stage_durations(schedule.shape.num_stages))
    found = simulate(schedule, costs, Links(latency_s=latency_s))
    assert found.makespan_s == pytest.approx(longest_path_s(schedule, costs, latency_s))


@settings(deadline=None, max_examples=60)
@given(schedules(), st.data())
def test_a_resource_does_one_thing_at_a_time_and_all_work_is_done(
    schedule: Schedule, data: st.DataObject
) -> None:
    costs = data.draw(stage_durations(schedule.shape.num_stages))
    links = Links(latency_s=0.25, bandwidth_bytes_per_s=2.0, message_bytes=1.0)
    full = schedule
    if not schedule.shape.reduces:
        full = with_reductions(schedule, costs, links)
    found = simulate(full, costs, links, num_iterations=2)
    tracks: dict[tuple[int, Resource, int], list[Interval]] = {}
    for item in found.intervals:
        tracks.setdefault((item.device, item.resource, item.peer), []).append(item)
    for items in tracks.values():
        items.sort(key=lambda item: item.start_s)
        for before, after in itertools.pairwise(items):
            assert before.end_s <= after.start_s + 1e-9
    computed = [item for item in found.intervals if item.resource is not Resource.SEND]
    assert len(computed) == 2 * full.num_actions


def test_messages_queue_on_a_link_and_pay_its_latency() -> None:
    schedule = by_hand("0 1", "0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", batches=2)
    links = Links(latency_s=1.0, bandwidth_bytes_per_s=10.0, message_bytes=50.0)
    found = spans(simulate(schedule, Durations(F=2.0, B=3.0), links))
    assert found["0SEND_F0"] == (2.0, 7.0)
    assert found["1F0"] == (8.0, 10.0)
    assert found["0SEND_F1"] == (7.0, 12.0)  # ready at 4, the link is free at 7
    assert found["1F1"] == (13.0, 15.0)
    assert found["1B0"] == (15.0, 18.0)
    assert found["1SEND_B0"] == (18.0, 23.0)
    assert found["0B0"] == (24.0, 27.0)


def test_each_link_and_boundary_has_its_own_speed() -> None:
    schedule = by_hand("0 1 2", "0F0 0B0", "1F0 1B0", "2F0 2B0")
    links = Links(
        bandwidth_bytes_per_s=1.0,
        message_bytes=(2.0, 6.0),
        between={(1, 2): Link(latency_s=5.0, bandwidth_bytes_per_s=3.0)},
    )
    found = spans(simulate(schedule, Durations(F=1.0, B=1.0), links))
    assert found["1F0"][0] == 1 + 2
    assert found["2F0"][0] == 4 + 6 / 3 + 5
    assert found["1B0"][0] == found["2B0"][1] + 6
    assert found["0B0"][0] == found["1B0"][1] + 2


def test_stages_on_one_device_exchange_for_nothing() -> None:
    schedule = by_hand("0 0", "0F0 1F0 1B0 0B0")
    links = Links(latency_s=100.0, bandwidth_bytes_per_s=1.0, message_bytes=100.0)
    assert simulate(schedule, Durations(F=1, B=2), links).makespan_s == 6


def test_exposed_communication_is_what_no_compute_hides() -> None:
    """Device 1's first input takes 4 s with nothing to do; its second arrives during 1F0."""
    schedule = by_hand("0 1", "0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", batches=2)
    links = Links(bandwidth_bytes_per_s=1.0, message_bytes=4.0)
    found = simulate(schedule, Durations(F=(1.0, 6.0), B=0.0), links)
    assert found.exposed_communication_s(1) == pytest.approx(4.0 + 8.0)
    hidden = simulate(schedule, Durations(F=(1.0, 6.0), B=0.0))
    assert hidden.exposed_communication_s(1) == 0.0


def test_written_out_sends_take_the_time_of_implied_ones() -> None:
    links = Links(latency_s=0.5, bandwidth_bytes_per_s=4.0, message_bytes=1.0)
    costs = Durations(F=1, I=2, W=1)
    for name, per_device, options in VARIANTS:
        schedule = variant(name, per_device, options, 4, 8)
        if schedule is None:
            continue
        full = with_communication(schedule, costs, links)
        implied, written = simulate(schedule, costs, links), simulate(full, costs, links)
        assert written.makespan_s == pytest.approx(implied.makespan_s), name
        if schedule.shape.num_devices > 1:
            assert full.explicit_communication
            with pytest.raises(ScheduleError, match="already"):
                with_communication(full, costs, links)


def test_two_streams_slow_each_other_only_while_both_work() -> None:
    """W of 4 s with I of 6 s, both 1.5 times slower: W ends after 6 s, in which I did 4 s."""
    schedule = by_hand("0 0", "0F0 1F0 1I0 1W0@side 0I0 0W0@side")
    costs = Durations(F=1.0, I=(6.0, 1.0), W=(0.0, 4.0))
    co_run = CoRun(occupancy={Kind.I: 0.75, Kind.W: 0.75})
    found = spans(simulate(schedule, costs, co_run=co_run))
    assert found["1I0"] == (2.0, 3.0)
    assert found["1W0"] == (3.0, 9.0)
    assert found["0I0"] == (3.0, 11.0)


@pytest.mark.parametrize(
    ("share", "interference", "makespan_s"), [(0.5, 0.0, 9.0), (1.0, 0.0, 14.0), (0.5, 0.2, 10.0)]
)
def test_co_running_gains_what_the_device_has_left(
    share: float, interference: float, makespan_s: float
) -> None:
    schedule = by_hand("0 0", "0F0 1F0 1I0 1W0@side 0I0 0W0@side")
    costs = Durations(F=1.0, I=(5.0, 2.0), W=(0.0, 5.0))
    co_run = CoRun(default_occupancy=share, interference=interference)
    assert simulate(schedule, costs, co_run=co_run).makespan_s == pytest.approx(makespan_s)


@pytest.mark.parametrize(("share", "pair_s"), [(0.5, 6.0), (0.75, 7.0), (1.0, 8.0)])
def test_a_pair_that_ends_together_takes_as_long_and_gives_its_first_output_at_the_end(
    share: float, pair_s: float
) -> None:
    """F of 2 s with B of 6 s: all of F is slowed down, and an equal part of B."""
    schedule = by_hand("0 0", "0F0 1F0 1B0 0B0 0F1@side>1F0 1F1 1B1 0B1", batches=2)
    costs = Durations(F=2.0, B=6.0)
    co_run = CoRun(default_occupancy=share)
    apart = spans(simulate(schedule, costs, co_run=co_run))
    joined = spans(simulate(schedule, costs, co_run=replace(co_run, end_together=True)))
    assert apart["1B0"] == joined["1B0"] == (4.0, 4.0 + pair_s)
    assert apart["0F1"] == (4.0, 4.0 + 2.0 * 2 * share)
    assert joined["0F1"] == (4.0, 4.0 + pair_s)


def test_a_step_waits_for_the_action_it_names() -> None:
    held = by_hand("0 0", "0F0 1F0 1I0 0I0 1W0@side>0I0 0W0")
    free = by_hand("0 0", "0F0 1F0 1I0 0I0 1W0@side 0W0")
    costs = Durations(F=1.0, I=3.0, W=1.0)
    assert spans(simulate(free, costs))["1W0"][0] == 5.0
    assert spans(simulate(held, costs))["1W0"][0] == 8.0


def test_the_next_forward_waits_for_the_reduction_and_the_update_of_its_own_stage() -> None:
    extra = "reduces: yes\nupdates: yes\n"
    schedule = by_hand("0 0", "0U~1 0F0 1U~1 1F0 1I0 1W0 1G 0I0 0W0 0G", extra=extra)
    costs = Durations(F=1.0, I=1.0, W=1.0, G=(5.0, 2.0), U=0.5)
    found = simulate(schedule, costs, num_iterations=3)
    second = {str(i.action): i for i in found.intervals if i.iteration == 1}
    first = {str(i.action): i for i in found.intervals if i.iteration == 0}
    assert first["0W0"].end_s == 6.0
    assert (first["1G"].start_s, first["1G"].end_s) == (4.0, 6.0)
    assert (first["0G"].start_s, first["0G"].end_s) == (6.0, 11.0)
    assert (first["0U"].start_s, second["0F0"].start_s) == (11.0, 11.5)
    assert found.period_s == pytest.approx(0.5 + 1 + 0.5 + 1 + 2 + 2 + 5)


def test_a_w_of_the_last_iteration_runs_beside_this_iterations_forward() -> None:
    schedule = by_hand("0 0", "0F0 1W0@side~1>0F0 1F0 1I0 0I0 0W0")
    costs = Durations(F=4.0, I=1.0, W=2.0)
    found = simulate(schedule, costs, co_run=CoRun(default_occupancy=0.5), num_iterations=3)
    late = [item for item in found.intervals if str(item.action) == "1W0"]
    assert [item.start_s for item in sorted(late)] == [16.0, 30.0, 37.0]
    assert found.period_s == 14.0  # F, wait for W before 1F0 of the same layer, F, I, I, W


def test_recomputation_and_offloading_free_what_they_should() -> None:
    memory = Memory(activation_bytes=10.0, checkpoint_bytes=1.0)
    plain = by_hand("0", "0F0 0F1 0B0 0B1", batches=2)
    again = by_hand("0", "0F0 0F1 0R0 0B0 0R1 0B1", batches=2, extra="recomputed: 0\n")
    moved = by_hand(
        "0", "0F0 0O0 0F1 0O1 0L0>0F1 0B0 0L1>0B0 0B1", batches=2, extra="offloaded: 0\n"
    )
    costs = Durations(F=4.0, B=8.0, O=1.0, L=1.0)
    assert simulate(plain, costs, memory=memory).peak_memory_bytes == (20.0,)
    assert simulate(again, costs, memory=memory).peak_memory_bytes == (11.0,)
    offloaded = simulate(moved, costs, memory=memory)
    assert spans(offloaded)["0B0"] == (9.0, 17.0)
    curve = {point.time_s: point.held_bytes for point in offloaded.memory_curve(0)}
    assert curve[4.0] == 20.0  # 0F1 starts before 0O0 has ended
    assert curve[5.0] == 10.0
    assert again.num_actions == 6
    assert simulate(again, costs).peak_activations == (1.0,)


def test_the_memory_curve_counts_weights_gradients_and_what_w_still_needs() -> None:
    schedule = by_hand("0", "0U~1 0F0 0I0 0W0 0G", extra="reduces: yes\nupdates: yes\n")
    memory = Memory(
        activation_bytes=10.0,
        after_input_gradient_bytes=4.0,
        gradient_bytes=3.0,
        weight_bytes=100.0,
    )
    costs = Durations(F=1.0, I=1.0, W=1.0, G=1.0, U=1.0)
    found = simulate(schedule, costs, memory=memory)
    assert [tuple(point) for point in found.memory_curve(0)] == [
        (0.0, 110.0),
        (2.0, 107.0),  # 10 - 6 freed after I, W's gradient taken
        (3.0, 103.0),
        (5.0, 100.0),  # freed by the update that follows the reduction
    ]
    assert found.peak_memory_bytes == (110.0,)


def test_costs_of_the_wrong_length_or_sign_are_refused() -> None:
    schedule = build("1f1b", num_stages=4, num_microbatches=4)
    with pytest.raises(ScheduleError, match=r"Durations\.F has 3 entries for 4 stages"):
        simulate(schedule, Durations(F=(1, 2, 3)))
    with pytest.raises(ScheduleError, match=">= 0"):
        simulate(schedule, Durations(F=-1.0))
    with pytest.raises(ScheduleError, match="message_bytes"):
        simulate(schedule, Durations(F=1), Links(message_bytes=(1, 2), latency_s=1))


def test_a_schedule_that_stops_is_reported() -> None:
    broken = by_hand("0", "0B0 0F0")
    with pytest.raises(ScheduleError, match="deadlocks, waiting at 0B0"):
        simulate(broken, Durations(F=1, B=1))


def test_grouped_costs_are_the_sums_of_their_blocks() -> None:
    blocks = Durations(F=(1, 2, 3, 4), I=1, W=(0, 1, 0, 1), G=2)
    links = Links(message_bytes=(10, 20, 30))
    assert blocks.grouped((1, 3)).table(2)[Kind.F] == [1, 9]
    assert blocks.grouped((2, 2)).table(2)[Kind.B] == [3, 3]
    assert links.grouped((1, 3)).boundary_bytes(2)[0] == 10
    assert links.grouped((3, 1)).boundary_bytes(2)[0] == 30
    assert Memory(activation_bytes=(1, 2, 3, 4)).grouped((2, 2)).activation_bytes == (3, 7)


def test_a_hundred_thousand_actions_keep_the_formula() -> None:
    schedule = build("zb_h1", num_stages=64, num_microbatches=512)
    assert schedule.num_actions == 3 * 64 * 512
    found = simulate(schedule, Durations(F=1, I=1, W=1))
    assert found.bubble_s == 63
    assert max(found.peak_activations) == 64


def test_single_actions_take_their_own_time() -> None:
    """Two stages, two micro-batches: one slow forward of four delays its successors."""
    schedule = by_hand("0 1", "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", batches=2)
    slow = {Action(1, Kind.F, 0): 5.0}
    found = spans(simulate(schedule, Durations(F=1, I=1, W=1, single=slow)))
    assert found["1F0"] == (1.0, 6.0)
    assert found["1B0"] == (6.0, 8.0)
    assert found["0B0"] == (8.0, 10.0)
    assert found["1F1"] == (8.0, 9.0)


def test_single_durations_are_checked() -> None:
    action = Action(0, Kind.F, 0)
    with pytest.raises(ScheduleError, match="finite number >= 0"):
        Durations(F=1, single={action: -1.0})
    with pytest.raises(ScheduleError, match="the key is an Action"):
        Durations(F=1, single={"0F0": 1.0})
    with pytest.raises(ScheduleError, match="to be merged"):
        Durations(F=1, single={action: 2.0}).grouped((2,))
