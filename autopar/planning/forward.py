"""Planning of a forward pass over parameters that keep their training placements.

In: a graph captured without its backward pass, the mesh of the training plan, and ``held``: the
placements that parameters (and, for the call that was trained with, inputs) already have. Out: an
assignment, searched over the forward pass alone with those placements fixed. Everything is priced
by roofline, so that a first evaluation measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.cost_models import Cluster, CommunicationModel, RooflineModel
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placements
from autopar.pricing.problem import price_graph
from autopar.pricing.tables import Pricing
from autopar.search import solve
from autopar.sharding.strategy import Analysis, Assignment

SEARCH_LIMIT_S = 20.0


def plan_forward(
    analysis: Analysis, mesh: Mesh, cluster: Cluster, held: Mapping[int, Placements]
) -> Assignment:
    """The fastest forward pass of a graph; ``held`` maps values to their placements."""
    compute, communication = RooflineModel(cluster.device), CommunicationModel(cluster)
    priced = price_graph(Pricing(analysis, mesh, cluster, compute, communication, held=held))
    solution = solve(priced.problem(), time_limit_s=SEARCH_LIMIT_S)
    return priced.assignment(solution.assignment)
