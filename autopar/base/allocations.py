"""Allocations on the CPU, as torch's profiler sees them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from autopar.base.torch_private import allocations

_LOG_LEVEL, _NOTHING = "KINETO_LOG_LEVEL", "6"


class Recording:
    """The allocations and releases of all threads from now on; one at a time in a process."""

    def __init__(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        self._profiler = torch.profiler.profile(activities=activities, profile_memory=True)
        with _silent_profiler():
            self._profiler.start()

    def end(self) -> list[int]:
        """Bytes of each allocation and, negative, of each release, in order."""
        self._profiler.stop()
        return allocations(self._profiler)


@contextlib.contextmanager
def _silent_profiler() -> Iterator[None]:
    """Within: a first profiler of this process logs no lines to standard error, unless the user has
    chosen what it logs. It reads that when it first starts."""
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = _NOTHING
    try:
        yield
    finally:
        del os.environ[_LOG_LEVEL]
