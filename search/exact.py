"""The elimination solver: the order of least work, and one elimination.

In: any problem whose tables fit the cap. Out: the proved optimum; under a memory budget by branch
and bound on Lagrangian bounds, each of which is an elimination.
"""

from __future__ import annotations

import math

from autopar.search.budget import solve_with_budget
from autopar.search.elimination import Program, best_program
from autopar.search.local_search import cheapest_choices, descend
from autopar.search.problem import Method, Problem
from autopar.search.reduction import reduce_problem
from autopar.search.solver import Capability, Options, Progress

_LONG = 1e8  # operations of about a tenth of a second


class EliminationSolver:
    """PaSE's recurrence over the best of several orders."""

    method = Method.ELIMINATION
    capability = Capability(memory=True, proves=True, bounds=True)

    def refuses(self, problem: Problem, options: Options) -> str | None:
        """Refuse tables above the cap."""
        program = best_program(problem.node_costs, problem.edge_costs)
        if program.size_bytes <= options.table_cap_bytes:
            return None
        return f"{program.size_bytes:.3g} bytes of tables, over {options.table_cap_bytes:.3g}"

    def run(self, problem: Problem, progress: Progress) -> None:
        """Eliminate; if the optimum exceeds the budget, branch on Lagrangian bounds."""
        program = best_program(problem.node_costs, problem.edge_costs)
        eliminate(problem, program, progress)
        if progress.done or problem.budgets is None:
            return
        reduction = reduce_problem(problem, check=progress.check)
        assert reduction is not None, "an assignment of finite cost exists"
        solve_with_budget(reduction, progress, use_ilp=False)


def eliminate(problem: Problem, program: Program, progress: Progress) -> None:
    """The optimum without the budget: a bound, and the answer if it fits the budget."""
    progress.enter(Method.ELIMINATION)
    if program.num_operations > _LONG and math.isfinite(progress.remaining_s):
        start = progress.assignment or cheapest_choices(problem)
        progress.offer(descend(problem, start, progress))
    cap_bytes = progress.options.table_cap_bytes
    values = program.run(problem.node_costs, problem.edge_costs, cap_bytes, progress.check)
    if values.optimum == math.inf:
        progress.prove_infeasible("every assignment holds a forbidden choice or pair")
        return
    assignment = program.assignment(values)
    progress.raise_bound(min(values.optimum, problem.cost(assignment)))
    progress.offer(assignment)
    if problem.fits(assignment):
        progress.raise_bound(progress.cost)
