"""Enumeration of all assignments: the tests' oracle, and a solver for tiny problems.

In: a problem of at most ``LIMIT`` assignments. Out: the optimum; ties go to the first in
lexicographic order.
"""

from __future__ import annotations

import itertools
import math

from autopar.search.problem import Method, Problem
from autopar.search.solver import Capability, Options, Progress

LIMIT = 2_000_000


class BruteForce:
    """Enumerate all assignments."""

    method = Method.BRUTE_FORCE
    capability = Capability(memory=True, proves=True, bounds=False)

    def refuses(self, problem: Problem, options: Options) -> str | None:
        """Refuse more than ``LIMIT`` assignments."""
        count = math.prod(len(cost) for cost in problem.node_costs)
        return None if count <= LIMIT else f"{count:.3g} assignments, over {LIMIT}"

    def run(self, problem: Problem, progress: Progress) -> None:
        """Offer each assignment in lexicographic order."""
        progress.enter(self.method)
        least = math.inf
        sizes = [range(problem.num_choices(node)) for node in range(problem.num_nodes)]
        for assignment in itertools.product(*sizes):
            if progress.remaining_s <= 0:
                return
            progress.offer(assignment)
            if problem.budgets is not None and problem.cost(assignment) < math.inf:
                least = min(least, max(problem.memory(assignment)))
        if progress.cost < math.inf:
            progress.raise_bound(progress.cost)
        elif least < math.inf:
            progress.prove_infeasible("the memory budget is below the least feasible one", least)
        else:
            progress.prove_infeasible("every assignment holds a forbidden choice or pair")
