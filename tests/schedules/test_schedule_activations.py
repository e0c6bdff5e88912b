"""Recomputation and offloading keep a schedule valid and trade memory for time as predicted."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import schedules

from autopar.base.errors import ScheduleError
from autopar.schedules import (
    Durations,
    Kind,
    Memory,
    Schedule,
    build,
    format_schedule,
    parse_schedule,
    simulate,
    verify,
    with_offloading,
    with_recomputation,
)

COSTS = Durations(F=1, I=1, W=1, O=0.5, L=0.5)


@settings(deadline=None, max_examples=80)
@given(schedules(), st.data())
def test_every_schedule_can_recompute_and_offload_any_stages(
    schedule: Schedule, data: st.DataObject
) -> None:
    free = [s for s in range(schedule.shape.num_stages) if s not in schedule.shape.recomputed]
    chosen = data.draw(st.sets(st.sampled_from(free))) if free else set()
    again = with_recomputation(schedule, chosen)
    verify(again)
    assert parse_schedule(format_schedule(again)) == again
    extra = sum(len(chosen) and item.action.stage in chosen for _, item in backwards(schedule))
    assert again.num_actions == schedule.num_actions + extra
    spans = any(item.action.span > 1 for steps in schedule.devices for item in steps)
    if not spans:
        moved = with_offloading(schedule, chosen, actions_ahead=data.draw(st.integers(0, 4)))
        verify(moved)
        assert moved.num_actions == schedule.num_actions + 2 * extra
        assert simulate(moved, COSTS).makespan_s >= simulate(schedule, COSTS).makespan_s - 1e-9
    elif chosen:
        with pytest.raises(ScheduleError, match="several micro-batches"):
            with_offloading(schedule, chosen)


def backwards(schedule: Schedule) -> list[tuple[int, object]]:
    return [
        (device, item)
        for device, steps in enumerate(schedule.devices)
        for item in steps
        if item.action.kind in (Kind.I, Kind.B)
    ]


def test_recomputing_1f1b_costs_a_forward_a_micro_batch_and_holds_one_activation() -> None:
    plain = build("1f1b", num_stages=4, num_microbatches=8)
    again = with_recomputation(plain, range(4))
    costs = Durations(F=1, B=2)
    # recomputing needs no gradient from above, so in the drain it hides in 1F1B's bubbles
    assert simulate(again, costs).makespan_s == 8 * (1 + 1 + 2) + (4 - 1) * (1 + 2)
    assert simulate(again, costs).peak_activations == (1,) * 4
    memory = Memory(activation_bytes=10, checkpoint_bytes=1)
    peaks = simulate(again, costs, memory=memory).peak_memory_bytes
    assert peaks == (3 + 10, 2 + 10, 1 + 10, 10)


def test_offloading_in_good_time_costs_no_time_and_less_memory() -> None:
    plain = build("1f1b", num_stages=8, num_microbatches=16)
    costs = Durations(F=2, B=4, O=1, L=1)
    late = simulate(with_offloading(plain, [0], actions_ahead=0), costs)
    early = simulate(with_offloading(plain, [0], actions_ahead=2), costs)
    assert early.makespan_s == simulate(plain, costs).makespan_s < late.makespan_s
    kept = simulate(plain, costs).peak_activations
    assert kept[0] == 8
    assert late.peak_activations[0] < early.peak_activations[0] < kept[0]
    assert early.peak_activations[1:] == kept[1:]


@pytest.mark.parametrize("stages", [[4], [-1], [0, 9]])
def test_stages_that_do_not_exist_are_refused(stages: list[int]) -> None:
    plain = build("1f1b", num_stages=4, num_microbatches=8)
    with pytest.raises(ScheduleError, match=r"not among 0\.\.3"):
        with_recomputation(plain, stages)
    with pytest.raises(ScheduleError, match=r"not among 0\.\.3"):
        with_offloading(plain, stages)


def test_nothing_is_given_up_twice() -> None:
    plain = build("1f1b", num_stages=2, num_microbatches=2)
    with pytest.raises(ScheduleError, match="recomputed"):
        with_recomputation(with_recomputation(plain, [1]), [1])
    with pytest.raises(ScheduleError, match="offloaded"):
        with_offloading(with_offloading(plain, [1]), [1])
    with pytest.raises(ScheduleError, match="actions_ahead"):
        with_offloading(plain, [1], actions_ahead=-1)
