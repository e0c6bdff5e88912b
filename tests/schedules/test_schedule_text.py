"""Actions, steps and schedules round-trip through text; other text is rejected."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import schedules

from autopar.base.errors import ScheduleError
from autopar.schedules import (
    Action,
    Kind,
    PipelineShape,
    Resource,
    Schedule,
    Step,
    format_schedule,
    parse_action,
    parse_schedule,
    parse_step,
)


@st.composite
def actions(draw: st.DrawFn) -> Action:
    kind = draw(st.sampled_from(list(Kind)))
    stage, replica = draw(st.integers(0, 2000)), draw(st.integers(0, 64))
    if kind.per_stage:
        return Action(stage, kind, replica=replica)
    return Action(stage, kind, draw(st.integers(0, 5000)), draw(st.integers(1, 5)), replica)


@given(actions())
def test_an_action_is_read_back_from_its_text(action: Action) -> None:
    assert parse_action(str(action)) == action
    assert hash(parse_action(str(action))) == hash(action)


@given(actions(), actions(), st.sampled_from(list(Resource)), st.integers(0, 1), st.booleans())
def test_a_step_is_read_back_from_its_text(
    action: Action, after: Action, resource: Resource, lag: int, waits: bool
) -> None:
    item = Step(action, resource, lag, after if waits else None)
    assert parse_step(str(item)) == item


@given(actions(), actions())
def test_different_actions_have_different_texts(first: Action, second: Action) -> None:
    assert (first == second) == (str(first) == str(second))


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(2, Kind.F, 0)),
        ("2.1B5", Action(2, Kind.B, 5, replica=1)),
        ("0F4-5", Action(0, Kind.F, 4, span=2)),
        ("3G", Action(3, Kind.G)),
        ("1SEND_F7", Action(1, Kind.SEND_F, 7)),
    ],
)
def test_the_notation(text: str, action: Action) -> None:
    assert parse_action(text) == action
    assert str(action) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F0",
        "2F",
        "2X0",
        "2f0",
        " 2F0",
        "02F0",
        "2F00",
        "2.0F0",
        "3G1",
        "2F3-3",
        "2F3-1",
        "-1F0",
    ],
)
def test_text_that_is_no_action_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ScheduleError):
        parse_action(text)


@settings(deadline=None, max_examples=60)
@given(schedules())
def test_a_schedule_is_read_back_from_its_text(schedule: Schedule) -> None:
    assert parse_schedule(format_schedule(schedule)) == schedule


def test_a_shape_with_all_its_extra_work_is_read_back() -> None:
    shape = PipelineShape(
        num_microbatches=2,
        placement=((0, 1), (1, 0)),
        replica_of=(0, 1),
        reduces=True,
        updates=True,
        recomputed=(0,),
        offloaded=(1,),
    )
    schedule = Schedule(name="by hand", shape=shape, devices=((), ()))
    assert parse_schedule(str(schedule)) == schedule


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no colon", "line 4"),
        ("device 3: 0F0", "expected 'device 0'"),
        ("device 0: 0F0 0Q0", "'0Q0'"),
        ("device 0: 0F0@main", "canonical"),
        ("name: again", "given twice"),
        ("colour: red", "unknown keys"),
    ],
)
def test_a_broken_schedule_text_names_its_fault(line: str, message: str) -> None:
    text = f"name: x\nnum_microbatches: 1\nplacement: 0\n{line}\n"
    with pytest.raises(ScheduleError, match=message):
        parse_schedule(text)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_microbatches": 0, "placement": ((0,),)},
        {"num_microbatches": 1, "placement": ()},
        {"num_microbatches": 1, "placement": ((0, 1), (0,))},
        {"num_microbatches": 1, "placement": ((0, 2),)},
        {"num_microbatches": 2, "placement": ((0,),), "replica_of": (0,)},
        {"num_microbatches": 1, "placement": ((0,),), "replica_of": (1,)},
    ],
)
def test_an_impossible_shape_is_refused(fields: dict) -> None:
    with pytest.raises(ScheduleError):
        PipelineShape(**fields)
