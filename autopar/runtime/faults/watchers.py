"""The threads that watch over a job, one in each process; that of rank 0 is the hub.

In: connections between rank 0 and every other rank. Out: a diagnosis in every process when one of
them dies, hangs or raises. Each rank sends a heartbeat with its status once a second. A connection
that breaks means that the process has died, also on another host; one that is silent means that it
is stopped, unless its host shows that it runs or waits for a processor. Silence is measured in time
that this thread listened: while another thread keeps it from running, by Python's interpreter lock,
nothing that was sent to it counts as missing. On any sign of trouble the hub asks all ranks for
their state, and `judge` decides. If the hub itself is gone, each rank decides for itself.
"""

from __future__ import annotations

import collections
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.runtime.faults import liveness, progress
from autopar.runtime.faults.json_lines import JsonLines
from autopar.runtime.faults.judge import CallNumber, Condition, State, diagnose
from autopar.runtime.faults.own_rank import OwnRank, as_message, from_message

HEARTBEAT_S = 1.0
_MAX_LISTENING_S = 2 * HEARTBEAT_S  # between two receptions; after longer the listener was delayed
SETTLE_S = 0.5  # how long after one rank's fault its cause, another's, may show up
ANSWER_S = 2.0  # how long the hub waits for answers
REFUSED_S = 10.0  # how long others stay in a call before one that raised in it is at fault
TAIL_S = 15.0  # how long others may take to finish a step after a rank has left

Message = dict[str, Any]


@dataclass(slots=True)
class Seen:
    """The ranks that their host's other processes see stopped, and those that they see runnable."""

    stopped: set[int] = field(default_factory=set)
    runnable: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Known:
    """The last messages of one rank, and for how long this thread has listened since the last."""

    silent_s: float = 0.0
    status: Message = field(default_factory=dict)
    answer: Message | None = None
    gone: State | None = None
    gone_s: float = 0.0

    @property
    def is_silent(self) -> bool:
        return self.gone is None and self.silent_s > liveness.SILENT_S

    def go(self, how: State) -> None:
        """Note that the rank is gone."""
        if self.gone is None:
            self.gone, self.gone_s = how, time.monotonic()


