"""Threads of a process group that run as soon as a message wakes them.

gloo's threads sleep until bytes arrive. Where every core computes, Linux lets a thread that wakes
up wait until the one that computes has had its slice, some milliseconds, and every message of a
collective waits so once: 1 KiB, summed over two processes after 4 ms of computing, took 2.3 ms on
average, and with real-time priority, which waits for nobody, 0.35. A process has the right to it
with the capability ``CAP_SYS_NICE`` or a limit ``RLIMIT_RTPRIO`` above 0; without, all stays as it
was. The threads work as long as it takes to sum or copy a message, so nothing starves.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_LOWEST = 1
_TASKS = Path("/proc/self/task")


@contextlib.contextmanager
def prompt_threads(device_type: str) -> Iterator[None]:
    """Threads that the process starts inside become prompt, where the system lets them.

    Only for groups on ``"cpu"``: NCCL's threads poll, and would take cores for themselves. What
    these threads start in turn, as OpenMP's to copy a large message, is not prompt.
    """
    before = _threads()
    yield
    if device_type == "cpu":
        _let_go_first(_threads() - before)


def make_gloo_prompt() -> None:
    """As `prompt_threads`, for the threads of groups that somebody else has made before."""
    _let_go_first({thread for thread in _threads() if "gloo" in _name(thread)})


def _threads() -> set[int]:
    return {int(name) for name in os.listdir(_TASKS)} if sys.platform == "linux" else set()


def _name(thread: int) -> str:
    try:
        return (_TASKS / str(thread) / "comm").read_text()
    except OSError:  # it has ended
        return ""


def _let_go_first(threads: set[int]) -> None:
    for thread in threads:
        try:
            os.sched_setscheduler(
                thread, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(_LOWEST)
            )
        except ProcessLookupError:  # it has ended
            continue
        except OSError:  # not allowed, or not possible in this container
            return
