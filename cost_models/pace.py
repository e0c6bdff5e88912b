"""How fast a processor works at this moment.

A tenant that shares the host, its other hardware threads or its heat slows a processor down by a
third for seconds or minutes, and no counter of this machine tells. What was measured then is
measured again when the same small piece of arithmetic takes as long as it does at its best.
"""

import time
from collections.abc import Mapping
from typing import TypeVar

import torch

SLOW = 1.12
"""How much longer than at its best the piece takes when a processor is said to be slow: in a quiet
minute nine of ten products took at most 1.11 times as long as the quickest tenth."""
_SIZE = 384
_Key = TypeVar("_Key")


class Pace:
    """Times a product of two matrices on one thread: about 2 ms."""

    def __init__(self) -> None:
        self._operands = torch.randn(_SIZE, _SIZE), torch.randn(_SIZE, _SIZE)
        self._out = torch.empty(_SIZE, _SIZE)
        self()

    def __call__(self) -> float:
        """Seconds."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            start_s = time.perf_counter()
            torch.mm(*self._operands, out=self._out)
            return time.perf_counter() - start_s
        finally:
            torch.set_num_threads(threads)


def slow_ones(paces_s: Mapping[_Key, float]) -> list[_Key]:
    """Those of what was measured during which a processor was slow, in their order."""
    usual_s = SLOW * min(paces_s.values(), default=0.0)
    return [key for key, pace_s in paces_s.items() if pace_s > usual_s]
