"""How much longer a step gets as one of its blocks' times grows: slopes of the time of a step.

In: the costs of a step. Out: an `Exposure`. The time of a step is a convex function of the times of
its blocks, and proportional to all of them together. So a search that counts each time by its slope
finds a lower bound on every step. One thing is not convex, that the backward pass waits for what it
gathers; it is left out, which makes steps shorter and keeps the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.pricing.exposure import BlockExposure, Exposure
from autopar.pricing.step_costs import StepCosts, Turn


@dataclass(slots=True)
class _Slopes:
    """The slopes of a turn's times."""

    work: float = 1.0
    gather: float = 1.0
    reduce: float = 1.0


def slopes_of(
    costs: StepCosts, num_microbatches: int, slowdown: float, *, released: bool, scattered: bool
) -> Exposure:
    """The slopes of a step of several micro-batches.

    ``released``: parameters are gathered for every pass; ``scattered``: gradients are reduced in
    every micro-batch.
    """
    num = num_microbatches
    first = _forward(costs.forward(is_first=True), slowdown)
    last = _backward(costs.backward(is_last=True), slowdown)
    every = _forward(costs.forward(is_first=False), slowdown) if num > 1 else first
    other = _backward(costs.backward(is_last=False), slowdown) if num > 1 else last

    def mean(one: float, others: float) -> float:
        return (one + (num - 1) * others) / num

    blocks = []
    for f, e, b, o in zip(first, every, last[::-1], other[::-1]):
        reductions = mean(b.reduce, o.reduce)
        blocks.append(
            BlockExposure(
                forward=mean(f.work, e.work),
                backward=mean(b.work, o.work),
                gathers=mean(f.gather, e.gather) if released else f.gather,
                gathers_back=mean(b.gather, o.gather),
                reductions=min(b.reduce, reductions) if scattered else b.reduce,
            )
        )
    return Exposure(of_blocks=tuple(blocks), is_least=True)


def _forward(turns: Sequence[Turn], slowdown: float) -> list[_Slopes]:
    """A turn takes as long as its work or the next one's gather, whichever is longer."""
    found = [_Slopes() for _ in turns]
    for number, following in enumerate(turns[1:]):
        if slowdown * turns[number].work_s <= following.gather_s:
            found[number].work = 0.0
        else:
            found[number + 1].gather = 1 - 1 / slowdown
    return found


def _backward(turns: Sequence[Turn], slowdown: float) -> list[_Slopes]:
    """Reductions and gathers queue up, and the pass waits for all of them at its end."""
    queued_s, is_behind = 0.0, list[bool]()
    for number, turn in enumerate(turns):
        queued_s += turns[number + 1].gather_s if number + 1 < len(turns) else 0.0
        worked_s = slowdown * turn.work_s
        is_behind.append(worked_s <= queued_s)
        queued_s = max(0.0, queued_s - worked_s) + turn.reduce_s
    found, queue = [_Slopes() for _ in turns], 1.0
    for number in range(len(turns) - 1, -1, -1):
        found[number].reduce = queue
        if is_behind[number]:
            found[number].work = slowdown * (1 - queue)
        else:
            queue = 1 - 1 / slowdown
        if number + 1 < len(turns):
            found[number + 1].gather = queue
    return found
