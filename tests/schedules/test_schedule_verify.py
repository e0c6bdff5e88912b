"""``verify`` accepts every generated schedule and rejects every broken one, naming the place.

An independent check decides here which schedules are illegal: it looks for a cycle with networkx.
"""

import re
from collections.abc import Iterable
from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from schedule_cases import PLAIN, VARIANTS, schedules, variant

from autopar.base.errors import ScheduleError
from autopar.schedules import (
    Action,
    Durations,
    Kind,
    PipelineShape,
    Schedule,
    Step,
    build,
    parse_schedule,
    parse_step,
    simulate,
    verify,
    with_communication,
    with_reductions,
)

COSTS = Durations(F=1, I=1, W=1, G=1)


def with_device(schedule: Schedule, device: int, steps: Iterable[Step]) -> Schedule:
    devices = list(schedule.devices)
    devices[device] = tuple(steps)
    return replace(schedule, devices=tuple(devices))


def is_legal(schedule: Schedule) -> bool:
    """Whether device order (of F, I, W and B) and data dependencies form no cycle."""
    graph = nx.DiGraph()
    makes_gradient: dict[tuple[int, int], Action] = {}
    for steps in schedule.devices:
        order = [item.action for item in steps]
        nx.add_path(graph, order)
        for action in order:
            if action.kind in (Kind.I, Kind.B):
                makes_gradient[action.stage, action.microbatch] = action
    for action in list(graph):
        stage, m = action.stage, action.microbatch
        if action.kind is Kind.F and stage > 0:
            graph.add_edge(action._replace(stage=stage - 1), action)
        if action.kind is Kind.W:
            graph.add_edge(action._replace(kind=Kind.I), action)
        if action.kind in (Kind.I, Kind.B):
            graph.add_edge(action._replace(kind=Kind.F), action)
            if (stage + 1, m) in makes_gradient:
                graph.add_edge(makes_gradient[stage + 1, m], action)
    return nx.is_directed_acyclic_graph(graph)


@pytest.mark.parametrize(("name", "per_device", "options"), VARIANTS)
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_every_generated_schedule_passes(
    name: str, per_device: int, options: dict, devices: int
) -> None:
    built = [variant(name, per_device, options, devices, batches) for batches in range(1, 21)]
    passed = [verify(schedule) for schedule in built if schedule is not None]
    assert len(passed) >= 3


@settings(deadline=None, max_examples=150)
@given(schedules(), st.data())
def test_every_deletion_is_rejected(schedule: Schedule, data: st.DataObject) -> None:
    device, place = data.draw(st.sampled_from(cells(schedule)))
    steps = schedule.devices[device]
    broken = with_device(schedule, device, steps[:place] + steps[place + 1 :])
    with pytest.raises(ScheduleError, match="missing") as caught:
        verify(broken)
    assert f"device {device}" in str(caught.value)


@settings(deadline=None, max_examples=150)
@given(schedules(), st.data())
def test_every_duplication_is_rejected(schedule: Schedule, data: st.DataObject) -> None:
    device, place = data.draw(st.sampled_from(cells(schedule)))
    target = data.draw(st.integers(0, len(schedule.devices[device])))
    steps = list(schedule.devices[device])
    steps.insert(target, steps[place])
    with pytest.raises(ScheduleError, match="already done") as caught:
        verify(with_device(schedule, device, steps))
    assert str(steps[target].action) in str(caught.value)


@settings(deadline=None, max_examples=300)
@given(schedules(PLAIN), st.data())
def test_exactly_the_illegal_swaps_are_rejected(schedule: Schedule, data: st.DataObject) -> None:
    device, first = data.draw(st.sampled_from(cells(schedule)))
    second = data.draw(st.integers(0, len(schedule.devices[device]) - 1))
    assume(first != second)
    steps = list(schedule.devices[device])
    steps[first], steps[second] = steps[second], steps[first]
    swapped = with_device(schedule, device, steps)
    if is_legal(swapped):
        verify(swapped)
        simulate(swapped, COSTS)
    else:
        with pytest.raises(ScheduleError, match=r"must come after|deadlock"):
            verify(swapped)
        with pytest.raises(ScheduleError):
            simulate(swapped, COSTS)


