"""glibc's heap in a process that trains on the CPU: what a step frees is kept for the next one.

By default glibc gives a large tensor's memory back to the kernel as soon as it is freed, and the
kernel must find and clear every page again in the next step: measured, up to a quarter of a
step. Kept, it serves the next step, as the caching allocator's memory does on a GPU; the peak is
the same, but the process does not shrink between steps.

Kept for ever it would creep: a step's tensors fit into the holes of the last one's ever less well,
and after fifty steps of a GPT-2 on two processes the heap had twice its size. Where it has grown by
a tenth (`FreedMemory`), what is free goes back once. Does nothing where glibc is not.
"""

from __future__ import annotations

import ctypes
import functools
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# From malloc.h: parameters of mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_STATM = Path("/proc/self/statm")
_TUNABLES = "GLIBC_TUNABLES"
_HUGE_PAGES = "glibc.malloc.hugetlb=1"


@functools.cache
def _glibc() -> Any:
    try:
        found = ctypes.CDLL(None)
        return found if hasattr(found, "gnu_get_libc_version") else None
    except OSError:
        return None


def keep_freed_memory() -> None:
    """From now on nothing that this process frees goes back to the kernel by itself.

    Threads that are started later share one heap: buffers that the threads of a process group free
    would else be kept for each of them alone.
    """
    if (glibc := _glibc()) is not None:
        glibc.mallopt(_M_ARENA_MAX, 1)
        glibc.mallopt(_M_TRIM_THRESHOLD, -1)
        glibc.mallopt(_M_MMAP_MAX, 0)


def give_back_freed_memory() -> None:
    """Give the kernel what this process has freed, once."""
    if (glibc := _glibc()) is not None:
        glibc.malloc_trim(ctypes.c_size_t(0))


class FreedMemory:
    """Gives back what is free when a process has grown though its steps are alike."""

    _GROWTH = 1.1
    """Over what the process took after the second step, or after the first since it gave back."""
    _PAUSE_S = 5.0
    """The least time from one to the next: to find 480 MiB of pages anew then took 0.14 s more than
    to write to pages that were there, 0.02 s with huge pages."""

    def __init__(self) -> None:
        self._num_settling = 2
        self._usual_bytes = 0
        self._last_s = 0.0

    def after_step(self) -> None:
        now_s, now_bytes = time.monotonic(), resident_bytes()
        if self._num_settling:
            self._num_settling -= 1
            self._usual_bytes = now_bytes
        elif now_bytes > self._GROWTH * self._usual_bytes and now_s > self._last_s + self._PAUSE_S:
            give_back_freed_memory()
            self._num_settling, self._last_s = 1, now_s


def resident_bytes() -> int:
    """Memory of this process that is there; 0 where nothing tells."""
    try:
        return int(_STATM.read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def with_huge_pages(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process to be started, whose heap asks for huge pages.

    Only a new process can be told so; a choice of the user's own is left as it is.
    """
    known = env.get(_TUNABLES, "")
    if "glibc.malloc.hugetlb" in known or _glibc() is None:
        return dict(env)
    return {**env, _TUNABLES: f"{known}:{_HUGE_PAGES}" if known else _HUGE_PAGES}
