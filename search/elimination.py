"""Exact search by variable elimination: PaSE's recurrence as min-plus products of tables.

In: a problem's tables and an elimination order. Out: the optimum F(G, phi*), an assignment that
reaches it, and the kept tables, from which the min-marginals of every choice follow.

PaSE (Elango, IPDPS 2021, arXiv 2407.04001), step by step:

- objective F(G, phi) = sum_v t_l(v, phi) + sum_(u,v) t_x(u, v, phi): ``Problem.cost``;
- vertex order and dependent sets D(i) of GenerateSeq: ``ordering.simulate``, one rule of several;
- H(i, phi), the layer cost of v_i plus its edges to later vertices: the factors of v_i's bucket;
- R(i, phi) = min over C(v_i) of H(i, phi') + sum_j R(j, phi' restricted): ``_min_sum``, for all
  phi over D(i) at once; the R(j) are the results that earlier steps left in the bucket;
- extraction of phi* from the stored minimisers: ``Elimination.assignment``, which looks the
  minimiser up again in the factors, last eliminated node first.

Differences from the paper: tables live in memory as dense arrays; nothing is stored for a
minimiser; and two steps on the very same tables in the same arrangement give the same result, so
it is computed once (``Tables``): 32 equal layers cost one. Ties go to the lowest choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from autopar.search.ordering import Order
from autopar.search.problem import Array, Edge, SearchError

_CHUNK_ELEMENTS = 1 << 20
_COMPRESS_ABOVE = 1 << 22

Factor = tuple[tuple[int, ...], Array]  # scope (ascending nodes), table with one dim for each


class TableTooLargeError(SearchError):
    """An elimination step would make more tables than the stated memory cap allows."""


@dataclass(slots=True)
class Tables:
    """Results of steps, kept under the identity of the tables that went in.

    Every array is referenced here, so an ``id`` stays unique as long as the cache lives.
    """

    cap_bytes: float = 1 << 30
    size_bytes: int = 0
    num_computed: int = 0
    num_reused: int = 0
    _results: dict[tuple[object, ...], Array] = field(default_factory=dict)
    _inputs: dict[int, Array] = field(default_factory=dict)
    _classes: dict[tuple[int, int], tuple[object, ...]] = field(default_factory=dict)

    def step(self, node: int, scope: tuple[int, ...], factors: Sequence[Factor]) -> Array:
        """R(i, .) over ``scope``: the minimum over ``node`` of the sum of ``factors``."""
        place = {other: index + 1 for index, other in enumerate(scope)}
        place[node] = 0
        local = [(tuple(place[other] for other in nodes), table) for nodes, table in factors]
        key = tuple(sorted((id(table), dims) for dims, table in local))
        known = self._results.get(key)
        if known is not None:
            self.num_reused += 1
            return known
        shape = [0] * (len(scope) + 1)
        for dims, table in local:
            for dim, size in zip(dims, table.shape):
                shape[dim] = size
        size_bytes = 8 * math.prod(shape[1:])
        if self.size_bytes + size_bytes > self.cap_bytes:
            raise TableTooLargeError(
                f"step {self.num_computed} needs a table of {size_bytes} bytes on top of "
                f"{self.size_bytes}, over table_cap_bytes={self.cap_bytes:.0f}"
            )
        result = self._compute(tuple(shape), local)
        for _, table in local:
            self._inputs[id(table)] = table
        self._results[key] = result
        self.size_bytes += size_bytes
        self.num_computed += 1
        return result

    def _compute(self, shape: tuple[int, ...], local: list[Factor]) -> Array:
        if math.prod(shape) < _COMPRESS_ABOVE:
            return _min_sum(shape, _aligned(len(shape), local))
        return self._compressed(shape, local)

    def _compressed(self, shape: tuple[int, ...], local: list[Factor]) -> Array:
        """The step on one representative of each class of choices no factor tells apart."""
        keep: list[Array] = []
        back: list[Array] = []
        for dim in range(1, len(shape)):
            label = np.zeros(shape[dim], dtype=np.int64)
            for dims, table in local:
                if dim in dims:
                    label = label * shape[dim] + self._labels(table, dims.index(dim))
                    label = np.unique(label, return_inverse=True)[1]
            _, first, inverse = np.unique(label, return_index=True, return_inverse=True)
            keep.append(first)
            back.append(inverse)
        small = []
        for dims, table in local:
            for axis, dim in enumerate(dims):
                if dim and len(keep[dim - 1]) < shape[dim]:
                    table = np.take(table, keep[dim - 1], axis=axis)
            small.append((dims, table))
        inner = (shape[0], *(len(first) for first in keep))
        result = _min_sum(inner, _aligned(len(shape), small))
        for axis, inverse in enumerate(back):
            if inner[axis + 1] < shape[axis + 1]:
                result = np.take(result, inverse, axis=axis)
        return result

    def _labels(self, table: Array, axis: int) -> Array:
        """Equal slices of ``table`` along ``axis`` get equal labels."""
        key = (id(table), axis)
        known = self._classes.get(key)
        if known is None:
            seen: dict[bytes, int] = {}
            moved = np.moveaxis(table, axis, 0)
            labels = [seen.setdefault(row.tobytes(), len(seen)) for row in moved]
            known = self._classes[key] = (table, np.array(labels, dtype=np.int64))
        return known[1]  # type: ignore[return-value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One eliminated node: its dependent set, its bucket, and R over the dependent set."""

    node: int
    scope: tuple[int, ...]
    factors: tuple[Factor, ...]
    result: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Elimination:
    """The optimum with every step that led to it."""

    steps: tuple[Step, ...]
    optimum: float

    def assignment(self) -> tuple[int, ...]:
        """phi*, read back from the last eliminated node to the first; ties to the lowest."""
        chosen = [0] * len(self.steps)
        for step in reversed(self.steps):
            total: Array | None = None
            for scope, table in step.factors:
                at = tuple(slice(None) if n == step.node else chosen[n] for n in scope)
                line = table[at]
                total = line if total is None else total + line
            assert total is not None
            chosen[step.node] = int(total.argmin())
        return tuple(chosen)


