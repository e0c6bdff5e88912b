"""The current speed of the processor.

Other tenants of the host, sibling hardware threads and heat can slow a processor down for seconds
or minutes, and no counter shows it. Measurements taken while a small reference computation was slow
are repeated when it is back at its best time.
"""

import time
from collections.abc import Mapping
from typing import TypeVar

import torch

SLOW = 1.2
"""The processor counts as slow if the reference computation takes this factor of its best time."""
_SIZE, _NUM_TRIES = 512, 3
_Key = TypeVar("_Key")


class Pace:
    """Times a product of two matrices on all threads of the process.

    The result is the fastest of a few runs, since a thread that was asleep may wake up on a busy
    core.
    """

    def __init__(self) -> None:
        self._operands = torch.randn(_SIZE, _SIZE), torch.randn(_SIZE, _SIZE)
        self._out = torch.empty(_SIZE, _SIZE)
        self()

    def __call__(self) -> float:
        """Seconds of the reference computation now."""
        return min(self._one() for _ in range(_NUM_TRIES))

    def _one(self) -> float:
        start_s = time.perf_counter()
        torch.mm(*self._operands, out=self._out)
        return time.perf_counter() - start_s


def slow_ones(paces_s: Mapping[_Key, float]) -> list[_Key]:
    """The keys of measurements during which the processor was slow, in order."""
    usual_s = SLOW * min(paces_s.values(), default=0.0)
    return [key for key, pace_s in paces_s.items() if pace_s > usual_s]
