"""Silence is measured in time that the watcher listened, not in time that it was itself delayed."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from autopar.runtime.faults import liveness, own_rank, watchers
from autopar.runtime.faults.host_peers import HostPeers, Location
from autopar.runtime.faults.json_lines import JsonLines
from autopar.runtime.faults.judge import CallNumber, Diagnosis, State
from autopar.runtime.faults.own_rank import Call, OwnRank

SILENT_S = 3.0
DELAY_S = 5.0  # longer than silence may last
LIMIT_S = 30.0
STEP = CallNumber(name="train_step()", number=1)


def in_a_step(rank: int) -> OwnRank:
    """A rank in the middle of a step; without others on its host, messages alone count."""
    own = OwnRank(rank, HostPeers(Location(host=("here",), pid=os.getpid(), page_path="")))
    own.begun[STEP.name] = STEP.number
    own.call = Call(number=STEP, thread=threading.get_ident(), since_s=time.monotonic(), limit=None)
    return own


class Other:
    """The other end of a watcher's connection: it sends heartbeats until it stops."""

    def __init__(self, rank: int, line: JsonLines) -> None:
        self.own, self.line = in_a_step(rank), line
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat)
        self._thread.start()

    def _beat(self) -> None:
        while not self._stopped.wait(0.1):
            self.line.send({"kind": "status", **self.own.status(), "waits": True})

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(LIMIT_S)


def delayed_once(kind: type[watchers.Watcher]) -> type[watchers.Watcher]:
    """A watcher whose thread is kept from running once, after it has received and before it looks,
    as another thread does that holds the interpreter's lock in C code."""

    class Delayed(kind):  # type: ignore[misc, valid-type]
        was_delayed = False
        due_s = time.monotonic() + 2 * watchers.HEARTBEAT_S

        def look(self) -> None:
            if not self.was_delayed and time.monotonic() > self.due_s:
                time.sleep(DELAY_S)
                self.was_delayed = True
            super().look()

    return Delayed


@contextlib.contextmanager
def joined(rank: int) -> Iterator[tuple[watchers.Watcher, Other]]:
    """A delayed watcher of ``rank`` of two, and the other rank."""
    here, there = socket.socketpair()
    own = in_a_step(rank)
    other = Other(1 - rank, JsonLines(there))
    kind = delayed_once(watchers.Member if rank else watchers.Hub)
    watcher = kind(own, {1 - rank: JsonLines(here)}, ["process 0", "process 1"])
    watcher.start()
    try:
        yield watcher, other
    finally:
        other.stop()
        own.call = None
        watcher.stop()
        watcher.forget_connections()
        there.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_delayed_watcher_takes_nobody_for_silent(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "SILENT_S", SILENT_S)
    monkeypatch.setattr(OwnRank, "enforce", lambda self: None)  # it would end this process
    with joined(rank) as (watcher, other):
        deadline_s = time.monotonic() + LIMIT_S
        while not watcher.was_delayed and time.monotonic() < deadline_s:  # type: ignore[attr-defined]
            time.sleep(0.05)
        assert watcher.was_delayed  # type: ignore[attr-defined]
        time.sleep(SILENT_S)
        assert watcher.own_rank.diagnosis is None
        other.stop()
        found = watcher.own_rank.diagnosis_within(LIMIT_S)
    assert found is not None
    assert (found.rank, found.state) == (1 - rank, State.SILENT)


def test_a_delay_of_the_process_is_no_wait_for_the_diagnosis(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its whole process stands still for longer than it may wait, and goes on."""
    own, passed_s = in_a_step(0), [0.0]
    found = Diagnosis(rank=1, text="rank 1 died", state=State.ENDED)

    def sleep(time_s: float) -> None:
        is_first = passed_s[0] == 0.0
        passed_s[0] += DELAY_S if is_first else time_s
        if passed_s[0] > DELAY_S + 1.0:
            own.conclude(found)

    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: passed_s[0])
    monkeypatch.setattr(own_rank, "time", clock)
    assert own.diagnosis_within(0.5 * DELAY_S) is found
    own.diagnosis = None
    monkeypatch.setattr(own, "conclude", lambda _: None)
    assert own.diagnosis_within(0.5 * DELAY_S) is None
    assert passed_s[0] < 3 * DELAY_S
