"""glibc's heap in a process that trains on the CPU: what a step frees is kept for the next one.

By default glibc gives a large tensor's memory back to the kernel as soon as it is freed, and the
kernel must find and clear every page again in the next step: measured, up to a quarter of a
step. Kept, it serves the next step, as the caching allocator's memory does on a GPU; the peak is
the same, but the process does not shrink between steps. Does nothing where glibc is not.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from typing import Any

# From malloc.h: parameters of mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
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


def with_huge_pages(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process to be started, whose heap asks for huge pages.

    Only a new process can be told so; a choice of the user's own is left as it is.
    """
    known = env.get(_TUNABLES, "")
    if "glibc.malloc.hugetlb" in known or _glibc() is None:
        return dict(env)
    return {**env, _TUNABLES: f"{known}:{_HUGE_PAGES}" if known else _HUGE_PAGES}
