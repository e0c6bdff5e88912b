"""Pinning as an integer program: the optimum, or a bound on it, and the least capacity.

Variables: x_i = 1 if item i is pinned, and the largest load P. Constraints: the pinned bytes plus
k P are at most the capacity; the load of each window is at most P. Bytes are scaled so that the
capacity is 1.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from autopar.movement.pinning.problem import Pinning, PinningProblem, infeasible
from autopar.search.mathopt import LinearProgram, LinearResult, solve_linear

_SLACK = 2e-6  # more than the solver's tolerance on a constraint


def pin_by_program(
    problem: PinningProblem, *, relative_gap: float = 0.0, time_limit_s: float | None = None
) -> Pinning:
    """The best pinned set, by HiGHS. Raises MovementError for an infeasible capacity.

    If time runs out, the set is the best one found (empty if none was), and the bound is valid.
    """
    scale = max(problem.savings, default=0) or 1
    costs = [-saved / scale for saved in problem.savings]
    bound = math.inf
    for slack in (0.0, _SLACK):
        program = _program(problem, np.array([*costs, 0.0]), (1 - slack))
        result = solve_linear(program, relative_gap=relative_gap, time_limit_s=time_limit_s)
        if result.infeasible:
            break
        bound = min(bound, -result.bound * scale) if not slack else bound
        pinned = _pinned(result)
        if pinned is not None and problem.fits(pinned):
            saved = problem.saved_bytes(pinned)
            near = bound - saved <= 1e-9 * max(bound, 1.0)
            return Pinning(
                pinned=pinned,
                saved_bytes=saved,
                bound_bytes=saved if near else bound,
                method="integer program",
            )
        if pinned is None:
            return Pinning(pinned=frozenset(), saved_bytes=0, bound_bytes=bound, method="none")
    raise infeasible(problem, least_capacity(problem))


def least_capacity(problem: PinningProblem) -> int:
    """The least capacity for which some set may be pinned."""
    return problem.needed_bytes(smallest_set(problem))


def smallest_set(problem: PinningProblem) -> frozenset[int]:
    """The pinned set that needs the least capacity, as pinning makes the largest load smaller."""
    capacity = problem.num_held * max(problem.full_loads, default=0)
    if not capacity:
        return frozenset()
    sizes = [size / capacity for size in problem.sizes]
    costs = np.array([*sizes, float(problem.num_held)])
    pinned = _pinned(solve_linear(_program(problem.with_capacity(capacity), costs, 1.0)))
    candidates = [frozenset[int](), *([pinned] if pinned is not None else [])]
    return min(candidates, key=problem.needed_bytes)


def relaxed_saving(problem: PinningProblem, low: int, high: int) -> tuple[float, float] | None:
    """The best saving with items pinned in part, and its largest load P, for P in low..high.

    It is a concave function of P. None if no such P is feasible.
    """
    scale, largest = max(problem.capacity_bytes, 1), max(problem.savings, default=0) or 1
    costs = np.array([*(-saved / largest for saved in problem.savings), 0.0])
    program = _program(problem, costs, 1.0)
    lower, upper = program.lower.copy(), program.upper.copy()
    lower[-1], upper[-1] = low / scale, high / scale
    result = solve_linear(replace(program, lower=lower, upper=upper), relaxed=True)
    if result.values is None:
        return None
    return -result.bound * largest, float(result.values[-1]) * scale


def _pinned(result: LinearResult) -> frozenset[int] | None:
    if result.values is None:
        return None
    return frozenset(np.flatnonzero(result.values[:-1] > 0.5).tolist())


def _program(problem: PinningProblem, costs: np.ndarray, limit: float) -> LinearProgram:
    """Row 0 is the capacity, row 1 + w window w: P + its pinned bytes >= its full load."""
    scale = max(problem.capacity_bytes, 1)
    sizes = np.array(problem.sizes) / scale
    num_items, num_windows = problem.num_items, len(problem.windows)
    rows = [0] * (num_items + 1)
    columns = [*range(num_items), num_items]
    coefficients = [*sizes.tolist(), float(problem.num_held)]
    for number, window in enumerate(problem.windows, start=1):
        rows += [number] * (len(window.items) + 1)
        columns += [*window.items, num_items]
        coefficients += [*(sizes[i] for i in window.items), 1.0]
    return LinearProgram(
        costs=costs,
        lower=np.zeros(num_items + 1),
        upper=np.array([1.0] * num_items + [math.inf]),
        integer=np.array([True] * num_items + [False]),
        rows=np.array(rows),
        columns=np.array(columns),
        coefficients=np.array(coefficients),
        row_lower=np.array([-math.inf, *(load / scale for load in problem.full_loads)]),
        row_upper=np.array([limit] + [math.inf] * num_windows),
        num_wanted=num_items + 1,
    )
