"""Movement of least traffic: in which gaps each tensor leaves the device, under a capacity.

A pinned set keeps a tensor for the whole step or never. Here each gap between two uses is a choice
of its own, and a tensor that stays takes memory only while it is alive. With m_g = 1 if gap g is
moved and y_v = 1 if version v is copied to the host:

    minimise   sum of size(v) y_v + sum of size(g) m_g
    such that  y_v >= m_g for the gaps of a version (less what its host copy already is free for),
    for every operation, twice: the tensors that it uses, its workspace, and every other tensor that
    is alive and not certainly away, are at most the capacity.

The two rows of an operation are the moments while offloads of the one before are in flight, and
while loads for the next one are; `verify` counts the same. The least capacity is that with all gaps
moved. The integer program is sparse: bytes held are variables that each operation changes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from autopar.base.errors import MovementError
from autopar.base.units import format_bytes
from autopar.movement.gaps import (
    Gap,
    gaps_by_tensor,
    gaps_of,
    movement_plan,
    transfer_bytes,
    versions_of,
)
from autopar.movement.lifetimes import StepLifetimes
from autopar.movement.plan import MovementPlan
from autopar.search.linear import CONSTRAINT_SLACK, LinearProgram, LinearResult
from autopar.search.linear_solver import solve_linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """The moved gaps, the bytes that they copy in a step, and a lower bound on the least bytes."""

    moved: frozenset[Gap]
    moved_bytes: int
    bound_bytes: float

    def plan(self, step: StepLifetimes) -> MovementPlan:
        return movement_plan(step, self.moved)


def held_bytes(step: StepLifetimes, moved: Collection[Gap]) -> tuple[list[int], list[int]]:
    """The most bytes while each operation runs: beside offloads, and beside loads."""
    rows = []
    for kind in (0, 1):
        change = [0] * (step.num_ops + 1)
        for gap in moved:
            for start, stop in _runs(gap.absent(step.num_ops)[kind]):
                change[start] -= step.tensors[gap.tensor].size_bytes
                change[stop] += step.tensors[gap.tensor].size_bytes
        rows.append([a + b for a, b in zip(step.live_bytes(), accumulate(change[:-1]))])
    return rows[0], rows[1]


def least_capacity(step: StepLifetimes) -> int:
    """The least capacity under which the step can run at all: everything moves that can."""
    return max(max(row, default=0) for row in held_bytes(step, gaps_of(step)))


def least_traffic(
    step: StepLifetimes,
    capacity_bytes: int,
    *,
    relative_gap: float = 0.0,
    time_limit_s: float | None = None,
) -> Residency:
    """The gaps to move for the least traffic. Raises MovementError for an infeasible capacity.

    ``time_limit_s`` is for all integer programs together.
    """
    end_s = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
    least = least_capacity(step)
    if capacity_bytes < least:
        raise MovementError(
            f"the step does not run within {capacity_bytes} bytes "
            f"({format_bytes(capacity_bytes)}), even if every tensor moves whenever it can: allow "
            f"at least {least} bytes ({format_bytes(least)}), or compute smaller micro-batches",
            least_bytes=least,
        )
    if capacity_bytes >= step.peak_bytes:
        return Residency(moved=frozenset(), moved_bytes=0, bound_bytes=0.0)
    form = _Form(step, capacity_bytes)
    relaxed = solve_linear(form.program(0.0), relaxed=True, time_limit_s=time_limit_s)
    best = form.rounded(relaxed)
    bound = relaxed.bound * form.scale if relaxed.optimal else 0.0
    for slack, share in ((0.0, 0.5), (CONSTRAINT_SLACK, 1.0)):
        left_s = share * (end_s - time.monotonic())
        if best[1] - bound <= max(relative_gap * best[1], 0.5) or left_s <= 0:
            break
        result = solve_linear(
            form.program(slack), relative_gap=relative_gap,
            time_limit_s=left_s if math.isfinite(left_s) else None,
        )  # fmt: skip
        if not slack:
            bound = max(bound, result.bound * form.scale)
        best = min(best, form.rounded(result), key=lambda found: found[1])
    moved, size = best
    near = size - bound <= 1e-9 * max(size, 1)
    return Residency(moved=moved, moved_bytes=size, bound_bytes=size if near else bound)


class _Form:
    """The integer program: gaps, versions, and the bytes held in each row are its columns."""

    def __init__(self, step: StepLifetimes, capacity_bytes: int) -> None:
        self.step, self.capacity = step, capacity_bytes
        self.scale = float(max(capacity_bytes, 1))
        self.by_tensor = gaps_by_tensor(step)
        self.gaps = [gap for gaps in self.by_tensor for gap in gaps]
        self.column = {gap: number for number, gap in enumerate(self.gaps)}
        self.versions = [
            version
            for tensor, gaps in zip(step.tensors, self.by_tensor)
            for version in versions_of(tensor, gaps)
        ]
        self.sizes = [step.tensors[gap.tensor].size_bytes for gap in self.gaps]

    def program(self, slack: float) -> LinearProgram:
        """Columns: m, y, then per kind of row the bytes that have been moved away, by operation."""
        num_gaps, num_versions, num_ops = len(self.gaps), len(self.versions), self.step.num_ops
        first_held = num_gaps + num_versions
        entries: list[tuple[int, int, float]] = []
        lower: list[float] = []
        upper: list[float] = []

        def row(low: float, high: float, *items: tuple[int, float]) -> None:
            entries.extend((len(lower), column, value) for column, value in items)
            lower.append(low)
            upper.append(high)

        for number, version in enumerate(self.versions, start=num_gaps):
            free = [(self.column[gap], 1.0) for gap in version.free_if]
            for gap in version.gaps:
                row(0.0, math.inf, (number, 1.0), (self.column[gap], -1.0), *free)
        for kind in (0, 1):
            changes: list[list[tuple[int, float]]] = [[] for _ in range(num_ops + 1)]
            for column, gap in enumerate(self.gaps):
                size = self.sizes[column] / self.scale
                for start, stop in _runs(gap.absent(num_ops)[kind]):
                    changes[start].append((column, -size))
                    changes[stop].append((column, size))
            for op in range(num_ops):
                column = first_held + kind * num_ops + op
                former = [(column - 1, -1.0)] if op else []
                row(0.0, 0.0, (column, 1.0), *former, *_summed(changes[op]))
        live = [held / self.scale - (1.0 - slack) for held in self.step.live_bytes()]
        num_columns = first_held + 2 * num_ops
        sizes = [size / self.scale for size in self.sizes]
        copies = [
            self.step.tensors[version.gaps[0].tensor].size_bytes / self.scale
            for version in self.versions
        ]
        rows, columns, coefficients = zip(*entries)
        return LinearProgram(
            costs=np.array([*sizes, *copies, *[0.0] * (2 * num_ops)]),
            lower=np.array([*[0.0] * first_held, *(max(0.0, x) for x in live * 2)]),
            upper=np.array([*[1.0] * first_held, *[math.inf] * (2 * num_ops)]),
            integer=np.arange(num_columns) < num_gaps,
            rows=np.array(rows),
            columns=np.array(columns),
            coefficients=np.array(coefficients),
            row_lower=np.array(lower),
            row_upper=np.array(upper),
            num_wanted=num_gaps,
        )

    def rounded(self, result: LinearResult) -> tuple[frozenset[Gap], int]:
        """The moved gaps nearest to a solution that keep within the capacity, and their bytes.

        Gaps stay in ascending order of how much of them is moved, wherever there is room.
        """
        values: Sequence[float] = (
            [0.0] * len(self.gaps) if result.values is None else result.values.tolist()
        )
        room = self._room()
        moved = set(self.gaps)
        order = sorted(range(len(self.gaps)), key=lambda i: (round(values[i], 6), -self.sizes[i]))
        for number in order:
            gap, size = self.gaps[number], self.sizes[number]
            rows = gap.absent(self.step.num_ops)
            if all((free[ops] >= size).all() for free, ops in zip(room, rows)):
                moved.discard(gap)
                for free, ops in zip(room, rows):
                    free[ops] -= size
        return frozenset(moved), self._bytes(moved)

    def _room(self) -> tuple[np.ndarray, np.ndarray]:
        first, second = held_bytes(self.step, self.gaps)
        return self.capacity - np.array(first), self.capacity - np.array(second)

    def _bytes(self, moved: Collection[Gap]) -> int:
        return sum(
            transfer_bytes(tensor, gaps, moved)
            for tensor, gaps in zip(self.step.tensors, self.by_tensor)
        )


def _runs(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending positions as runs, each a start and a stop."""
    runs: list[tuple[int, int]] = []
    for position in positions:
        if runs and runs[-1][1] == position:
            runs[-1] = (runs[-1][0], position + 1)
        else:
            runs.append((position, position + 1))
    return runs


def _summed(changes: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """One entry per column."""
    totals: dict[int, float] = {}
    for column, value in changes:
        totals[column] = totals.get(column, 0.0) + value
    return list(totals.items())
