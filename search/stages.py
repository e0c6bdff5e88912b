"""Cutting of a chain of blocks into contiguous stages that minimizes the slowest stage.

In: seconds of each block, and of the traffic across each possible cut. Out: where the stages begin.
A stage takes the time of its blocks and of the traffic at both ends. Exact, by dynamic programming
in O(stages x blocks^2): the first pass finds the least time of the slowest stage, the second the
least total traffic among all cuts that achieve it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autopar.search.problem import Array, SearchError

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
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(block_s, dtype=float))])
    ends = np.array([0.0, *traffic_s, 0.0])
    stage_s = (sums[None, :] - sums[:, None]) + ends[:, None] + ends[None, :]
    stage_s[np.tril_indices(num_blocks + 1)] = np.inf  # a stage has at least one block

    def slower(rest: Array) -> Array:
        return np.maximum(stage_s, rest)

    limit = _best(num_stages, slower, num_blocks)[0] * (1 + _ROUNDING)
    crossed = np.where(stage_s <= limit, ends, np.inf)
    return _best(num_stages, lambda rest: crossed + rest, num_blocks)[1]


def _best(
    num_stages: int, cost: Callable[[Array], Array], num_blocks: int
) -> tuple[float, tuple[int, ...]]:
    """The least cost of stages over all blocks, and their starts; built from the last stage.

    ``cost`` takes the costs of what follows each possible stop and gives those of every start and
    stop.
    """
    costs = np.full(num_blocks + 1, np.inf)
    costs[num_blocks] = 0.0
    chosen: list[Array] = []
    for _ in range(num_stages):
        found = cost(costs)
        stops = found.argmin(axis=1)
        costs = found[np.arange(num_blocks + 1), stops]
        chosen.append(stops)
    starts, start = [], 0
    for stops in reversed(chosen):
        starts.append(start)
        start = int(stops[start])
    return float(costs[0]), tuple(starts)
