"""The best sharding on every mesh: exact, or within a budget of memory.

In: priced graphs and constraints. Out: a `Candidate` for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from autopar.base.errors import ConstraintError
from autopar.ir.mesh import Mesh
from autopar.passes.prepare import Cut
from autopar.planning.constraints import Constraint, narrow
from autopar.planning.setting import Setting
from autopar.pricing.candidate import Candidate
from autopar.pricing.problem import WHOLE, PricedGraph, Residence, price_graph
from autopar.pricing.step_time import time_parts
from autopar.search import Status, solve

SEARCH_LIMIT_S = 60.0
BUDGET_GAP = 5e-3


def search_meshes(setting: Setting, cut: Cut, meshes: Sequence[Mesh]) -> list[Candidate]:
    """The best strategies on each mesh, memory left out; raises ConstraintError for none."""
    found = []
    for mesh in meshes:
        setting.progress(f"search on mesh {mesh}")
        priced = price_graph(setting.pricing(cut, mesh))
        found += [
            search_priced(priced, setting.constraints, exposed) for exposed in setting.exposures
        ]
    return found


def search_priced(
    priced: PricedGraph, constraints: Sequence[Constraint], exposed: float = 1.0
) -> Candidate:
    """The best strategy on one mesh, memory left out; raises ConstraintError for none."""
    problem = priced.problem(narrow(priced, constraints), exposed=exposed)
    solution = solve(problem, time_limit_s=SEARCH_LIMIT_S)
    if solution.status is Status.INFEASIBLE:
        names = " and ".join(map(str, constraints)) or "the placements"
        raise ConstraintError(f"no strategy satisfies {names} together; drop one of them")
    return Candidate(priced=priced, solution=solution, exposed=exposed)


def search_within(
    setting: Setting,
    candidates: Sequence[Candidate],
    budget_bytes: float,
    residence: Residence = WHOLE,
    cutoff_s: float = math.inf,
) -> list[Candidate]:
    """The meshes of some candidates under a budget, the most promising first.

    A search for more than ``cutoff_s``, or for more than a mesh before it took, ends. A mesh is
    searched again in the way that was better without the budget. What is found may have no
    strategy.
    """
    found: list[Candidate] = []
    cutoffs_s = {candidate.exposed: cutoff_s for candidate in candidates}
    better: dict[PricedGraph, float] = {}
    for candidate in sorted(candidates, key=rank):
        better.setdefault(candidate.priced, candidate.exposed)
    for priced, exposed in better.items():
        problem = priced.problem(
            narrow(priced, setting.constraints), budget_bytes, exposed, residence
        )
        solution = solve(
            problem, time_limit_s=setting.budget_limit_s, gap=BUDGET_GAP, cutoff=cutoffs_s[exposed]
        )
        cutoffs_s[exposed] = min(cutoffs_s[exposed], solution.cost * (1 - BUDGET_GAP))
        found.append(Candidate(priced=priced, solution=solution, exposed=exposed))
    return found


def least_budget(tried: Sequence[Candidate]) -> float:
    """The least estimated budget that some mesh can keep (a little more, for rounding)."""
    return min(_least_budgets(tried), default=math.inf) * (1 + 1e-9)


def _least_budgets(tried: Sequence[Candidate]) -> Iterator[float]:
    for candidate in tried:
        if candidate.solution.least_feasible_budget is not None:
            yield candidate.solution.least_feasible_budget


def cheapest(candidates: Sequence[Candidate]) -> Candidate:
    """The fastest; among equals (within rounding) fewer axes, then a fixed order."""
    return min(candidates, key=rank)


def rank(candidate: Candidate) -> tuple[float, int, tuple[int, ...]]:
    """The order of candidates without a pipeline: a fixed one among those that are equally fast."""
    return ranked(time_parts(candidate).step_s, candidate.mesh) if candidate.is_found else _LAST


def ranked(time_s: float, mesh: Mesh) -> tuple[float, int, tuple[int, ...]]:
    """Times to nine digits; among equals fewer axes first, then smaller outer ones."""
    return float(f"{time_s:.9g}"), mesh.num_axes, mesh.axis_sizes


_LAST = (math.inf, 0, ())
