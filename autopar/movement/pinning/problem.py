"""Data pinning as numbers: which items stay on the device, under a capacity.

A pinned item has memory of its own for the whole step; the others are fetched before and written
back after their uses, through memory that is shared over time. A *window* is a set of items that
share it at once. With C the capacity, k the number of windows held at once:

    maximise   sum of saved(x) over pinned x
    such that  sum of size(x) over pinned x  +  k * largest load  <=  C,
    load of a window = its reserved bytes + sum of size(x) over its items that are not pinned.

``twice_largest`` is the condition of the NTU thesis of 2018 (and of GeePS): windows are single
operations and k = 2, for two buffers of the largest load. ``adjacent`` is tighter: windows are
pairs of consecutive operations and k = 1, as one operation computes while the next one's items
arrive or the last one's leave. Whatever meets the first condition meets the second.

The problem is NP-complete, by reduction from PARTITION: can whole numbers a_1..a_n be divided into
two sets of equal sums S? Take an item of size and saving a_i for each of them, each used by an
operation of its own; one more operation that reserves A = max a_i bytes; k = 2, and C = S + 2A. The
largest load is A whatever is pinned, so pinned items may take S bytes, and the best saving is S if
and only if there is such a division. (`tests/movement/test_pinning.py` solves one.)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.movement.gaps import gaps_by_tensor, transfer_bytes
from autopar.movement.lifetimes import StepLifetimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Items that are on the device together, and bytes that are never an item's."""

    items: tuple[int, ...]
    reserved_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class PinningProblem:
    """Sizes and savings of items, the windows, and how many windows are held at once (k)."""

    sizes: tuple[int, ...]
    savings: tuple[int, ...]
    windows: tuple[Window, ...]
    num_held: int
    capacity_bytes: int

    @property
    def num_items(self) -> int:
        return len(self.sizes)

    @cached_property
    def full_loads(self) -> tuple[int, ...]:
        """The load of each window with nothing pinned."""
        return tuple(w.reserved_bytes + sum(self.sizes[i] for i in w.items) for w in self.windows)

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """The windows that hold each item."""
        found: list[list[int]] = [[] for _ in self.sizes]
        for number, window in enumerate(self.windows):
            for item in window.items:
                found[item].append(number)
        return tuple(map(tuple, found))

    def loads(self, pinned: Collection[int]) -> list[int]:
        """The load of each window."""
        kept = frozenset(pinned)
        return [
            full - sum(self.sizes[i] for i in w.items if i in kept)
            for full, w in zip(self.full_loads, self.windows)
        ]

    def largest_load(self, pinned: Collection[int]) -> int:
        return max(self.loads(pinned), default=0)

    def needed_bytes(self, pinned: Collection[int]) -> int:
        """The least capacity for which this set may be pinned."""
        return sum(self.sizes[i] for i in pinned) + self.num_held * self.largest_load(pinned)

    def fits(self, pinned: Collection[int]) -> bool:
        return self.needed_bytes(pinned) <= self.capacity_bytes

    def saved_bytes(self, pinned: Collection[int]) -> int:
        return sum(self.savings[i] for i in pinned)

    def with_capacity(self, capacity_bytes: int) -> PinningProblem:
        return replace(self, capacity_bytes=capacity_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinning:
    """A pinned set, its saving, and an upper bound on the best saving."""

    pinned: frozenset[int]
    saved_bytes: int
    bound_bytes: float

    @property
    def is_optimal(self) -> bool:
        return self.saved_bytes >= self.bound_bytes


def twice_largest(step: StepLifetimes, capacity_bytes: int) -> PinningProblem:
    """Pinning under the condition of the thesis and of GeePS."""
    windows = tuple(
        Window(items=items, reserved_bytes=reserved)
        for items, reserved in zip(step.used_by, step.workspace_bytes)
    )
    return _problem(step, windows, 2, capacity_bytes)


def adjacent(step: StepLifetimes, capacity_bytes: int) -> PinningProblem:
    """Pinning where transfers of neighbours overlap an operation."""
    used, reserved = step.used_by, step.workspace_bytes
    last = max(step.num_ops - 1, 1)
    windows = tuple(
        Window(
            items=tuple(dict.fromkeys(i for items in used[op : op + 2] for i in items)),
            reserved_bytes=max(reserved[op : op + 2]),
        )
        for op in range(last)
    )
    return _problem(step, windows, 1, capacity_bytes)


def _problem(
    step: StepLifetimes, windows: tuple[Window, ...], num_held: int, capacity_bytes: int
) -> PinningProblem:
    """An item's saving is what is copied in a step if it moves in all of its gaps."""
    savings = (
        transfer_bytes(tensor, gaps, gaps)
        for tensor, gaps in zip(step.tensors, gaps_by_tensor(step))
    )
    return PinningProblem(
        sizes=tuple(tensor.size_bytes for tensor in step.tensors),
        savings=tuple(savings),
        windows=windows,
        num_held=num_held,
        capacity_bytes=capacity_bytes,
    )
