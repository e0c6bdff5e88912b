"""How much of the times of a block a search counts.

How much of the parameters' communication a step overlaps depends on the whole strategy, and a
search adds up prices that do not. So it is made with several of these
(`autopar.planning.exposed_search`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockExposure:
    """The fractions of a block's times that count as time of the step.

    ``forward`` and ``backward``: computation, and the communication that it waits for; ``gathers``
    and ``gathers_back``: gathering parameters for the forward and the backward pass;
    ``reductions``: moving gradients to where they are stored.
    """

    forward: float = 1.0
    backward: float = 1.0
    gathers: float = 1.0
    gathers_back: float = 1.0
    reductions: float = 1.0


WHOLE_BLOCK = BlockExposure()


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """The fractions of each block, in the order of the graph; empty if everything counts.

    ``is_least``: no strategy's step is below its sum of these, so that a bound on the sums bounds
    the steps.
    """

    of_blocks: tuple[BlockExposure, ...] = ()
    is_least: bool = False

    def of(self, block: int | None) -> BlockExposure:
        """The fractions of a block, by its number; all counts of what no block reads."""
        return WHOLE_BLOCK if block is None or not self.of_blocks else self.of_blocks[block]

    def blended(self, other: Exposure, share: float) -> Exposure:
        """The mean of both, the other with a ``share``; below all steps if both are."""
        blocks = (
            BlockExposure(
                **{
                    name: (1 - share) * getattr(one, name) + share * getattr(two, name)
                    for name in BlockExposure.__slots__
                }
            )
            for one, two in zip(self.of_blocks, other.of_blocks)
        )
        return Exposure(of_blocks=tuple(blocks), is_least=self.is_least and other.is_least)

    @property
    def weighs_computation(self) -> bool:
        return any(each.forward != 1.0 or each.backward != 1.0 for each in self.of_blocks)


ALL_EXPOSED = Exposure()
EXACT = Exposure(is_least=True)
"""On one device, where nothing is communicated."""


def least_exposed(num_blocks: int, least: float, *, in_pipeline: bool = False) -> Exposure:
    """The least that any strategy exposes, so that a search by it bounds all steps.

    The forward pass waits for the first block's parameters, and the backward pass, which ends with
    that block, for its gradients; not so in a pipeline, whose other micro-batches may overlap both.
    All else may be overlapped, which costs the fraction ``least``.
    """
    others = BlockExposure(gathers=least, gathers_back=least, reductions=least)
    first = others if in_pipeline else BlockExposure(gathers_back=least)
    return Exposure(of_blocks=(first, *[others] * (num_blocks - 1)), is_least=True)
