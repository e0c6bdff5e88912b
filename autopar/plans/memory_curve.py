"""Memory over time: what a device holds at each place of a step, by category.

In: the counted memory of a program, and the prices of its blocks. Out: the curve that a plan keeps.
Without a pipeline its time is that of the step's timeline: a place lasts until the next one starts,
waiting included. In a pipeline it is the computation of the device, as priced: waiting and
communication take none. Places without a time of their own count as moments of the place before
them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autopar.base.units import nine_digits
from autopar.ir.recomputation import Recomputation
from autopar.memory.program import ProgramMemory
from autopar.memory.tally import Moment
from autopar.plans.parts import ModulePlan
from autopar.plans.predicted import MemoryCurve
from autopar.plans.timeline import block_seconds
from autopar.pricing.step_costs import Part
from autopar.pricing.step_timeline import Span, Track

MOST_POINTS = 1000
"""A longer curve is thinned: neighbours become one, with the bytes of the fullest."""
UPDATE = "update"


class _Span(NamedTuple):
    """The fullest moment of a span of time."""

    moment: Moment
    time_s: float


class _Started(NamedTuple):
    """A moment, and when its place starts in the step; None without a time of its own."""

    moment: Moment
    start_s: float | None


def step_curve(
    memory: ProgramMemory, spans: Sequence[Span], *, num_microbatches: int, num_passes: int
) -> MemoryCurve | None:
    """The curve of a step without a pipeline; None without the prices of its blocks.

    ``spans`` are those of one of the ``num_passes`` equal passes of the step. Micro-batches that
    the memory leaves out become one span, with the bytes of the fullest moment of an equal one.
    """
    started = _started(memory, spans, num_microbatches)
    if all(each.start_s is None for each in started):
        return None
    found = _joined(_lasting(started, max(span.end_s for span in spans)))
    return _curve(found * num_passes, memory.num_left_out)


def pipeline_curve(
    memory: ProgramMemory,
    modules: Sequence[ModulePlan],
    recomputation: Recomputation,
    *,
    num_microbatches: int,
    update_s: float,
) -> MemoryCurve | None:
    """The curve of a pipeline; None without the prices of its blocks.

    ``modules`` and ``recomputation`` are those of the plan, ``update_s`` its predicted seconds.
    """
    seconds = block_seconds(modules, recomputation, num_microbatches)
    return _curve(_joined(_computing(memory.moments, seconds, update_s)), memory.num_left_out)


def _curve(spans: Sequence[_Span], num_left_out: int) -> MemoryCurve | None:
    """The curve with at most `MOST_POINTS` points."""
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
        num_left_out=num_left_out,
    )


def _started(memory: ProgramMemory, spans: Sequence[Span], num_microbatches: int) -> list[_Started]:
    """The moments of a step without a pipeline, with the starts of the blocks' graphs and updates.

    The micro-batches that are left out are before the last but one, and equal to it.
    """
    moments, left_out = memory.moments, memory.num_left_out
    starts_s, numbers = _starts(spans), _microbatches(moments)
    equal = num_microbatches - left_out - 2
    first = numbers.index(equal) if left_out else len(numbers)
    found, begun = list[_Started](), set[int]()
    for index, (moment, number) in enumerate(zip(moments, numbers)):
        graph, _, block = moment.place.partition(" ")
        microbatch = number + left_out * (index >= first)
        start_s = starts_s.get((microbatch, graph, block)) if number >= 0 else None
        if start_s is not None and microbatch not in begun:
            begun.add(microbatch)
            start_s = _begin_s(starts_s, microbatch)
        found.append(_Started(moment, start_s))
    _start_gathers(found)
    _start_updates(found, spans)
    if left_out:
        last = len(numbers) - numbers[::-1].index(equal)
        fullest = max(moments[first:last], key=lambda moment: moment.size_bytes)
        found.insert(first, _Started(fullest, _begin_s(starts_s, equal)))
    return found


def _begin_s(starts_s: Mapping[tuple[int, str, str], float], microbatch: int) -> float:
    """The start of the first graph of a micro-batch, which may be one that takes no memory."""
    return min(start_s for (number, *_), start_s in starts_s.items() if number == microbatch)


def _start_gathers(found: list[_Started]) -> None:
    """Let a block's turn start with the gathers, for itself and the next block, before its graph.

    They have no time of their own, and the same action as the graph.
    """
    for index in range(len(found) - 1, 0, -1):
        (moment, start_s), (before, before_s) = found[index], found[index - 1]
        is_gather = before.place[:2] in ("F ", "I ") and before.action == moment.action
        if start_s is not None and before_s is None and is_gather:
            found[index], found[index - 1] = _Started(moment, None), _Started(before, start_s)


def _starts(spans: Sequence[Span]) -> dict[tuple[int, str, str], float]:
    """The start of each micro-batch's graph of each block."""
    found: dict[tuple[int, str, str], float] = {}
    for span in spans:
        if span.track is not Track.COLLECTIVE:
            found.setdefault((span.microbatch, span.graph, span.block), span.start_s)
    return found


