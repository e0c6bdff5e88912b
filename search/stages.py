"""Cutting of a chain of blocks into contiguous stages that minimizes the slowest stage.

In: seconds of each block, and of a message across each possible cut. Out: where the stages begin.
Messages pass while stages compute, so that a pipeline is as slow as its slowest stage or message.
Stages may run on unequal devices over unequal links. Exact, by dynamic programming in
O(stages x blocks^2): the first pass finds the least time of the slowest, the second, among all cuts
that achieve it, the least time of all messages, and then of the slowest stage.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.search.problem import Array, SearchError

_ROUNDING = 1e-12


def cut_chain(
    block_s: Sequence[float] | Sequence[Sequence[float]],
    message_s: Sequence[float] | Sequence[Sequence[float]],
    num_stages: int,
) -> tuple[int, ...]:
    """The first block of each stage; ``message_s[i]`` is the time of what block i sends on.

    Where devices are unequal, ``block_s`` has a row for each stage; where links are, ``message_s``
    has one for each border between two stages. Raises SearchError if there are fewer blocks than
    stages.
    """
    blocks, messages = np.asarray(block_s, dtype=float), np.asarray(message_s, dtype=float)
    num_blocks = blocks.shape[-1]
    if messages.shape[-1] != max(num_blocks - 1, 0):
        raise SearchError(
            f"{messages.shape[-1]} cuts for {num_blocks} blocks: give one less than blocks"
        )
    if not 1 <= num_stages <= num_blocks:
        raise SearchError(
            f"{num_blocks} blocks cannot be cut into {num_stages} stages of at least one block; "
            f"use 1 to {num_blocks} stages"
        )
    blocks = np.broadcast_to(blocks, (num_stages, num_blocks))
    ends = np.zeros((num_stages + 1, num_blocks + 1))
    ends[1:-1, 1:-1] = np.broadcast_to(messages, (num_stages - 1, num_blocks - 1))
    sums = np.concatenate([np.zeros((num_stages, 1)), np.cumsum(blocks, axis=1)], axis=1)
    chain = _Chain(sums, ends, np.tril(np.ones((num_blocks + 1, num_blocks + 1), dtype=bool)))
    return chain.starts(chain.least_s() * (1 + _ROUNDING))


class _Chain:
    """All stages of a chain, from each start (rows) to each stop (columns)."""

    def __init__(self, sums: Array, ends: Array, is_empty: Array) -> None:
        self.sums, self.ends, self.is_empty = sums, ends, is_empty
        self.num_stages, self.num_places = sums.shape

    def work_s(self, stage: int) -> Array:
        times: Array = self.sums[stage][None, :] - self.sums[stage][:, None]
        times[self.is_empty] = np.inf  # a stage has at least one block
        return times

    def stage_s(self, stage: int) -> Array:
        """Seconds of a stage or of a message at its ends, whichever takes longer."""
        messages_s = np.maximum.outer(self.ends[stage], self.ends[stage + 1])
        return np.maximum(self.work_s(stage), messages_s)

    def least_s(self) -> float:
        """The least time of the slowest stage or message."""
        slowest_s = np.full(self.num_places, np.inf)
        slowest_s[-1] = 0.0
        for stage in reversed(range(self.num_stages)):
            slowest_s = np.maximum(self.stage_s(stage), slowest_s).min(axis=1)
        return float(slowest_s[0])

    def starts(self, limit_s: float) -> tuple[int, ...]:
        """The starts of stages of which none takes longer than a limit; see the module's docstring
        for which."""
        sent_s, slowest_s = np.full(self.num_places, np.inf), np.zeros(self.num_places)
        sent_s[-1] = 0.0
        every, chosen = np.arange(self.num_places), list[Array]()
        for stage in reversed(range(self.num_stages)):
            sent = np.where(self.stage_s(stage) <= limit_s, self.ends[stage + 1] + sent_s, np.inf)
            least = sent.min(axis=1, keepdims=True) * (1 + _ROUNDING)
            slowest = np.where(sent <= least, np.maximum(self.work_s(stage), slowest_s), np.inf)
            stops = slowest.argmin(axis=1)
            sent_s, slowest_s = sent[every, stops], slowest[every, stops]
            chosen.append(stops)
        starts, start = [], 0
        for stops in reversed(chosen):
            starts.append(start)
            start = int(stops[start])
        return tuple(starts)
