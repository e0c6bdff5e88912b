"""Search within a memory budget: Lagrangian bounds, then methods that close the gap.

In: a problem with budgets whose elimination fits the table cap. Out, on the ``Progress``: the
optimum, or the best found and a bound, or the least feasible budget. The steps, which end as soon
as the gap is closed: check that the budget is feasible; find the best prices; solve the ILP over
the choices seen so far; mix expensive and frugal assignments; remove choices that no better
assignment has; branch a little on L; solve the ILP over the rest; branch on L to the end.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
from collections.abc import Sequence

import numpy as np

from autopar.search import ilp
from autopar.search.lagrangian import Lagrangian, Point
from autopar.search.problem import Array
from autopar.search.reduction import Reduction, compose, reduce_problem
from autopar.search.solver import OutOfTimeError, Progress

_POOL_SHARE = 0.35  # of the time left, for the ILP over the choices seen so far
_POOL_LIMIT_S = 20.0
_POOL_GAP = 1e-4
_FIRST_SHARE = 0.5  # of the time left, for the branches before the ILP over all choices
_FIRST_BRANCHES = 256


def solve_with_budget(reduction: Reduction, progress: Progress, *, use_ilp: bool) -> None:
    """Close the gap as far as time allows; raises ``TableTooLargeError`` above the cap."""
    progress.enter("lagrangian")
    dual = Lagrangian(reduction, progress)
    if not _is_feasible(dual, progress):
        return
    best = dual.maximise()
    if use_ilp and not progress.done:
        _by_pool(dual, best, progress)
    if not progress.done:
        dual.mix()
    if progress.done:
        return
    left = dual.fix(best) if progress.assignment else reduction
    if left is None:
        progress.raise_bound(progress.cost)
        return
    floor = progress.cost if progress.assignment else math.inf
    if use_ilp:
        first_s = _FIRST_SHARE * progress.remaining_s
        with progress.limited_to(first_s), contextlib.suppress(OutOfTimeError):
            branch_and_bound(left, progress, best.prices, floor, max_branches=_FIRST_BRANCHES)
        if not progress.done:
            _by_ilp(left, progress)
    if not progress.done:
        branch_and_bound(left, progress, best.prices, floor)


def _is_feasible(dual: Lagrangian, progress: Progress) -> bool:
    """Offer the assignment of least memory; report a budget that is infeasible."""
    frugal = dual.least_memory([1.0] * len(dual.groups))
    progress.offer(dual.reduction.lift(frugal))
    if progress.assignment:
        return True
    budgets = dual.problem.budgets
    assert budgets is not None
    least = dual.least_of_each_group()
    if all(used <= budgets[g] for g, used in zip(dual.groups, least)):
        return True
    report_least_budget(dual.reduction, progress)
    return False


def report_least_budget(reduction: Reduction, progress: Progress) -> None:
    """Prove INFEASIBLE, with the least number of bytes per group that would be feasible."""
    left_s = None if math.isinf(progress.remaining_s) else max(1.0, progress.remaining_s)
    least = ilp.least_budget(reduction.problem, left_s)
    if least is None:
        progress.prove_infeasible("no assignment fits the memory budget")
    else:
        progress.prove_infeasible(f"the least feasible budget is {least:.6g} bytes", least)


def _by_pool(dual: Lagrangian, best: Point, progress: Progress) -> None:
    """The ILP over the choices that matter at the best prices: gives assignments, but no bound."""
    pool = reduce_within(dual.pool(best), progress)
    if pool is not None:
        progress.enter("ilp")
        with progress.limited_to(min(_POOL_LIMIT_S, _POOL_SHARE * progress.remaining_s)):
            ilp.solve_reduced(pool, progress, floor=-math.inf, gap=_POOL_GAP)


def _by_ilp(left: Reduction, progress: Progress) -> None:
    """The ILP over all remaining choices."""
    smaller = reduce_within(left, progress)
    floor = progress.cost
    if smaller is None:
        progress.raise_bound(floor)
    elif ilp.IlpSolver().refuses(smaller.problem, progress.options) is None:
        progress.enter("ilp")
        ilp.solve_reduced(smaller, progress, floor=floor, relax_first=False)


def reduce_within(outer: Reduction, progress: Progress) -> Reduction | None:
    """Reduce a reduction once more; None if no assignment is left."""
    inner = reduce_problem(outer.problem, check=progress.check)
    if inner is None:
        return None
    keep = tuple(kept[more] for kept, more in zip(outer.keep, inner.keep))
    return Reduction(problem=inner.problem, keep=keep)


def branch_and_bound(
    root: Reduction,
    progress: Progress,
    prices: Sequence[float],
    floor: float,
    *,
    max_branches: int | None = None,
) -> None:
    """Split the choices of one node at a time, the branch with the smallest L first.

    floor: a bound on all assignments outside ``root``. Ends after ``max_branches``, with a bound.
    """
    progress.enter("branch_and_bound")
    count, num_branches = itertools.count(), 0
    heap: list[tuple[float, int, Reduction, tuple[float, ...]]] = []
    heapq.heappush(heap, (progress.bound, next(count), root, tuple(prices)))
    while heap:
        bound = heap[0][0]
        progress.raise_bound(min(bound, floor, progress.cost))
        if progress.done or (max_branches is not None and num_branches == max_branches):
            return
        num_branches += 1
        _, _, branch, start = heapq.heappop(heap)
        dual = Lagrangian(branch, progress, floor=-math.inf)
        if not _can_fit(dual):
            continue
        best = dual.maximise(start)
        if progress.remaining_s <= 0:
            return
        if best.value >= progress.cost:
            continue
        for masks in _split(dual, best):
            heapq.heappush(heap, (best.value, next(count), compose(branch, masks), best.prices))
    if progress.assignment:
        progress.raise_bound(min(floor, progress.cost))
    else:
        report_least_budget(root, progress)


def _can_fit(dual: Lagrangian) -> bool:
    """Offer the branch's assignment of least memory; False if some group can never fit."""
    budgets, frugal = dual.problem.budgets, dual.least_memory([1.0] * len(dual.groups))
    if dual.problem.cost(frugal) == math.inf:
        return False
    assert budgets is not None
    if dual.problem.fits(frugal):
        dual.progress.offer(dual.reduction.lift(frugal))
        return True
    least = dual.least_of_each_group()
    return all(used <= budgets[g] for g, used in zip(dual.groups, least))


def _split(dual: Lagrangian, best: Point) -> list[list[Array]]:
    """Two sets of masks that partition the branch's assignments; none if only one is left."""
    sizes = [len(cost) for cost in dual.problem.node_costs]
    open_nodes = [node for node, size in enumerate(sizes) if size > 1]
    if not open_nodes:
        return []
    ends = dual.ends()
    costly = best if ends is None else ends[0]
    other = best if ends is None else ends[1]
    memory = dual.problem.node_memory
    assert memory is not None

    def weight(node: int) -> tuple[bool, float]:
        first, second = costly.assignment[node], other.assignment[node]
        return first != second, float(abs(memory[node][first] - memory[node][second]))

    node = max(open_nodes, key=weight)
    taken = np.arange(sizes[node]) == costly.assignment[node]
    whole = [np.ones(size, dtype=bool) for size in sizes]
    return [[*whole[:node], mask, *whole[node + 1 :]] for mask in (taken, ~taken)]
