"""What the control groups of this process leave it of the host, as a container's limits do.

Comes in: the files that the kernel shows, of version 1 or 2. Goes out: cores and bytes, the least
of every group that the process is in. The system's counts of pages and cores know nothing of them,
and a process that takes more is killed or slowed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How many cores' time and how many bytes; infinite where nothing is limited."""

    num_cores: float
    memory_bytes: float


def limits(root: Path = Path("/")) -> Limits:
    """The limits of this process; ``root`` is the folder of ``proc`` and ``sys``."""
    cores, sizes = [math.inf], [math.inf]
    for folder in _groups(root):
        sizes += _numbers(folder / "memory.max") + _numbers(folder / "memory.limit_in_bytes")
        quota = _numbers(folder / "cpu.cfs_quota_us") + _numbers(folder / "cpu.cfs_period_us")
        for shares in (_numbers(folder / "cpu.max"), quota):
            if len(shares) == 2 and min(shares) > 0:
                cores.append(shares[0] / shares[1])
    return Limits(num_cores=min(cores), memory_bytes=min(sizes))


def _groups(root: Path) -> Iterator[Path]:
    """The folder of each group that the process is in, and of all groups above it.

    A line is ``number:controllers:path``, without controllers in version 2. In a container the path
    may be the host's and its folder not there; the topmost is then the container's own.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controller
            group = top / path.strip("/")
            yield from (group, *(g for g in group.parents if g.is_relative_to(top)))


def _numbers(path: Path) -> list[float]:
    """The numbers of a file, infinite for ``max``; none where there is no such file."""
    try:
        return [math.inf if word == "max" else float(word) for word in _text(path).split()]
    except ValueError:
        return []  # of a kernel that writes something else


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
