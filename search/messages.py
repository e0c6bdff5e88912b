"""Message passing: lower bounds for graphs that are too dense to eliminate.

In: a reduced problem. Out: a bound, assignments decoded from it, and the choices that no better
assignment can have. The cost is reparametrised as sum_i t_i[x_i] + sum_e t_e[x_i, x_j], always
equal to F(x); sum_i min t_i + sum_e min t_e is a lower bound for any reparametrisation. A sweep
visits the nodes, pulls the minimum of each edge of i into t_i, and pushes shares of t_i to the
edges ahead (sequential reweighted message passing: Kolmogorov, PAMI 2015, which on pairs is TRW-S).
The bound never decreases, and tends to that of the linear relaxation.
"""

from __future__ import annotations

import math

import numpy as np

from autopar.search.problem import Array, Problem


class Messages:
    """A reparametrisation of a problem's cost: t_e = E + u[:, None] + v[None, :]."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.node_terms = [cost.copy() for cost in problem.node_costs]
        self.edges = list(problem.edge_costs)
        self.tables = [np.ascontiguousarray(table) for table in problem.edge_costs.values()]
        self.sides = [(np.zeros(table.shape[0]), np.zeros(table.shape[1])) for table in self.tables]
        self.near: list[list[tuple[int, int, int]]] = [[] for _ in self.node_terms]
        for index, (i, j) in enumerate(self.edges):
            self.near[i].append((j, index, 0))
            self.near[j].append((i, index, 1))

    def sweep(self, *, forward: bool) -> None:
        """Pull and push at every node, in ascending or descending order."""
        order = range(len(self.near)) if forward else range(len(self.near) - 1, -1, -1)
        for node in order:
            self._pull(node)
            ahead = [e for e in self.near[node] if (e[0] > node) == forward]
            if not ahead:
                continue
            behind = len(self.near[node]) - len(ahead)
            share = self.node_terms[node] / max(len(ahead), behind)
            for _, index, side in ahead:
                self.sides[index][side][:] += share
            self.node_terms[node] = self.node_terms[node] - share * len(ahead)

    def bound(self) -> float:
        """The lower bound of the current reparametrisation."""
        terms = [float(term.min()) for term in self.node_terms]
        return math.fsum(
            terms + [float(self._edge(index).min()) for index in range(len(self.edges))]
        )

    def decode(self) -> tuple[int, ...]:
        """Choose the cheapest choice node by node, given those before; ties go to the lowest."""
        chosen: list[int] = []
        for node, term in enumerate(self.node_terms):
            total = term
            for other, index, side in self.near[node]:
                if other < node:
                    total = total + self._line(index, side, chosen[other])
                else:
                    total = total + self._least(index, side)
            chosen.append(int(total.argmin()))
        return tuple(chosen)

    def possible(self, limit_s: float) -> list[Array]:
        """For each node, the mask of choices that an assignment of at most ``limit_s`` may have."""
        total = self.bound()
        slack = 1e-9 * max(abs(limit_s), abs(total))
        masks = []
        for node, term in enumerate(self.node_terms):
            extra = term - term.min()
            for _, index, side in self.near[node]:
                least = self._least(index, side)
                extra = extra + (least - least.min())
            masks.append(total + extra <= limit_s + slack)
        return masks

    def _edge(self, index: int) -> Array:
        rows, columns = self.sides[index]
        return self.tables[index] + rows[:, None] + columns[None, :]

    def _least(self, index: int, side: int) -> Array:
        """The least cost of the edge for each choice on one side."""
        rows, columns = self.sides[index]
        if side == 0:
            return np.asarray((self.tables[index] + columns[None, :]).min(axis=1) + rows)
        return np.asarray((self.tables[index] + rows[:, None]).min(axis=0) + columns)

    def _line(self, index: int, side: int, other_choice: int) -> Array:
        rows, columns = self.sides[index]
        table = self.tables[index]
        if side == 0:
            return np.asarray(table[:, other_choice] + rows + columns[other_choice])
        return np.asarray(table[other_choice] + columns + rows[other_choice])

    def _pull(self, node: int) -> None:
        for _, index, side in self.near[node]:
            least = self._least(index, side)
            self.sides[index][side][:] -= least
            self.node_terms[node] = self.node_terms[node] + least
