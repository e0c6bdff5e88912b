"""The search as an integer linear program, linear relaxation first.

In: any problem, with or without a memory budget. Out: the optimum, or the best found and a bound.
Variables: x[i, a], node i takes choice a; y[e, r, s] >= 0, edge e pays for a pair of choices, one
for every pair of *different* rows r and columns s of its table. Constraints, in this order
(``Formulation``): sum_a x[i, a] = 1; sum_s y[e, r, s] = sum of x[i, a] with row r; the same for
columns; the memory of each group above its minimum, as a fraction of what the budget leaves, is at
most 1. The relaxation is integral on most such instances, which proves optimality at once.
Otherwise its rounding is offered, and HiGHS branches from the best known assignment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.search.linear import LinearProgram, LinearResult
from autopar.search.linear_solver import solve_linear
from autopar.search.problem import Array, Method, Problem
from autopar.search.reduction import Reduction, reduce_problem
from autopar.search.solver import OPTIMAL_GAP, Capability, Options, Progress

_MAX_VARIABLES = 3_000_000
_INTEGRAL = 1e-6
_TRUST = 1e-7  # HiGHS' tolerance, as a fraction of the largest cost; bounds are lowered by as much
_SLACK = 2e-6
_LARGEST = 1e4  # scaled costs are in 0..1e4


class IlpSolver:
    """OR-Tools MathOpt with HiGHS."""

    method = Method.ILP
    capability = Capability(memory=True, proves=True, bounds=True)

    def refuses(self, problem: Problem, options: Options) -> str | None:
        """Refuse more variables than fit in memory."""
        num_variables = num_edge_variables(problem)
        if num_variables <= _MAX_VARIABLES:
            return None
        return f"{num_variables} edge variables, over {_MAX_VARIABLES}"

    def run(self, problem: Problem, progress: Progress) -> None:
        """Reduce, relax, and branch only if the relaxation is fractional."""
        progress.enter(self.method)
        reduction = reduce_problem(problem, check=progress.check)
        if reduction is None:
            progress.prove_infeasible("every assignment holds a forbidden choice or pair")
        else:
            solve_reduced(reduction, progress, floor=math.inf)


def solve_reduced(
    reduction: Reduction,
    progress: Progress,
    *,
    floor: float,
    gap: float = 0.0,
    relax_first: bool = True,
) -> None:
    """Relaxation, then branch and bound; ``progress`` is that of the original problem.

    floor: a bound on the assignments that the reduction excludes. relax_first: False if a bound at
    least as good as the relaxation's is known, such as a Lagrangian one.
    """
    if not reduction.problem.num_nodes:
        progress.offer(())
        progress.raise_bound(0.0)
        return
    form = Formulation(reduction.problem)
    session = _Session(form=form, reduction=reduction, progress=progress, floor=floor)
    if relax_first and _relaxation_settles(session):
        return
    slack = 0.0
    for _ in range(2):
        start = reduction.lower(progress.assignment) if progress.assignment else None
        result = solve_linear(
            form.program(slack),
            time_limit_s=_left(progress),
            hint=None if start is None else form.hint(start),
            relative_gap=max(progress.options.gap, gap, OPTIMAL_GAP / 10),
        )
        if result.infeasible:
            if slack == 0.0:
                _report_infeasible(session)
            return
        if session.take(result, bounds=slack == 0.0):
            return
        slack = _SLACK  # over the budget by rounding: solve again with a slightly smaller one


def _relaxation_settles(session: _Session) -> bool:
    """Solve the relaxation and use its result; returns whether nothing is left to do."""
    program, progress = session.form.program(), session.progress
    relaxed = solve_linear(program, time_limit_s=_left(progress), relaxed=True)
    if relaxed.infeasible:
        _report_infeasible(session)
        return True
    session.take(relaxed)
    return progress.done or (relaxed.optimal and session.form.is_integral(relaxed.values))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    """Translates results of HiGHS to the original problem."""

    form: Formulation
    reduction: Reduction
    progress: Progress
    floor: float

    def take(self, result: LinearResult, *, bounds: bool = True) -> bool:
        """Offer the (rounded) values and raise the bound; False if they break the budget."""
        fits = True
        if result.values is not None:
            assignment = self.reduction.lift(self.form.assignment(result.values))
            self.progress.offer(assignment)
            fits = self.progress.problem.fits(assignment)
        if bounds:
            bound = self.form.seconds(result.bound)
            trust_s = _TRUST * self.form.span_s
            best = self.progress.cost
            self.progress.raise_bound(
                min(self.floor, best)
                if best - bound <= trust_s
                else min(self.floor, bound - trust_s)
            )
        return fits


def _left(progress: Progress) -> float | None:
    """Time limit for HiGHS, which checks the clock rarely and overruns by a tenth or more."""
    return None if math.isinf(progress.remaining_s) else 0.8 * progress.remaining_s


def _report_infeasible(session: _Session) -> None:
    """No assignment is left: either a better one is known, or the problem is infeasible."""
    progress = session.progress
    if progress.assignment:
        progress.raise_bound(min(session.floor, progress.cost))
    elif session.floor == math.inf:
        least = least_budget(session.reduction.problem, _left(progress))
        if least is None:
            over = " or is over the budget" if session.reduction.problem.budgets else ""
            progress.prove_infeasible(f"every assignment has a forbidden pair{over}")
        else:
            progress.prove_infeasible(f"the least feasible budget is {least:.6g} bytes", least)


def least_budget(problem: Problem, time_limit_s: float | None = None) -> float | None:
    """The least bytes per group for which an assignment exists; None if not known."""
    if problem.node_memory is None:
        return None
    if not any(table.max() == math.inf for table in problem.edge_costs.values()):
        return _independent_least_budget(problem)
    forbidding = {e: t for e, t in problem.edge_costs.items() if t.max() == math.inf}
    form = Formulation(replace(problem, edge_costs=forbidding), peak=True)
    result = solve_linear(form.program(), time_limit_s=time_limit_s, relative_gap=1e-12)
    if result.values is None or not result.optimal:
        return None
    return max(problem.memory(form.assignment(result.values)))


def _independent_least_budget(problem: Problem) -> float | None:
    """The least budget without forbidden pairs: each node takes its choice of least memory."""
    frugal = []
    assert problem.node_memory is not None
    for cost, memory in zip(problem.node_costs, problem.node_memory):
        if not (cost < math.inf).any():
            return None
        frugal.append(int(np.where(cost < math.inf, memory, math.inf).argmin()))
    return max(problem.memory(frugal))


class Formulation:
    """The arrays of the program, with costs shifted and scaled to the precision of HiGHS.

    peak: minimise the largest memory of any group instead of the cost.
    """

    def __init__(self, problem: Problem, *, peak: bool = False) -> None:
        self.problem = problem
        self.peak = peak
        self.offsets = np.cumsum([0, *(len(cost) for cost in problem.node_costs)])
        self._rows: list[Array] = []
        self._columns: list[Array] = []
        self._coefficients: list[Array] = []
        self._row_bounds: list[tuple[Array, Array]] = []
        self._num_rows = 0
        self._num_columns = int(self.offsets[-1])
        self._costs: list[Array] = []
        self._upper: list[Array] = []
        self._labels: dict[int, tuple[Array, Array]] = {}
        self._edge_starts: list[tuple[int, int, int, Array, Array, int]] = []
        self._shift: list[float] = []
        self._add_nodes()
        for (i, j), table in problem.edge_costs.items():
            self._add_edge(i, j, table)
        self.span_s = max((float(np.abs(c).max()) for c in self._costs if len(c)), default=0.0)
        self._add_memory()

    def seconds(self, value: float) -> float:
        """The cost in seconds of an objective value of the program."""
        return value * self._unit_s + math.fsum(self._shift)

    @property
    def _unit_s(self) -> float:
        return self.span_s / _LARGEST if self.span_s > 0 and not self.peak else 1.0

    def program(self, slack: float = 0.0) -> LinearProgram:
        """The arrays; ``slack`` reduces every budget by that fraction."""
        lower = np.concatenate([low for low, _ in self._row_bounds])
        upper = np.concatenate([high for _, high in self._row_bounds])
        if self._num_memory_rows and slack:
            upper[-self._num_memory_rows :] *= 1 - slack
        num_nodes_columns = int(self.offsets[-1])
        integer = np.zeros(self._num_columns, dtype=bool)
        integer[:num_nodes_columns] = True
        costs = np.concatenate(self._costs)
        return LinearProgram(
            costs=costs if self.peak else costs / self._unit_s,
            lower=np.zeros(self._num_columns),
            upper=np.concatenate(self._upper),
            integer=integer,
            rows=np.concatenate(self._rows),
            columns=np.concatenate(self._columns),
            coefficients=np.concatenate(self._coefficients),
            row_lower=lower,
            row_upper=upper,
            num_wanted=num_nodes_columns,
        )

    def assignment(self, values: Array) -> tuple[int, ...]:
        """The choice with the largest value of each node; ties go to the lowest choice."""
        pairs = zip(self.offsets[:-1], self.offsets[1:])
        return tuple(int(values[low:high].argmax()) for low, high in pairs)

    def is_integral(self, values: Array | None) -> bool:
        """Whether the values are 0 or 1 within HiGHS' tolerance."""
        return values is not None and bool((np.abs(values - values.round()) <= _INTEGRAL).all())

    def hint(self, assignment: Sequence[int]) -> Array:
        """The values of all variables for an assignment."""
        values = np.zeros(self._num_columns)
        values[self.offsets[:-1] + np.asarray(assignment)] = 1.0
        for i, j, start, rows, columns, num_columns in self._edge_starts:
            place = rows[assignment[i]] * num_columns + columns[assignment[j]]
            values[start + place] = 1.0
        return values

    def _add_rows(self, low: Array, high: Array) -> int:
        self._row_bounds.append((low, high))
        self._num_rows += len(low)
        return self._num_rows - len(low)

    def _put(self, rows: Array, columns: Array, coefficients: Array) -> None:
        self._rows.append(rows)
        self._columns.append(columns)
        self._coefficients.append(coefficients)

    def _add_nodes(self) -> None:
        """sum_a x[i, a] = 1."""
        count = self.problem.num_nodes
        first = self._add_rows(np.ones(count), np.ones(count))
        for node, cost in enumerate(self.problem.node_costs):
            size = len(cost)
            columns = self.offsets[node] + np.arange(size)
            self._put(np.full(size, first + node), columns, np.ones(size))
            shift = float(cost.min())
            self._shift.append(shift)
            self._costs.append(np.zeros(size) if self.peak else cost - shift)
            self._upper.append(np.ones(size))

    def _add_edge(self, i: int, j: int, table: Array) -> None:
        """sum_s y[e, r, s] = sum_(a in r) x[i, a] and the same for columns."""
        if id(table) not in self._labels:
            self._labels[id(table)] = (distinct_rows(table), distinct_rows(table.T))
        rows, columns = self._labels[id(table)]
        pick_rows = np.unique(rows, return_index=True)[1]
        pick_columns = np.unique(columns, return_index=True)[1]
        small = table[np.ix_(pick_rows, pick_columns)]
        num_rows, num_columns = small.shape
        start = self._num_columns
        self._num_columns += small.size
        first = self._add_rows(np.zeros(num_rows), np.zeros(num_rows))
        second = self._add_rows(np.zeros(num_columns), np.zeros(num_columns))
        y = start + np.arange(small.size)
        self._put(first + np.repeat(np.arange(num_rows), num_columns), y, np.ones(small.size))
        self._put(second + np.tile(np.arange(num_columns), num_rows), y, np.ones(small.size))
        self._put(first + rows, self.offsets[i] + np.arange(len(rows)), -np.ones(len(rows)))
        columns_x = self.offsets[j] + np.arange(len(columns))
        self._put(second + columns, columns_x, -np.ones(len(columns)))
        finite = np.isfinite(small)
        shift = float(small[finite].min())
        self._shift.append(shift)
        self._costs.append(np.where(finite & (not self.peak), small - shift, 0.0).ravel())
        self._upper.append(np.where(finite, 1.0, 0.0).ravel())
        self._edge_starts.append((i, j, start, rows, columns, num_columns))

    def _add_memory(self) -> None:
        """The memory of each group above its minimum is at most what the budget leaves above that.

        Differences to the minimum keep a byte significant next to terabytes. With ``peak`` the
        budget is the largest minimum of any group plus a last variable.
        """
        budgets, memory = self.problem.budgets, self.problem.node_memory
        self._num_memory_rows = 0
        if memory is None or (budgets is None and not self.peak):
            return
        groups = range(self.problem.num_groups)
        spans = [each - each.min() for each in memory]
        top, least = [0.0] * len(groups), [[0.0] for _ in groups]
        for node, each in enumerate(memory):
            top[self.problem.group(node)] += float(spans[node].max())
            least[self.problem.group(node)].append(float(each.min()))
        if self.peak:
            most = max(math.fsum(each) for each in least)
            left = [math.fsum([most, *(-m for m in each)]) for each in least]
            scales = [math.fsum(top) or 1.0] * len(groups)
            limits = [min(1.0, each / scale) for each, scale in zip(left, scales)]
        else:
            pairs = list(zip(budgets or (), least))
            left = [math.fsum([b, *(-m for m in each)]) + math.ulp(b) for b, each in pairs]
            scales = [max(each, 1e-9 * most) or 1.0 for each, most in zip(left, top)]
            limits = [-1.0 if e < 0 else e / scale for e, scale in zip(left, scales)]
        limited = [g for g in groups if math.isfinite(scales[g])]
        self._num_memory_rows = len(limited)
        high = np.array([limits[g] for g in limited])
        first = self._add_rows(np.full(len(limited), -math.inf), high)
        row_of = {group: first + k for k, group in enumerate(limited)}
        for node, each in enumerate(spans):
            group = self.problem.group(node)
            if group in row_of:
                columns = self.offsets[node] + np.arange(len(each))
                self._put(np.full(len(each), row_of[group]), columns, each / scales[group])
                if not self.peak:  # exclude choices that exceed the budget alone
                    self._upper[node] = (each <= max(0.0, left[group])).astype(float)
        if self.peak:
            self._put(
                np.array(sorted(row_of.values())),
                np.full(len(limited), self._num_columns),
                np.full(len(limited), -1.0),
            )
            self._costs.append(np.ones(1))
            self._upper.append(np.full(1, math.inf))
            self._num_columns += 1


def distinct_rows(table: Array) -> Array:
    """Labels of the rows of a table, equal for equal rows, numbered by first appearance."""
    seen: dict[bytes, int] = {}
    return np.array([seen.setdefault(row.tobytes(), len(seen)) for row in table])


def num_edge_variables(problem: Problem) -> int:
    """The number of pairs of choices that have a variable."""
    distinct = {id(table): _pairs(table) for table in problem.edge_costs.values()}
    return sum(distinct[id(table)] for table in problem.edge_costs.values())


def _pairs(table: Array) -> int:
    return int(distinct_rows(table).max() + 1) * int(distinct_rows(table.T).max() + 1)
