"""Variants of a problem that differ in node costs only: compiled once, solved one by one.

In: a problem, and for each variant the costs of every node (+inf where the variant rules out a
choice, as a known strategy does). Out: one ``Solution`` per variant, equal to that of ``solve``.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.search.api import solve
from autopar.search.elimination import best_program
from autopar.search.exact import eliminate
from autopar.search.problem import Array, Problem, SearchError, Solution
from autopar.search.solver import Options, OutOfTimeError, Progress

_MOST_OPERATIONS = 1e9  # above this, it is better to reduce each variant first


def solve_each(
    problem: Problem,
    variants: Sequence[Sequence[Array]],
    *,
    time_limit_s: float | None = None,
) -> list[Solution]:
    """The best assignment under each variant's node costs.

    Arrays that are shared by many nodes in all variants are eliminated once, as in ``Problem``.
    time_limit_s: for each variant. Raises ``SearchError`` for a problem with constraints.
    """
    if problem.constraints:
        raise SearchError("variants cannot have constraints: write +inf into their costs instead")
    if not variants:
        return []
    keys = [tuple(id(costs[node]) for costs in variants) for node in range(problem.num_nodes)]
    program = best_program(problem.node_costs, problem.edge_costs, keys)
    options = Options(time_limit_s=time_limit_s)
    suits = (
        problem.budgets is None
        and program.num_operations <= _MOST_OPERATIONS
        and program.size_bytes <= options.table_cap_bytes
    )
    found = []
    for costs in variants:
        variant = problem.with_node_costs(costs)
        if not suits:
            found.append(solve(variant, time_limit_s=time_limit_s))
            continue
        progress = Progress(variant, options)
        try:
            eliminate(variant, program, progress)
        except OutOfTimeError:
            progress.note = "stopped by the time limit"
        found.append(progress.solution())
    return found
