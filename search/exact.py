"""The elimination solver: the least-work order, one elimination, and a Lagrangian under a budget.

In: any problem whose tables fit the cap. Out: the optimum with its proof.
"""

from __future__ import annotations

import math

from autopar.search.elimination import Tables, eliminate
from autopar.search.ordering import best_order
from autopar.search.problem import Method, Problem, SearchError
from autopar.search.solver import Capability, Options, Progress


class EliminationSolver:
    """PaSE's recurrence over the best of several orders."""

    method = Method.ELIMINATION
    capability = Capability(memory=False, proves=True, bounds=True)

    def refuses(self, problem: Problem, options: Options) -> str | None:
        """A table over the cap whatever the order."""
        order = best_order([len(cost) for cost in problem.node_costs], problem.edge_costs)
        size_bytes = 8 * order.largest_table
        if size_bytes <= options.table_cap_bytes:
            return None
        return f"a table of {size_bytes:.3g} bytes is over {options.table_cap_bytes:.3g}"

    def run(self, problem: Problem, progress: Progress) -> None:
        """Eliminate; the optimum is also the bound."""
        progress.enter(self.method)
        order = best_order([len(cost) for cost in problem.node_costs], problem.edge_costs)
        tables = Tables(cap_bytes=progress.options.table_cap_bytes)
        found = eliminate(problem.node_costs, problem.edge_costs, order, tables)
        if found.optimum == math.inf:
            progress.prove_infeasible("every assignment holds a forbidden choice or pair")
            return
        assignment = found.assignment()
        progress.raise_bound(min(found.optimum, problem.cost(assignment)))
        if not progress.offer(assignment) and not problem.fits(assignment):
            raise SearchError("the unconstrained optimum is over the memory budget")
