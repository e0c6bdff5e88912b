"""The processor time of other programs on this host during a measurement.

A measurement that other programs disturbed is repeated. This is only known on Linux, if this
process may use all processors of the host; otherwise no disturbance is reported.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_STAT = Path("/proc/stat")


class Others:
    """``share``: the fraction of the host's processor time used by others; 0 if unknown."""

    share: float = 0.0


@contextmanager
def watched(own_cpu_s: Callable[[], float]) -> Iterator[Others]:
    """Determine the share of others while the body runs.

    ``own_cpu_s`` returns the processor seconds so far of the measured processes.
    """
    found = Others()
    before_s, own_s, start_s = _busy_s(), own_cpu_s(), time.monotonic()
    yield found
    after_s, elapsed_s = _busy_s(), time.monotonic() - start_s
    if before_s is None or after_s is None or elapsed_s <= 0:
        return
    others_s = (after_s - before_s) - (own_cpu_s() - own_s)
    found.share = max(0.0, others_s / (elapsed_s * (os.cpu_count() or 1)))


def _busy_s() -> float | None:
    """Busy seconds of all processors since boot."""
    if not _STAT.exists() or len(os.sched_getaffinity(0)) != os.cpu_count():
        return None
    user, nice, system, _, _, irq, softirq, steal = map(
        int, _STAT.read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