@settings(deadline=None, max_examples=100)
@given(schedules(), st.data())
def test_swaps_between_devices_are_rejected(schedule: Schedule, data: st.DataObject) -> None:
    assume(schedule.shape.num_devices > 1)
    one, first = data.draw(st.sampled_from(cells(schedule)))
    two, second = data.draw(st.sampled_from(cells(schedule)))
    assume(one != two)
    mine, yours = list(schedule.devices[one]), list(schedule.devices[two])
    mine[first], yours[second] = yours[second], mine[first]
    with pytest.raises(ScheduleError, match=f"is on device ({one}|{two})"):
        verify(with_device(with_device(schedule, one, mine), two, yours))


@settings(deadline=None, max_examples=100)
@given(schedules(("1f1b", "zb_h1", "chimera", "zb_v", "dualpipe")), st.data())
def test_written_out_communication_cannot_lose_or_repeat_an_action(
    schedule: Schedule, data: st.DataObject
) -> None:
    full = with_reductions(with_communication(schedule, COSTS), COSTS)
    verify(full)
    device, place = data.draw(st.sampled_from(cells(full)))
    steps = full.devices[device]
    with pytest.raises(ScheduleError, match="missing"):
        verify(with_device(full, device, steps[:place] + steps[place + 1 :]))
    with pytest.raises(ScheduleError, match="already done"):
        verify(with_device(full, device, (*steps, steps[place])))


def cells(schedule: Schedule) -> list[tuple[int, int]]:
    return [(d, p) for d, steps in enumerate(schedule.devices) for p in range(len(steps))]


def test_the_error_names_device_step_and_action_and_marks_the_cell() -> None:
    schedule = build("1f1b", num_stages=4, num_microbatches=6)
    steps = list(schedule.devices[2])
    steps[0], steps[2] = steps[2], steps[0]
    with pytest.raises(ScheduleError) as caught:
        verify(with_device(schedule, 2, steps))
    text = str(caught.value)
    assert "device 2, step 0, 2B0: must come after 2F0" in text
    rows = [line for line in text.splitlines() if line.startswith("step 0")]
    assert [re.split(r"\s{2,}", row) for row in rows] == [["step 0", "0F0", "1F0", ">2B0<", "3F0"]]


