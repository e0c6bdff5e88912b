"""Local search: changes of single nodes, then neighbourhoods solved exactly.

In: a problem and an assignment. Out: assignments offered to the ``Progress``. A neighbourhood frees
some nodes and fixes the others, such that the free part has small tables; elimination then finds
the best assignment of all free nodes at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from autopar.search.elimination import Pattern, compile_order
from autopar.search.ordering import Rule, simulate
from autopar.search.problem import Array, Problem
from autopar.search.solver import Progress

_STEP_OPERATIONS = 3e6
_PATIENCE = 60


def cheapest_choices(problem: Problem) -> tuple[int, ...]:
    """Each node's cheapest choice by its own cost, without edges; ties go to the lowest."""
    return tuple(int(cost.argmin()) for cost in problem.node_costs)


def frugal_choices(problem: Problem) -> tuple[int, ...]:
    """Each node's choice of least memory among those of finite cost; ties go to the lowest."""
    assert problem.node_memory is not None
    pairs = zip(problem.node_costs, problem.node_memory)
    return tuple(int(np.where(cost < math.inf, each, math.inf).argmin()) for cost, each in pairs)


def descend(problem: Problem, assignment: Sequence[int], progress: Progress) -> tuple[int, ...]:
    """Change one node at a time to its best choice, until none improves or time is up."""
    near = neighbours(problem)
    chosen = list(assignment)
    waiting = list(range(problem.num_nodes))
    queued = [True] * problem.num_nodes
    while waiting and progress.remaining_s > 0:
        node = waiting.pop()
        queued[node] = False
        total = _charged(problem, near, chosen, node)
        best = int(total.argmin())
        if not total[best] < total[chosen[node]]:
            continue
        chosen[node] = best
        for other, _ in near[node]:
            if not queued[other]:
                queued[other] = True
                waiting.append(other)
    return tuple(chosen)


def neighbours(problem: Problem) -> list[list[tuple[int, Array]]]:
    """For each node, (neighbour, table with the node's choices first)."""
    near: list[list[tuple[int, Array]]] = [[] for _ in range(problem.num_nodes)]
    for (i, j), table in problem.edge_costs.items():
        near[i].append((j, table))
        near[j].append((i, table.T))
    return near


def improve(
    problem: Problem,
    progress: Progress,
    offer: Callable[[tuple[int, ...]], bool],
    assignment: tuple[int, ...],
    *,
    until_s: float,
) -> tuple[int, ...]:
    """Solve random neighbourhoods until many in a row bring no improvement.

    until_s: as ``Progress.elapsed_s``. Returns the last assignment; each better one is offered.
    """
    generator = np.random.default_rng(progress.options.seed)
    near = neighbours(problem)
    misses = 0
    while misses < _PATIENCE and progress.elapsed_s < until_s and not progress.done:
        free = _grow(problem, near, generator)
        better = _solve_free(problem, progress, near, assignment, free)
        if problem.cost(better) < problem.cost(assignment):
            assignment, misses = better, 0
            offer(assignment)
        else:
            misses += 1
    return assignment


def _charged(
    problem: Problem, near: list[list[tuple[int, Array]]], chosen: Sequence[int], node: int
) -> Array:
    total = problem.node_costs[node]
    for other, table in near[node]:
        total = total + table[:, chosen[other]]
    return total


def _grow(
    problem: Problem, near: list[list[tuple[int, Array]]], generator: np.random.Generator
) -> list[int]:
    """Nodes around a random one, as many as the limit on the work of elimination allows."""
    start = int(generator.integers(problem.num_nodes))
    seen, order = {start}, [start]
    for node in order:
        others = [other for other, _ in near[node] if other not in seen]
        generator.shuffle(others)
        seen.update(others)
        order.extend(others)
    low, high = 1, len(order)
    while low < high:  # bisect for the largest prefix within the limit
        middle = (low + high + 1) // 2
        if _operations(problem, near, order[:middle]) <= _STEP_OPERATIONS:
            low = middle
        else:
            high = middle - 1
    return sorted(order[:low])


def _operations(
    problem: Problem, near: list[list[tuple[int, Array]]], free: Sequence[int]
) -> float:
    place = {node: index for index, node in enumerate(free)}
    edges = [
        (place[n], place[other])
        for n in free
        for other, _ in near[n]
        if other in place and n < other
    ]
    sizes = [problem.num_choices(node) for node in free]
    return simulate(sizes, edges, Rule.LEAST_WORK).num_operations


def _solve_free(
    problem: Problem,
    progress: Progress,
    near: list[list[tuple[int, Array]]],
    assignment: tuple[int, ...],
    free: Sequence[int],
) -> tuple[int, ...]:
    """The best assignment that differs only in the free nodes."""
    place = {node: index for index, node in enumerate(free)}
    costs, edges = [], {}
    for node in free:
        total = problem.node_costs[node]
        for other, table in near[node]:
            if other not in place:
                total = total + table[:, assignment[other]]
            elif node < other:
                edges[place[node], place[other]] = table
        costs.append(total)
    sizes = [len(cost) for cost in costs]
    program = compile_order(simulate(sizes, edges, Rule.LEAST_WORK), Pattern.of(costs, edges))
    found = program.assignment(program.run(costs, edges, 1 << 28, progress.check))
    chosen = list(assignment)
    for node, choice in zip(free, found):
        chosen[node] = choice
    return tuple(chosen)
