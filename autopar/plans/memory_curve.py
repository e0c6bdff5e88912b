"""Memory over time: what a device holds at each place of a step, by category.

In: the counted memory of a program and the predicted seconds of its blocks. Out: the curve that a
plan keeps. Its time is the computation of the device, as priced: waiting and communication take
none, and places without computation count as moments of the place before them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autopar.base.units import nine_digits
from autopar.ir.recomputation import Recomputation
from autopar.memory.program import ProgramMemory
from autopar.memory.tally import Moment
from autopar.plans.parts import MemoryCurve, ModulePlan
from autopar.plans.timeline import block_seconds

MOST_POINTS = 1000
"""A longer curve is thinned: neighbours become one, with the bytes of the fullest."""


class _Span(NamedTuple):
    """The fullest moment of a span of computation."""

    moment: Moment
    time_s: float


def memory_curve(
    memory: ProgramMemory,
    modules: Sequence[ModulePlan],
    recomputation: Recomputation,
    *,
    num_microbatches: int,
    update_s: float,
) -> MemoryCurve | None:
    """The curve of a step; None without the prices of its blocks.

    ``modules`` and ``recomputation`` are those of the plan, ``update_s`` its predicted seconds.
    """
    seconds = block_seconds(modules, recomputation, num_microbatches)
    spans = _spans(memory.moments, seconds, update_s)
    if not spans:
        return None
    length = math.ceil(len(spans) / MOST_POINTS)
    thinned = [_merged(spans[i : i + length]) for i in range(0, len(spans), length)]
    used = {c for span in thinned for c, size in span.moment.by_category.items() if size}
    categories, points, start_s = sorted(used), list[str](), 0.0
    for (_, place, sizes), time_s in thinned:
        numbers = " ".join(str(sizes.get(category, 0)) for category in categories)
        points.append(f"{nine_digits(start_s)} {numbers} {place}")
        start_s += time_s
    return MemoryCurve(
        categories=tuple(map(str, categories)),
        points=tuple(points),
        end_s=nine_digits(start_s),
        num_left_out=memory.num_left_out,
    )


def _spans(
    moments: Sequence[Moment], seconds: Mapping[str, Mapping[str, float]], update_s: float
) -> list[_Span]:
    """The moments with their seconds; those without are part of the span before them."""
    last = {(moment.action, moment.place): index for index, moment in enumerate(moments)}
    num_updates = sum(moment.place == "update" for moment in moments)
    found: list[_Span] = []
    for index, moment in enumerate(moments):
        graph, _, block = moment.place.partition(" ")
        time_s = seconds.get(block, {}).get(graph, 0.0)
        if moment.place == "update":
            time_s = update_s / num_updates
        elif last[moment.action, moment.place] != index:
            time_s = 0.0
        found.append(_Span(moment, time_s))
        if len(found) > 1 and (time_s == 0.0 or found[-2].time_s == 0.0):
            found[-2:] = [_merged(found[-2:])]
    return [span for span in found if span.time_s]


def _merged(spans: Sequence[_Span]) -> _Span:
    fullest = max((span.moment for span in spans), key=lambda moment: moment.size_bytes)
    return _Span(fullest, sum(span.time_s for span in spans))
