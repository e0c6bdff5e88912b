"""Cutting of a chain of blocks into contiguous stages that minimizes the slowest stage.

In: seconds of each block, and of the traffic across each possible cut. Out: where the stages begin.
A stage takes the time of its blocks and of the traffic at both ends. Exact, by dynamic programming
in O(stages x blocks^2): the first pass finds the least time of the slowest stage, the second the
least total traffic among all cuts that achieve it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autopar.search.problem import SearchError

_ROUNDING = 1e-12


def cut_chain(
    block_s: Sequence[float], traffic_s: Sequence[float], num_stages: int
) -> tuple[int, ...]:
    """The first block of each stage; ``traffic_s[i]`` is the traffic between blocks i and i + 1.

    Raises SearchError if there are fewer blocks than stages.
    """
    num_blocks = len(block_s)
    if len(traffic_s) != max(num_blocks - 1, 0):
        raise SearchError(
            f"{len(traffic_s)} cuts for {num_blocks} blocks: give one less than blocks"
        )
    if not 1 <= num_stages <= num_blocks:
        raise SearchError(
            f"{num_blocks} blocks cannot be cut into {num_stages} stages of at least one block; "
            f"use 1 to {num_blocks} stages"
        )
    sums = [0.0]
    for time_s in block_s:
        sums.append(sums[-1] + time_s)
    ends = [0.0, *traffic_s, 0.0]

    def stage_s(start: int, stop: int) -> float:
        return sums[stop] - sums[start] + ends[start] + ends[stop]

    slowest = _best(num_blocks, num_stages, lambda a, b, rest: max(stage_s(a, b), rest))[0]
    limit = slowest * (1 + _ROUNDING)

    def traffic(start: int, stop: int, rest: float) -> float:
        return ends[stop] + rest if stage_s(start, stop) <= limit else math.inf

    return _best(num_blocks, num_stages, traffic)[1]


def _best(
    num_blocks: int, num_stages: int, cost: Callable[[int, int, float], float]
) -> tuple[float, tuple[int, ...]]:
    """The least cost of stages over all blocks, and their starts; built from the last stage."""
    costs = [math.inf] * num_blocks + [0.0]
    chosen: list[list[int]] = []
    for remaining in range(1, num_stages + 1):
        following, stops = [math.inf] * (num_blocks + 1), [num_blocks] * (num_blocks + 1)
        for start in range(num_stages - remaining, num_blocks - remaining + 1):
            for stop in range(start + 1, num_blocks - remaining + 2):
                found = cost(start, stop, costs[stop])
                if found < following[start]:
                    following[start], stops[start] = found, stop
        costs = following
        chosen.append(stops)
    starts, start = [], 0
    for stops in reversed(chosen):
        starts.append(start)
        start = stops[start]
    return costs[0], tuple(starts)
