"""The search problem of a graph on a mesh: decisions, costs and memory.

Nodes are ops (with their choices), stored values (parameters and inputs with their stored
placements) and relays (values with several consumers, with the placements they may be redistributed
to). An edge's cost is the redistribution from the placement that one side supplies to the one that
the other needs, forward and backward. Equal nodes and edges share their arrays, so that the search
recognizes repetition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from autopar.cost_models.estimate import Estimate
from autopar.ir.choice import Choice
from autopar.ir.graph import Value, ValueKind
from autopar.ir.placement import Placements, R
from autopar.pricing.exposure import ALL_EXPOSED, Exposure
from autopar.pricing.moves import Array, PlacementTable
from autopar.pricing.node_memory import NodeBytes, NodeMemory
from autopar.pricing.nodes import Home, Node, NodeKind, homes_of
from autopar.pricing.readers import first_and_last_readers
from autopar.pricing.tables import OpTable, Pricing, ValueTable
from autopar.pricing.weighted import Weighing
from autopar.search import Problem
from autopar.sharding.strategy import Assignment, Strategy

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Moved:
    """A redistribution between the placements that one node supplies and another needs.

    ``target`` is None at the ends of the graph, where a value ends in the only placement of
    ``needs``; ``num_joined`` values are coalesced.
    """

    value: Value
    source: int
    supplies: PlacementTable
    target: int | None
    needs: PlacementTable
    stored: bool = False
    num_joined: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Residence:
    """The fraction of the model that the pipeline rank with the most memory holds.

    ``weights``: its fraction of parameters, gradients and optimizer state. ``activations``: the
    number of micro-batches of the whole model whose activations it holds at once.
    """

    weights: float = 1.0
    activations: float = 1.0


WHOLE = Residence()
"""Without a pipeline: all parameters, and one micro-batch at a time."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class PricedGraph:
    """The search problem of a graph on a mesh: numbers, and the meaning of its nodes."""

    pricing: Pricing
    nodes: tuple[Node, ...]
    tables: tuple[OpTable | ValueTable, ...]
    costs: tuple[Array, ...]
    held: tuple[NodeBytes, ...]
    edges: dict[tuple[int, int], Array]
    moves: tuple[Moved, ...]
    _derived: dict[Callable[[PricedGraph], Any], Any] = field(
        default_factory=dict, init=False, repr=False
    )

    def derived(self, make: Callable[[PricedGraph], _T]) -> _T:
        """The result of ``make`` for this problem, computed once and kept with it."""
        if make not in self._derived:
            self._derived[make] = make(self)
        found: _T = self._derived[make]
        return found

    def memory(
        self, residence: Residence = WHOLE, *, released: bool = False, scattered: bool = False
    ) -> tuple[Array, ...]:
        """Bytes of every choice of every node on the device that holds the most.

        ``released``: gathered parameters are released after each pass; ``scattered``: gradients are
        reduce-scattered in every micro-batch.
        """
        share, known = residence, dict[NodeBytes, Array]()
        for held in self.held:
            if held not in known:
                weights = held.released if released else held.weights
                weights = weights - held.accumulated if scattered else weights
                known[held] = share.weights * weights + share.activations * held.activations
        return tuple(known[held] for held in self.held)

    def problem(
        self,
        costs: Sequence[Array] | None = None,
        budget_bytes: float | None = None,
        exposed: Exposure = ALL_EXPOSED,
        residence: Residence = WHOLE,
        *,
        released: bool = False,
        scattered: bool = False,
    ) -> Problem:
        """The numbers for the search.

        Optionally with other node costs, within a memory budget, with only what is ``exposed`` of
        the blocks' times, or with all gathered parameters ``released`` after each pass, and all
        gradients that can be ``scattered`` in every micro-batch.
        """
        edges, costs = self.edges, self.costs if costs is None else costs
        if released or scattered or exposed.of_blocks:
            edges = self._with_passes(exposed, released=released, scattered=scattered)
        if exposed.weighs_computation:
            homes = self.derived(node_homes)
            weighing = Weighing(self.pricing.graph, self.nodes, homes, self.tables, exposed)
            costs, edges = weighing.costs(costs, self.costs), weighing.edges(edges)
        return Problem(
            costs,
            edges,
            None
            if budget_bytes is None
            else self.memory(residence, released=released, scattered=scattered),
            None if budget_bytes is None else max(0.0, budget_bytes - self.pricing.buffer_bytes),
            node_names=[f"{node.kind} {node.name} {node.index}" for node in self.nodes],
        )

    def _with_passes(
        self, exposed: Exposure, *, released: bool, scattered: bool
    ) -> dict[tuple[int, int], Array]:
        """The edges with parameters gathered, or their gradients scattered, for every pass, and the
        exposed fraction of each; equal ones still share one array."""
        edges, transposed = dict(self.edges), dict[int, Array]()
        of_parameter = self.pricing.analysis.derived(first_and_last_readers)
        for move in self.moves:
            if not move.stored or move.target is None:
                continue
            first, last = of_parameter.get(move.value.index, (None, None))
            here, there = exposed.of(first), exposed.of(last)
            num = self.pricing.num_gathers(move.value, released=released)
            num_scatters = self.pricing.num_microbatches if scattered else 1
            gathers = here.gathers
            if num > self.pricing.num_microbatches:  # as many for the backward pass
                gathers = (gathers + there.gathers_back) / 2
            if num == num_scatters == 1 and gathers == here.reductions == 1.0:
                continue
            matrix = self.pricing.moves.matrix(
                move.value, move.supplies, move.needs, stored=True, num_gathers=num,
                num_scatters=num_scatters, exposed=(gathers, here.reductions),
            )  # fmt: skip
            if move.source > move.target:
                turned = transposed.setdefault(id(matrix), np.ascontiguousarray(matrix.T))
                edges[move.target, move.source] = turned
            else:
                edges[move.source, move.target] = matrix
        return edges

    def parameters(self) -> frozenset[int]:
        """The parameters that have a stored placement."""
        values, nodes = self.pricing.graph.values, self.nodes
        stored = (n.index for n in nodes if n.kind is NodeKind.STORED)
        return frozenset(i for i in stored if values[i].kind is ValueKind.PARAMETER)

    def assignment(
        self,
        solution: Sequence[int],
        released: frozenset[int] = frozenset(),
        scattered: frozenset[int] = frozenset(),
    ) -> Assignment:
        """The assignment of a search solution; ``released`` and ``scattered`` as in it."""
        analysis = self.pricing.analysis
        redundant = Choice((None,) * self.pricing.mesh.num_axes)
        choices = [redundant] * len(analysis.graph.ops)
        stored: dict[int, Placements] = {}
        relays: dict[int, Placements] = {}
        for node, table, pick in zip(self.nodes, self.tables, solution):
            if isinstance(table, OpTable):
                choices[node.index] = table.choices[pick]
            else:
                placements = table.placements.at(pick)
                (stored if node.kind == NodeKind.STORED else relays)[node.index] = placements
        return Assignment(
            mesh=self.pricing.mesh, choices=tuple(choices), stored=stored, relays=relays,
            released=released, scattered=scattered,
        )  # fmt: skip

    def strategy(
        self,
        solution: Sequence[int],
        released: frozenset[int] = frozenset(),
        scattered: frozenset[int] = frozenset(),
    ) -> Strategy:
        """The strategy of a search solution."""
        return Strategy(self.pricing.analysis, self.assignment(solution, released, scattered))

    def collectives(self, solution: Sequence[int]) -> Iterator[Estimate]:
        """The prices of a solution's communication: inside ops, then of every redistribution."""
        for table, pick in zip(self.tables, solution):
            if isinstance(table, OpTable) and (inside := table.collectives[pick]) is not None:
                yield inside
        for move in self.moves:
            supply = move.supplies.at(solution[move.source])
            need = move.needs.at(0 if move.target is None else solution[move.target])
            price = self.pricing.moves.price(
                move.value, supply, need, stored=move.stored, num_joined=move.num_joined
            )
            if price.collectives is not None:
                yield price.collectives


