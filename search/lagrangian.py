"""Memory budgets by Lagrangian bounds on elimination, with a price of memory for each group.

In: a reduced problem with budgets whose elimination fits the cap. Out, on a ``Progress``: a lower
bound, good assignments within the budget, and a smaller problem (``Reduction``) that still has
every assignment better than the best known.

With prices p >= 0, L(p) = min_x F(x) + sum_g p_g (memory_g(x) - budget_g) is one elimination with
node costs c_i + p m_i, and a lower bound on the budgeted optimum. The best p is found by cutting
planes in a box around the best point (each x found gives a line above L; their minimum is maximised
by a small linear program). At the best prices, the least L over assignments with x_i = a (the
min-marginal) rules out choice a if it exceeds the best known cost. Repeated layers all switch
choice at the same price, so the best assignments mix two of those found: expensive choices up to
some node and frugal ones after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.search.elimination import Pattern, Program, best_program, compile_order
from autopar.search.linear import LinearProgram
from autopar.search.linear_solver import solve_linear
from autopar.search.problem import Array, Problem
from autopar.search.reduction import Reduction, compose
from autopar.search.solver import Progress

_ROUNDS = 80
_CLOSE = 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """An elimination at given prices: its assignment, with cost and memory, and L."""

    prices: tuple[float, ...]
    assignment: tuple[int, ...]
    cost: float
    memory: tuple[float, ...]
    value: float


@dataclass(slots=True)
class Lagrangian:
    """The dual of a reduced problem, with all points evaluated so far.

    Prices are in seconds per ``unit`` of memory (the group's budget), which keeps them at the scale
    of the costs. Groups without a limit are omitted. ``floor`` is a bound on the assignments that
    the reduction excludes; -inf if L bounds only a branch.
    """

    reduction: Reduction
    progress: Progress
    floor: float = math.inf
    problem: Problem = field(init=False)
    program: Program = field(init=False)
    groups: tuple[int, ...] = field(init=False)
    units: tuple[float, ...] = field(init=False)
    points: list[Point] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.problem = problem = self.reduction.problem
        budgets, memory = problem.budgets, problem.node_memory
        assert budgets is not None
        assert memory is not None
        self.groups = tuple(g for g in range(problem.num_groups) if math.isfinite(budgets[g]))
        top = [0.0] * problem.num_groups
        for node, each in enumerate(memory):
            top[problem.group(node)] += float(each.max())
        self.units = tuple(budgets[g] or top[g] or 1.0 for g in self.groups)
        keys = [
            (id(cost), id(memory[node]), problem.group(node))
            for node, cost in enumerate(problem.node_costs)
        ]
        self.program = best_program(problem.node_costs, problem.edge_costs, keys)

    def evaluate(self, prices: Sequence[float]) -> Point:
        """An elimination at these prices: L is a bound, and its assignment is offered."""
        point = self._solve(self.program, prices, self._priced(prices))
        self.points.append(point)
        self.progress.raise_bound(min(point.value, self.floor))
        return point

    def evaluate_split(
        self, prices: Sequence[float], other: Sequence[float], until: Sequence[int]
    ) -> Point:
        """Evaluate with nodes of group k before ``until[k]`` at ``other`` prices; not a bound."""
        costs, earlier = self._priced(prices), self._priced(other)
        limits = dict(zip(self.groups, until))
        for node in range(self.problem.num_nodes):
            if node < limits.get(self.problem.group(node), 0):
                costs[node] = earlier[node]
        program = compile_order(self.program.order, Pattern.of(costs, self.problem.edge_costs))
        return self._solve(program, prices, costs)

    def _solve(self, program: Program, prices: Sequence[float], costs: list[Array]) -> Point:
        cap_bytes = self.progress.options.table_cap_bytes
        values = program.run(costs, self.problem.edge_costs, cap_bytes, self.progress.check)
        assignment = program.assignment(values)
        point = Point(
            prices=tuple(prices),
            assignment=assignment,
            cost=self.problem.cost(assignment),
            memory=self.problem.memory(assignment),
            value=values.optimum - self._offset(prices),
        )
        if self.fits(point):
            self.progress.offer(self.reduction.lift(assignment))
        return point

    def fits(self, point: Point) -> bool:
        """Whether the point fits every budget."""
        return self.problem.fits(point.assignment)

    def excess(self, memory: Sequence[float]) -> list[float]:
        """(memory - budget) / unit of each limited group."""
        budgets = self.problem.budgets
        assert budgets is not None
        return [(memory[g] - budgets[g]) / unit for g, unit in zip(self.groups, self.units)]

    def _offset(self, prices: Sequence[float]) -> float:
        budgets = self.problem.budgets
        assert budgets is not None
        parts = [p * budgets[g] / u for p, g, u in zip(prices, self.groups, self.units)]
        return math.fsum(parts)

    def _priced(self, prices: Sequence[float], *, scale: float = 1.0) -> list[Array]:
        """c_i + p m_i; identical arrays stay one object."""
        memory = self.problem.node_memory
        assert memory is not None
        rate = {g: p / u for p, g, u in zip(prices, self.groups, self.units)}
        known: dict[tuple[int, int, float], Array] = {}
        priced = []
        for node, cost in enumerate(self.problem.node_costs):
            price = rate.get(self.problem.group(node), 0.0)
            key = (id(cost), id(memory[node]), price)
            if key not in known:
                known[key] = scale * cost + price * memory[node]
            priced.append(known[key])
        return priced

    def least_memory(self, weights: Sequence[float]) -> tuple[int, ...]:
        """The assignment with the least weighted sum of memory / unit over the groups."""
        costs, edges = self._priced(weights, scale=0.0), self._pure_edges()
        program = best_program(costs, edges)
        cap_bytes = self.progress.options.table_cap_bytes
        values = program.run(costs, edges, cap_bytes, self.progress.check)
        return program.assignment(values)

    def least_of_each_group(self) -> tuple[float, ...]:
        """The least bytes that each limited group can use, independent of the others."""
        count = len(self.groups)
        found = []
        for k, group in enumerate(self.groups):
            assignment = self.least_memory([float(index == k) for index in range(count)])
            found.append(self.problem.memory(assignment)[group])
        return tuple(found)

    def _pure_edges(self) -> dict[tuple[int, int], Array]:
        """Edges with 0 for allowed and +inf for forbidden pairs, if they forbid any."""
        known: dict[int, Array | None] = {}
        for table in self.problem.edge_costs.values():
            if id(table) not in known:
                holed = bool(table.max() == math.inf)
                known[id(table)] = np.where(table < math.inf, 0.0, math.inf) if holed else None
        pure = {edge: known[id(table)] for edge, table in self.problem.edge_costs.items()}
        return {edge: table for edge, table in pure.items() if table is not None}

    def maximise(self, start: Sequence[float] | None = None) -> Point:
        """The best prices; stops when the cutting planes meet L, or at the time limit."""
        best = self.evaluate([0.0] * len(self.groups) if start is None else start)
        radius = abs(best.cost) or 1.0
        for _ in range(_ROUNDS):
            if self.progress.done or not self.groups or best.value == math.inf:
                break
            prices, promised = self._next_prices(best, radius)
            gain = promised - best.value
            if gain <= _CLOSE * max(abs(best.value), 1e-300):
                break
            point = self.evaluate(prices)
            if point.value > best.value + 0.1 * gain:
                best, radius = point, radius * 2
            elif point.value > best.value:
                best = point
            else:
                radius = radius / 2 if len(self.groups) > 1 else radius
        return best

    def _next_prices(self, best: Point, radius: float) -> tuple[list[float], float]:
        """Maximise the minimum of all lines within the box of ``radius`` around ``best``."""
        count = len(self.groups)
        slopes = np.array([self.excess(point.memory) for point in self.points])
        heights = np.array([point.cost for point in self.points])
        num_lines = len(heights)
        center = np.array(best.prices)
        scale = float(np.abs(heights).max()) or 1.0
        columns = np.tile(np.arange(count + 1), num_lines)
        program = LinearProgram(
            costs=np.array([*([0.0] * count), -1.0]),
            lower=np.array([*(np.maximum(0.0, center - radius) / scale), -math.inf]),
            upper=np.array([*((center + radius) / scale), math.inf]),
            integer=np.zeros(count + 1, dtype=bool),
            rows=np.repeat(np.arange(num_lines), count + 1),
            columns=columns,
            coefficients=np.hstack([-slopes, np.ones((num_lines, 1))]).ravel(),
            row_lower=np.full(num_lines, -math.inf),
            row_upper=heights / scale,
            num_wanted=count + 1,
        )
        result = solve_linear(program, small=True)
        if result.values is None:
            return list(best.prices), best.value
        prices = [max(0.0, float(value)) * scale for value in result.values[:count]]
        return prices, float(result.values[count]) * scale

    def ends(self) -> tuple[Point, Point] | None:
        """The best points (by L) over and within the budget; None if either is missing."""
        over = [point for point in self.points if not self.fits(point)]
        under = [point for point in self.points if self.fits(point)]
        if not over or not under:
            return None
        return max(over, key=lambda p: p.value), max(under, key=lambda p: p.value)

    def mix(self) -> None:
        """For each group, bisect on the node up to which the expensive (or frugal) choices fit."""
        ends = self.ends()
        if ends is None:
            return
        costly, frugal = ends
        for costly_first in (True, False):
            first, second = (costly, frugal) if costly_first else (frugal, costly)
            start = 0 if costly_first else self.problem.num_nodes
            until = [start] * len(self.groups)
            for k in range(len(self.groups)):
                low, high = 0, self.problem.num_nodes
                while high - low > 1 and not self.progress.done:
                    until[k] = (low + high) // 2
                    fits = self.fits(self.evaluate_split(second.prices, first.prices, until))
                    low, high = (until[k], high) if fits == costly_first else (low, until[k])
                until[k] = low if costly_first else high

    def fix(self, best: Point) -> Reduction | None:
        """The choices of assignments better than the best known; None if there are none."""
        costs = self._priced(best.prices)
        cap_bytes = self.progress.options.table_cap_bytes
        values = self.program.run(costs, self.problem.edge_costs, cap_bytes, self.progress.check)
        limit = self.progress.cost + self._offset(best.prices)
        limit += 1e-9 * max(abs(limit), abs(self.progress.cost))
        masks = [marginal <= limit for marginal in self.program.marginals(values)]
        if not all(mask.any() for mask in masks):
            return None
        return compose(self.reduction, masks)

    def pool(self, best: Point) -> Reduction:
        """The choices of the best assignment, and of the lowest lines at the best prices."""
        masks = [np.zeros(len(cost), dtype=bool) for cost in self.problem.node_costs]
        lines = [(self._line(point, best), point.assignment) for point in self.points]
        lines.sort(key=lambda line: line[0])
        taken = [assignment for _, assignment in lines[: 3 + 2 * len(self.groups)]]
        known = self.reduction.lower(self.progress.assignment) if self.progress.assignment else None
        for assignment in taken if known is None else [*taken, known]:
            for mask, choice in zip(masks, assignment):
                mask[choice] = True
        return compose(self.reduction, masks)

    def _line(self, point: Point, at: Point) -> float:
        """F(x) + p (memory(x) - budget) of a point at the prices of another."""
        pairs = zip(at.prices, self.excess(point.memory))
        return point.cost + math.fsum(price * over for price, over in pairs)
