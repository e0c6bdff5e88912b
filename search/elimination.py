"""Exact search by variable elimination: PaSE's recurrence as min-plus products of tables.

In: a problem's tables and an elimination order. Out: the optimum F(G, phi*), an optimal assignment,
and the tables, from which ``marginals`` computes the least cost of every choice. PaSE (Elango,
IPDPS 2021, arXiv 2407.04001), step by step:

- objective F(G, phi) = sum_v t_l(v, phi) + sum_(u,v) t_x(u, v, phi): ``Problem.cost``;
- vertex order and dependent sets D(i) of GenerateSeq: ``ordering.simulate``, one rule of several;
- H(i, phi), the layer cost of v_i plus its edges to later vertices: the factors of v_i's bucket;
- R(i, phi) = min over C(v_i) of H(i, phi') + sum_j R(j, phi' restricted): ``min_sum``, for all phi
  over D(i) at once; the R(j) are results of earlier steps in the bucket;
- extraction of phi* from the stored minimisers: ``Program.assignment``, which recomputes the
  minimiser from the factors, last eliminated node first. Ties go to the lowest choice.

In addition, an order is first compiled to a ``Program`` without reading the numbers. Two steps on
the same tables in the same arrangement are one operation of the program, so 32 equal layers cost
one, and the work and memory of a program are known exactly before it runs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.search.minplus import Check, aligned, go_on, min_sum_step
from autopar.search.ordering import HOPELESS, Order, candidate_orders
from autopar.search.problem import Array, Edge, SearchError

Ref = int  # index of a table: node costs, edge costs, then results of operations
Scope = tuple[int, ...]  # ascending nodes, one for each dim of a table


MAX_DIMS = 64 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 32
"""The most dims of an array. An order that joins more counts as one of infinite size, though most
may have a single choice: `autopar.search.reduction` leaves such nodes out."""


MAX_PROGRAMS = 4
"""How many programs are kept: those of a mesh."""


class TableTooLargeError(SearchError):
    """The elimination needs more memory for tables than the cap allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A distinct step: the minimum over dim 0 of a sum of tables.

    shape: that of the joined table, with the eliminated node first. inputs: (dims of the table,
    table).
    """

    shape: tuple[int, ...]
    inputs: tuple[tuple[tuple[int, ...], Ref], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An eliminated node: its dependent set, its bucket, and its result R over the set."""

    node: int
    scope: Scope
    factors: tuple[tuple[Scope, Ref], ...]
    result: Ref


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """An order compiled for a pattern of tables.

    leaves: those of the pattern. num_operations: additions over all
    distinct steps. size_bytes: the size of all distinct results.
    """

    order: Order
    leaves: tuple[int | Edge, ...]
    operations: tuple[Operation, ...]
    steps: tuple[Step, ...]
    num_operations: float
    size_bytes: float

    def run(
        self,
        node_costs: Sequence[Array],
        edge_costs: Mapping[Edge, Array],
        cap_bytes: float,
        check: Check = go_on,
    ) -> Values:
        """Compute every table; raises ``TableTooLargeError`` above the cap.

        check: called before every step and between the pieces of a large one; may raise to stop.
        """
        if self.size_bytes > cap_bytes:
            largest = max(_elements(operation.shape[1:]) for operation in self.operations)
            raise TableTooLargeError(
                f"elimination needs {self.size_bytes:.3g} bytes of tables (the largest "
                f"{8 * largest:.3g}), over table_cap_bytes={cap_bytes:.3g}"
            )
        tables = [
            node_costs[leaf] if isinstance(leaf, int) else edge_costs[leaf] for leaf in self.leaves
        ]
        classes: dict[tuple[int, int], Array] = {}
        for operation in self.operations:
            check()
            local = [(dims, tables[ref]) for dims, ref in operation.inputs]
            tables.append(min_sum_step(operation.shape, local, classes, check))
        roots = [float(tables[step.result]) for step in self.steps if not step.scope]
        return Values(tables=tuple(tables), optimum=math.fsum(roots))

    def assignment(self, values: Values) -> tuple[int, ...]:
        """phi*, reconstructed from the last eliminated node to the first; ties go to the lowest."""
        chosen = [0] * len(self.steps)
        picked: dict[tuple[Ref, tuple[int, ...]], int] = {}  # equal steps pick alike
        for step in reversed(self.steps):
            key = (step.result, tuple([chosen[n] for n in step.scope]))
            if key in picked:
                chosen[step.node] = picked[key]
                continue
            total: Array | None = None
            for scope, ref in step.factors:
                at = tuple([slice(None) if n == step.node else chosen[n] for n in scope])
                line = values.tables[ref][at]
                total = line if total is None else total + line
            assert total is not None
            chosen[step.node] = picked[key] = int(total.argmin())
        return tuple(chosen)

    def marginals(self, values: Values) -> list[Array]:
        """For every node [K_i]: the least cost of any assignment with that choice.

        This is the downward sweep: the least cost of the rest of the graph, as a table over each
        step's dependent set, is passed from a step to those whose results it used.
        """
        outside: dict[int, Array] = {}
        owner: dict[int, int] = {}  # node -> index of the step whose bucket has its result
        position = {step.node: index for index, step in enumerate(self.steps)}
        for step in self.steps:
            if step.scope:
                owner[step.node] = min(position[n] for n in step.scope)
        children: dict[int, list[int]] = {}
        for node, index in owner.items():
            children.setdefault(index, []).append(node)
        total_of_roots = values.optimum
        found: list[Array] = [np.empty(0)] * len(self.steps)
        for index in range(len(self.steps) - 1, -1, -1):
            step = self.steps[index]
            dims = (step.node, *step.scope)
            belief = self._belief(step, values)
            if step.scope:
                belief = belief + outside.pop(step.node)
            else:
                belief = belief + (total_of_roots - float(values.tables[step.result]))
            found[step.node] = belief.min(axis=tuple(range(1, len(dims))))
            for child in children.get(index, ()):
                below = self.steps[position[child]]
                drop = tuple(k for k, n in enumerate(dims) if n not in below.scope)
                order = [n for n in dims if n in below.scope]
                through = np.transpose(belief.min(axis=drop), [order.index(n) for n in below.scope])
                inside = values.tables[below.result]
                finite = inside < math.inf
                outside[child] = np.subtract(
                    through, inside, out=np.full(inside.shape, math.inf), where=finite
                )
        return found

    def _belief(self, step: Step, values: Values) -> Array:
        dims = (step.node, *step.scope)
        place = {n: k for k, n in enumerate(dims)}
        local = [
            (tuple(place[n] for n in scope), values.tables[ref]) for scope, ref in step.factors
        ]
        total = np.zeros((1,) * len(dims))
        for table in aligned(len(dims), local):
            total = total + table
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """The tables of a program that has run, and the optimum; +inf if no assignment is allowed."""

    tables: tuple[Array, ...]
    optimum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """The graph of a problem and the identity of its tables, all that programs depend on.

    nodes: the number of each node's table; edges: that of each edge. leaves: for each table, a node
    or an edge that has it; shapes: its shape.
    """

    nodes: tuple[Ref, ...]
    edges: tuple[tuple[Edge, Ref], ...]
    leaves: tuple[int | Edge, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls,
        node_costs: Sequence[Array],
        edge_costs: Mapping[Edge, Array],
        node_keys: Sequence[object] | None = None,
    ) -> Pattern:
        """The pattern of some tables.

        node_keys: equal for nodes that have the same cost array in every run; by default the ids of
        the arrays in ``node_costs``.
        """
        keys = [id(cost) for cost in node_costs] if node_keys is None else node_keys
        numbers: dict[object, Ref] = {}
        leaves: list[int | Edge] = []
        shapes: list[tuple[int, ...]] = []

        def number(key: object, place: int | Edge, table: Array) -> Ref:
            ref = numbers.setdefault(key, len(leaves))
            if ref == len(leaves):
                leaves.append(place)
                shapes.append(table.shape)
            return ref

        nodes = [number((0, keys[node]), node, cost) for node, cost in enumerate(node_costs)]
        edges = [(edge, number((1, id(cost)), edge, cost)) for edge, cost in edge_costs.items()]
        return cls(
            nodes=tuple(nodes), edges=tuple(edges), leaves=tuple(leaves), shapes=tuple(shapes)
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """K_i, the number of choices of each node."""
        return tuple([self.shapes[ref][0] for ref in self.nodes])


def compile_order(order: Order, pattern: Pattern) -> Program:
    """Compile an elimination order for all problems of a pattern."""
    builder = _Builder(pattern.shapes)
    position = [0] * len(pattern.nodes)
    for index, node in enumerate(order.nodes):
        position[node] = index
    buckets: list[list[tuple[Scope, Ref]]] = [
        [((node,), ref)] for node, ref in enumerate(pattern.nodes)
    ]
    for (i, j), ref in pattern.edges:
        buckets[i if position[i] < position[j] else j].append(((i, j), ref))
    steps: list[Step] = []
    for node in order.nodes:
        factors = tuple(buckets[node])
        scope = tuple(sorted({n for nodes, _ in factors for n in nodes} - {node}))
        result = builder.step(node, scope, factors)
        steps.append(Step(node=node, scope=scope, factors=factors, result=result))
        if scope:
            buckets[min(scope, key=position.__getitem__)].append((scope, result))
    return Program(
        order=order,
        leaves=pattern.leaves,
        operations=tuple(builder.operations),
        steps=tuple(steps),
        num_operations=builder.num_operations,
        size_bytes=builder.size_bytes,
    )


class _Builder:
    """Numbers tables so that identical ones share a number."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.operations: list[Operation] = []
        self.num_operations = 0.0
        self.size_bytes = 0.0
        self._shapes = list(shapes)
        self._known: dict[object, Ref] = {}

    def step(self, node: int, scope: Scope, factors: Sequence[tuple[Scope, Ref]]) -> Ref:
        place = {other: index + 1 for index, other in enumerate(scope)}
        place[node] = 0
        inputs = tuple(sorted([(tuple([place[n] for n in nodes]), r) for nodes, r in factors]))
        known = self._known.get(inputs)
        if known is not None:
            return known
        shape = [0] * (len(scope) + 1)
        for dims, ref in inputs:
            for dim, size in zip(dims, self._shapes[ref]):
                shape[dim] = size
        self.operations.append(Operation(shape=tuple(shape), inputs=inputs))
        self.num_operations += _elements(shape)
        self.size_bytes += 8.0 * _elements(shape[1:]) if len(shape) <= MAX_DIMS else math.inf
        self._shapes.append(tuple(shape[1:]))
        self._known[inputs] = len(self._shapes) - 1
        return len(self._shapes) - 1


def _elements(shape: Sequence[int]) -> float:
    try:
        return float(math.prod(shape))
    except OverflowError:
        return math.inf


def best_program(
    node_costs: Sequence[Array],
    edge_costs: Mapping[Edge, Array],
    node_keys: Sequence[object] | None = None,
) -> Program:
    """The program with the least distinct work among the orders worth compiling; ``node_keys`` as
    in `Pattern.of`. It is kept, as a model is searched on many meshes and by many prices."""
    return _best_program(Pattern.of(node_costs, edge_costs, node_keys))


@functools.lru_cache(maxsize=MAX_PROGRAMS)
def _best_program(pattern: Pattern) -> Program:
    orders = _orders(pattern.sizes, tuple([edge for edge, _ in pattern.edges]))
    limit = 3 * orders[0].num_operations
    worth = [order for order in orders if order.num_operations <= limit]
    if orders[0].largest_table > HOPELESS:
        worth = worth[:1]
    programs = [compile_order(order, pattern) for order in worth]
    return min(programs, key=lambda program: program.num_operations)


@functools.lru_cache(maxsize=MAX_PROGRAMS)
def _orders(sizes: tuple[int, ...], edges: tuple[Edge, ...]) -> list[Order]:
    return candidate_orders(sizes, edges)
