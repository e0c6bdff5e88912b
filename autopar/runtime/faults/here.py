"""What this process of a job is doing, and what a diagnosis means for it.

In: the calls that the user's thread makes, and the diagnosis that the watching thread brings. Out:
status messages about this process; its end, where a diagnosis finds it stuck.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any

from autopar.runtime.faults import whereabouts
from autopar.runtime.faults.judge import CallNumber, Diagnosis, State, in_wait
from autopar.runtime.faults.life import Pulse
from autopar.runtime.faults.neighbours import Neighbours
from autopar.runtime.faults.step_limit import StepLimit

GRACE_S = 6.0
"""How long the user's thread may take to leave a call after a diagnosis; then its process ends."""
_MAX_STACK_FRAMES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the user's thread ``thread``; ``limit`` where it may hang."""

    number: CallNumber
    thread: int
    since_s: float
    limit: StepLimit | None

    @property
    def is_late(self) -> bool:
        return self.limit is not None and time.monotonic() - self.since_s > self.limit.limit_s


class Here:
    """This process; written by the user's thread and read by the one that watches."""

    def __init__(self, rank: int, neighbours: Neighbours) -> None:
        self.rank = rank
        self.neighbours = neighbours
        self.call: Call | None = None
        self.begun: dict[str, int] = {}
        self.error: dict[str, Any] | None = None
        self.last_error = ""
        self.failed_call = ""
        self.told_to_end = False
        self.diagnosis: Diagnosis | None = None
        self._pulse = Pulse(os.getpid())
        self._felt: Call | None = None

    def feel_pulse(self) -> None:
        """Look whether this process does anything in its call; by the thread that watches."""
        call = self.call
        if call is not self._felt:
            self._pulse.restart()
            self._felt = call
        elif call is not None and call.limit is not None:
            self._pulse.look(whereabouts.current())

    def _is_idle(self, call: Call) -> bool:
        if call is not self._felt or call.limit is None:
            return False
        return self._pulse.idle_s > call.limit.idle_limit_s

    def status(self, *, asked: bool = False) -> dict[str, Any]:
        """How this rank fares; if asked, also its stack and what its neighbours do."""
        call, diagnosis = self.call, self.diagnosis
        status = {
            "call": "" if call is None else str(call.number),
            "begun": dict(self.begun),
            "doing": whereabouts.current() if call is not None else "",
            "in_call_s": 0.0 if call is None else time.monotonic() - call.since_s,
            "late": call is not None and call.is_late,
            "idle": call is not None and self._is_idle(call),
            "error": self.error,
            "last_error": self.last_error,
            "failed_call": self.failed_call,
            "told_to_end": self.told_to_end,
        }
        if asked:
            assert diagnosis is None
            frame = None if call is None else sys._current_frames().get(call.thread)
            stack = [] if frame is None else traceback.format_stack(frame)
            status["stack"] = "".join(stack[-_MAX_STACK_FRAMES:])
            status["waits"] = in_wait(frame)
            status["doing_of"] = {str(r): text for r, text in self.neighbours.doing().items()}
            status["stopped"] = self.neighbours.stopped()
        return status

    def conclude(self, diagnosis: Diagnosis) -> None:
        self.diagnosis = diagnosis

    def diagnosis_within(self, limit_s: float) -> Diagnosis | None:
        """Without any lock: a signal handler may wait while the thread that it interrupts does."""
        deadline_s = time.monotonic() + limit_s
        while self.diagnosis is None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return self.diagnosis

    def enforce(self) -> None:
        """See the rank at fault and this process end, once there is a diagnosis.

        A thread that waits in a collective is woken by the end of its peers; where all of them
        live on, nothing but the end of this process stops it. The rank that hangs goes first.
        """
        assert self.diagnosis is not None
        if self.diagnosis.state in (State.STOPPED, State.SILENT):
            self.neighbours.kill(self.diagnosis.rank)
        hangs = self.diagnosis.rank == self.rank and self.error is None
        deadline_s = time.monotonic() + (0.0 if hangs else GRACE_S)
        while self.call is not None and time.monotonic() < deadline_s:
            time.sleep(0.05)
        if self.call is not None:
            self._end(self.call)

    def _end(self, call: Call) -> None:
        assert self.diagnosis is not None
        frame = sys._current_frames().get(call.thread)
        stack = "" if frame is None else "".join(traceback.format_stack(frame))
        print(
            f"{stack}autopar.base.errors.WorkerError: {self.diagnosis.text}\n"
            f"rank {self.rank} is stuck in {call.number}, so its process ends here",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        sys.stdout.flush()
        os._exit(1)


def as_message(diagnosis: Diagnosis) -> dict[str, Any]:
    return {"kind": "diagnosis", **dataclasses.asdict(diagnosis)}


def from_message(message: dict[str, Any]) -> Diagnosis:
    return Diagnosis(rank=message["rank"], text=message["text"], state=State(message["state"]))
