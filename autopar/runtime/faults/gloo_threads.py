"""A wait for gloo's threads at the exit of a process, which would otherwise sometimes abort.

torch 2.11 to 2.13: a thread of the process group drops a collective's tensors after the collective
has been reported as done, and takes the interpreter's lock for it. If the interpreter has begun to
finalize by then, CPython ends the thread in the middle of a destructor, and the process aborts with
"terminate called without an active exception". Destroying the process group joins the threads, but
only if nothing refers to it any more.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
from pathlib import Path

from autopar.runtime.faults.liveness import is_runnable_thread

_THREADS = Path("/proc/self/task")
_NAME = "pt_gloo_runloop"
_LIMIT_S = 5.0
_POLL_S = 0.001
_NUM_IDLE = 5
"""Looks in a row that find no thread running. One that waits for the lock is woken when this one
sleeps, so that one look would do if there were a single thread."""


@functools.cache
def settle_at_exit() -> None:
    """Wait at the exit of this process until gloo's threads have nothing left to drop.

    A thread that waits for another process, as after a fault, counts as having nothing. Without
    ``/proc`` there is no wait.
    """
    atexit.register(_settle)


def _settle() -> None:
    deadline_s, num_idle = time.monotonic() + _LIMIT_S, 0
    found = threads()
    while found and num_idle < _NUM_IDLE and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)  # without the interpreter's lock
        num_idle = 0 if any(map(is_runnable_thread, found)) else num_idle + 1


def threads() -> list[int]:
    """The ids of gloo's threads in this process; none without ``/proc``."""
    found = []
    for comm in _THREADS.glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread has just ended
            if comm.read_text().strip() == _NAME:
                found.append(int(comm.parent.name))
    return found
