"""The rank that is blamed; real faults are in test_torchrun_faults and
test_faults_between_steps."""

from __future__ import annotations

import pytest

from autopar.runtime.faults.judge import CallNumber, Condition, State, diagnose

THIRD = CallNumber(name="train_step()", number=3)
STEP = {"call": THIRD, "doing": "action 1F0"}


def blamed(*states: State, late: bool = False, **of_last: object) -> int | None:
    """Rank by rank; those in a call are in a step, and the last one is as told."""
    outside = (State.OUTSIDE, State.LEFT)
    conditions = [
        Condition(rank=rank, state=state, late=late, **({} if state in outside else STEP))
        for rank, state in enumerate(states[:-1])
    ]
    last = {**({} if states[-1] in outside else STEP), **of_last}
    conditions.append(Condition(rank=len(states) - 1, state=states[-1], **last))  # type: ignore[arg-type]
    diagnosis = diagnose(conditions, num_ranks=len(states))
    return None if diagnosis is None else diagnosis.rank


def test_a_death_in_a_step_comes_before_all_that_it_causes() -> None:
    assert blamed(State.CUT_OFF, State.FAILED, State.SILENT, State.ENDED) == 3
    assert blamed(State.CUT_OFF, State.FAILED, State.SILENT) == 2
    assert blamed(State.CUT_OFF, State.WAITING, State.FAILED) == 2


@pytest.mark.parametrize("gone", [State.ENDED, State.LEFT])
def test_who_ended_outside_of_a_step_is_blamed_once_others_miss_it(gone: State) -> None:
    nowhere = {"call": None, "doing": ""}
    assert blamed(State.OUTSIDE, State.BUSY, gone, **nowhere) is None
    assert blamed(State.WAITING, State.BUSY, gone, late=True, **nowhere) == 2
    assert blamed(State.CUT_OFF, State.BUSY, gone, **nowhere) == 2


@pytest.mark.parametrize("gone", [State.ENDED, State.LEFT])
def test_who_is_gone_is_blamed_at_once_by_those_whose_call_it_never_began(gone: State) -> None:
    nowhere = {"call": None, "doing": ""}
    before, in_it = {"train_step()": 2}, {"train_step()": 3, "save()": 1}
    assert blamed(State.WAITING, State.BUSY, gone, begun=before, **nowhere) == 2
    assert blamed(State.WAITING, State.BUSY, gone, begun={}, **nowhere) == 2
    assert blamed(State.WAITING, State.BUSY, gone, begun=in_it, **nowhere) is None
    assert blamed(State.OUTSIDE, State.OUTSIDE, gone, begun=before, **nowhere) is None


def test_who_ended_in_an_error_is_blamed_wherever_others_are() -> None:
    raised = {"call": None, "doing": "", "error": "OSError: no such file", "fatal": True}
    assert blamed(State.OUTSIDE, State.OUTSIDE, State.LEFT, **raised) == 2
    assert blamed(State.OUTSIDE, State.ENDED, State.LEFT, **raised) != 0


def test_those_who_are_told_to_end_name_who_is_gone_already() -> None:
    """As ``torchrun`` signals all others when one process has ended."""
    gone = Condition(rank=0, state=State.ENDED)
    told = Condition(rank=1, state=State.OUTSIDE, told_to_end=True)
    ended_too = Condition(rank=2, state=State.ENDED, told_to_end=True, **STEP)  # type: ignore[arg-type]
    for conditions in ([gone, told], [gone, told, ended_too], [ended_too, told, gone]):
        found = diagnose(conditions, num_ranks=3)
        assert found is not None
        assert found.rank == 0
    assert diagnose([told], num_ranks=3) is None


def test_who_raised_in_a_call_is_blamed_once_others_have_waited_there() -> None:
    raised = {"call": None, "doing": "", "error": "OSError", "failed_call": THIRD}
    assert blamed(State.WAITING, State.WAITING, State.OUTSIDE, **raised) is None
    waiting = Condition(rank=0, state=State.WAITING, waited=True, **STEP)  # type: ignore[arg-type]
    outside = Condition(rank=1, state=State.OUTSIDE, **raised)  # type: ignore[arg-type]
    found = diagnose([waiting, outside], num_ranks=2)
    assert found is not None
    assert found.rank == 1
    assert "raised OSError in train_step() number 3, which others are still in" in found.text


def test_a_rank_that_is_slow_to_come_to_a_step_is_waited_for() -> None:
    assert blamed(State.WAITING, State.WAITING, State.OUTSIDE, late=True) is None
    assert blamed(State.CUT_OFF, State.WAITING, State.OUTSIDE) == 2


def test_of_a_late_step_the_rank_that_computes_is_blamed() -> None:
    assert blamed(State.WAITING, State.WAITING, State.BUSY) is None
    assert blamed(State.WAITING, State.WAITING, State.BUSY, late=True) == 2
    assert blamed(State.WAITING, State.WAITING, State.WAITING, late=True) == 0


def test_a_silent_rank_outside_of_a_step_is_left_alone() -> None:
    nowhere = {"call": None, "doing": ""}
    assert blamed(State.OUTSIDE, State.BUSY, State.SILENT, **nowhere) is None
    assert blamed(State.WAITING, State.BUSY, State.SILENT, late=True, **nowhere) is None
    assert blamed(State.CUT_OFF, State.BUSY, State.SILENT, **nowhere) == 2


def test_a_stopped_rank_is_blamed_once_others_are_in_a_step() -> None:
    nowhere = {"call": None, "doing": ""}
    assert blamed(State.WAITING, State.BUSY, State.STOPPED) == 2
    assert blamed(State.WAITING, State.BUSY, State.STOPPED, **nowhere) == 2
    assert blamed(State.OUTSIDE, State.OUTSIDE, State.STOPPED, **nowhere) is None


def test_a_rank_that_does_nothing_is_blamed_if_all_do_nothing() -> None:
    assert blamed(State.WAITING, State.BUSY, State.WAITING, idle=True) is None
    idle = [
        Condition(rank=rank, state=state, idle=True, **STEP)
        for rank, state in enumerate([State.WAITING, State.BUSY, State.WAITING])
    ]
    diagnosis = diagnose(idle, num_ranks=3)
    assert diagnosis is not None
    assert diagnosis.rank == 1
    assert "no rank has used its processor" in diagnosis.text
    assert diagnose([idle[0], idle[2]], num_ranks=2) is None
    loading = Condition(rank=3, state=State.OUTSIDE)
    assert diagnose([*idle, loading], num_ranks=4) is None
