"""The diagnosis of a job in trouble: which rank is at fault.

In: the condition of each rank, as far as it is known, from the watch that ranks keep over each
other or from the parent of local workers. Out: the rank that caused the trouble, and the message of
the error that the others raise; or nothing, if no rank is blocked. It exists because one failure
soon looks like many: the peers of a dead rank report broken connections, and the peers of a rank
that hangs hang with it.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType, TracebackType

import torch.distributed

from autopar.base.errors import WorkerError
from autopar.base.source_files import PACKAGE, lies_in
from autopar.runtime.faults.progress import START

WAITING = (Path(torch.distributed.__file__).parent, PACKAGE / "comm" / "transports")
"""Folders whose code waits for other processes."""
_MAX_LISTED = 8


class State(StrEnum):
    """The state of a rank. Only one that is ``OUTSIDE`` runs the user's own code."""

    OUTSIDE = "is outside of autopar"
    WAITING = "waits for other ranks"
    BUSY = "computes"
    FAILED = "raised"
    CUT_OFF = "raised in a collective"
    STOPPED = "is stopped"
    SILENT = "gives no sign of life"
    LEFT = "left"
    ENDED = "died"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallNumber:
    """One call of a method on all ranks: ``train_step() number 3``."""

    name: str
    number: int

    def __str__(self) -> str:
        return f"{self.name} number {self.number}"

    @classmethod
    def parse(cls, text: str) -> CallNumber | None:
        """The call that ``str`` wrote; None if the text is none."""
        name, is_one, number = text.rpartition(" number ")
        return cls(name=name, number=int(number)) if is_one and number.isdigit() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """The condition of one rank: ``call`` is the method that it is in, ``doing`` the action there.

    ``late``: it has been in that call for longer than it should. ``idle``: it has done nothing
    there for so long that it hangs, unless it waits. ``waited``: it has been in it for so long that
    a rank which failed in the same call will not call it again. ``begun`` is the number of the last
    call of each method, None if that is not certain. ``failed_call`` raised ``error``. ``fatal``:
    its process ends because of the error. ``told_to_end``: it received SIGTERM. ``time_s`` orders
    errors and deaths.
    """

    rank: int
    state: State
    process: str = ""
    call: CallNumber | None = None
    doing: str = ""
    late: bool = False
    idle: bool = False
    waited: bool = False
    begun: Mapping[str, int] | None = None
    error: str = ""
    failed_call: CallNumber | None = None
    fatal: bool = False
    told_to_end: bool = False
    stack: str = ""
    time_s: float = 0.0

    @property
    def place(self) -> str:
        """The action and call that the rank is in, for messages."""
        if not self.doing and not self.call:
            return "outside of a step"
        if not self.doing or self.doing.startswith(START):
            return f"in {self.call}"
        return f"in {self.doing} of {self.call}" if self.call else f"in {self.doing}"

    @property
    def is_gone(self) -> bool:
        return self.state in (State.ENDED, State.LEFT)

    def misses(self, call: CallNumber | None) -> bool:
        """Whether it is known that this rank has not begun another rank's call."""
        return (
            call is not None
            and self.begun is not None
            and self.begun.get(call.name, 0) < call.number
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The rank at fault and the message of the error that every other rank raises."""

    rank: int
    text: str
    state: State

    def error(self) -> WorkerError:
        return WorkerError(self.text, rank=self.rank)


def waits_for_peers(filename: str) -> bool:
    """Whether code of this file waits for other processes."""
    return lies_in(filename, WAITING)


def raised_by_peers(trace: TracebackType | None) -> bool:
    """Whether an exception was raised by a wait for other processes."""
    frames = traceback.extract_tb(trace)
    return bool(frames) and waits_for_peers(frames[-1].filename)


def in_wait(frame: FrameType | None) -> bool:
    """Whether a thread, by its innermost frame, waits for other processes."""
    return frame is not None and waits_for_peers(frame.f_code.co_filename)


def diagnose(conditions: Sequence[Condition], *, num_ranks: int) -> Diagnosis | None:
    """Find the rank at fault, as `culprit_of`, with the message of the error to raise."""
    culprit = culprit_of(conditions)
    if culprit is None:
        return None
    return Diagnosis(
        rank=culprit.rank, state=culprit.state, text=_text(culprit, conditions, num_ranks)
    )


def culprit_of(conditions: Sequence[Condition]) -> Condition | None:
    """The condition of the rank at fault, None while no rank is blocked.

    ``conditions`` need not have all ranks. These causes are looked for in this order:

    - A rank died, is stopped, is silent or raised in the middle of a call, without SIGTERM. A
      stopped rank is at fault outside of a call too, if others are in one.
    - A process is gone and needed: it ended in an error, it has not begun a call that others are
      in, or the others received SIGTERM because of it.
    - A rank is cut off or late, or all are idle and not all wait: then a rank that is gone; one
      that has not begun the call, once another is cut off; one that computes; the first that was
      cut off; the lowest of those that wait for each other.
    - A rank raised in a call that the others wait in.
    """
    unasked = [c for c in conditions if not c.told_to_end]
    return (
        _in_the_middle(unasked)
        or _gone_for_good(conditions)
        or _in_the_middle(conditions)
        or _behind_a_delay(conditions)
        or _broken_off(conditions)
    )


def _in_the_middle(conditions: Sequence[Condition]) -> Condition | None:
    is_awaited = any(c.state in (State.WAITING, State.BUSY) for c in conditions)
    for state in (State.ENDED, State.STOPPED, State.SILENT):
        is_enough = is_awaited and state is State.STOPPED
        found = [c for c in conditions if c.state is state and (c.doing or c.call or is_enough)]
        if found:
            return min(found, key=lambda c: c.time_s)
    failed = [c for c in conditions if c.state is State.FAILED]
    return min(failed, key=lambda c: c.time_s, default=None)


def _gone_for_good(conditions: Sequence[Condition]) -> Condition | None:
    gone = sorted(
        (c for c in conditions if c.is_gone),
        key=lambda c: (c.told_to_end, not c.fatal, c.state is not State.ENDED, c.time_s),
    )
    present = [c for c in conditions if not c.is_gone]
    are_told_to_end = any(c.told_to_end for c in present)
    for c in gone:
        if c.fatal or are_told_to_end or any(c.misses(other.call) for other in present):
            return c
    return None


def _broken_off(conditions: Sequence[Condition]) -> Condition | None:
    """A rank that raised in a call and has not called it again while others are still in it."""
    waiting = {c.call for c in conditions if c.call is not None and c.waited}
    found = [c for c in conditions if c.call is None and c.failed_call in waiting]
    return min(found, key=lambda c: c.time_s, default=None)


def _behind_a_delay(conditions: Sequence[Condition]) -> Condition | None:
    cut_off = [c for c in conditions if c.state is State.CUT_OFF]
    busy = [c for c in conditions if c.state is State.BUSY]
    waiting = [c for c in conditions if c.state is State.WAITING]
    # If all of them wait for each other, a slow link may be carrying a message.
    all_are_idle = bool(busy) and all(c.idle for c in [*busy, *waiting])
    if not cut_off and not all_are_idle and not any(c.late for c in conditions):
        return None
    gone = [c for c in conditions if c.is_gone]
    outside = [c for c in conditions if c.state in (State.OUTSIDE, State.STOPPED, State.SILENT)]
    if gone:
        return gone[0]
    if outside:  # they may only be slow: loading data, writing a file
        return outside[0] if cut_off else None
    first = sorted(cut_off, key=lambda c: c.time_s)
    return next(iter([*busy, *first, *waiting]), None)


def _text(culprit: Condition, conditions: Sequence[Condition], num_ranks: int) -> str:
    process = f" ({culprit.process})" if culprit.process else ""
    lines = [f"rank {culprit.rank} of {num_ranks}{process} {_what(culprit)}"]
    others = [c for c in conditions if c.rank != culprit.rank]
    lines += [
        f"rank {other.rank} {other.state}"
        + f" {other.place}" * (other.state is not State.OUTSIDE)
        + f": {other.error}" * bool(other.error)
        for other in others[:_MAX_LISTED]
    ]
    if len(others) > _MAX_LISTED:
        lines.append(f"and {len(others) - _MAX_LISTED} more ranks")
    if culprit.stack:
        lines += [f"Python stack of rank {culprit.rank}:", culprit.stack.rstrip()]
    lines.append(
        "this job cannot go on: start it again, and compiled.load(path) the last checkpoint, "
        "under the same plan or another"
    )
    return "\n".join(lines)


def _what(culprit: Condition) -> str:
    place = culprit.place
    match culprit.state:
        case _ if culprit.is_gone and culprit.fatal:
            return f"ended {place}: its script raised {culprit.error}"
        case _ if culprit.is_gone and culprit.told_to_end:
            return f"died {place}: it was told to end (SIGTERM)"
        case State.ENDED:
            return (
                f"died {place}: its process was killed (by a user, or by the kernel when memory "
                "ran out) or crashed; its exit code is with who started it"
            )
        case State.STOPPED:
            return f"hangs {place}: it gives no sign of life, its process is stopped"
        case State.SILENT:
            return f"hangs {place}: it gives no sign of life (stopped?)"
        case State.LEFT:
            why = f" after {culprit.error}" if culprit.error else ""
            return f"left {place}{why}: its script ended while others need it"
        case State.OUTSIDE if culprit.failed_call is not None:
            return f"raised {culprit.error} in {culprit.failed_call}, which others are still in"
        case State.OUTSIDE:
            why = f"; its last call raised {culprit.error}" if culprit.error else ""
            return f"has not come to the step that others are in{why}"
        case State.FAILED | State.CUT_OFF:
            return f"raised {culprit.error} {place}"
        case _ if culprit.idle:
            return f"hangs {place}: no rank has used its processor for a while"
        case _:
            return f"hangs {place}: the step takes far longer than those before"
