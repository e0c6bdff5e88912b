"""Signs of life of a process, as the kernel tells them of one that does not speak for itself.

In: a process id on this host. Out: for how long it has been stopped, or has done nothing: used no
processor time, with all that it started, in one and the same action. Where there is no ``/proc``
nothing is ever found to be stopped or idle.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

SILENT_S = 15.0
"""A rank that is waited for and gave no sign of life for so long has stopped."""
LOOK_S = 1.0  # the time from one look to the next
_MAX_GAP_S = 2 * LOOK_S  # of a longer one no more counts: who looks was held up too
_AWAKE_S = 0.2  # the processor time of a process that moves; one that waits may use less
_ALONE_S = 5.0  # idle for so long, a process may still wait for one that it started


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A line of ``/proc/PID/stat``: ``processor_s`` counts children that have ended."""

    state: str
    parent: int
    processor_s: float


def sign_of(pid: int) -> Sign | None:
    """None if there is no such process, or no ``/proc``."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, parent, *numbers = text.rpartition(")")[2].split()
    ticks = sum(map(int, numbers[9:13]))
    return Sign(state=state, parent=int(parent), processor_s=ticks / os.sysconf("SC_CLK_TCK"))


def is_stopped(pid: int) -> bool:
    """By SIGSTOP or the like; one that a debugger holds is not."""
    sign = sign_of(pid)
    return sign is not None and sign.state == "T"


def processor_s_of_all(pid: int) -> float:
    """The processor time of a process and of all that it started, by itself or through others."""
    signs = {int(entry): sign_of(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()}
    children: dict[int, list[int]] = {}
    for other, sign in signs.items():
        if sign is not None:
            children.setdefault(sign.parent, []).append(other)
    total_s, todo = 0.0, [pid]
    while todo:
        member = todo.pop()
        sign = signs.get(member)
        total_s += 0.0 if sign is None else sign.processor_s
        todo += children.get(member, [])
    return total_s


class Pulse:
    """For how long a process has been stopped or idle, from one `look` at it to the next."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.restart()

    def restart(self) -> None:
        """As if it had just moved."""
        self.stopped_s = self.idle_s = 0.0
        self._looked_s = time.monotonic()
        self._doing = ""
        self._own_s = 0.0
        self._all_s: float | None = None

    def look(self, doing: str) -> None:
        """``doing``: the action that it is in."""
        now_s = time.monotonic()
        passed_s = min(now_s - self._looked_s, _MAX_GAP_S)
        self._looked_s = now_s
        sign = sign_of(self.pid)
        if sign is None:
            self.restart()
            return
        self.stopped_s = self.stopped_s + passed_s if sign.state == "T" else 0.0
        self.idle_s += passed_s
        if self._has_moved(sign, doing):
            self.idle_s, self._all_s = 0.0, None
            self._doing, self._own_s = doing, sign.processor_s

    def _has_moved(self, sign: Sign, doing: str) -> bool:
        """Also while it runs, waits for a disk, or is held by a debugger."""
        if sign.state not in ("S", "T") or doing != self._doing:
            return True
        if sign.processor_s - self._own_s > _AWAKE_S:
            return True
        if self.idle_s < _ALONE_S:
            return False
        all_s = processor_s_of_all(self.pid)
        if self._all_s is None:
            self._all_s = all_s
        return abs(all_s - self._all_s) > _AWAKE_S
