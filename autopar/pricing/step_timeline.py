"""The timeline of a step without a pipeline, drawn from the turns that its time is the sum of.

In: the costs of a step's blocks. Out: spans on three tracks of a device: its computing stream, the
redistributions that computation waits for, and the communication that runs beside it. The price
says how long they take, not in which order within a block: all redistributions of a block are drawn
at once, before its forward pass and after its input gradients. Computation that is slower beside
communication is drawn as long as it takes. Updates, also early ones, are priced after the passes,
and so is what a step waits for copies to the host, which is priced as one time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from autopar.cost_models.communication import slowed_s
from autopar.pricing.step_costs import Part, StepCosts, Timed, Turn, timed

_GRAPHS = {Part.FORWARD: "F", Part.WEIGHT_GRADIENTS: "W", Part.UPDATE: "U"}


class Track(StrEnum):
    """The tracks of a timeline, each of which has one span at a time."""

    MAIN = "main"
    REDISTRIBUTION = "redistribution"
    COLLECTIVE = "collective"
    HOST = "host"


TRACKS = {
    Part.REDISTRIBUTION: Track.REDISTRIBUTION,
    Part.GATHER: Track.COLLECTIVE,
    Part.REDUCTION: Track.COLLECTIVE,
    Part.STALL: Track.HOST,
}
"""The tracks of the parts that are no computation."""


class Span(NamedTuple):
    """A part of the step in time.

    ``graph`` is the block's graph F, I or W that it is part of, or that parameters are gathered
    for; G for reductions, H for copies to the host, U for updates. ``block`` is empty for
    parameters that no block reads, ``microbatch`` -1 for updates and for what follows all
    micro-batches. ``alone_s`` is what it takes by itself.
    """

    part: Part
    graph: str
    block: str
    microbatch: int
    start_s: float
    end_s: float
    alone_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def track(self) -> Track:
        return TRACKS.get(self.part, Track.MAIN)


def step_spans(
    costs: StepCosts,
    *,
    num_microbatches: int,
    slowdown: float,
    num_passes: int = 1,
    stall_s: float = 0.0,
) -> tuple[Span, ...]:
    """The spans of a step, in the order in which they are issued; those without time left out.

    ``slowdown``: the factor by which computation is slower beside communication. ``stall_s``: what
    all passes together wait for copies to the host.
    """
    play = _Play(slowdown)
    for _ in range(num_passes):
        for number in range(num_microbatches):
            play.run(costs.forward(is_first=number == 0), "F", number)
            play.run(costs.backward(is_last=number == num_microbatches - 1), "I", number)
        play.end(costs, stall_s / num_passes)
    return tuple(play.spans)


class _Play:
    """``now_s``: the end of the computing stream; ``free_s``: that of the communication beside."""

    def __init__(self, slowdown: float) -> None:
        self.slowdown = slowdown
        self.now_s = self.free_s = 0.0
        self.spans: list[Span] = []

    def run(self, turns: Sequence[Turn], graph: str, microbatch: int) -> None:
        """Play a pass."""
        if turns:
            self._gather(turns[0], graph, microbatch)
            self.now_s += turns[0].gather_s
        for turn, after, times in itertools.zip_longest(
            turns, turns[1:], timed(turns, self.slowdown)
        ):
            if after is not None:
                self._gather(after, graph, microbatch)
            self._work(turn, times, graph, microbatch)
            self.now_s += times.taken_s
            self._reduce(turn.block, turn.reduce_s, microbatch)
            self.now_s += times.waited_s

    def end(self, costs: StepCosts, stall_s: float) -> None:
        """Play what follows the micro-batches: reductions that no block completes, the stall, and
        updates."""
        self._reduce("", costs.reduce_after_s, -1)
        self.now_s += costs.reduce_after_s
        start_s, self.now_s = self.now_s, self.now_s + stall_s
        self._add(Span(Part.STALL, "H", "", -1, start_s, self.now_s, stall_s))
        updates = [(block.name, block.update_s) for block in costs.blocks]
        for name, time_s in (*updates, ("", costs.update_after_s)):
            end_s = self.now_s + time_s
            self._add(Span(Part.UPDATE, "U", name, -1, self.now_s, end_s, time_s))
            self.now_s = end_s

    def _gather(self, turn: Turn, graph: str, microbatch: int) -> None:
        self._communicate(Part.GATHER, graph, turn.block, microbatch, turn.gather_s)

    def _reduce(self, block: str, time_s: float, microbatch: int) -> None:
        self._communicate(Part.REDUCTION, "G", block, microbatch, time_s)

    def _communicate(
        self, part: Part, graph: str, block: str, microbatch: int, time_s: float
    ) -> None:
        """Queue communication, which runs beside computation."""
        start_s = max(self.now_s, self.free_s)
        self.free_s = start_s + time_s
        self._add(Span(part, graph, block, microbatch, start_s, self.free_s, time_s))

    def _work(self, turn: Turn, times: Timed, graph: str, microbatch: int) -> None:
        """Add a turn's work, slower while communication runs."""
        done_s, start_s = 0.0, self.now_s
        for part, time_s in turn.work:
            done_s += time_s
            end_s = self.now_s + slowed_s(done_s, times.beside_s, self.slowdown)
            of = _GRAPHS.get(part, graph)
            self._add(Span(part, of, turn.block, microbatch, start_s, end_s, time_s))
            start_s = end_s

    def _add(self, span: Span) -> None:
        if span.alone_s > 0.0:
            self.spans.append(span)
