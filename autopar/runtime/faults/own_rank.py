"""The state of this process of a job, and the end of it after a diagnosis.

In: the calls that the user's thread makes, and the diagnosis from the watcher's thread. Out: status
messages about this process; and its exit, if it is stuck in a call when there is a diagnosis.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any

from autopar.runtime.faults import progress
from autopar.runtime.faults.host_peers import HostPeers
from autopar.runtime.faults.judge import CallNumber, Diagnosis, State, in_wait
from autopar.runtime.faults.liveness import Activity
from autopar.runtime.faults.step_limit import StepLimit

GRACE_S = 6.0
"""How long the user's thread may take to leave a call after a diagnosis; then its process ends."""
_MAX_STACK_FRAMES = 12
_POLL_S = 0.01
_MAX_POLL_S = 0.1  # a poll that takes longer was delayed


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


class OwnRank:
    """The state of this process, written by the user's thread and read by the watcher's."""

    def __init__(self, rank: int, peers: HostPeers) -> None:
        self.rank = rank
        self.peers = peers
        self.call: Call | None = None
        self.begun: dict[str, int] = {}
        self.error: dict[str, Any] | None = None
        self.last_error = ""
        self.failed_call = ""
        self.told_to_end = False
        self.diagnosis: Diagnosis | None = None
        self._activity = Activity(os.getpid())
        self._sampled: Call | None = None

    def sample_activity(self) -> None:
        """Note whether this process does anything in its call; for the watcher's thread."""
        call = self.call
        if call is not self._sampled:
            self._activity.restart()
            self._sampled = call
        elif call is not None and call.limit is not None:
            self._activity.sample(progress.current())

    def _is_idle(self, call: Call) -> bool:
        if call is not self._sampled or call.limit is None:
            return False
        return self._activity.idle_s > call.limit.idle_limit_s

    def status(self, *, asked: bool = False) -> dict[str, Any]:
        """The state of this rank; if asked, also its stack and what its peers on the host do."""
        call, diagnosis = self.call, self.diagnosis
        status = {
            "call": "" if call is None else str(call.number),
            "begun": dict(self.begun),
            "doing": progress.current() if call is not None else "",
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
            status["doing_of"] = {str(r): text for r, text in self.peers.doing().items()}
            status["stopped"] = self.peers.stopped()
            status["runnable"] = self.peers.runnable()
        return status

    def conclude(self, diagnosis: Diagnosis) -> None:
        self.diagnosis = diagnosis

    def diagnosis_within(self, limit_s: float) -> Diagnosis | None:
        """Wait for the diagnosis, for ``limit_s`` in which this process runs.

        The time of a delay of the whole process does not count, as it has delayed the watcher's
        thread too. There is no lock: this may run in a signal handler that has interrupted a wait
        of the same thread.
        """
        waited_s, last_s = 0.0, time.monotonic()
        while self.diagnosis is None and waited_s < limit_s:
            time.sleep(_POLL_S)
            now_s = time.monotonic()
            waited_s += min(now_s - last_s, _MAX_POLL_S)
            last_s = now_s
        return self.diagnosis

    def enforce(self) -> None:
        """Kill the rank at fault if it cannot exit, and end this process if it stays in its call.

        A thread that waits in a collective is woken by the end of its peers; while all of them are
        alive, only the end of the process stops it. The rank that hangs goes first.
        """
        assert self.diagnosis is not None
        if self.diagnosis.state in (State.STOPPED, State.SILENT):
            self.peers.kill(self.diagnosis.rank)
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