class Watcher(threading.Thread):
    """Sends this rank's status and receives others' until there is a diagnosis, or a stop."""

    def __init__(
        self, own_rank: OwnRank, lines: Mapping[int, JsonLines], names: Sequence[str]
    ) -> None:
        super().__init__(name="autopar-watch", daemon=True)
        self.own_rank = own_rank
        self.lines = dict(lines)
        self.names = names
        self.known = {rank: _Known() for rank in lines}
        self._posted: collections.deque[Message] = collections.deque()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        for rank, line in self.lines.items():
            self._selector.register(line, selectors.EVENT_READ, rank)
        self._next_heartbeat_s = 0.0
        self._received_s = time.monotonic()
        self.listened_s = 0.0
        self._stopping = False

    # --- called by the user's thread ---------------------------------------------------------

    def post(self, message: Message) -> None:
        """Tell the others at once."""
        self._posted.append(message)
        self._wake.send(b".")

    def stop(self) -> None:
        """Say goodbye and end."""
        self._stopping = True
        self.post({"kind": "bye", **self.own_rank.status()})
        self.join(2 * ANSWER_S)

    def forget_connections(self) -> None:
        """Close the connections in a forked process, which must not hold them open."""
        for line in self.lines.values():
            line.close()

    # --- the thread --------------------------------------------------------------------------

    def run(self) -> None:
        while self.own_rank.diagnosis is None:
            self._receive()
            while self._posted:
                self.send_own(self._posted.popleft())
            if self._stopping:
                break
            if time.monotonic() >= self._next_heartbeat_s:
                self._next_heartbeat_s = time.monotonic() + HEARTBEAT_S
                self.own_rank.sample_activity()
                self.send_own({"kind": "status", **self.own_rank.status()})
            self.look()
        if self.own_rank.diagnosis is not None:
            self.own_rank.enforce()

    def _receive(self) -> None:
        limit_s = min(max(self._next_heartbeat_s - time.monotonic(), 0.0), self.patience_s())
        ready = self._selector.select(limit_s)
        self._count_listening()
        for key, _ in ready:
            if key.data is None:
                self._woken.recv(4096)
                continue
            line = self.lines[key.data]
            for message in line.receive():
                self.known[key.data].silent_s = 0.0
                self.take(key.data, message)
            if line.ended:
                self._selector.unregister(line)
                self.known[key.data].go(State.ENDED)

    def _count_listening(self) -> None:
        """Add the time since the last reception, but for a delay of this thread, to the clocks."""
        now_s = time.monotonic()
        passed_s = min(now_s - self._received_s, _MAX_LISTENING_S)
        self._received_s = now_s
        self.listened_s += passed_s
        for known in self.known.values():
            known.silent_s += passed_s

    def patience_s(self) -> float:
        """How long the next `look` can wait."""
        return HEARTBEAT_S

    def send_own(self, message: Message) -> None:
        """Send this rank's own message to whoever needs it."""
        raise NotImplementedError

    def take(self, rank: int, message: Message) -> None:
        """Take in a message from another rank."""
        raise NotImplementedError

    def look(self) -> None:
        """Look for trouble, and decide on a diagnosis."""
        raise NotImplementedError

    def condition(
        self, rank: int, known: _Known, doing: str | None, *, host: Seen, any_gone: bool
    ) -> Condition:
        """A rank's condition for the judge; ``doing`` (None: unknown) and what is ``Seen`` of all
        ranks come from its host."""
        status = known.answer or known.status
        error: Message = status.get("error") or {}
        call: str = status.get("call", "")
        in_call_s = status.get("in_call_s", 0.0)
        begun: dict[str, int] | None = dict(status.get("begun", {}))
        assert begun is not None
        if doing is None:
            doing = status.get("doing", "")
            if known.gone is State.ENDED:
                begun = None  # it may have gone on since its last message
        elif doing.startswith(progress.START):
            call = doing.removeprefix(progress.START)
        elif not doing or doing.startswith(progress.AFTER):
            last = CallNumber.parse(doing.removeprefix(progress.AFTER))
            if last is not None:
                begun[last.name] = max(begun.get(last.name, 0), last.number)
            call = doing = ""
        if error:
            call, doing = error["call"], error["doing"]
        return Condition(
            rank=rank,
            state=_state(rank, known, status, error, host, is_inside=bool(call or doing)),
            process=self.names[rank],
            call=CallNumber.parse(call),
            doing=doing or "",
            late=bool(status.get("late")) or (any_gone and in_call_s > TAIL_S),
            idle=bool(status.get("idle")),
            waited=in_call_s > REFUSED_S,
            begun=begun,
            failed_call=CallNumber.parse(status.get("failed_call", "")),
            fatal=bool(status.get("fatal")),
            told_to_end=bool(status.get("told_to_end")),
            error=error.get("text") or status.get("last_error", ""),
            stack=status.get("stack", ""),
            time_s=error.get("heard_s", known.gone_s),
        )


def _state(
    rank: int, known: _Known, status: Message, error: Message, host: Seen, *, is_inside: bool
) -> State:
    if error and known.gone is not State.LEFT:
        return State.CUT_OFF if error["by_peers"] else State.FAILED
    if known.gone is not None:
        return known.gone
    if known.is_silent and rank in host.stopped:
        return State.STOPPED
    if known.is_silent and rank not in host.runnable:
        return State.SILENT
    if not is_inside:
        return State.OUTSIDE
    return State.WAITING if status.get("waits") else State.BUSY


class Member(Watcher):
    """The watcher of every rank but 0: reports to the hub, and watches the hub."""

    def send_own(self, message: Message) -> None:
        self.lines[0].send(message)

    def take(self, rank: int, message: Message) -> None:
        hub = self.known[0]
        if hub.gone is not None:
            return
        match message["kind"]:
            case "ask":
                self.send_own({"kind": "answer", **self.own_rank.status(asked=True)})
            case "diagnosis":
                self.own_rank.conclude(from_message(message))
            case "bye" | "dying":
                hub.status = {**message, "call": "", "doing": ""}
                hub.go(State.LEFT)
            case _:
                hub.status = message

    def look(self) -> None:
        hub = self.known[0]
        if (hub.gone is None and not hub.is_silent) or self.own_rank.diagnosis is not None:
            return
        own = _Known(status=self.own_rank.status())
        any_gone = hub.gone is not None and time.monotonic() - hub.gone_s > TAIL_S
        doing = self.own_rank.peers.doing().get(0)
        peers = self.own_rank.peers
        host = Seen(stopped=set(peers.stopped()), runnable=set(peers.runnable()))
        conditions = [
            self.condition(0, hub, doing, host=host, any_gone=any_gone),
            self.condition(self.own_rank.rank, own, None, host=host, any_gone=any_gone),
        ]
        diagnosis = diagnose(conditions, num_ranks=len(self.names))
        if diagnosis is not None:
            self.own_rank.conclude(diagnosis)


