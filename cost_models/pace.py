"""How fast a processor works at this moment.

A tenant that shares the host, its other hardware threads or its heat slows a processor down by a
third for seconds or minutes, and no counter of this machine tells. What was measured then is
measured again when the same small piece of arithmetic takes as long as it does at its best.
"""

import time
from collections.abc import Mapping
from typing import TypeVar

import torch

SLOW = 1.2
"""How much longer than at its best the piece takes when a processor is said to be slow: in a quiet
minute nine of ten took at most 1.2 times as long as the quickest of a hundred."""
_SIZE, _NUM_TRIES = 512, 3
_Key = TypeVar("_Key")


class Pace:
    """Times a product of two matrices on as many threads as the process has: about 3 ms on one.

    The quickest of a few, since a thread that was asleep may wake up where another one works.
    """

    def __init__(self) -> None:
        self._operands = torch.randn(_SIZE, _SIZE), torch.randn(_SIZE, _SIZE)
        self._out = torch.empty(_SIZE, _SIZE)
        self()

    def __call__(self) -> float:
        """Seconds."""
        return min(self._one() for _ in range(_NUM_TRIES))

    def _one(self) -> float:
        start_s = time.perf_counter()
        torch.mm(*self._operands, out=self._out)
        return time.perf_counter() - start_s


def slow_ones(paces_s: Mapping[_Key, float]) -> list[_Key]:
    """Those of what was measured during which a processor was slow, in their order."""
    usual_s = SLOW * min(paces_s.values(), default=0.0)
    return [key for key, pace_s in paces_s.items() if pace_s > usual_s]
