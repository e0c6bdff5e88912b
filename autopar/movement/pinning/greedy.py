"""GeePS's policy (Cui et al., EuroSys 2016), the baseline: pin what an operation at the peak uses.

It needs room for twice the largest load before it pins anything, and never pins to make room.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from autopar.base.errors import MovementError
from autopar.movement.pinning.problem import Pinning, PinningProblem


def pin_greedily(problem: PinningProblem) -> Pinning:
    """GeePS's pinned set. Raises MovementError where GeePS refuses.

    Repeat until nothing is pinned: if all the rest fits, pin it; else pin the first item of the
    largest window that fits with the load that remains; else whatever fits with the current load,
    in order of the items (GeePS's is that of a hash table).
    """
    sizes, held, capacity = problem.sizes, problem.num_held, problem.capacity_bytes
    loads = list(problem.full_loads)
    pinned: dict[int, None] = {}
    rest = dict.fromkeys(range(problem.num_items))
    used = 0
    largest = max(loads, default=0)
    if held * largest > capacity:
        raise MovementError(
            f"GeePS needs room for {held} times the largest load, {held * largest} bytes, before "
            f"it pins anything, but there are {capacity}: pin_by_dynamic_program may do with less",
            least_bytes=held * largest,
        )

    def pin(item: int) -> None:
        nonlocal used
        pinned[item] = None
        del rest[item]
        used += sizes[item]
        for number in problem.users[item]:
            loads[number] -= sizes[item]

    while rest:
        largest = max(loads, default=0)
        if used + sum(sizes[i] for i in rest) + held * largest <= capacity:
            pinned.update(rest)
            break
        before = len(pinned)
        if loads:
            _pin_at_peak(problem, loads, rest, used, pin)
        if len(pinned) == before:
            for item in list(rest):
                if used + sizes[item] + held * largest <= capacity:
                    pin(item)
        if len(pinned) == before:
            break
    found = frozenset(pinned)
    return Pinning(pinned=found, saved_bytes=problem.saved_bytes(found), bound_bytes=math.inf)


def _pin_at_peak(
    problem: PinningProblem,
    loads: list[int],
    rest: dict[int, None],
    used: int,
    pin: Callable[[int], None],
) -> None:
    """Pin the first item of the largest window that fits with what is then the largest load."""
    peak = loads.index(max(loads))
    second = max((load for number, load in enumerate(loads) if number != peak), default=0)
    for item in problem.windows[peak].items:
        if item not in rest:
            continue
        size = problem.sizes[item]
        then = max(loads[peak] - size, second)
        if used + size + problem.num_held * then <= problem.capacity_bytes:
            pin(item)
            return
