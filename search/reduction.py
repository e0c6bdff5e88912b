"""Reductions to smaller problems with the same optimum.

In: a problem without constraints. Out: a ``Reduction``: a problem with fewer choices and edges, and
the map back. Each rule keeps at least one optimal assignment of the budgeted problem:

- support: a choice of infinite cost, or with no allowed partner on some edge, is removed;
- separable edges: E_ij[a, b] = f[a] + g[b] is added to the two nodes' costs, and the edge removed;
- dominance (Goldstein's criterion): choice b of node i is removed if some choice a uses no more
  memory (where there is a budget) and c_i[a] - c_i[b] + sum over edges of max_y (E_ij[a, y] -
  E_ij[b, y]) <= 0, since then a is as good as b for any choices of the neighbours. Of two equal
  choices the lower one is kept.

Identical tables stay one object, so that 32 equal layers are reduced once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.search.minplus import Check, go_on
from autopar.search.problem import Array, Edge, Problem

_ROUNDING = 4 * np.finfo(np.float64).eps


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """A smaller problem, and for each node its original choices."""

    problem: Problem
    keep: tuple[Array, ...]

    def lift(self, assignment: Sequence[int]) -> tuple[int, ...]:
        """The original assignment for one of the smaller problem."""
        return tuple(int(kept[choice]) for kept, choice in zip(self.keep, assignment))

    def lower(self, assignment: Sequence[int]) -> tuple[int, ...] | None:
        """The smaller problem's assignment for an original one; None if a choice was removed."""
        lowered = []
        for kept, choice in zip(self.keep, assignment):
            place = int(np.searchsorted(kept, choice))
            if place == len(kept) or kept[place] != choice:
                return None
            lowered.append(place)
        return tuple(lowered)


def reduce_problem(
    problem: Problem, *, dominance: bool = True, check: Check = go_on
) -> Reduction | None:
    """Apply every rule until nothing changes; None if no assignment is allowed.

    check: called between tables; may raise to stop.
    """
    masks = _supported(problem)
    if masks is None:
        return None
    reduction = restrict(problem, masks)
    reduction = replace(reduction, problem=_without_separable(reduction.problem))
    while dominance:
        alive = _undominated(reduction.problem, check)
        if all(mask.all() for mask in alive):
            break
        reduction = compose(reduction, alive)
        reduction = replace(reduction, problem=_without_separable(reduction.problem))
    return reduction


def compose(outer: Reduction, masks: Iterable[Array]) -> Reduction:
    """``outer`` restricted to the choices of its smaller problem whose mask is True."""
    inner = restrict(outer.problem, masks)
    keep = tuple(kept[more] for kept, more in zip(outer.keep, inner.keep))
    return Reduction(problem=inner.problem, keep=keep)


def dominance_operations(problem: Problem) -> float:
    """The number of additions in one round of dominance, over the distinct tables."""
    distinct = {id(table): table.shape for table in problem.edge_costs.values()}
    return float(sum(rows * cols * (rows + cols) for rows, cols in distinct.values()))


def restrict(problem: Problem, masks: Iterable[Array]) -> Reduction:
    """The problem restricted to choices whose mask is True; sharing of tables is preserved."""
    shared: dict[tuple[int, bytes], Array] = {}
    keep = []
    for mask in masks:
        kept = np.flatnonzero(mask)
        keep.append(shared.setdefault((len(mask), kept.tobytes()), kept))
    known: dict[tuple[int, ...], Array] = {}

    def cut(table: Array, *kept: Array) -> Array:
        key = (id(table), *(id(each) for each in kept))
        if key not in known:
            whole = all(len(each) == size for each, size in zip(kept, table.shape))
            known[key] = table if whole else table[np.ix_(*kept)]
        return known[key]

    memory = problem.node_memory
    smaller = replace(
        problem,
        node_costs=[cut(cost, kept) for cost, kept in zip(problem.node_costs, keep)],
        edge_costs={
            (i, j): cut(table, keep[i], keep[j]) for (i, j), table in problem.edge_costs.items()
        },
        node_memory=None if memory is None else [cut(m, kept) for m, kept in zip(memory, keep)],
    )
    return Reduction(problem=smaller, keep=tuple(keep))


