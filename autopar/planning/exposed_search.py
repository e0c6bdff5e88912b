"""The fastest sharding on one mesh, and a lower bound on the steps of all.

In: a priced graph. Out: a `Candidate` for each of several searches. The time of a step is no sum of
prices, as it depends on the whole strategy how much communication is overlapped. A search adds up
prices. So it is made with all communication exposed, with as little as possible, and then by what
the fastest strategy so far exposes of each block's, as long as that makes a step faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from autopar.base.errors import ConstraintError
from autopar.ir.mesh import Mesh
from autopar.planning.constraints import narrow
from autopar.planning.deadline import NEVER, Deadline
from autopar.planning.ranking import cheapest, rank
from autopar.planning.setting import Setting
from autopar.pricing.candidate import Candidate
from autopar.pricing.exposed_shares import exposure_of
from autopar.pricing.exposure import ALL_EXPOSED, EXACT, Exposure, least_exposed
from autopar.pricing.problem import PricedGraph
from autopar.pricing.slopes import slopes_of
from autopar.pricing.step_time import step_costs, time_parts
from autopar.search import Solution, Status, solve

SEARCH_LIMIT_S = 60.0
MAX_REFINEMENTS = 3
"""Searches on one mesh by what the fastest strategy so far exposes."""
MAX_PROOFS = 4
"""Searches on one mesh by slopes."""
PROVED, NEARLY_PROVED = 1e-4, 1e-3
"""A strategy this close to the bound, relatively, is not proved any further, and not by means of
slopes."""


def search_exposures(
    setting: Setting,
    priced: PricedGraph,
    best_s: float = math.inf,
    known_s: float = math.inf,
) -> Iterator[Candidate]:
    """The best strategies on one mesh without a pipeline or a memory limit; see the module's
    docstring. Where no step can be below ``best_s``, or the first searches did not end, the fastest
    is not searched any further; where none can be below ``known_s``, only the first search is made,
    which shows it. Raises ConstraintError if there is none."""
    if priced.pricing.mesh.num_devices == 1:
        yield search_exposed(setting, priced, EXACT)
        return
    least = 1 - 1 / setting.cluster.overlap_slowdown
    in_pipeline = setting.space.pipeline is not None
    num_blocks = len(priced.pricing.graph.blocks)
    exposures = least_exposed(num_blocks, least, in_pipeline=in_pipeline), ALL_EXPOSED
    found: list[Candidate] = []
    for exposed in exposures:
        found.append(search_exposed(setting, priced, exposed))
        yield found[-1]
        if bound_on_mesh(found) >= known_s:
            return
    if bound_on_mesh(found) >= best_s or not _has_ended(found):
        return
    best = cheapest(found)
    for _ in range(MAX_REFINEMENTS):
        yield (other := search_exposed(setting, priced, exposure_of(best)))
        if not rank(other) < rank(best):
            break
        best = other


def search_exposed(setting: Setting, priced: PricedGraph, exposed: Exposure) -> Candidate:
    """The best strategy on one mesh without a memory limit; raises ConstraintError if none."""
    released = setting.space.reshard_after_forward is True
    scattered = setting.space.reduce_every_microbatch is True
    problem = priced.problem(
        narrow(priced, setting.constraints), exposed=exposed, released=released,
        scattered=scattered,
    )  # fmt: skip
    solution = solve(problem, time_limit_s=SEARCH_LIMIT_S)
    if solution.status is Status.INFEASIBLE:
        names = " and ".join(map(str, setting.constraints)) or "the placements"
        raise ConstraintError(f"no strategy satisfies {names} together; remove one of them")
    return candidate_of(priced, solution, exposed, released=released, scattered=scattered)


def candidate_of(
    priced: PricedGraph, solution: Solution, exposed: Exposure, *, released: bool, scattered: bool
) -> Candidate:
    """A search's solution. ``released``: all gathered parameters are released after each pass;
    ``scattered``: all gradients that can be are reduce-scattered in every micro-batch."""
    parameters, none = priced.parameters(), frozenset[int]()
    return Candidate(
        priced=priced, solution=solution, exposed=exposed,
        released=parameters if released else none, scattered=parameters if scattered else none,
    )  # fmt: skip


def _has_ended(found: Sequence[Candidate]) -> bool:
    """Whether all searches found the optimum of their prices in time."""
    return all(each.solution.status is Status.OPTIMAL for each in found)


def proofs(
    setting: Setting,
    candidates: Sequence[Candidate],
    deadline: Deadline = NEVER,
    best_s: float = math.inf,
) -> Iterator[Candidate]:
    """Searches that raise the lower bound, on each mesh where it is below ``best_s`` and the
    fastest step, and the searches before have ended; none after the ``deadline``.

    The first is by the slopes of the fastest step, each other by the mean of all slopes so far: the
    method of Frank and Wolfe for the sum of slopes with the greatest minimum. They find faster
    strategies too.
    """
    of_mesh: dict[PricedGraph, list[Candidate]] = {}
    for each in candidates:
        of_mesh.setdefault(each.priced, []).append(each)
    best_s = min(best_s, *map(step_of_a_pass, candidates))
    for priced, found in of_mesh.items():
        if not _has_ended(found):
            continue
        exposed = None
        for number in range(1, MAX_PROOFS + 1):
            near = PROVED if exposed is None else NEARLY_PROVED
            if bound_on_mesh(found) >= (1 - near) * best_s or deadline.is_over:
                break
            if exposed is None:
                exposed = slopes_at(setting, cheapest(found))
            else:
                exposed = exposed.blended(slopes_at(setting, found[-1]), 1 / number)
            found.append(search_exposed(setting, priced, exposed))
            best_s = min(best_s, step_of_a_pass(found[-1]))
            yield found[-1]


def slopes_at(setting: Setting, of: Candidate) -> Exposure:
    """The exposure by the slopes of a strategy's step; no step is below its sum by these."""
    return slopes_of(
        step_costs(of), of.num_microbatches, setting.cluster.overlap_slowdown,
        released=bool(of.released), scattered=bool(of.scattered),
    )  # fmt: skip


def step_of_a_pass(found: Candidate) -> float:
    """Seconds of a step that is computed once, as a search counts them; +inf without a strategy."""
    passes = found.priced.pricing.num_passes
    return time_parts(found).step_s / passes if found.is_found else math.inf


def bound_on_mesh(candidates: Sequence[Candidate]) -> float:
    """A lower bound on the steps of one mesh, each computed once; 0 if none is known."""
    return max((c.solution.bound for c in candidates if c.exposed.is_least), default=0.0)


def sharding_bound_s(candidates: Sequence[Candidate]) -> float:
    """A lower bound on the steps of all meshes, each computed once."""
    of_mesh: dict[Mesh, list[Candidate]] = {}
    for each in candidates:
        of_mesh.setdefault(each.mesh, []).append(each)
    return min(map(bound_on_mesh, of_mesh.values()), default=0.0)
