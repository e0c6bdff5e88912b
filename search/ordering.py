"""Elimination orders: several are simulated, and the cheapest is used.

In: the graph and the number of choices of every node. Out: an ``Order`` with its predicted work and
tables. An order depends on sizes, not on costs, so it serves every problem on the same graph (the
Lagrangian solves hundreds of them).

Eliminating node v joins it with its dependent set D(v), the neighbours it has by then (PaSE
section 4): work K_v * prod K_u, result table prod K_u over u in D(v). PaSE's GenerateSeq takes
the smallest D(v) by count; that is ``PASE`` here, one rule among several.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

_LOG_SCALE = 1 << 20  # logarithms are integers, so that sums are exact in any order


class Rule(StrEnum):
    """How the next node is picked; ties go to the shallowest step, then to the lowest index.

    The depth of a step is the number of steps in the chain of results it builds on. Shallow steps
    first means that equal layers are eliminated in parallel and in the same way, so that their
    equal steps are recognised (``elimination.Program``) instead of merging with what precedes them.
    """

    LEAST_WORK = "least_work"
    LEAST_TABLE = "least_table"
    PASE = "pase"
    LEAST_FILL = "least_fill"
    NATURAL = "natural"


HOPELESS = 1e60  # entries of a table: no other rule can make it affordable


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """An elimination order with its predicted work and memory.

    num_operations: additions and comparisons over all steps, without reuse of equal steps.
    largest_table, largest_step: elements of the largest result and of the largest step.
    width: size of the largest dependent set, PaSE's M.
    """

    nodes: tuple[int, ...]
    rule: Rule
    num_operations: float
    largest_table: float
    largest_step: float
    width: int


def candidate_orders(
    sizes: Sequence[int], edges: Iterable[tuple[int, int]], *, cheap: float = 2e8
) -> list[Order]:
    """Orders by increasing predicted work; rules are tried until one is ``cheap``."""
    edge_list = list(edges)
    orders: list[Order] = []
    for rule in Rule:
        hopeless = min((order.largest_table for order in orders), default=0.0) > HOPELESS
        if rule is Rule.LEAST_FILL and (hopeless or len(sizes) > 4000):
            continue
        orders.append(simulate(sizes, edge_list, rule))
        if orders[-1].num_operations <= cheap:
            break
    return sorted(orders, key=lambda order: order.num_operations)


def simulate(sizes: Sequence[int], edges: Iterable[tuple[int, int]], rule: Rule) -> Order:
    """Eliminate symbolically under a rule, and sum up work and memory."""
    graph = _Graph(sizes, edges)
    score = graph.score(rule)
    depth = [0] * len(sizes)
    heap = [(score(node), 0, node) for node in range(len(sizes))]
    current = [value for value, _, _ in heap]
    heapq.heapify(heap)
    nodes: list[int] = []
    operations = largest = largest_step = 0.0
    width = 0
    while heap:
        value, level, node = heapq.heappop(heap)
        if graph.gone[node] or value != current[node] or level != depth[node]:
            continue
        nodes.append(node)
        width = max(width, len(graph.adjacent[node]))
        table = _elements(graph.log_step[node] - graph.logs[node])
        step = table * sizes[node]
        operations += step
        largest, largest_step = max(largest, table), max(largest_step, step)
        near = graph.adjacent[node]
        for touched in graph.eliminate(node, wide=rule is Rule.LEAST_FILL):
            current[touched] = score(touched)
            if touched in near:
                depth[touched] = max(depth[touched], level + 1)
            heapq.heappush(heap, (current[touched], depth[touched], touched))
    return Order(
        nodes=tuple(nodes),
        rule=rule,
        num_operations=operations,
        largest_table=largest,
        largest_step=largest_step,
        width=width,
    )


def _elements(log: int) -> float:
    exponent = log / _LOG_SCALE
    return math.inf if exponent > 1000 else 2.0**exponent


class _Graph:
    """Adjacency under elimination, with the logarithm of every node's step size."""

    def __init__(self, sizes: Sequence[int], edges: Iterable[tuple[int, int]]) -> None:
        self.adjacent: list[set[int]] = [set() for _ in sizes]
        for i, j in edges:
            self.adjacent[i].add(j)
            self.adjacent[j].add(i)
        self.logs = [round(math.log2(size) * _LOG_SCALE) for size in sizes]
        self.log_step = [
            log + sum(self.logs[other] for other in near)
            for log, near in zip(self.logs, self.adjacent)
        ]
        self.gone = [False] * len(sizes)

    def score(self, rule: Rule) -> Callable[[int], int]:
        if rule is Rule.LEAST_WORK:
            return self.log_step.__getitem__
        if rule is Rule.LEAST_TABLE:
            return lambda node: self.log_step[node] - self.logs[node]
        if rule is Rule.PASE:
            return lambda node: len(self.adjacent[node])
        if rule is Rule.LEAST_FILL:
            return self.fill
        return lambda node: node

    def fill(self, node: int) -> int:
        """The sum of the logarithms of the tables of all missing pairs of D(node)."""
        near = sorted(self.adjacent[node])
        total = 0
        for index, first in enumerate(near):
            known = self.adjacent[first]
            for second in near[index + 1 :]:
                if second not in known:
                    total += self.logs[first] + self.logs[second]
        return total

    def eliminate(self, node: int, *, wide: bool) -> list[int]:
        """Connect the neighbours of ``node``; returns the nodes whose score may change."""
        self.gone[node] = True
        near = self.adjacent[node]
        for other in near:
            known = self.adjacent[other]
            known.discard(node)
            added = near - known
            added.discard(other)
            known |= added
            grown = sum(self.logs[new] for new in added)
            self.log_step[other] += grown - self.logs[node]
        touched = set(near)
        if wide:
            for other in near:
                touched |= self.adjacent[other]
        return sorted(touched)