class Hub(Watcher):
    """The watcher of rank 0: receives all reports, asks when something looks wrong, and sends all
    ranks the diagnosis."""

    def __init__(
        self, own_rank: OwnRank, lines: Mapping[int, JsonLines], names: Sequence[str]
    ) -> None:
        super().__init__(own_rank, lines, names)
        self.own = _Known()
        self._asked_s: float | None = None  # in time listened
        self._quiet_until_s = 0.0

    def patience_s(self) -> float:
        return HEARTBEAT_S if self._asked_s is None else 0.05

    def send_own(self, message: Message) -> None:
        if message["kind"] == "error":
            self._note_error(self.own, message)
            return
        if message["kind"] == "dying":
            self.own.status = message
            self.own.go(State.LEFT)
        elif message["kind"] == "status" and self.own.gone is None:
            self.own.status = message
        self._tell_all(message)

    def _tell_all(self, message: Message) -> None:
        for rank, line in self.lines.items():
            if self.known[rank].gone is None:
                line.send(message)

    def take(self, rank: int, message: Message) -> None:
        known = self.known[rank]
        if known.gone is not None:
            return
        match message["kind"]:
            case "answer":
                known.answer = message
            case "error":
                self._note_error(known, message)
            case "bye" | "dying":
                known.status = {**known.status, **message, "call": "", "doing": ""}
                known.answer = None
                known.go(State.LEFT)
            case _:
                known.status = message

    def _note_error(self, known: _Known, message: Message) -> None:
        known.status = {**known.status, **message["status"]}
        known.status["error"] = {**message["error"], "heard_s": time.monotonic()}
        if known.answer is not None:
            known.answer = {**known.answer, "error": known.status["error"]}

    def look(self) -> None:
        now_s = time.monotonic()
        if self._asked_s is not None:
            if self._all_answered(self._asked_s):
                self._decide()
        elif now_s >= self._quiet_until_s and self._is_trouble(now_s):
            self._asked_s = self.listened_s
            for known in self.known.values():
                known.answer = None
            self._tell_all({"kind": "ask"})

    def _is_trouble(self, now_s: float) -> bool:
        everyone = [self.own, *self.known.values()]
        is_tail = any(k.gone and now_s - k.gone_s > TAIL_S for k in everyone)
        here = [k for k in everyone if k.gone is None]
        return all(k.status.get("idle") for k in here) or any(
            k.gone is State.ENDED
            or k.is_silent
            or k.status.get("late")
            or k.status.get("error")
            or k.status.get("fatal")
            or (is_tail and k.status.get("in_call_s", 0.0) > TAIL_S)
            or (k.gone and any(h.status.get("call") or h.status.get("told_to_end") for h in here))
            or (
                k.status.get("failed_call")
                and any(h.status.get("in_call_s", 0.0) > REFUSED_S for h in here)
            )
            for k in everyone
        )

    def _all_answered(self, asked_s: float) -> bool:
        waited_s = self.listened_s - asked_s
        missing = [
            k for k in self.known.values() if k.gone is None and not k.is_silent and not k.answer
        ]
        return waited_s > ANSWER_S or (waited_s > SETTLE_S and not missing)

    def _decide(self) -> None:
        self._asked_s = None
        self._quiet_until_s = time.monotonic() + HEARTBEAT_S
        own_error = self.own.status.get("error")
        if self.own.gone is None:
            self.own.status = {**self.own_rank.status(asked=True), "error": own_error}
        everyone = {0: self.own, **self.known}
        doing: dict[int, str] = {}
        host = Seen()
        for known in everyone.values():
            told = known.answer or known.status
            doing.update((int(rank), text) for rank, text in told.get("doing_of", {}).items())
            host.stopped.update(told.get("stopped", []))
            host.runnable.update(told.get("runnable", []))
        now_s = time.monotonic()
        any_gone = any(k.gone and now_s - k.gone_s > TAIL_S for k in everyone.values())
        conditions = [
            self.condition(rank, known, doing.get(rank), host=host, any_gone=any_gone)
            for rank, known in sorted(everyone.items())
        ]
        diagnosis = diagnose(conditions, num_ranks=len(self.names))
        if diagnosis is not None:
            self._tell_all(as_message(diagnosis))
            self.own_rank.conclude(diagnosis)