def _microbatches(moments: Sequence[Moment]) -> list[int]:
    """The micro-batch of each last moment of a block's graph; -1 for other moments.

    A graph runs once for each micro-batch, in their order.
    """
    last = {(moment.action, moment.place): index for index, moment in enumerate(moments)}
    counts, found = Counter[str](), list[int]()
    for index, (action, place, _) in enumerate(moments):
        is_last = place[:2] in ("F ", "I ", "W ") and last[action, place] == index
        found.append(counts[place] if is_last else -1)
        counts[place] += is_last
    return found


def _start_updates(found: list[_Started], spans: Sequence[Span]) -> None:
    """Spread the updates after the last graph over the time of all updates, as they are priced."""
    timed = [index for index, each in enumerate(found) if each.start_s is not None]
    after = range(timed[-1] + 1 if timed else 0, len(found))
    updates = [index for index in after if found[index].moment.place == UPDATE]
    priced = [span for span in spans if span.part is Part.UPDATE]
    if not priced:
        return
    start_s, time_s = priced[0].start_s, priced[-1].end_s - priced[0].start_s
    for number, index in enumerate(updates):
        moment = found[index].moment
        found[index] = _Started(moment, start_s + time_s * number / len(updates))


def _lasting(started: Sequence[_Started], end_s: float) -> list[_Span]:
    """The moments with the seconds until the next one starts; the first one starts at 0."""
    found, until_s = list[_Span](), end_s
    first = next(index for index, each in enumerate(started) if each.start_s is not None)
    for index in range(len(started) - 1, -1, -1):
        moment, start_s = started[index]
        if start_s is None:
            found.append(_Span(moment, 0.0))
            continue
        start_s = 0.0 if index == first else min(start_s, until_s)
        found.append(_Span(moment, until_s - start_s))
        until_s = start_s
    return found[::-1]


def _computing(
    moments: Sequence[Moment], seconds: Mapping[str, Mapping[str, float]], update_s: float
) -> list[_Span]:
    """The moments of a pipeline with their seconds of computation."""
    last = {(moment.action, moment.place): index for index, moment in enumerate(moments)}
    num_updates = sum(moment.place == UPDATE for moment in moments)
    found: list[_Span] = []
    for index, moment in enumerate(moments):
        graph, _, block = moment.place.partition(" ")
        time_s = seconds.get(block, {}).get(graph, 0.0)
        if moment.place == UPDATE:
            time_s = update_s / num_updates
        elif last[moment.action, moment.place] != index:
            time_s = 0.0
        found.append(_Span(moment, time_s))
    return found


def _joined(spans: Sequence[_Span]) -> list[_Span]:
    """The spans, of which those without time are part of the one before them."""
    found: list[_Span] = []
    for span in spans:
        found.append(span)
        if len(found) > 1 and (span.time_s == 0.0 or found[-2].time_s == 0.0):
            found[-2:] = [_merged(found[-2:])]
    return [span for span in found if span.time_s]


def _merged(spans: Sequence[_Span]) -> _Span:
    fullest = max((span.moment for span in spans), key=lambda moment: moment.size_bytes)
    return _Span(fullest, sum(span.time_s for span in spans))