def eliminate(
    node_costs: Sequence[Array],
    edge_costs: Mapping[Edge, Array],
    order: Order,
    tables: Tables,
) -> Elimination:
    """Eliminate every node in ``order``; raises ``TableTooLargeError`` over the cap."""
    position = [0] * len(node_costs)
    for index, node in enumerate(order.nodes):
        position[node] = index
    buckets: list[list[Factor]] = [[((node,), cost)] for node, cost in enumerate(node_costs)]
    for (i, j), table in edge_costs.items():
        buckets[i if position[i] < position[j] else j].append(((i, j), table))
    steps: list[Step] = []
    constants: list[float] = []
    for node in order.nodes:
        factors = tuple(buckets[node])
        buckets[node] = []
        scope = tuple(sorted({other for nodes, _ in factors for other in nodes} - {node}))
        result = tables.step(node, scope, factors)
        steps.append(Step(node=node, scope=scope, factors=factors, result=result))
        if scope:
            first = min(scope, key=position.__getitem__)
            buckets[first].append((scope, result))
        else:
            constants.append(float(result))
    return Elimination(steps=tuple(steps), optimum=math.fsum(constants))


def _aligned(num_dims: int, local: Sequence[Factor]) -> list[Array]:
    """Tables with ``num_dims`` dims each, node first; those inside another's dims are added up."""
    wide: list[tuple[frozenset[int], Array]] = []
    ordered = sorted(local, key=lambda item: -len(item[0]))
    for dims, table in ordered:
        order = sorted(range(len(dims)), key=dims.__getitem__)
        index: list[slice | None] = [None] * num_dims
        for dim in dims:
            index[dim] = slice(None)
        spread = np.transpose(table, order)[tuple(index)]
        for slot, (covered, total) in enumerate(wide):
            if covered.issuperset(dims):
                wide[slot] = (covered, total + spread)
                break
        else:
            wide.append((frozenset(dims), spread))
    return [table for _, table in wide]


def _min_sum(shape: tuple[int, ...], tables: Sequence[Array]) -> Array:
    """min over dim 0 of the broadcast sum, in pieces that stay in the processor's cache."""
    if len(tables) == 1:
        return np.asarray(tables[0].min(axis=0))
    per_slice = math.prod(shape) // max(1, shape[1])
    if math.prod(shape) <= _CHUNK_ELEMENTS:
        return np.asarray(_add_all(tables).min(axis=0))
    result = np.empty(shape[1:])
    width = max(1, _CHUNK_ELEMENTS // per_slice)
    for start in range(0, shape[1], width):
        part = [
            table if table.shape[1] == 1 else table[:, start : start + width] for table in tables
        ]
        if width == 1 and len(shape) > 2:
            inner = [table[:, 0] for table in part]
            result[start] = _min_sum((shape[0], *shape[2:]), inner)
        else:
            result[start : start + width] = _add_all(part).min(axis=0)
    return result


def _add_all(tables: Sequence[Array]) -> Array:
    """The broadcast sum, smallest tables first so that only the last addition is full size."""
    total, *rest = sorted(tables, key=lambda table: table.size)
    for table in rest:
        total = total + table
    return total
