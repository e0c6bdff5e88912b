"""The compute streams of a device: where each of its actions runs, and what it waits for.

In: a program and a device's route, whose schedule runs weight gradients (W) on a second compute
stream. Out: an `Issue` for each action, in the order in which the host issues them, with the events
that it waits for and records; none if the schedule has one stream. Nothing here depends on tensors.

A stream runs what it is given in order, so an action waits only for the latest action of the other
stream on which it depends, and only if no earlier wait implies it. Gradients are reduced on the
side stream alone, behind the W that completes them, and the main stream joins it at the end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from autopar.lowering.arrivals import contributions_of_round
from autopar.lowering.route import Route, has_weight_graph
from autopar.lowering.types import RankProgram
from autopar.schedules.action import Action, Kind
from autopar.schedules.schedule import Resource


class Part(StrEnum):
    """The kind of an issue: an action, the reduction of gradients that an action of the main stream
    has completed, or the join, in which the main stream waits for the side stream."""

    RUN = "run"
    REDUCE = "reduce"
    JOIN = "join"


class Datum(NamedTuple):
    """Data that one action writes and another reads.

    ``what``: the ``arguments`` of W in a micro-batch (``place``: the block), the ``gradient`` that
    accumulates over all micro-batches (``place``: the parameter), or the ``reduced`` one.
    """

    what: str
    place: int
    microbatch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """One submission of work by the host to one stream.

    ``number``: its place in the order of issue. ``waits``: the issues of the other stream whose
    events it waits for; ``records``: whether one waits for its own. ``uses``: what it computes with
    and the other stream has made, whose memory must outlive this use. Updates use none: gradients
    live until the next step, in which the side stream begins behind the main stream.
    """

    number: int
    action: Action | None
    part: Part
    stream: Resource
    waits: tuple[int, ...] = ()
    records: bool = False
    uses: tuple[Datum, ...] = ()

    def __str__(self) -> str:
        name = "join" if self.action is None else str(self.action)
        return f"{name} {self.part}" if self.part is Part.REDUCE else name


class _Draft(NamedTuple):
    """An issue before its waits are known; ``after``: actions whose ends it waits for too."""

    action: Action | None
    part: Part
    stream: Resource
    reads: Collection[Datum] = ()
    writes: Collection[Datum] = ()
    after: Action | None = None


def streams_of(program: RankProgram, route: Route) -> tuple[Issue, ...]:
    """The issues of one training step on a device, in order; none without a second stream."""
    steps = program.pipeline.schedule.devices[route.device]
    side = frozenset(item.action for item in steps if item.resource is Resource.SIDE)
    if not side:
        return ()
    after = {item.action: item.after for item in steps if item.after is not None}
    return _with_waits([*_Drafts(program, route, side, after).all()])


class _Drafts:
    """The issues of a device, with what each reads and writes."""

    def __init__(
        self,
        program: RankProgram,
        route: Route,
        side: Collection[Action],
        after: dict[Action, Action],
    ) -> None:
        self.program, self.route = program, route
        self.side, self.after = side, after
        self.remaining = contributions_of_round(program, route)
        self.complete: set[int] = set()
        self.reduces = program.pipeline.shape.reduces

    def all(self) -> Iterator[_Draft]:
        reduced: list[Datum] = []
        for action in self.route.actions:
            for draft in self._of(action):
                reduced += [datum for datum in draft.writes if datum.what == "reduced"]
                yield draft
        yield _Draft(None, Part.JOIN, Resource.MAIN, reads=reduced)

    def _of(self, action: Action) -> Iterator[_Draft]:
        kind, after = action.kind, self.after.get(action)
        if kind in (Kind.W, Kind.B):
            yield from self._weights(action, after)
        elif kind is Kind.I:
            made = self._arguments(action)
            yield _Draft(action, Part.RUN, Resource.MAIN, writes=made, after=after)
        elif kind is Kind.G:
            values = self.complete.intersection(self.route.parameters[action.stage])
            yield self._reduction(action, Part.RUN, values)
        else:
            values = set()
            if kind is Kind.U and action not in self.route.late_updates:
                values = self.complete.intersection(self.route.parameters[action.stage])
            read = _data("reduced", values)
            yield _Draft(action, Part.RUN, Resource.MAIN, reads=read, after=after)

    def _weights(self, action: Action, after: Action | None) -> Iterator[_Draft]:
        """W, or I and W: its reductions follow on the side stream."""
        read = self._arguments(action) if action.kind is Kind.W else []
        values, complete = self._contribute(action)
        summed, reduced = _data("gradient", values), _data("reduced", complete)
        if action in self.side:
            made = [*summed, *(() if self.reduces else reduced)]
            yield _Draft(action, Part.RUN, Resource.SIDE, [*read, *summed], made, after)
            return
        yield _Draft(action, Part.RUN, Resource.MAIN, [*read, *summed], summed, after)
        if complete and not self.reduces:
            yield self._reduction(action, Part.REDUCE, complete)

    def _reduction(self, action: Action, part: Part, values: Iterable[int]) -> _Draft:
        values = sorted(values)
        read, made = _data("gradient", values), _data("reduced", values)
        return _Draft(action, part, Resource.SIDE, read, made)

    def _arguments(self, action: Action) -> list[Datum]:
        assert action.microbatch is not None
        blocks, kernels = self.program.blocks, self.program.kernels
        return [
            Datum("arguments", position, action.microbatch)
            for position in self.route.blocks[action.stage]
            if has_weight_graph(kernels[blocks[position].kernel])
        ]

    def _contribute(self, action: Action) -> tuple[list[int], list[int]]:
        """The parameters whose gradients an action adds to, and those that it completes."""
        values = []
        for position in self.route.blocks[action.stage]:
            block = self.program.blocks[position]
            kernel = self.program.kernels[block.kernel]
            if has_weight_graph(kernel):
                num_inputs = len(block.interface.inputs)
                values += [block.interface.parameters[o - num_inputs] for o in kernel.weight_grads]
        self.remaining.subtract(values)
        complete = [v for v in sorted(set(values)) if not self.remaining[v]]
        self.complete.update(complete)
        return sorted(set(values)), complete


def _kind(draft: _Draft) -> Kind | None:
    return None if draft.action is None else draft.action.kind


def _data(what: str, values: Iterable[int]) -> list[Datum]:
    return [Datum(what, value) for value in values]


def _with_waits(drafts: Sequence[_Draft]) -> tuple[Issue, ...]:
    made_by: dict[Datum, int] = {}
    makers: dict[Datum, set[Resource]] = {}
    place = {d.action: n for n, d in enumerate(drafts) if d.part is Part.RUN}
    waited = {Resource.MAIN: -1, Resource.SIDE: -1}
    found: list[Issue] = []
    for number, draft in enumerate(drafts):
        needs = [made_by[datum] for datum in draft.reads if datum in made_by]
        if draft.after is not None:
            needs.append(place[draft.after])
        last = max((n for n in needs if drafts[n].stream is not draft.stream), default=-1)
        waits = (last,) if last > waited[draft.stream] else ()
        waited[draft.stream] = max(last, waited[draft.stream])
        uses: list[Datum] = []
        if draft.part is not Part.JOIN and _kind(draft) is not Kind.U:
            uses = [d for d in draft.reads if makers.get(d, set()) - {draft.stream}]
        found.append(
            Issue(
                number=number, action=draft.action, part=draft.part, stream=draft.stream,
                waits=waits, uses=tuple(dict.fromkeys(uses)),
            )
        )  # fmt: skip
        for datum in draft.writes:
            made_by[datum] = number
            makers.setdefault(datum, set()).add(draft.stream)
    recorded = {number for issue in found for number in issue.waits}
    return tuple(replace(issue, records=issue.number in recorded) for issue in found)