def node_homes(priced: PricedGraph) -> list[Home]:
    """The homes of all decisions."""
    return homes_of(priced.pricing.analysis, priced.nodes)


def price_graph(pricing: Pricing) -> PricedGraph:
    """Build the problem over all ops that are not fixed, parameters, inputs and relays."""
    return _Builder(pricing).build()


class _Builder:
    def __init__(self, pricing: Pricing) -> None:
        self.pricing = pricing
        self.analysis = pricing.analysis
        self.graph = pricing.graph
        self.node_memory = NodeMemory(pricing)
        self.nodes: list[Node] = []
        self.tables: list[OpTable | ValueTable] = []
        self.op_node: dict[int, int] = {}
        self.edges: dict[tuple[int, int], list[Array]] = {}
        self.moves: list[Moved] = []
        self.extra: dict[int, Array] = {}
        self.transposes: dict[int, tuple[Array, Array]] = {}

    def build(self) -> PricedGraph:
        for op in self.graph.ops:
            if not all(o is None or self.graph.values[o].fixed for o in op.outputs):
                self.op_node[op.index] = self._add(
                    NodeKind.OP, op.index, op.name, self.pricing.op_table(op)
                )
        for value in self.graph.values:
            self._add_value(value)
        self._add_ends()
        costs = tuple(
            t.cost_s + self.extra[n] if n in self.extra else t.cost_s
            for n, t in enumerate(self.tables)
        )
        return PricedGraph(
            pricing=self.pricing,
            nodes=tuple(self.nodes),
            tables=tuple(self.tables),
            costs=costs,
            held=tuple(self._held(node) for node in range(len(self.nodes))),
            edges=self._merged(),
            moves=tuple(self.moves),
        )

    def _held(self, node: int) -> NodeBytes:
        decision, table = self.nodes[node], self.tables[node]
        if isinstance(table, OpTable):
            return self.node_memory.op(self.graph.ops[decision.index], table)
        if decision.kind == NodeKind.RELAY:
            return self.node_memory.relay(self.graph.values[decision.index], table)
        return self.node_memory.stored(table)

    def _add(self, kind: NodeKind, index: int, name: str, table: OpTable | ValueTable) -> int:
        self.nodes.append(Node(kind=kind, index=index, name=name))
        self.tables.append(table)
        return len(self.nodes) - 1

    def _add_value(self, value: Value) -> None:
        """Add a value's own nodes, and the edges from its source to its consumers."""
        uses = self.analysis.consumers.get(value.index, ())
        if value.fixed or value.kind in (ValueKind.BUFFER, ValueKind.CONSTANT):
            return
        if value.kind in (ValueKind.PARAMETER, ValueKind.INPUT):
            table = self.pricing.stored_table(value)
            name = value.target or value.name
            source = self._add(NodeKind.STORED, value.index, name, table)
            supply, stored = table.placements, value.kind is ValueKind.PARAMETER
        else:
            op, position = self.analysis.producers[value.index]
            source = self.op_node[op]
            supply, stored = self.pricing.op_table(self.graph.ops[op]).supplies[position], False
        if value.index in self.analysis.relayed:
            relay = self.pricing.relay_table(value)
            node = self._add(NodeKind.RELAY, value.index, value.name, relay)
            self._connect(
                Moved(
                    value=value, source=source, supplies=supply, target=node,
                    needs=relay.placements, stored=stored,
                ),
                node,
            )  # fmt: skip
            source, supply, stored = node, relay.placements, False
        for op, position in uses:
            need = self.pricing.op_table(self.graph.ops[op]).needs[position]
            node = self.op_node[op]
            self._connect(
                Moved(
                    value=value, source=source, supplies=supply, target=node, needs=need,
                    stored=stored,
                ),
                node,
            )  # fmt: skip

    def _seconds(self, move: Moved) -> Array:
        self.moves.append(move)
        return self.pricing.moves.matrix(
            move.value, move.supplies, move.needs, stored=move.stored, num_joined=move.num_joined
        )

    def _connect(self, move: Moved, target: int) -> None:
        source, matrix = move.source, self._seconds(move)
        if source < target:
            self.edges.setdefault((source, target), []).append(matrix)
        else:
            self.edges.setdefault((target, source), []).append(self._transposed(matrix))

    def _transposed(self, matrix: Array) -> Array:
        """The transpose, cached by id; the matrix is kept alive, so that its id stays unique."""
        if id(matrix) not in self.transposes:
            self.transposes[id(matrix)] = (matrix, np.ascontiguousarray(matrix.T))
        return self.transposes[id(matrix)][1]

    def _add_ends(self) -> None:
        """Add the moves at the ends of the graph: loss and new buffers must end up replicated.

        So must the outputs of a forward pass. All buffers are coalesced.
        """
        buffers = [new for _, new in self.graph.mutations]
        ends = [(new, len(buffers)) for new in buffers]
        if self.graph.loss is not None:
            ends.append((self.graph.loss, 1))
        else:
            ends += [(o, 1) for o in self.graph.outputs if o in self.analysis.producers]
        whole = ((R,) * self.pricing.mesh.num_axes,)
        target = PlacementTable(whole, np.zeros(1, dtype=np.intp))
        for index, num_joined in ends:
            if self.graph.values[index].fixed or index not in self.analysis.producers:
                continue
            op, position = self.analysis.producers[index]
            supply = self.pricing.op_table(self.graph.ops[op]).supplies[position]
            node = self.op_node[op]
            move = Moved(
                value=self.graph.values[index], source=node, supplies=supply, target=None,
                needs=target, num_joined=num_joined,
            )  # fmt: skip
            cost = self._seconds(move)[:, 0]
            self.extra[node] = self.extra.get(node, np.zeros(len(cost))) + cost

    def _merged(self) -> dict[tuple[int, int], Array]:
        """One matrix per edge; equal sums share one array, so that the search sees repetition."""
        sums: dict[tuple[int, ...], Array] = {}
        merged = {}
        for edge, matrices in self.edges.items():
            if len(matrices) == 1:
                merged[edge] = matrices[0]
                continue
            key = tuple(id(m) for m in matrices)
            if key not in sums:
                sums[key] = np.sum(matrices, axis=0)
            merged[edge] = sums[key]
        return merged
