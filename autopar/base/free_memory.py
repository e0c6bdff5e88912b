"""The memory that a device has left, for work that adapts its size to it."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import torch

from autopar.base.accelerators import is_accelerator, module_of

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated now, as reported by the GPU's driver or the OS and its cgroup."""
    if is_accelerator(device):
        return int(module_of(device).mem_get_info(device)[0])
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError):
        found = re.search(r"MemAvailable:\s*(\d+) kB", _MEMINFO.read_text())
        free = int(found[1]) * 1024 if found else free
    with contextlib.suppress(OSError, ValueError):  # no limit reads "max"
        limit = int((_GROUP / "memory.max").read_text())
        free = min(free, limit - int((_GROUP / "memory.current").read_text()))
    return free
