"""Exact choices, over numbers, of what a backward pass keeps and what it recomputes.

In a block, values are computed from one another. The derivative needs some of them; each of these
is kept, or recomputed from values that are themselves kept or recomputed. `cheapest` finds the
choice of least time within a number of bytes, as an integer program with two variables per value:
whether it is available in the backward pass (a), and whether it is recomputed (r):

- minimise the sum of time x r (then of size x (a - r));
- a = 1 for needed values; r <= a, and r <= a of each input; r = 0 where recomputing is impossible,
  r = a where keeping is;
- the sum of size x (a - r) is at most the limit.

Without the limit the constraints are those of a minimum cut, so the relaxation is nearly integral.
`frontier` lists such choices from the most bytes to the least. Over the blocks `choose` picks one
option of each within the memory of every moment of a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.search.linear import LinearProgram
from autopar.search.linear_solver import solve_linear
from autopar.search.problem import Array, SearchError

Indices = np.ndarray[Any, np.dtype[np.intp]]

_TIE = 1e-6
"""Weight of bytes against seconds, of which the largest possible sums are scaled to one."""
_SCALE = 1e4
"""Scale of the costs, with which ties are above the tolerances of HiGHS."""
_TOLERANCE = 1e-6
"""Relative excess over a limit that the solver may take for none."""
MAX_STATES = 2048
GAP = 1e-3
"""Relative gap of the integer program over blocks that do not run in order."""
PROGRAM_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One value: its bytes if it is kept, the seconds to recompute it, and what from.

    ``inputs`` are positions of earlier values. ``is_needed``: the derivative reads it.
    """

    size_bytes: int
    time_s: float
    inputs: tuple[int, ...] = ()
    is_needed: bool = False
    can_keep: bool = True
    can_repeat: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A choice: the positions of the kept values, their bytes, and the seconds of recomputing."""

    values: frozenset[int]
    size_bytes: int
    time_s: float


def cheapest(values: Sequence[Value], limit_bytes: float = math.inf) -> Kept | None:
    """The choice of least time that keeps at most ``limit_bytes``; None if there is none.

    Among those of equal time, that of the fewest bytes.
    """
    return _solved(values, limit_bytes, by_size=False)


def smallest(values: Sequence[Value]) -> Kept:
    """The choice that keeps the fewest bytes, and takes the least time among those."""
    least = _solved(values, math.inf, by_size=True)
    if least is None:
        raise SearchError("a needed value can neither be kept nor recomputed")
    found = _solved(values, least.size_bytes, by_size=False)
    return least if found is None else found


def frontier(values: Sequence[Value], max_points: int = 24) -> tuple[Kept, ...]:
    """Choices that no other dominates, from the most bytes to the least, both ends among them.

    Each is the fastest within its bytes; with more than ``max_points`` of them, about evenly
    spaced ones are listed.
    """
    first, last = cheapest(values), smallest(values)
    if first is None:
        raise SearchError("a needed value can neither be kept nor recomputed")
    points, step = [first], (first.size_bytes - last.size_bytes) / max_points
    while points[-1].size_bytes > last.size_bytes:
        size = points[-1].size_bytes
        limit = min(size - 1, math.floor(size * (1 - 2 * _TOLERANCE)), math.floor(size - step))
        found = cheapest(values, max(limit, last.size_bytes))
        points.append(last if found is None or found.size_bytes >= size else found)
    # The solver may stop at a choice with more bytes where several take the same time.
    return tuple(
        point
        for number, point in enumerate(points)
        if all(point.time_s < other.time_s for other in points[number + 1 :])
    )


def _solved(values: Sequence[Value], limit_bytes: float, *, by_size: bool) -> Kept | None:
    num = len(values)
    times = np.array([v.time_s for v in values] or [0.0])
    sizes = np.array([v.size_bytes for v in values] or [0], dtype=float)
    times, sizes = times / (times.sum() or 1.0), sizes / (sizes.sum() or 1.0)
    seconds, held = (_TIE, 1.0) if by_size else (1.0, _TIE)
    costs = _SCALE * np.concatenate([held * sizes, seconds * times - held * sizes])[: 2 * num]
    lower, upper = np.zeros(2 * num), np.ones(2 * num)
    rows: list[tuple[int, int, float]] = []
    row_lower: list[float] = []
    for i, value in enumerate(values):
        lower[i] = float(value.is_needed)
        if not value.can_repeat:
            upper[num + i] = 0.0
        for source in (i, *value.inputs):  # r <= a of the value itself and of its inputs
            rows += [(len(row_lower), source, 1.0), (len(row_lower), num + i, -1.0)]
            row_lower.append(0.0)
        if not value.can_keep:  # a <= r
            rows += [(len(row_lower), num + i, 1.0), (len(row_lower), i, -1.0)]
            row_lower.append(0.0)
    row_upper = [math.inf] * len(row_lower)
    if limit_bytes < math.inf:
        unit = max(limit_bytes, 1.0)
        for i, value in enumerate(values):
            if value.size_bytes:
                share = value.size_bytes / unit
                rows += [(len(row_lower), i, share), (len(row_lower), num + i, -share)]
        row_lower.append(-math.inf)
        row_upper.append(limit_bytes / unit)
    table = np.array(rows).reshape(-1, 3)
    result = solve_linear(
        LinearProgram(
            costs=costs, lower=lower, upper=upper, integer=np.ones(2 * num, dtype=bool),
            rows=table[:, 0].astype(int), columns=table[:, 1].astype(int),
            coefficients=table[:, 2], row_lower=np.array(row_lower),
            row_upper=np.array(row_upper), num_wanted=2 * num,
        )
    )  # fmt: skip
    if result.values is None:
        return None
    chosen = result.values > 0.5
    return kept_of(values, frozenset(i for i in range(num) if chosen[i] and not chosen[num + i]))


def kept_of(values: Sequence[Value], kept: frozenset[int]) -> Kept:
    """The choice that keeps some values: what it recomputes follows from what is needed."""
    used, again = set[int](), set[int]()
    stack = [i for i, value in enumerate(values) if value.is_needed]
    while stack:
        i = stack.pop()
        if i in used or i in again:
            continue
        if i in kept:
            used.add(i)
            continue
        if not values[i].can_repeat:
            raise SearchError(f"value {i} is needed, but neither kept nor can it be recomputed")
        again.add(i)
        stack.extend(values[i].inputs)
    return Kept(
        values=frozenset(used),
        size_bytes=sum(values[i].size_bytes for i in used),
        time_s=sum(values[i].time_s for i in sorted(again)),
    )


# --- over the blocks ----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One choice of a block: for each micro-batch the bytes that it keeps between its forward and
    its backward graph, and those that are ``late``, kept from there until its gradients of weights;
    the bytes of each of its graphs while it runs, by phase; and seconds."""

    kept_bytes: float
    late_bytes: float = 0.0
    own_bytes: tuple[float, ...] = ()
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Moments of a step, one a row; blocks are columns.

    ``kept`` and ``late``: the number of micro-batches for which a block holds such bytes.
    ``running``: the block that runs, or -1, and the ``phase`` of it. ``others_bytes``: all that
    does not depend on the options.
    """

    kept: Indices
    late: Indices
    running: Indices
    phase: Indices
    others_bytes: Array

    def bytes_of(self, options: Sequence[Option]) -> Array:
        """The bytes of each moment with one option of each block, without those of others."""
        own = _by_phase(options, self)
        rows, runs = np.arange(len(self.running)), self.running >= 0
        total = self.kept @ np.array([o.kept_bytes for o in options])
        total = total + self.late @ np.array([o.late_bytes for o in options])
        return np.asarray(total + np.where(runs, own[rows, self.running], 0.0))

    def distinct(self) -> Moments:
        """The fullest of the moments that differ in nothing but ``others_bytes``."""
        alike = np.column_stack([self.kept, self.late, self.running, self.phase])
        rows, which = np.unique(alike, axis=0, return_inverse=True)
        others = np.full(len(rows), -math.inf)
        np.maximum.at(others, which.reshape(-1), self.others_bytes)
        num = self.kept.shape[1]
        return Moments(
            kept=rows[:, :num], late=rows[:, num : 2 * num], running=rows[:, -2],
            phase=rows[:, -1], others_bytes=others,
        )  # fmt: skip


def _by_phase(options: Sequence[Option], moments: Moments) -> Array:
    """The bytes of the graphs of each block in the phase of each moment."""
    own = np.array([o.own_bytes for o in options], dtype=float).reshape(len(options), -1)
    if not own.shape[1]:
        return np.zeros((len(moments.phase), len(options)))
    return np.asarray(own[:, moments.phase].T)


def choose(
    blocks: Sequence[Sequence[Option]], moments: Moments, limit_bytes: float
) -> tuple[int, ...] | None:
    """The option of each block with the least total time within the memory; None if none fits.

    If the blocks run in order, each keeping its values until its backward graph, by dynamic
    programming: exact with up to `MAX_STATES` totals of bytes; beyond these, totals are rounded up
    to about a thousandth of the limit. In other orders by an integer program, within `GAP` of the
    least time.
    """
    moments = moments.distinct()
    if not blocks:
        return () if (moments.others_bytes <= limit_bytes).all() else None
    ends = _ends_in_order(moments)
    if ends is None:
        return _by_program(blocks, moments, limit_bytes)
    return _in_order(blocks, moments, ends, limit_bytes)


def _ends_in_order(moments: Moments) -> Indices | None:
    """By moment the last block whose option matters; None unless, in each, the blocks before that
    one, and no later ones, hold what they keep for one micro-batch."""
    num = moments.kept.shape[1]
    running = moments.running
    held = moments.kept.sum(axis=1)
    ends = np.maximum(held - 1, running)
    columns = np.arange(num)
    is_first = moments.kept == (columns < held[:, None])
    is_late = (moments.late > 0) <= (columns == running[:, None])
    is_next = (running < 0) | (running >= held - 1) & (running <= held)
    return ends if is_first.all() and is_late.all() and is_next.all() else None


def _in_order(
    blocks: Sequence[Sequence[Option]], moments: Moments, ends: Indices, limit_bytes: float
) -> tuple[int, ...] | None:
    """Dynamic programming over the bytes that the blocks before each one keep."""
    if (moments.others_bytes[ends < 0] > limit_bytes).any():
        return None
    held, times = np.zeros(1), np.zeros(1)
    steps: list[tuple[Indices, Indices]] = []  # the previous state of each, and the option picked
    for block, options in enumerate(blocks):
        kept = np.array([option.kept_bytes for option in options])
        late = np.array([option.late_bytes for option in options])
        rows = np.flatnonzero(ends == block)
        most = np.full(len(options), -math.inf)
        if len(rows):
            own = _by_phase(options, moments)[rows]
            own = np.where(moments.running[rows, None] == block, own, 0.0)
            own = own + np.outer(moments.kept[rows, block], kept)
            own = own + np.outer(moments.late[rows, block], late)
            most = (own + moments.others_bytes[rows, None]).max(axis=0)
        before, picks = np.nonzero(held[:, None] + most <= limit_bytes)
        if not len(before):
            return None
        held = held[before] + kept[picks]
        times = times[before] + np.array([option.time_s for option in options])[picks]
        best, held = _undominated(held, times, limit_bytes)
        times = times[best]
        steps.append((before[best], picks[best]))
    state, chosen = int(times.argmin()), list[int]()
    for before, picks in reversed(steps):
        chosen.append(int(picks[state]))
        state = int(before[state])
    return tuple(reversed(chosen))


def _undominated(held: Array, times: Array, limit_bytes: float) -> tuple[Indices, Array]:
    """The states that hold fewer bytes than every faster one, and the bytes that they hold."""
    order = np.lexsort((times, held))
    ahead = np.minimum.accumulate(times[order])[:-1]
    best = order[np.append(True, times[order][1:] < ahead)]
    if len(best) <= MAX_STATES or not math.isfinite(limit_bytes):
        return best, held[best]
    edges = max(limit_bytes, 1.0) / (MAX_STATES // 2) * np.arange(MAX_STATES // 2 + 1)
    at = np.minimum(np.searchsorted(edges, held[best]), len(edges) - 1)
    again, rounded = _undominated(edges[at], times[best], math.inf)
    return best[again], rounded


def _by_program(
    blocks: Sequence[Sequence[Option]], moments: Moments, limit_bytes: float
) -> tuple[int, ...] | None:
    """An integer program over the options, with constraints only of moments that were too full."""
    picked = tuple(min(range(len(b)), key=lambda i: b[i].time_s) for b in blocks)
    tight = np.zeros(len(moments.running), dtype=bool)
    while True:
        held = moments.bytes_of([b[i] for b, i in zip(blocks, picked)])
        excess = held + moments.others_bytes - limit_bytes
        excess[tight] = 0.0  # up to the tolerance of the solver
        if excess.max(initial=0.0) <= 0:
            return picked
        for block in np.unique(moments.running):
            mine = np.where(moments.running == block, excess, 0.0)
            tight[int(mine.argmax())] |= mine.max() > 0
        rows = np.flatnonzero(tight)
        for limit in (limit_bytes, (1 - _TOLERANCE) * limit_bytes):
            found = _picked(blocks, moments, rows, limit)
            if found is None:
                return None
            picked = found
            held = moments.bytes_of([b[i] for b, i in zip(blocks, picked)])
            if (held + moments.others_bytes <= limit_bytes)[rows].all():
                break  # and not just within the tolerance of the solver


def _picked(
    blocks: Sequence[Sequence[Option]], moments: Moments, tight: Indices, limit_bytes: float
) -> tuple[int, ...] | None:
    """The options of least time with which some moments are not too full."""
    of_block = np.repeat(np.arange(len(blocks)), [len(options) for options in blocks])
    flat = [option for options in blocks for option in options]
    kept = np.array([option.kept_bytes for option in flat], dtype=float)
    late = np.array([option.late_bytes for option in flat], dtype=float)
    used = moments.kept[np.ix_(tight, of_block)] * kept
    used = used + moments.late[np.ix_(tight, of_block)] * late
    own = np.array([option.own_bytes for option in flat], dtype=float).reshape(len(flat), -1)
    for row, moment in enumerate(tight):
        if moments.running[moment] >= 0 and own.shape[1]:
            mine = of_block == moments.running[moment]
            used[row, mine] += own[mine, moments.phase[moment]]
    room = limit_bytes - moments.others_bytes[tight]
    if (room < 0).any():
        return None
    unit = max(limit_bytes, 1.0)
    times = np.array([option.time_s for option in flat])
    scale = max(sum(max(o.time_s for o in options) for options in blocks), 1e-30)
    rows, columns = np.nonzero(used)
    num, num_blocks = len(flat), len(blocks)
    result = solve_linear(
        LinearProgram(
            costs=_SCALE * times / scale, lower=np.zeros(num), upper=np.ones(num),
            integer=np.ones(num, dtype=bool),
            rows=np.concatenate([of_block, num_blocks + rows]),
            columns=np.concatenate([np.arange(num), columns]),
            coefficients=np.concatenate([np.ones(num), used[rows, columns] / unit]),
            row_lower=np.concatenate([np.ones(num_blocks), np.full(len(tight), -math.inf)]),
            row_upper=np.concatenate([np.ones(num_blocks), room / unit]),
            num_wanted=num,
        ),
        time_limit_s=PROGRAM_LIMIT_S, relative_gap=GAP,
    )  # fmt: skip
    if result.values is None:
        return None
    starts = np.flatnonzero(np.r_[True, of_block[1:] != of_block[:-1]])
    stops = np.r_[starts[1:], num]
    return tuple(int(result.values[a:b].argmax()) for a, b in zip(starts, stops))
