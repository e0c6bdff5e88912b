"""``auto``: combines the solvers, cheapest first, and keeps the best assignment so far.

In: any problem. Out: the optimum if it is affordable, else the best found and a valid bound.

1. Elimination, if its tables fit the cap and its work is small; reductions first if they cost less
   than they save.
2. If the optimum exceeds the budget: Lagrangian bounds, ILP, branch and bound (``budget``).
3. If the graph is too dense to eliminate: message-passing bounds alternate with local search;
   choices that are ruled out are removed, and elimination is tried again on the rest; then the ILP.
"""

from __future__ import annotations

import math

from autopar.search import ilp
from autopar.search.budget import reduce_within, report_least_budget, solve_with_budget
from autopar.search.elimination import Program, best_program
from autopar.search.exact import eliminate
from autopar.search.linear import LinearSolverError
from autopar.search.local_search import cheapest_choices, descend, frugal_choices, improve
from autopar.search.mcmc import McmcSolver
from autopar.search.messages import Messages
from autopar.search.problem import Method, Problem
from autopar.search.reduction import Reduction, compose, dominance_operations, reduce_problem
from autopar.search.solver import Capability, Options, OutOfTimeError, Progress

_OPERATIONS_PER_S = 1e9
_MOST_OPERATIONS = 2e10  # without a time limit
_SOON = 1e9  # operations of about a second: not worth reducing first
_ROUNDS = 12
_SWEEPS = 40
_STALL = 1e-4
_VARIABLES_PER_S = 2e5  # rate at which the ILP is built, before it can check the clock
_REDUCE_SHARE = 0.3  # of the time left


class AutoSolver:
    """All methods, the cheapest proof first."""

    method = Method.AUTO
    capability = Capability(memory=True, proves=True, bounds=True)

    def refuses(self, problem: Problem, options: Options) -> str | None:
        """Nothing is refused."""
        return None

    def run(self, problem: Problem, progress: Progress) -> None:
        """See the module's docstring; if HiGHS fails, the best assignment so far is kept."""
        try:
            _search(problem, progress)
        except LinearSolverError as error:
            if not progress.assignment:
                raise
            progress.note = str(error)


def _search(problem: Problem, progress: Progress) -> None:
    if problem.budgets is not None and _is_too_small(problem, progress):
        return
    program = best_program(problem.node_costs, problem.edge_costs)
    worthwhile = max(_SOON, 2 * dominance_operations(problem))
    if program.num_operations <= worthwhile and _affordable(program, progress):
        eliminate(problem, program, progress)
        if progress.done or problem.budgets is None:
            return
    try:
        with progress.limited_to(_REDUCE_SHARE * progress.remaining_s):
            reduction = reduce_problem(problem, check=progress.check)
    except OutOfTimeError:  # dominance compares all pairs of choices, for which there is no time
        reduction = reduce_problem(problem, dominance=False)
    if reduction is None:
        progress.prove_infeasible("every assignment has a forbidden choice or pair")
        return
    program = best_program(reduction.problem.node_costs, reduction.problem.edge_costs)
    if not _affordable(program, progress):
        _dense(reduction, progress)
        return
    if progress.bound == -math.inf:
        eliminate_reduced(reduction, program, progress)
    if not progress.done and problem.budgets is not None:
        solve_with_budget(reduction, progress, use_ilp=True)


def _is_too_small(problem: Problem, progress: Progress) -> bool:
    """Whether even the choices of least memory exceed the budget, which proves it infeasible."""
    frugal = frugal_choices(problem)
    used = problem.memory(frugal)
    if len(used) != 1 or problem.fits(frugal) or problem.cost(frugal) == math.inf:
        return False
    progress.prove_infeasible(f"the least feasible budget is {used[0]:.6g} bytes", used[0])
    return True


def _affordable(program: Program, progress: Progress) -> bool:
    if program.size_bytes > progress.options.table_cap_bytes:
        return False
    most = min(_MOST_OPERATIONS, _OPERATIONS_PER_S * 0.5 * progress.remaining_s)
    return program.num_operations <= most


def eliminate_reduced(reduction: Reduction, program: Program, progress: Progress) -> None:
    """Eliminate a reduced problem; ``progress`` is that of the original one."""
    progress.enter(Method.ELIMINATION)
    inner = reduction.problem
    if not progress.assignment:
        progress.offer(reduction.lift(descend(inner, cheapest_choices(inner), progress)))
    cap_bytes = progress.options.table_cap_bytes
    values = program.run(inner.node_costs, inner.edge_costs, cap_bytes, progress.check)
    if values.optimum == math.inf:
        progress.prove_infeasible("every assignment has a forbidden choice or pair")
        return
    assignment = reduction.lift(program.assignment(values))
    progress.raise_bound(min(values.optimum, progress.problem.cost(assignment)))
    progress.offer(assignment)
    if progress.problem.fits(assignment):
        progress.raise_bound(progress.cost)


