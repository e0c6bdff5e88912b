"""Settings of glibc's heap for training on the CPU: memory that a step frees is kept for the next.

By default glibc returns a large tensor's memory to the kernel as soon as it is freed, and the
kernel must allocate and clear every page again in the next step, which can take a quarter of it.
Kept memory serves the next step, as the caching allocator's does on a GPU; the peak is the same,
but the process does not shrink between steps.

Memory kept for ever would fragment: a step's tensors fit ever less well into the holes of the last
one's, and the heap grows. When it has grown by a tenth (`FreedMemory`), free memory is returned
once. Without glibc nothing is done.

Tensors are aligned, for which glibc before 2.38 takes up to 96 bytes more than they need and frees
the remainder. If a small object takes that remainder, or a thread's cache keeps it, a freed tensor
leaves a hole with no room for a tensor of the same size. So workers have no such caches, and small
objects find spare chunks of their own sizes.
"""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import time
from collections.abc import Mapping
from typing import Any

# From malloc.h: parameters of mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_STATM = "/proc/self/statm"
_TUNABLES = "GLIBC_TUNABLES"
_SMALL_SIZES = range(24, 144, 16)
_NUM_SPARE = 4000
"""Sizes that fit into such a remainder, in glibc's steps; free chunks of each, 5 MiB in all."""
_SETTINGS = {"glibc.malloc.hugetlb": "1", "glibc.malloc.tcache_count": "0"}


@functools.cache
def _glibc() -> Any:
    try:
        found = ctypes.CDLL(None)
        return found if hasattr(found, "gnu_get_libc_version") else None
    except OSError:
        return None


@functools.cache
def keep_freed_memory() -> None:
    """Keep all memory that this process frees from now on; only the first call does something.

    Threads started later share one heap: otherwise buffers freed by a process group's threads would
    be kept for each of them alone.
    """
    if (glibc := _glibc()) is not None:
        glibc.mallopt(_M_ARENA_MAX, 1)
        glibc.mallopt(_M_TRIM_THRESHOLD, -1)
        glibc.mallopt(_M_MMAP_MAX, 0)
        _spare_small_chunks(glibc)


def _spare_small_chunks(glibc: Any) -> None:
    """Make free chunks of each small size, separated by allocated ones.

    Small objects take these, and not the remainder after a tensor.
    """
    glibc.malloc.restype, glibc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    glibc.free.restype, glibc.free.argtypes = None, [ctypes.c_void_p]
    for size in _SMALL_SIZES:
        chunks = [glibc.malloc(size) for _ in range(2 * _NUM_SPARE)]
        for chunk in chunks[::2]:
            glibc.free(chunk)


def give_back_freed_memory() -> None:
    """Return the memory that this process has freed to the kernel, once."""
    if (glibc := _glibc()) is not None:
        glibc.malloc_trim(ctypes.c_size_t(0))


class FreedMemory:
    """Returns free memory to the kernel when the process has grown although its steps are alike."""

    _GROWTH = 1.1
    """Growth since the second step, or since the first after memory was returned."""
    _PAUSE_S = 5.0
    """The least time between two returns: allocating the pages again costs a part of a step."""
    _CHECK_S = 0.05
    """The least time between two looks, which cost a part of a step of a small model."""

    def __init__(self) -> None:
        self._num_settling = 2
        self._usual_bytes = 0
        self._next_s = 0.0

    def after_step(self) -> None:
        now_s = time.monotonic()
        if self._num_settling:
            self._num_settling -= 1
            self._usual_bytes = resident_bytes()
        elif now_s > self._next_s:
            self._next_s = now_s + self._CHECK_S
            if resident_bytes() > self._GROWTH * self._usual_bytes:
                give_back_freed_memory()
                self._num_settling, self._next_s = 1, now_s + self._PAUSE_S


def resident_bytes() -> int:
    """Resident memory of this process; 0 if the system does not tell."""
    try:
        file = os.open(_STATM, os.O_RDONLY)  # quicker than pathlib's
    except OSError:
        return 0
    try:
        return int(os.read(file, 128).split()[1]) * resource.getpagesize()
    finally:
        os.close(file)


def with_heap_settings(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a new process whose heap uses huge pages and has no thread caches.

    Only a process that starts can be told so; the user's own settings are kept.
    """
    if _glibc() is None:
        return dict(env)
    known = env.get(_TUNABLES, "")
    added = [f"{name}={value}" for name, value in _SETTINGS.items() if name not in known]
    found = ":".join([*filter(None, [known]), *added])
    return {**env, _TUNABLES: found}
