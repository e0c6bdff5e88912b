"""The prices of a strategy on each island of a cluster whose parts are not alike.

In: a priced graph. Out: the same choices priced by an island's own devices and links.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from msgspec import structs

from autopar.cost_models import Cluster, CommunicationModel, RooflineModel
from autopar.pricing.problem import PricedGraph, price_graph
from autopar.pricing.tables import Pricing


def on_islands(priced: PricedGraph) -> Callable[[Cluster], PricedGraph]:
    """The graph priced on an island, which is done once for each: choices have the same places."""
    whole = priced.pricing

    @functools.cache
    def on(island: Cluster) -> PricedGraph:
        slowest = structs.replace(whole.cluster.device, memory_bytes=island.device.memory_bytes)
        is_alike = island.device == slowest
        return price_graph(
            Pricing(
                whole.analysis, whole.mesh, island,
                whole.compute if is_alike else RooflineModel(island.device),
                CommunicationModel(island), whole.microbatches, held=whole.held,
                optimizer=whole.optimizer, num_passes=whole.num_passes, routes=whole.moves.routes,
            )
        )  # fmt: skip

    return on
