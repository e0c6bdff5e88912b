"""How much of this host's processors other programs use while something is measured.

A measurement beside another program's work says little; one that saw such work is made again. Only
Linux tells, and only where this process may use every processor of the host; elsewhere nobody is
seen.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_STAT = Path("/proc/stat")


class Others:
    """``share`` of the host's processor time that went to others; 0 where that is unknown."""

    share: float = 0.0


@contextmanager
def watched(own_cpu_s: Callable[[], float]) -> Iterator[Others]:
    """Watches while the body runs. ``own_cpu_s`` gives the processor seconds, so far, of the
    processes that are measured."""
    found = Others()
    before_s, own_s, start_s = _busy_s(), own_cpu_s(), time.monotonic()
    yield found
    after_s, elapsed_s = _busy_s(), time.monotonic() - start_s
    if before_s is None or after_s is None or elapsed_s <= 0:
        return
    others_s = (after_s - before_s) - (own_cpu_s() - own_s)
    found.share = max(0.0, others_s / (elapsed_s * (os.cpu_count() or 1)))


def _busy_s() -> float | None:
    """Processor seconds of all processors since the start that were not idle."""
    if not _STAT.exists() or len(os.sched_getaffinity(0)) != os.cpu_count():
        return None
    user, nice, system, _, _, irq, softirq, steal = map(
        int, _STAT.read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
