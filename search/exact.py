"""The elimination solver: the order of least work, and one elimination.

In: any problem whose tables fit the cap. Out: the optimum with its proof.
"""

from __future__ import annotations

import math

from autopar.search.elimination import best_program
from autopar.search.problem import Method, Problem, SearchError
from autopar.search.solver import Capability, Options, Progress


class EliminationSolver:
    """PaSE's recurrence over the best of several orders."""

    method = Method.ELIMINATION
    capability = Capability(memory=False, proves=True, bounds=True)

    def refuses(self, problem: Problem, options: Options) -> str | None:
        """Tables over the cap whatever the order."""
        program = best_program(problem.node_costs, problem.edge_costs)
        if program.size_bytes <= options.table_cap_bytes:
            return None
        return f"{program.size_bytes:.3g} bytes of tables, over {options.table_cap_bytes:.3g}"

    def run(self, problem: Problem, progress: Progress) -> None:
        """Eliminate; the optimum is also the bound."""
        progress.enter(self.method)
        program = best_program(problem.node_costs, problem.edge_costs)
        cap_bytes = progress.options.table_cap_bytes
        values = program.run(problem.node_costs, problem.edge_costs, cap_bytes)
        if values.optimum == math.inf:
            progress.prove_infeasible("every assignment holds a forbidden choice or pair")
            return
        assignment = program.assignment(values)
        progress.raise_bound(min(values.optimum, problem.cost(assignment)))
        if not progress.offer(assignment) and not problem.fits(assignment):
            raise SearchError("the unconstrained optimum is over the memory budget")
