"""The fraction of each block's communication that a strategy's step exposes.

In: a priced strategy. Out: an `Exposure`, by which a search counts communication as exposed where
this step exposes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from autopar.pricing.candidate import Candidate
from autopar.pricing.exposure import BlockExposure, Exposure
from autopar.pricing.step_costs import BLOCK_TIMES, BlockCosts, StepCosts, pass_s
from autopar.pricing.step_time import step_costs

DIGITS, LEAST = 2, 1e-3
"""Fractions are rounded, so that equal layers have equal prices, and never 0, so that a search
prefers less communication."""
PROBE = 0.01
"""The fraction of a block's computation that communicates on trial, where no block does."""


def exposure_of(candidate: Candidate) -> Exposure:
    """The exposed fractions of each block's gathers and gradient reductions.

    That is what the step would save without them, in proportion; for a block that has none, what it
    would lose by as much as other blocks have. The first, the middle and the last of equal blocks
    are tried, and all others are taken to be like the middle one.
    """
    shares = _Shares(candidate)
    equal: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for number, block in enumerate(shares.costs.blocks):
        equal[tuple(f"{getattr(block, name):.6g}" for name in BLOCK_TIMES)].append(number)
    found: dict[int, BlockExposure] = {}
    for group in equal.values():
        middle = group[len(group) // 2]
        for number in dict.fromkeys((group[0], middle, group[-1])):
            found[number] = shares.of(number)
        found |= dict.fromkeys(group[1:-1], found[middle])
    return Exposure(of_blocks=tuple(found[number] for number in range(len(found))))


class _Shares:
    """The exposed fractions of a block, found by leaving its communication out."""

    def __init__(self, candidate: Candidate) -> None:
        self.costs, self.num = step_costs(candidate), candidate.num_microbatches
        self.slowdown = candidate.priced.pricing.communication.cluster.overlap_slowdown
        self.passes_s = self._passes_s(self.costs)
        self.mean_gathers_s = _mean([self._gathers_s(block) for block in self.costs.blocks])
        self.mean_reductions_s = _mean([self._reductions_s(block) for block in self.costs.blocks])

    def of(self, number: int) -> BlockExposure:
        block = self.costs.blocks[number]
        probe_s = PROBE * (block.forward_s + block.backward_s)
        gathers = self._fraction(
            number,
            {"first_gather_s": 0.0, "gather_s": 0.0, "gather_back_s": 0.0},
            self._gathers_s(block),
            {"first_gather_s": self.mean_gathers_s or probe_s},
        )
        reductions = self._fraction(
            number,
            {"scatter_s": 0.0, "reduce_s": 0.0},
            self._reductions_s(block),
            {"reduce_s": self.mean_reductions_s or probe_s},
        )
        return BlockExposure(gathers=gathers, gathers_back=gathers, reductions=reductions)

    def _fraction(
        self, number: int, without: dict[str, float], now_s: float, tried: dict[str, float]
    ) -> float:
        """The fraction exposed of the ``now_s`` that a block communicates, or of what is tried."""
        more_s = -now_s or sum(tried.values())
        if not more_s:
            return 1.0
        blocks = list(self.costs.blocks)
        blocks[number] = msgspec.structs.replace(blocks[number], **(without if now_s else tried))
        other = msgspec.structs.replace(self.costs, blocks=tuple(blocks))
        fraction = (self._passes_s(other) - self.passes_s) / more_s
        return min(1.0, max(LEAST, round(fraction, DIGITS)))

    def _passes_s(self, costs: StepCosts) -> float:
        return sum(count * pass_s(turns, self.slowdown) for turns, count in costs.passes(self.num))

    def _gathers_s(self, block: BlockCosts) -> float:
        every_s = (self.num - 1) * block.gather_s + self.num * block.gather_back_s
        return block.first_gather_s + every_s

    def _reductions_s(self, block: BlockCosts) -> float:
        return block.reduce_s + self.num * block.scatter_s


def _mean(times_s: Sequence[float]) -> float:
    """The mean of those that are not 0; 0 if all are."""
    positive = [time_s for time_s in times_s if time_s]
    return sum(positive) / len(positive) if positive else 0.0
