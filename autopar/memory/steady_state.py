"""A device's step with fewer rounds of its steady state, which takes the same memory.

In: a route. Out: the route without most of the rounds that only repeat. In its steady state a
pipeline device repeats a run of actions, each time with later micro-batches: what is live at the
end of a round is what was live at its beginning, for other micro-batches. So the peak of a step,
and where it is, do not depend on how often the round repeats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from autopar.lowering.arrivals import scattered
from autopar.lowering.route import Route
from autopar.lowering.types import RankProgram
from autopar.schedules.action import Action
from autopar.schedules.schedule import PipelineShape

NUM_KEPT = 4
"""Rounds that stay: a gradient's first, second, later and last contributions differ."""


def shortened(route: Route, program: RankProgram) -> Route:
    """The route with at most `NUM_KEPT` rounds of its steady state, or the route itself.

    Gradients that are scattered in every micro-batch are counted by them, so all rounds stay.
    """
    shape, actions = program.pipeline.shape, route.actions
    num = shape.num_microbatches
    if scattered(program):
        return route
    for step in range(1, num // (NUM_KEPT + 1) + 1):
        length, rest = divmod(len([a for a in actions if a.microbatch is not None]) * step, num)
        if rest or not length or not _keeps_replicas(shape, step):
            continue
        start, stop = _repeated(actions, length, step)
        removed = (stop - start) // length + 1 - NUM_KEPT
        if removed > 0:
            return _without(route, start + length, length * removed, step * removed, num) or route
    return route


def _keeps_replicas(shape: PipelineShape, step: int) -> bool:
    """Whether micro-batches ``step`` apart are processed by the same replica."""
    replicas = shape.replica_of
    return replicas[step:] == replicas[: len(replicas) - step] if replicas else True


def _repeated(actions: Sequence[Action], length: int, step: int) -> tuple[int, int]:
    """The longest run of positions whose action comes again ``length`` later, for a micro-batch
    that is ``step`` later."""
    best, start = (0, 0), 0
    for position in range(len(actions) - length + 1):
        is_end = position == len(actions) - length
        if is_end or _later(actions[position], step) != actions[position + length]:
            if position - start > best[1] - best[0]:
                best = start, position
            start = position + 1
    return best


def _later(action: Action, step: int) -> Action:
    if action.microbatch is None:
        return action
    return action._replace(microbatch=action.microbatch + step)


def _without(route: Route, start: int, length: int, step: int, num: int) -> Route | None:
    """The route without some actions, those after them being ``step`` micro-batches earlier.

    None unless this is the work of ``num - step`` micro-batches on each stage of the device.
    """
    later = route.actions[start + length :]
    actions = (*route.actions[:start], *(_later(action, -step) for action in later))
    left = num - step
    if Counter(actions) != Counter(
        a for a in route.actions if a.microbatch is None or a.microbatch < left
    ):
        return None
    counters = route.contributions, route.readings, route.reads
    if any(count * left % num for counter in counters for count in counter.values()):
        return None
    contributions, readings, reads = (
        Counter({value: count * left // num for value, count in counter.items()})
        for counter in counters
    )
    steps = dict.fromkeys(route.actions[:start], 0) | dict.fromkeys(later, -step)
    return replace(
        route, actions=actions, contributions=contributions, readings=readings, reads=reads,
        incoming={
            peer: tuple(_later(a, steps[a]) for a in receives if a in steps)
            for peer, receives in route.incoming.items()
        },
        arrived={
            _later(receive, steps[receive]): tuple(_later(s, steps[receive]) for s in sends)
            for receive, sends in route.arrived.items()
            if receive in steps
        },
    )  # fmt: skip