def _supported(problem: Problem) -> list[Array] | None:
    """Masks of choices with finite cost and a partner on every edge; None if a node has none."""
    masks = [cost < math.inf for cost in problem.node_costs]
    holed = {id(table): bool(table.max() == math.inf) for table in problem.edge_costs.values()}
    edges = [(e, table < math.inf) for e, table in problem.edge_costs.items() if holed[id(table)]]
    changed = True
    while changed:
        changed = False
        for (i, j), finite in edges:
            rows, cols = finite[:, masks[j]].any(axis=1), finite[masks[i]].any(axis=0)
            for node, left in ((i, masks[i] & rows), (j, masks[j] & cols)):
                if left.sum() < masks[node].sum():
                    masks[node], changed = left, True
    return masks if all(mask.any() for mask in masks) else None


def _split(table: Array) -> tuple[Array, Array] | None:
    """(f, g) with table = f[:, None] + g[None, :] up to rounding, or None."""
    if table.max() == math.inf:
        return None
    rows, cols = table[:, 0], table[0] - table[0, 0]
    rest = np.abs(table - rows[:, None] - cols[None, :]).max()
    return (rows, cols) if rest <= _ROUNDING * np.abs(table).max() else None


def _without_separable(problem: Problem) -> Problem:
    """Fold separable edges into the costs of their nodes."""
    distinct = {id(table): table for table in problem.edge_costs.values()}
    parts = {key: _split(table) for key, table in distinct.items()}
    edges: dict[Edge, Array] = {}
    added: dict[int, list[tuple[int, int]]] = {}
    for (i, j), table in problem.edge_costs.items():
        if parts[id(table)] is None:
            edges[i, j] = table
            continue
        for side, node in enumerate((i, j)):
            added.setdefault(node, []).append((id(table), side))
    if not added:
        return problem
    known: dict[object, Array] = {}
    costs = list(problem.node_costs)
    for node, pieces in added.items():
        key = (id(costs[node]), tuple(sorted(pieces)))
        if key not in known:
            total = costs[node]
            for table_id, side in pieces:
                part = parts[table_id]
                assert part is not None
                total = total + part[side]
            known[key] = total
        costs[node] = known[key]
    return replace(problem, node_costs=costs, edge_costs=edges)


def _undominated(problem: Problem, check: Check) -> list[Array]:
    """For each node, the mask of choices that no other choice dominates."""
    near: list[list[tuple[int, int]]] = [[] for _ in range(problem.num_nodes)]
    tables: dict[int, Array] = {}
    for (i, j), table in problem.edge_costs.items():
        tables[id(table)] = table
        near[i].append((id(table), 0))
        near[j].append((id(table), 1))
    worst: dict[tuple[int, int], Array] = {}
    known: dict[object, Array] = {}
    masks = []
    for node, cost in enumerate(problem.node_costs):
        memory = None
        if problem.node_memory is not None and problem.budgets is not None:
            memory = problem.node_memory[node]
        sides = sorted(near[node])
        key = (id(cost), id(memory), tuple(sides))
        if key not in known:
            check()
            for table_id, side in sides:
                if (table_id, side) not in worst:
                    table = tables[table_id] if side == 0 else tables[table_id].T
                    worst[table_id, side] = _worst_difference(table)
            known[key] = _undominated_choices(cost, memory, [worst[side] for side in sides])
        masks.append(known[key])
    return masks


def _worst_difference(table: Array) -> Array:
    """[a, b] -> max over columns y of table[a, y] - table[b, y]; forbidden b are ignored."""
    table = np.ascontiguousarray(table)
    result = np.empty((len(table), len(table)))
    with np.errstate(invalid="ignore"):
        for index, row in enumerate(table):
            difference = row[None, :] - table
            np.nan_to_num(difference, copy=False, nan=-math.inf, posinf=math.inf, neginf=-math.inf)
            difference.max(axis=1, out=result[index])
    return result


def _undominated_choices(cost: Array, memory: Array | None, worst: Sequence[Array]) -> Array:
    with np.errstate(invalid="ignore"):
        total = cost[:, None] - cost[None, :]
        for difference in worst:
            total = total + difference
    index = np.arange(len(cost))
    first = index[:, None] < index[None, :]
    beats = (total < 0) | ((total == 0) & first)
    if memory is not None:
        less = memory[:, None] < memory[None, :]
        beats |= (total == 0) & less
        beats &= memory[:, None] <= memory[None, :]
    np.fill_diagonal(beats, False)
    alive = np.ones(len(cost), dtype=bool)
    for choice in range(
        len(cost)
    ):  # one at a time: by rounding, two choices could dominate each other
        if (beats[:, choice] & alive).any():
            alive[choice] = False
    return alive
