"""Which rank is blamed, and who may speak to the watch; real faults are in test_torchrun_faults."""

from __future__ import annotations

import socket
import threading

import pytest

from autopar.runtime.faults.inquest import Condition, State, verdict_of
from autopar.runtime.faults.lines import accept_all, connect, listen

STEP = {"call": "train_step() number 3", "doing": "action 1F0"}


def blamed(*states: State, late: bool = False, **of_last: object) -> int | None:
    """Rank by rank; those in a call are in a step, and the last one is as told."""
    outside = (State.OUTSIDE, State.LEFT)
    conditions = [
        Condition(rank=rank, state=state, late=late, **({} if state in outside else STEP))
        for rank, state in enumerate(states[:-1])
    ]
    last = {**({} if states[-1] in outside else STEP), **of_last}
    conditions.append(Condition(rank=len(states) - 1, state=states[-1], **last))  # type: ignore[arg-type]
    verdict = verdict_of(conditions, num_ranks=len(states))
    return None if verdict is None else verdict.rank


def test_a_death_in_a_step_comes_before_all_that_it_causes() -> None:
    assert blamed(State.CUT_OFF, State.FAILED, State.SILENT, State.ENDED) == 3
    assert blamed(State.CUT_OFF, State.FAILED, State.SILENT) == 2
    assert blamed(State.CUT_OFF, State.WAITING, State.FAILED) == 2


@pytest.mark.parametrize("gone", [State.ENDED, State.LEFT])
def test_who_ended_outside_of_a_step_is_blamed_once_others_miss_it(gone: State) -> None:
    nowhere = {"call": "", "doing": ""}
    assert blamed(State.OUTSIDE, State.BUSY, gone, **nowhere) is None
    assert blamed(State.WAITING, State.BUSY, gone, late=True, **nowhere) == 2
    assert blamed(State.CUT_OFF, State.BUSY, gone, **nowhere) == 2


def test_a_rank_that_is_slow_to_come_to_a_step_is_waited_for() -> None:
    assert blamed(State.WAITING, State.WAITING, State.OUTSIDE, late=True) is None
    assert blamed(State.CUT_OFF, State.WAITING, State.OUTSIDE) == 2


def test_of_a_late_step_the_rank_that_computes_is_blamed() -> None:
    assert blamed(State.WAITING, State.WAITING, State.BUSY) is None
    assert blamed(State.WAITING, State.WAITING, State.BUSY, late=True) == 2
    assert blamed(State.WAITING, State.WAITING, State.WAITING, late=True) == 0


def test_a_silent_rank_outside_of_a_step_is_left_alone() -> None:
    nowhere = {"call": "", "doing": ""}
    assert blamed(State.OUTSIDE, State.BUSY, State.SILENT, **nowhere) is None
    assert blamed(State.WAITING, State.BUSY, State.SILENT, late=True, **nowhere) is None
    assert blamed(State.CUT_OFF, State.BUSY, State.SILENT, **nowhere) == 2


def test_a_stopped_rank_is_blamed_once_others_are_in_a_step() -> None:
    nowhere = {"call": "", "doing": ""}
    assert blamed(State.WAITING, State.BUSY, State.STOPPED) == 2
    assert blamed(State.WAITING, State.BUSY, State.STOPPED, **nowhere) == 2
    assert blamed(State.OUTSIDE, State.OUTSIDE, State.STOPPED, **nowhere) is None


def test_a_rank_that_does_nothing_is_blamed_if_all_do_nothing() -> None:
    assert blamed(State.WAITING, State.BUSY, State.WAITING, idle=True) is None
    idle = [
        Condition(rank=rank, state=state, idle=True, **STEP)
        for rank, state in enumerate([State.WAITING, State.BUSY, State.WAITING])
    ]
    verdict = verdict_of(idle, num_ranks=3)
    assert verdict is not None
    assert verdict.rank == 1
    assert "no rank has used its processor" in verdict.text
    assert verdict_of([idle[0], idle[2]], num_ranks=2) is None
    loading = Condition(rank=3, state=State.OUTSIDE)
    assert verdict_of([*idle, loading], num_ranks=4) is None


def test_a_stranger_or_noise_is_refused() -> None:
    with listen(everywhere=False) as listener:
        port = listener.getsockname()[1]

        def knock() -> None:
            connect("127.0.0.1", port, "a guess", 1, 5)
            with socket.create_connection(("127.0.0.1", port)) as noise:
                noise.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with socket.create_connection(("127.0.0.1", port)) as noise:
                noise.sendall(b'[1, 2, "token"]\n')
            kept.append(connect("127.0.0.1", port, "the token", 2, 5))

        kept: list[object] = []
        thread = threading.Thread(target=knock)
        thread.start()
        lines = accept_all(listener, "the token", 2, 1.5)
        thread.join()
    assert list(lines) == [2]
    lines[2].close()
