"""The machine and versions of a benchmark run, which head every results file."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def setting(*packages: str) -> dict[str, Any]:
    """The machine, its current load, and the versions of ``packages``."""
    return {
        "machine": {
            "processor": processor_name(),
            "num_cores": num_cores(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "python": platform.python_version(),
            "load": [round(x, 2) for x in os.getloadavg()],
        },
        "versions": {name: version(name) for name in packages},
    }


def num_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def processor_name() -> str:
    """The processor's name as the system reports it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