def _dense(reduction: Reduction, progress: Progress) -> None:
    """Alternate bounds and assignments until the rest can be eliminated or given to the ILP."""
    if progress.problem.budgets is None:
        left = _squeeze(reduction, progress)
        if left is None or progress.done:
            return
        reduction = left
    else:
        if not reduction.problem.fits(frugal_choices(reduction.problem)):
            report_least_budget(reduction, progress)  # infeasible even without forbidden pairs
            return
        _start_within_budget(reduction, progress)
        if progress.done:
            return
    floor = progress.cost if progress.problem.budgets is None else math.inf
    refusal = ilp.IlpSolver().refuses(reduction.problem, progress.options)
    in_time = ilp.num_edge_variables(reduction.problem) <= _VARIABLES_PER_S * progress.remaining_s
    if refusal is None and in_time:
        progress.enter(Method.ILP)
        ilp.solve_reduced(reduction, progress, floor=floor)


def _start_within_budget(reduction: Reduction, progress: Progress) -> None:
    """Start from the assignment of least memory, a bound that ignores the budget, and a chain."""
    progress.offer(reduction.lift(frugal_choices(reduction.problem)))
    progress.enter("messages")
    with progress.limited_to(0.2 * progress.remaining_s):
        _sweep(Messages(reduction.problem), reduction, progress, math.inf)
    progress.enter(Method.MCMC)
    with progress.limited_to(0.2 * progress.remaining_s):
        McmcSolver().run(progress.problem, progress)


def _squeeze(reduction: Reduction, progress: Progress) -> Reduction | None:
    """Message passing and local search; None if they closed the gap, else the rest."""
    progress.enter("messages")
    current = reduction.lower(progress.assignment) if progress.assignment else None
    best = descend(reduction.problem, current or cheapest_choices(reduction.problem), progress)
    progress.offer(reduction.lift(best))
    for _ in range(_ROUNDS):
        before = progress.bound
        messages = Messages(reduction.problem)
        floor = progress.cost if progress.assignment else math.inf
        _sweep(messages, reduction, progress, floor)
        if progress.done:
            return None
        if progress.assignment:
            left = compose_possible(messages, reduction, progress)
            if left is None:
                progress.raise_bound(progress.cost)
                return None
            program = best_program(left.problem.node_costs, left.problem.edge_costs)
            if _affordable(program, progress):
                _finish(left, program, progress)
                return None
            shrunk = _num_choices(left) < _num_choices(reduction)
            reduction = left
            if not shrunk and progress.bound - before <= _STALL * abs(progress.cost):
                break
    return reduction


def _sweep(messages: Messages, reduction: Reduction, progress: Progress, floor: float) -> None:
    """Sweep until the bound stalls, and decode and improve an assignment every few sweeps."""
    last = -math.inf
    for sweep in range(_SWEEPS):
        messages.sweep(forward=True)
        messages.sweep(forward=False)
        if sweep % 5 and sweep != _SWEEPS - 1:
            if progress.remaining_s <= 0:
                return
            continue
        bound = messages.bound()
        progress.raise_bound(min(bound, floor))
        best = descend(reduction.problem, messages.decode(), progress)
        progress.offer(reduction.lift(best))
        if progress.done or bound - last <= 1e-6 * abs(bound):
            break
        last = bound
    if progress.done or not progress.assignment or progress.problem.budgets is not None:
        return
    start = reduction.lower(progress.assignment) or best
    until_s = progress.elapsed_s + min(5.0, 0.2 * progress.remaining_s)
    improve(
        reduction.problem,
        progress,
        lambda better: progress.offer(reduction.lift(better)),
        start,
        until_s=until_s,
    )


def compose_possible(
    messages: Messages, reduction: Reduction, progress: Progress
) -> Reduction | None:
    """The choices possible below the best known cost, reduced again; None if there are none."""
    masks = messages.possible(progress.cost)
    if not all(mask.any() for mask in masks):
        return None
    return reduce_within(compose(reduction, masks), progress)


def _finish(left: Reduction, program: Program, progress: Progress) -> None:
    """Eliminate the rest; everything else costs at least as much as the best known."""
    progress.enter(Method.ELIMINATION)
    inner = left.problem
    cap_bytes = progress.options.table_cap_bytes
    values = program.run(inner.node_costs, inner.edge_costs, cap_bytes, progress.check)
    if values.optimum < math.inf:
        progress.offer(left.lift(program.assignment(values)))
    progress.raise_bound(progress.cost)


def _num_choices(reduction: Reduction) -> int:
    return sum(len(kept) for kept in reduction.keep)
