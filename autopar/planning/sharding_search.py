"""The best sharding on each mesh: exact, or within a memory budget.

In: priced graphs and constraints. Out: a `Candidate` for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from autopar.cost_models import Cluster
from autopar.ir.mesh import Mesh
from autopar.passes.prepare import Cut
from autopar.planning.constraints import narrow
from autopar.planning.deadline import NEVER, Deadline
from autopar.planning.exposed_search import (
    bound_on_mesh,
    candidate_of,
    proofs,
    search_exposures,
    slopes_at,
    step_of_a_pass,
)
from autopar.planning.ranking import rank
from autopar.planning.setting import Setting
from autopar.pricing.candidate import Candidate
from autopar.pricing.exposed_shares import exposure_of
from autopar.pricing.exposure import Exposure
from autopar.pricing.problem import WHOLE, PricedGraph, Residence, price_graph
from autopar.pricing.step_time import time_parts
from autopar.search import solve

BUDGET_GAP = 5e-3
TIGHT_SHARE = 2 / 3
"""The share of its time in which a search without a memory limit, of which nothing is estimated to
fit, goes through meshes."""


def search_meshes(
    setting: Setting,
    cut: Cut,
    meshes: Sequence[Mesh],
    deadline: Deadline = NEVER,
    known_s: float = math.inf,
) -> list[Candidate]:
    """The best strategies on each mesh without a memory limit; raises ConstraintError if none.

    Meshes are left out on which no step, computed once, is below ``known_s``, and after the
    ``deadline``, of several axes first those whose last one is least like a node. It is after
    `TIGHT_SHARE` of its time if nothing is estimated to fit as it is.
    """
    found: list[Candidate] = []
    tight_deadline = deadline.after(TIGHT_SHARE)
    for mesh in sorted(meshes, key=lambda mesh: unlike_a_node(setting.cluster, mesh)):
        is_tight = not any(_is_an_option(setting, each) for each in found)
        if found and (tight_deadline if is_tight else deadline).is_over:
            break
        setting.progress(f"search on mesh {mesh}")
        priced = price_graph(setting.pricing(cut, mesh))
        best_s = min(map(step_of_a_pass, found), default=math.inf)
        for each in search_exposures(setting, priced, best_s, known_s):
            if bound_on_mesh([each]) >= known_s:
                break
            found.append(each)
            if _is_an_option(setting, each):
                setting.progress.found(time_parts(each).step_s)
    if setting.space.pipeline is None:
        found += proofs(setting, found, deadline)
    return sorted(found, key=lambda candidate: meshes.index(candidate.mesh))


def unlike_a_node(cluster: Cluster, mesh: Mesh) -> float:
    """How far the last of several axes is from the devices of a node, in powers of two."""
    if mesh.num_axes == 1:
        return 0.0
    in_node = cluster.num_devices / max(cluster.num_nodes, 1)
    return abs(math.log2(mesh.axis_sizes[-1] / in_node))


def _is_an_option(setting: Setting, candidate: Candidate) -> bool:
    """Whether a candidate may be the plan as it is, as far as estimates say."""
    is_plain = setting.space.pipeline is None and not setting.space.recompute.is_fixed
    return is_plain and candidate.is_found and candidate.estimated_bytes() <= setting.budget_bytes


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

    A search is cut off at ``cutoff_s`` and at the cost found on an earlier mesh, if both count all
    communication or both what a step exposes. Each mesh is searched by what was better without the
    budget. A result may have no strategy. After the ``deadline`` the other meshes are left out.
    """
    found: list[Candidate] = []
    cutoffs_s: dict[bool, float] = {}
    better: dict[PricedGraph, Exposure] = {}
    for each in sorted(candidates, key=rank):
        if not each.exposed.weighs_computation:
            better.setdefault(each.priced, each.exposed)
    for priced, exposed in better.items():
        if found and deadline.is_over:
            break
        kind = bool(exposed.of_blocks)
        cutoff = cutoffs_s.get(kind, cutoff_s)
        found.append(
            _search_within(
                setting, priced, budget_bytes, exposed, residence, cutoff,
                released=released, scattered=scattered,
            )
        )  # fmt: skip
        cutoffs_s[kind] = min(cutoff, found[-1].solution.cost * (1 - BUDGET_GAP))
    return found


def search_nearby(
    setting: Setting, best: Candidate, budget_bytes: float, deadline: Deadline = NEVER
) -> Iterator[Candidate]:
    """Search the mesh of a strategy again under a budget, without a pipeline, by what its step
    exposes and by the slopes of its step; nothing after the ``deadline``."""
    for exposed in (exposure_of(best), slopes_at(setting, best)):
        if not deadline.is_over:
            yield _search_within(
                setting, best.priced, budget_bytes, exposed,
                released=bool(best.released), scattered=bool(best.scattered),
            )  # fmt: skip


def _search_within(
    setting: Setting,
    priced: PricedGraph,
    budget_bytes: float,
    exposed: Exposure,
    residence: Residence = WHOLE,
    cutoff_s: float = math.inf,
    *,
    released: bool,
    scattered: bool,
) -> Candidate:
    problem = priced.problem(
        narrow(priced, setting.constraints), budget_bytes, exposed, residence,
        released=released, scattered=scattered,
    )  # fmt: skip
    solution = solve(problem, time_limit_s=setting.budget_limit_s, gap=BUDGET_GAP, cutoff=cutoff_s)
    return candidate_of(priced, solution, exposed, released=released, scattered=scattered)


def least_budget(tried: Sequence[Candidate]) -> float:
    """The smallest estimated budget that is feasible on some mesh, plus a rounding margin."""
    return min(_least_budgets(tried), default=math.inf) * (1 + 1e-9)


def _least_budgets(tried: Sequence[Candidate]) -> Iterator[float]:
    for candidate in tried:
        if candidate.solution.least_feasible_budget is not None:
            yield candidate.solution.least_feasible_budget
