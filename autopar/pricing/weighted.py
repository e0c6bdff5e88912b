"""The costs of a search problem with only the exposed fractions of computation.

In: a problem's decisions, costs and edges, and an `Exposure`. Out: other costs and edges; equal
ones still share one array. Fractions of gathers and reductions are in the edges already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autopar.ir.graph import Graph
from autopar.pricing.exposure import BlockExposure, Exposure
from autopar.pricing.moves import Array
from autopar.pricing.nodes import Home, Node, home_of_edge
from autopar.pricing.tables import OpTable, ValueTable

Edges = dict[tuple[int, int], Array]


class Weighing:
    """Scales costs, and keeps what is scaled alike."""

    def __init__(
        self,
        graph: Graph,
        nodes: Sequence[Node],
        homes: Sequence[Home],
        tables: Sequence[OpTable | ValueTable],
        exposed: Exposure,
    ) -> None:
        self.nodes, self.homes, self.tables = nodes, homes, tables
        self.of_block = {block.name: exposed.of(n) for n, block in enumerate(graph.blocks)}
        self._scaled: dict[tuple[object, ...], tuple[object, Array]] = {}

    def costs(self, costs: Sequence[Array], full: Sequence[Array]) -> tuple[Array, ...]:
        """The ``costs``, which may be +inf, less what is not exposed of the ``full`` ones."""
        return tuple(self._cost(node, costs[node], full[node]) for node in range(len(costs)))

    def _cost(self, node: int, cost: Array, full: Array) -> Array:
        exposed, table = self._exposed(self.homes[node]), self.tables[node]
        if exposed is None:
            return cost
        forward, backward = exposed.forward, exposed.backward
        key = (id(cost), id(full), id(table), forward, backward)
        return self._kept(key, (cost, full, table), lambda: cost - _hidden(table, full, exposed))

    def edges(self, edges: Edges) -> Edges:
        """The redistributions of values by the fractions of the blocks that wait for them."""
        found = dict(edges)
        for (i, j), matrix in edges.items():
            kinds = (self.nodes[i].kind, self.nodes[j].kind)
            exposed = self._exposed(home_of_edge((self.homes[i], self.homes[j]), kinds))
            if exposed is not None:
                found[i, j] = self._scaled_edge(matrix, (exposed.forward + exposed.backward) / 2)
        return found

    def _scaled_edge(self, matrix: Array, fraction: float) -> Array:
        return self._kept((id(matrix), fraction), matrix, lambda: fraction * matrix)

    def _exposed(self, home: Home) -> BlockExposure | None:
        """The fractions of a block's computation; None if it counts, and for parameters."""
        exposed = self.of_block[home] if isinstance(home, str) else None
        if exposed is None or exposed.forward == exposed.backward == 1.0:
            return None
        return exposed

    def _kept(self, key: tuple[object, ...], source: object, make: Callable[[], Array]) -> Array:
        """The array of a key, made once; ``source`` is kept, so that ids stay unique."""
        if key not in self._scaled:
            self._scaled[key] = source, make()
        return self._scaled[key][1]


def _hidden(table: OpTable | ValueTable, full: Array, exposed: BlockExposure) -> Array:
    """Seconds that do not count; communication is half in the forward and half in the backward
    pass, as in `autopar.pricing.block_times`."""
    least = 1 - (exposed.forward + exposed.backward) / 2
    if not isinstance(table, OpTable):
        return least * full
    passes = [(e.forward_s, e.input_grad_s + e.weight_grad_s) for e in table.estimates]
    forward_s, backward_s = np.array(passes).T
    found: Array = (
        (1 - exposed.forward) * forward_s
        + (1 - exposed.backward) * backward_s
        + least * (full - forward_s - backward_s)
    )
    return found
