"""Pinning as an integer program: the optimum, or a bound on it, and the least capacity.

Variables: x_i = 1 if item i is pinned, and the largest load P. Constraints: the pinned bytes plus
k P are at most the capacity; the load of each window is at most P. Bytes are scaled so that the
capacity is 1.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from autopar.base.errors import MovementError
from autopar.movement.pinning.problem import Pinning, PinningProblem
from autopar.search.linear import CONSTRAINT_SLACK, LinearProgram, LinearResult
from autopar.search.linear_solver import solve_linear


def pin_by_program(
    problem: PinningProblem, *, relative_gap: float = 0.0, time_limit_s: float | None = None
) -> Pinning:
    """The best pinned set, by HiGHS. Raises MovementError for an infeasible capacity.

    If time runs out, the set is the best one found, or the `smallest_fitting` one if none was; the
    bound is valid.
    """
    scale = max(problem.savings, default=0) or 1
    costs = [-saved / scale for saved in problem.savings]
    bound = math.inf
    for slack in (0.0, CONSTRAINT_SLACK):
        program = _program(problem, np.array([*costs, 0.0]), (1 - slack))
        result = solve_linear(program, relative_gap=relative_gap, time_limit_s=time_limit_s)
        if not slack and not result.infeasible:
            bound = -result.bound * scale
        pinned = _pinned(result)
        if pinned is None or problem.fits(pinned):
            break
    if pinned is None or not problem.fits(pinned):
        pinned = smallest_fitting(problem)
    saved = problem.saved_bytes(pinned)
    near = bound - saved <= 1e-9 * max(bound, 1.0)
    return Pinning(pinned=pinned, saved_bytes=saved, bound_bytes=saved if near else bound)


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


def smallest_fitting(problem: PinningProblem) -> frozenset[int]:
    """The `smallest_set`. Raises MovementError if even that exceeds the capacity."""
    pinned = smallest_set(problem)
    if problem.fits(pinned):
        return pinned
    least = problem.needed_bytes(pinned)
    raise MovementError(
        f"no set of pinned tensors keeps within {problem.capacity_bytes} bytes, as operations need "
        f"their tensors on the device: allow at least {least} bytes, or compute smaller "
        "micro-batches",
        least_bytes=least,
    )


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
