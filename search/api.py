"""``solve``: applies the constraints, chooses a solver, and returns its answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autopar.search.auto import AutoSolver
from autopar.search.brute_force import BruteForce
from autopar.search.constraints import apply_constraints
from autopar.search.exact import EliminationSolver
from autopar.search.ilp import IlpSolver
from autopar.search.local_search import cheapest_choices, frugal_choices
from autopar.search.mcmc import McmcSolver
from autopar.search.problem import Method, Problem, SearchError, Solution
from autopar.search.solver import Options, OutOfTimeError, Progress, Solver

SOLVERS: dict[Method, Solver] = {
    Method.AUTO: AutoSolver(),
    Method.ELIMINATION: EliminationSolver(),
    Method.ILP: IlpSolver(),
    Method.BRUTE_FORCE: BruteForce(),
    Method.MCMC: McmcSolver(),
}


def solve(
    problem: Problem,
    *,
    method: str = "auto",
    time_limit_s: float | None = None,
    gap: float = 0.0,
    cutoff: float = math.inf,
    table_cap_bytes: float = 1 << 30,
    warm_start: Sequence[int] | None = None,
    max_steps: int | None = None,
    seed: int = 0,
    on_incumbent: Callable[[Solution], None] | None = None,
) -> Solution:
    """Find the cheapest assignment within the memory budget.

    method: ``auto``, ``elimination``, ``ilp``, ``brute_force`` or ``mcmc``. The other arguments are
    those of ``solver.Options``. Raises ``SearchError`` for an unknown method and for a problem that
    the method cannot handle (``auto`` handles all).
    """
    options = Options(
        time_limit_s=time_limit_s,
        gap=gap,
        cutoff=cutoff,
        table_cap_bytes=table_cap_bytes,
        warm_start=warm_start,
        max_steps=max_steps,
        seed=seed,
        on_incumbent=on_incumbent,
    )
    try:
        wanted = Method(method)
    except ValueError:
        names = ", ".join(repr(str(each)) for each in Method)
        raise SearchError(f"unknown method {method!r}; use one of {names}") from None
    problem = apply_constraints(problem)
    solver = SOLVERS[wanted]
    refusal = solver.refuses(problem, options)
    if refusal is not None:
        raise SearchError(f"method {str(wanted)!r} cannot handle this problem: {refusal}")
    progress = Progress(problem, options)
    if warm_start is not None:
        progress.offer(warm_start)
    if time_limit_s is not None:
        _offer_start(problem, progress)
    try:
        solver.run(problem, progress)
    except OutOfTimeError:
        progress.note = "stopped by the time limit"
    return progress.solution()


def _offer_start(problem: Problem, progress: Progress) -> None:
    """Offer two assignments without a search: the cheapest choices, and those of least memory."""
    progress.offer(cheapest_choices(problem))
    if problem.budgets is not None:
        progress.offer(frugal_choices(problem))
