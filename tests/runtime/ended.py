"""Whether processes of a test have ended."""

from __future__ import annotations

import time

import psutil

STOPPED_WITHIN_S = 10.0  # the promise is 30 s


def assert_gone(processes: list[psutil.Process], within_s: float = STOPPED_WITHIN_S) -> None:
    """Each process ends in time; one that is not reaped, in a container, has ended too."""
    deadline_s = time.monotonic() + within_s
    left = processes
    while left and time.monotonic() < deadline_s:
        time.sleep(0.05)
        left = [process for process in left if is_running(process)]
    assert not left, f"still running: {left}"


def is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