ONE_STAGE = "name: hand\nnum_microbatches: 1\nplacement: 0\n"
TWO_STAGES = "name: hand\nnum_microbatches: 1\nplacement: 0 1\n"
LATE_HALF = "num_microbatches: 2\nplacement: 0 1 | 1 0\nreplica_of: 0 1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ONE_STAGE + "device 0: 0F0 0B0 1F0", "stage 1 is not one of 0..0"),
        (ONE_STAGE + "device 0: 0.3F0 0B0", "replica is not one of"),
        (ONE_STAGE + "device 0: 0F0 0B7", r"micro-batches are 0\.\.0"),
        (ONE_STAGE + "device 0: 0F0 0B0-1", r"micro-batches are 0\.\.0"),
        (ONE_STAGE + "device 0: 0F0 0B0~2", "lag 2"),
        (ONE_STAGE + "device 0: 0F0 0B0 0G", "set reduces"),
        (ONE_STAGE + "device 0: 0F0 0R0 0B0", "set recomputed"),
        (ONE_STAGE + "device 0: 0F0@collective 0B0", "runs on main or side"),
        (ONE_STAGE + "device 0: 0F0 0B0 0W0", "W was already done"),
        (ONE_STAGE + "device 0: 0F0 0I0", r"W \(or B\) of stage 0, micro-batch 0, is missing"),
        (ONE_STAGE + "device 0: 0F0 0B0>0W0", "waits for 0W0, which is not earlier"),
        (ONE_STAGE + "device 0: 0F0 0SEND_F0 0B0", "no stage 1 to exchange with"),
        ("name: hand\n" + LATE_HALF + "device 0: 0F0 1.1F1\ndevice 1: 1F0 0.1F0", "belongs to"),
        (TWO_STAGES + "device 0: 0F0 0B0", "lists 1 devices"),
        (TWO_STAGES + "device 0: 0B0 0F0\ndevice 1: 1F0 1B0", "must come after 0F0"),
        (
            "name: hand\nnum_microbatches: 1\nplacement: 0 0\n"
            "device 0: 0F0 0SEND_F0 1RECV_F0 1F0 1B0 0B0",
            "on the same device",
        ),
        (
            "name: hand\nnum_microbatches: 2\nplacement: 0 1\n"
            "device 0: 0F0 0F1 0B0 0B1\ndevice 1: 1F0 1F1 1B1 1B0",
            None,
        ),
        (
            "name: hand\nnum_microbatches: 2\nplacement: 0 1 0\n"
            "device 0: 0F0 2F0 2B0 0F1 2F1 2B1 0B0 0B1\ndevice 1: 1F0 1F1 1B1 1B0",
            None,
        ),
        (
            "name: hand\nnum_microbatches: 2\nplacement: 0 1 0\n"
            "device 0: 0F0 2F0 2B0 0F1 2F1 2B1 0B0 0B1\ndevice 1: 1F0 1B0 1B1 1F1",
            "must come after 1F1",
        ),
        (
            "name: hand\nnum_microbatches: 2\nplacement: 0 1 0\n"
            "device 0: 0F0 2F0 2B0 0B0 0F1 2F1 2B1 0B1\ndevice 1: 1F0 1F1 1B0 1B1",
            "deadlock",
        ),
    ],
)
def test_each_rule_rejects_what_breaks_it(text: str, message: str | None) -> None:
    schedule = parse_schedule(text + "\n")
    if message is None:
        verify(schedule)
        return
    with pytest.raises(ScheduleError, match=message):
        verify(schedule)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("0U~1 0F0 0I0 0W0 0G", None),
        ("0F0 0I0 0W0 0G 0U", None),
        ("0F0 0I0 0G 0W0 0U", "must come after 0W0"),
        ("0F0 0I0 0W0 0U 0G", "must come after 0G"),
        ("0F0 0U~1 0I0 0W0 0G", "must be issued before this forward"),
        ("0F0 0G~1 0U~1 0I0 0W0", "must be issued before this forward"),
        ("0F0 0I0 0W0 0U", "G of stage 0, replica 0, is missing"),
        ("0F0 0I0 0W0 0G", "U of stage 0, replica 0, is missing"),
        ("0U~1 0F0 0I0 0W0@side~1 0G", "must come after 0W0"),
    ],
)
def test_reductions_follow_the_last_w_and_updates_precede_the_next_forward(
    steps: str, message: str | None
) -> None:
    shape = PipelineShape(num_microbatches=1, placement=((0,),), reduces=True, updates=True)
    listed = tuple(parse_step(text) for text in steps.split())
    schedule = Schedule(name="hand", shape=shape, devices=(listed,))
    if message is None:
        verify(schedule)
        return
    with pytest.raises(ScheduleError, match=message):
        verify(schedule)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("0F0 0O0 0L0 0B0", None),
        ("0F0 0L0 0O0 0B0", "must come after 0O0"),
        ("0F0 0O0 0B0 0L0", "must come after 0L0"),
        ("0O0 0F0 0L0 0B0", "must come after 0F0"),
        ("0F0 0O0 0B0", "L of stage 0, micro-batch 0, is missing"),
        ("0F0 0B0", "O of stage 0, micro-batch 0, is missing"),
    ],
)
def test_an_offloaded_activation_is_not_read_before_it_is_back(
    steps: str, message: str | None
) -> None:
    shape = PipelineShape(num_microbatches=1, placement=((0,),), offloaded=(0,))
    listed = tuple(parse_step(text) for text in steps.split())
    schedule = Schedule(name="hand", shape=shape, devices=(listed,))
    if message is None:
        verify(schedule)
        return
    with pytest.raises(ScheduleError, match=message):
        verify(schedule)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1", None),
        ("1RECV_F1 1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1", "next message from device 0"),
        ("1RECV_F0 1F0 1SEND_B0 1B0 1RECV_F1 1F1 1B1 1SEND_B1", "must come after 1B0"),
        ("1F0 1RECV_F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1", "must come after 1RECV_F0"),
        ("1RECV_F0 1F0 1B0 1RECV_F1 1F1 1B1 1SEND_B1", "SEND_B of stage 1, micro-batch 0"),
    ],
)
def test_a_link_delivers_in_order_and_nothing_is_read_before_it_came(
    second: str, message: str | None
) -> None:
    first = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    schedule = parse_schedule(
        f"name: hand\nnum_microbatches: 2\nplacement: 0 1\ndevice 0: {first}\ndevice 1: {second}\n"
    )
    if message is None:
        verify(schedule)
        return
    with pytest.raises(ScheduleError, match=message):
        verify(schedule)
