"""The best sharding on each mesh: exact, or within a memory budget.

In: priced graphs and constraints. Out: a `Candidate` for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from autopar.base.errors import ConstraintError
from autopar.cost_models import Cluster
from autopar.ir.mesh import Mesh
from autopar.passes.prepare import Cut
from autopar.planning.constraints import Constraint, narrow
from autopar.planning.deadline import NEVER, Deadline
from autopar.planning.setting import Setting
from autopar.pricing.candidate import Candidate
from autopar.pricing.problem import WHOLE, PricedGraph, Residence, price_graph
from autopar.pricing.step_time import time_parts
from autopar.search import Solution, Status, solve

SEARCH_LIMIT_S = 60.0
BUDGET_GAP = 5e-3


def search_meshes(
    setting: Setting, cut: Cut, meshes: Sequence[Mesh], deadline: Deadline = NEVER
) -> list[Candidate]:
    """The best strategies on each mesh without a memory limit; raises ConstraintError if none.

    After the ``deadline`` meshes are left out; of several axes, first those whose last one is least
    like a node.
    """
    found: list[Candidate] = []
    for mesh in sorted(meshes, key=lambda mesh: _unlike_a_node(setting.cluster, mesh)):
        if found and deadline.is_over:
            break
        setting.progress(f"search on mesh {mesh}")
        priced = price_graph(setting.pricing(cut, mesh))
        for exposed in setting.exposures:
            candidate = search_priced(
                priced,
                setting.constraints,
                exposed,
                released=setting.space.reshard_after_forward is True,
                scattered=setting.space.reduce_every_microbatch is True,
            )
            found.append(candidate)
            if _is_an_option(setting, candidate):
                setting.progress.found(time_parts(candidate).step_s)
    return sorted(found, key=lambda candidate: meshes.index(candidate.mesh))


def _unlike_a_node(cluster: Cluster, mesh: Mesh) -> float:
    """How far the last of several axes is from the devices of a node, in powers of two."""
    if mesh.num_axes == 1:
        return 0.0
    in_node = cluster.num_devices / max(cluster.num_nodes, 1)
    return abs(math.log2(mesh.axis_sizes[-1] / in_node))


def _is_an_option(setting: Setting, candidate: Candidate) -> bool:
    """Whether a candidate may be the plan as it is, as far as estimates say."""
    is_plain = setting.space.pipeline is None and not setting.space.recompute.is_fixed
    return is_plain and candidate.is_found and candidate.estimated_bytes() <= setting.budget_bytes


def search_priced(
    priced: PricedGraph,
    constraints: Sequence[Constraint],
    exposed: float = 1.0,
    *,
    released: bool = False,
    scattered: bool = False,
) -> Candidate:
    """The best strategy on one mesh without a memory limit; raises ConstraintError if none.

    ``released``: all gathered parameters are released after each pass; ``scattered``: all gradients
    that can be are reduce-scattered in every micro-batch.
    """
    problem = priced.problem(
        narrow(priced, constraints), exposed=exposed, released=released, scattered=scattered
    )
    solution = solve(problem, time_limit_s=SEARCH_LIMIT_S)
    if solution.status is Status.INFEASIBLE:
        names = " and ".join(map(str, constraints)) or "the placements"
        raise ConstraintError(f"no strategy satisfies {names} together; remove one of them")
    return _candidate(priced, solution, exposed, released, scattered)


def _candidate(
    priced: PricedGraph, solution: Solution, exposed: float, released: bool, scattered: bool
) -> Candidate:
    parameters, none = priced.parameters(), frozenset[int]()
    return Candidate(
        priced=priced, solution=solution, exposed=exposed,
        released=parameters if released else none, scattered=parameters if scattered else none,
    )  # fmt: skip


def search_within(
    setting: Setting,
    candidates: Sequence[Candidate],
    budget_bytes: float,
    residence: Residence = WHOLE,
    cutoff_s: float = math.inf,
    *,
    released: bool = False,
    scattered: bool = False,
    deadline: Deadline = NEVER,
) -> list[Candidate]:
    """Search the meshes of ``candidates`` again under a budget, the most promising first.

    A search is cut off at ``cutoff_s`` and at the cost found on an earlier mesh. Each mesh is
    searched with the exposed fraction that was better without the budget. A result may have no
    strategy. After the ``deadline`` the other meshes are left out.
    """
    found: list[Candidate] = []
    cutoffs_s = {candidate.exposed: cutoff_s for candidate in candidates}
    better: dict[PricedGraph, float] = {}
    for candidate in sorted(candidates, key=rank):
        better.setdefault(candidate.priced, candidate.exposed)
    for priced, exposed in better.items():
        if found and deadline.is_over:
            break
        problem = priced.problem(
            narrow(priced, setting.constraints), budget_bytes, exposed, residence,
            released=released, scattered=scattered,
        )  # fmt: skip
        solution = solve(
            problem, time_limit_s=setting.budget_limit_s, gap=BUDGET_GAP, cutoff=cutoffs_s[exposed]
        )
        cutoffs_s[exposed] = min(cutoffs_s[exposed], solution.cost * (1 - BUDGET_GAP))
        found.append(_candidate(priced, solution, exposed, released, scattered))
    return found


def least_budget(tried: Sequence[Candidate]) -> float:
    """The smallest estimated budget that is feasible on some mesh, plus a rounding margin."""
    return min(_least_budgets(tried), default=math.inf) * (1 + 1e-9)


def _least_budgets(tried: Sequence[Candidate]) -> Iterator[float]:
    for candidate in tried:
        if candidate.solution.least_feasible_budget is not None:
            yield candidate.solution.least_feasible_budget


def cheapest(candidates: Sequence[Candidate]) -> Candidate:
    """The fastest candidate; ties (within rounding) go to fewer axes, then to a fixed order."""
    return min(candidates, key=rank)


def rank(candidate: Candidate) -> tuple[float, int, tuple[int, ...]]:
    """Sort key of candidates without a pipeline, deterministic among equally fast ones."""
    return ranked(time_parts(candidate).step_s, candidate.mesh) if candidate.is_found else _LAST


def ranked(time_s: float, mesh: Mesh) -> tuple[float, int, tuple[int, ...]]:
    """Sort key: time to nine digits, then fewer axes, then smaller outer axes."""
    return float(f"{time_s:.9g}"), mesh.num_axes, mesh.axis_sizes


_LAST = (math.inf, 0, ())
