"""Pinning by the pseudo-polynomial dynamic program of the NTU thesis (2018), reconstructed.

With the largest load P given, what is left is a knapsack of capacity C - k P in which each window
of a full load over P must have some of its items pinned. It is solved window by window: a state is
the set of pinned items among those that later windows share (the *frontier*), and the pinned bytes;
per state the best saving is kept. There are at most C / quantum byte counts per frontier set, and
the windows are visited in an order that keeps the frontier small: in a training step an operation's
forward and backward go together. Items in none of these windows follow, by saving per byte.

Not every P is tried: an interval of candidates is bounded by the program with the loads limited by
its upper end and the knapsack by its lower end. If the solution fits, it is the best of the
interval; else the interval is split, the most promising first.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.movement.pinning.integer import relaxed_saving, smallest_fitting
from autopar.movement.pinning.problem import Pinning, PinningProblem

_MAX_FRONTIER = 60
_MAX_STATES = 1 << 12
_NUM_CUTS = 6
_TRUST = 1e-6  # the solver's tolerance
Ints = NDArray[np.int64]


def pin_by_dynamic_program(
    problem: PinningProblem, *, tolerance: float = 0.0, time_limit_s: float | None = None
) -> Pinning:
    """The best pinned set; with a ``tolerance``, one whose saving is about that fraction below.

    A tolerance also rounds byte counts, to a quantum of tolerance / 4 of the capacity. After
    ``time_limit_s`` the best set so far is returned. Raises MovementError for an infeasible
    capacity.
    """
    search = _Search(problem, tolerance, math.inf if time_limit_s is None else time_limit_s)
    best = search.run()
    if best is None:  # rounding may have hidden the only one
        best, search.is_exact = smallest_fitting(problem), False
    saved = problem.saved_bytes(best)
    return Pinning(
        pinned=best,
        saved_bytes=saved,
        bound_bytes=saved if search.is_exact else math.inf,
    )


@dataclass(slots=True)
class _States:
    """Parallel arrays; ``origin`` is the row of the history that a state came from."""

    frontier: Ints
    used: Ints
    saved: Ints
    origin: Ints

    def take(self, rows: NDArray[np.intp] | NDArray[np.bool_]) -> _States:
        return _States(self.frontier[rows], self.used[rows], self.saved[rows], self.origin[rows])

    def __len__(self) -> int:
        return len(self.used)


@dataclass(slots=True)
class _History:
    """For each decided item, in order: the row that each state came from, and if it is pinned."""

    items: list[int] = field(default_factory=list)
    origins: list[Ints] = field(default_factory=list)
    pinned: list[NDArray[np.bool_]] = field(default_factory=list)

    def set_of(self, row: int) -> set[int]:
        found = set()
        for item, origins, pinned in zip(
            reversed(self.items), reversed(self.origins), reversed(self.pinned)
        ):
            if pinned[row]:
                found.add(item)
            row = int(origins[row])
        return found


class _Search:
    """Branch and bound over intervals of the largest load."""

    def __init__(self, problem: PinningProblem, tolerance: float, time_limit_s: float) -> None:
        self.problem, self.tolerance = problem, tolerance
        self.end_s = time.monotonic() + time_limit_s
        self.is_exact = tolerance == 0
        self.quantum = max(1, int(problem.capacity_bytes * tolerance / 4))
        self.sizes = np.array(problem.sizes, dtype=np.int64)
        self.savings = np.array(problem.savings, dtype=np.int64)
        density = self.savings / np.maximum(self.sizes, 1)
        self.by_density = np.lexsort((-self.sizes, -density))
        self.order: list[int] = []
        self.best: frozenset[int] | None = None
        self.best_saved = -1

    def run(self) -> frozenset[int] | None:
        problem = self.problem
        least = max((w.reserved_bytes for w in problem.windows), default=0)
        most = max(problem.full_loads, default=0)
        most = min(most, problem.capacity_bytes // problem.num_held)
        intervals: list[tuple[int, int, int]] = []
        relaxed = relaxed_saving(problem, least, most) if least <= most else None
        if relaxed is None:
            return None
        # The load of the relaxation, with room for what rounding makes of it.
        middle = min(max(math.ceil(relaxed[1] * (1 + self.tolerance / 2)), least), most)
        self.order = _order(problem, middle)
        self._bound(middle, middle, intervals)
        least, most = self._end(least, middle), self._end(most, middle)
        self.order = _order(problem, least)
        self._bound(least, most, intervals)
        while intervals:
            negated, low, high = heapq.heappop(intervals)
            if -negated <= self._enough(self.best_saved):
                break
            if self.best is not None and time.monotonic() > self.end_s:
                self.is_exact = False
                break
            middle = (low + high) // 2
            self._bound(low, middle, intervals)
            self._bound(middle + 1, high, intervals)
        return self.best

    def _end(self, outer: int, inner: int) -> int:
        """An end of the loads that are worth a search, between two loads.

        The relaxation bounds the saving and is concave in the load: beyond a load of no interest,
        none is of interest.
        """
        for _ in range(_NUM_CUTS if self.best is not None else 0):
            middle = (outer + inner) // 2
            if middle in (outer, inner):
                break
            found = relaxed_saving(self.problem, middle, middle)
            if found is None or found[0] * (1 + _TRUST) < self._enough(self.best_saved):
                outer = middle
            else:
                inner = middle
        return outer

    def _enough(self, saved: int) -> float:
        """Savings up to this are not worth a further search."""
        return saved if saved <= 0 else saved * (1 + self.tolerance)

    def _bound(self, low: int, high: int, intervals: list[tuple[int, int, int]]) -> None:
        """Solve the relaxation of an interval; keep it unless its solution settles it."""
        budget = self.problem.capacity_bytes - self.problem.num_held * low
        if low > high or budget < 0:
            return
        found = _Sweep(self, high, budget).run()
        if found is None:
            return
        if self._offer(found):
            return
        self._offer(self._repaired(found))
        if low < high:
            heapq.heappush(intervals, (-self.problem.saved_bytes(found), low, high))

    def _offer(self, found: set[int]) -> bool:
        """Keep a set if it is the best so far; whether it fits."""
        if not self.problem.fits(found):
            return False
        saved = self.problem.saved_bytes(found)
        if saved > self.best_saved:
            self.best, self.best_saved = frozenset(found), saved
        return True

    def _repaired(self, found: set[int]) -> set[int]:
        """The set without items of little saving per byte, until the rest has room.

        Only items that do not raise the largest load leave, so the result may still not fit.
        """
        problem, sizes = self.problem, self.problem.sizes
        loads = problem.loads(found)
        largest = max(loads, default=0)
        excess = problem.needed_bytes(found) - problem.capacity_bytes
        rest = set(found)
        for item in reversed(self.by_density.tolist()):
            if excess <= 0:
                break
            users = problem.users[item]
            if item in rest and all(loads[w] + sizes[item] <= largest for w in users):
                rest.discard(item)
                excess -= sizes[item]
                for w in users:
                    loads[w] += sizes[item]
        return rest


class _Sweep:
    """The best set within ``budget`` bytes that leaves no window a load over ``limit``."""

    def __init__(self, search: _Search, limit: int, budget: int) -> None:
        self.search, self.budget = search, budget
        problem = search.problem
        self.sizes, self.savings = search.sizes, search.savings
        self.undecided = np.ones(problem.num_items, dtype=bool)
        self.history = _History()
        self.best: set[int] | None = None
        self.best_saved = -1
        self.windows = [
            (problem.windows[w].items, problem.full_loads[w] - limit)
            for w in search.order
            if problem.full_loads[w] > limit
        ]
        # A small item's load is always counted, so that it is no window's: few bytes, few states.
        self.small = int(search.tolerance / 4 * limit / max(1, self._widest()))
        self.slots: dict[int, int] = {}

    def _widest(self) -> int:
        return max((len(items) for items, _ in self.windows), default=1)

    def run(self) -> set[int] | None:
        start = np.zeros(1, dtype=np.int64)
        states = _States(start, start, start, start)
        last: dict[int, int] = {}
        for number, (items, _) in enumerate(self.windows):
            last.update((i, number) for i in items if self.sizes[i] > self.small)
        for number, (items, need) in enumerate(self.windows):
            states = self._window(states, items, need, number, last)
            if not len(states):
                return None
        for item in self.search.by_density:
            if not self.undecided[item]:
                continue
            self._offer_filled(states)
            states = self._promising(states)
            if not len(states):
                break
            states = self._decide(states, int(item), slot=None)
        self._offer_filled(states)
        return self.best

    def _window(
        self, states: _States, items: Sequence[int], need: int, number: int, last: dict[int, int]
    ) -> _States:
        """Decide a window's new items, drop states that pin too little of it, and forget."""
        here = [i for i in items if i in last]
        for item in sorted((i for i in here if self.undecided[i]), key=lambda i: -self.sizes[i]):
            free = next((s for s in range(_MAX_FRONTIER) if s not in self.slots.values()), None)
            if free is None:  # left unpinned
                self.undecided[item], self.search.is_exact = False, False
                continue
            self.slots[item] = free
            states = self._decide(states, item, slot=free)
        here = [i for i in here if i in self.slots]
        pinned = sum(
            (self.sizes[i] * ((states.frontier >> self.slots[i]) & 1) for i in here),
            np.zeros(len(states), dtype=np.int64),
        )
        states = states.take(pinned >= need)
        for item in here:
            if last[item] == number:
                states.frontier = states.frontier & ~(1 << self.slots.pop(item))
        return self._promising(states)

    def _decide(self, states: _States, item: int, slot: int | None) -> _States:
        """Each state without the item, and with it where it fits."""
        self.undecided[item] = False
        with_item = np.flatnonzero(states.used + self.sizes[item] <= self.budget)
        bit = 0 if slot is None else 1 << slot
        rows = np.concatenate([np.arange(len(states)), with_item])
        is_pinned = np.arange(len(rows)) >= len(states)
        self.history.items.append(item)
        self.history.origins.append(states.origin[rows])
        self.history.pinned.append(is_pinned)
        return self._undominated(
            _States(
                states.frontier[rows] | np.where(is_pinned, bit, 0),
                states.used[rows] + np.where(is_pinned, self.sizes[item], 0),
                states.saved[rows] + np.where(is_pinned, self.savings[item], 0),
                np.arange(len(rows)),
            )
        )

    def _undominated(self, states: _States) -> _States:
        """Drop states that save no more than one of the same frontier and no more bytes."""
        bucket = states.used // self.search.quantum
        order = np.lexsort((states.used, -states.saved, bucket, states.frontier))
        states = states.take(order)
        saved, frontier = states.saved, states.frontier
        group = np.concatenate([[0], np.cumsum(frontier[1:] != frontier[:-1])])
        # Savings of later groups are lifted over those of earlier ones, so that one running maximum
        # serves all.
        lifted = saved.astype(np.float64) + group * (float(saved.max(initial=0)) + 1.0)
        before = np.concatenate([[-1.0], np.maximum.accumulate(lifted)[:-1]])
        is_first = np.concatenate([[True], frontier[1:] != frontier[:-1]])
        return states.take(is_first | (lifted > before))

    def _promising(self, states: _States) -> _States:
        """Drop states whose bound is no better than the best known; keep a bounded number."""
        bound = self._bounds(states)
        known = max(self.best_saved, self.search.best_saved)
        keep = np.flatnonzero(bound > self.search._enough(known))
        if len(keep) > _MAX_STATES:
            keep = keep[np.argsort(-bound[keep])[:_MAX_STATES]]
            self.search.is_exact = False
        return states.take(keep)

    def _bounds(self, states: _States) -> NDArray[np.float64]:
        """Each state's saving with the undecided items of the best savings per byte, the last one
        in part."""
        rest = self.search.by_density[self.undecided[self.search.by_density]]
        sizes = np.concatenate([[0], np.cumsum(self.sizes[rest])])
        savings = np.concatenate([[0], np.cumsum(self.savings[rest])])
        room = self.budget - states.used
        whole = np.searchsorted(sizes, room, side="right") - 1
        following = np.minimum(whole + 1, len(rest))
        gained = savings[following] - savings[whole]
        share = (room - sizes[whole]) / np.maximum(sizes[following] - sizes[whole], 1)
        bounds: NDArray[np.float64] = states.saved + savings[whole] + share * gained
        return bounds

    def _offer_filled(self, states: _States) -> None:
        """Fill up the most promising state with whatever fits, and keep it if it is the best.

        It may only be filled once no window restricts it any more.
        """
        if not len(states) or self.slots:
            return
        row = int(np.argmax(self._bounds(states)))
        used, saved = int(states.used[row]), int(states.saved[row])
        filled = []
        for item in self.search.by_density[self.undecided[self.search.by_density]]:
            if used + self.sizes[item] <= self.budget:
                used += int(self.sizes[item])
                saved += int(self.savings[item])
                filled.append(int(item))
        if saved > self.best_saved:
            self.best_saved = saved
            self.best = self.history.set_of(int(states.origin[row])).union(filled)


def _order(problem: PinningProblem, limit: int) -> list[int]:
    """The windows of a full load over ``limit`` in an order with a small frontier.

    Next is the one that leaves fewest items decided but still needed, among those that share items
    with the frontier.
    """
    left = {number: None for number, load in enumerate(problem.full_loads) if load > limit}
    users: dict[int, set[int]] = {}
    for number in left:
        for item in problem.windows[number].items:
            users.setdefault(item, set()).add(number)
    frontier: set[int] = set()
    order = []
    while left:
        near = {number for item in frontier for number in users[item]}
        candidates: Collection[int] = sorted(near) or [next(iter(left))]

        def growth(number: int) -> int:
            items = problem.windows[number].items
            opened = sum(i not in frontier and len(users[i]) > 1 for i in items)
            return opened - sum(i in frontier and len(users[i]) == 1 for i in items)

        chosen = min(candidates, key=growth)
        order.append(chosen)
        del left[chosen]
        for item in problem.windows[chosen].items:
            users[item].discard(chosen)
            frontier.add(item) if users[item] else frontier.discard(item)
    return order
