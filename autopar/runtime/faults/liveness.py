"""The state of a process on this host as the kernel shows it: stopped, runnable, gone or idle.

In: a process id. Out: for how long the process has been stopped, or has been idle: in one and the
same action, it and its children have used no processor time. Without ``/proc`` no process is ever
found to be stopped or idle.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

SILENT_S = 15.0
"""A rank that others wait for is taken to be stopped after so long without a sign of life."""
SAMPLE_S = 1.0  # between two samples
_MAX_GAP_S = 2 * SAMPLE_S  # a longer gap counts as this: the observer was delayed too
_ACTIVE_S = 0.2  # processor time of a process that makes progress; a waiting one may use less
_CHILDREN_S = 5.0  # when a process is idle for so long, its children are sampled too


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStat:
    """The fields of ``/proc/PID/stat``; ``processor_s`` includes children that have ended."""

    state: str
    parent: int
    processor_s: float


def stat_of(pid: int) -> ProcessStat | None:
    """The process's present fields; None if there is no such process, or no ``/proc``."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, parent, *numbers = text.rpartition(")")[2].split()
    ticks = sum(map(int, numbers[9:13]))
    return ProcessStat(
        state=state, parent=int(parent), processor_s=ticks / os.sysconf("SC_CLK_TCK")
    )


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by SIGSTOP or the like, and not held by a debugger."""
    stat = stat_of(pid)
    return stat is not None and stat.state == "T"


def is_runnable(pid: int) -> bool:
    """Whether a thread of a process runs, or waits for a processor or a disk.

    Its heartbeat may be late although nothing is wrong: on a busy machine, or while an extension
    holds Python's interpreter lock.
    """
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    return any(is_runnable_thread(int(thread)) for thread in threads)


def is_runnable_thread(thread: int) -> bool:
    """Whether a thread runs, or waits for a processor or a disk."""
    stat = stat_of(thread)
    return stat is not None and stat.state in "RD"


def is_gone(pid: int) -> bool:
    """Whether a process has ended, reaped by its parent or not; False without ``/proc``."""
    stat = stat_of(pid)
    return os.path.exists("/proc/self") if stat is None else stat.state in "ZX"


def processor_s_of_all(pid: int) -> float:
    """The processor time of a process and of all its descendants."""
    stats = {int(entry): stat_of(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()}
    children: dict[int, list[int]] = {}
    for other, stat in stats.items():
        if stat is not None:
            children.setdefault(stat.parent, []).append(other)
    total_s, todo = 0.0, [pid]
    while todo:
        member = todo.pop()
        stat = stats.get(member)
        total_s += 0.0 if stat is None else stat.processor_s
        todo += children.get(member, [])
    return total_s


class Activity:
    """For how long a process has been stopped or idle, from one `sample` to the next."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.restart()

    def restart(self) -> None:
        """Count from now on."""
        self.stopped_s = self.idle_s = 0.0
        self._sampled_s = time.monotonic()
        self._doing = ""
        self._own_s = 0.0
        self._all_s: float | None = None

    def sample(self, doing: str) -> None:
        """Look at the process, which is in the action ``doing``."""
        now_s = time.monotonic()
        passed_s = min(now_s - self._sampled_s, _MAX_GAP_S)
        self._sampled_s = now_s
        stat = stat_of(self.pid)
        if stat is None:
            self.restart()
            return
        self.stopped_s = self.stopped_s + passed_s if stat.state == "T" else 0.0
        self.idle_s += passed_s
        if self._made_progress(stat, doing):
            self.idle_s, self._all_s = 0.0, None
            self._doing, self._own_s = doing, stat.processor_s

    def _made_progress(self, stat: ProcessStat, doing: str) -> bool:
        """Also while it runs, waits for a disk, or is held by a debugger."""
        if stat.state not in ("S", "T") or doing != self._doing:
            return True
        if stat.processor_s - self._own_s > _ACTIVE_S:
            return True
        if self.idle_s < _CHILDREN_S:
            return False
        all_s = processor_s_of_all(self.pid)
        if self._all_s is None:
            self._all_s = all_s
        return abs(all_s - self._all_s) > _ACTIVE_S
