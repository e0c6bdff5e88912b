"""Limits that control groups, such as a container's, impose on this process.

In: the kernel's files, of version 1 or 2. Out: cores and bytes, the minimum over all groups of the
process. The system's counts of pages and cores ignore these limits, and a process that exceeds them
is killed or throttled.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on cores and bytes; infinite where there is none."""

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
    """The folders of each group of the process and of all its parents.

    A line is ``number:controllers:path``, without controllers in version 2. In a container the path
    may be the host's and not exist; the top folder is then the container's own.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controller
            group = top / path.strip("/")
            yield from (group, *(g for g in group.parents if g.is_relative_to(top)))


def _numbers(path: Path) -> list[float]:
    """The numbers in a file, infinite for ``max``; none if the file does not exist."""
    try:
        return [math.inf if word == "max" else float(word) for word in _text(path).split()]
    except ValueError:
        return []  # an unknown format


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
