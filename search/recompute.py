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
option of each, by dynamic programming over the bytes held so far.
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
    """One choice of a block: bytes that it keeps until its backward pass, bytes of its own at the
    moments when its graphs run (kept ones included), and seconds."""

    kept_bytes: float
    own_bytes: tuple[float, ...]
    time_s: float


def choose(
    blocks: Sequence[Sequence[Option]],
    others_bytes: Sequence[tuple[float, ...]],
    limit_bytes: float,
) -> tuple[int, ...] | None:
    """The option of each block with the least total time within the memory; None if none fits.

    At each moment of a block, what the blocks before it keep, its own bytes and ``others_bytes`` of
    that moment are at most ``limit_bytes``. Exact with up to `MAX_STATES` totals of bytes; beyond
    these, totals are rounded up to about a thousandth of the limit.
    """
    held, times = np.zeros(1), np.zeros(1)
    steps: list[tuple[Indices, Indices]] = []  # the previous state of each, and the option picked
    for options, others in zip(blocks, others_bytes, strict=True):
        most = [
            max(
                (own + other for own, other in zip(option.own_bytes, others, strict=True)),
                default=0,
            )
            for option in options
        ]
        rows, picks = np.nonzero(held[:, None] + np.array(most) <= limit_bytes)
        if not len(rows):
            return None
        held = held[rows] + np.array([option.kept_bytes for option in options])[picks]
        times = times[rows] + np.array([option.time_s for option in options])[picks]
        best, held = _undominated(held, times, limit_bytes)
        times = times[best]
        steps.append((rows[best], picks[best]))
    state, chosen = int(times.argmin()), list[int]()
    for rows, picks in reversed(steps):
        chosen.append(int(picks[state]))
        state = int(rows[state])
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
