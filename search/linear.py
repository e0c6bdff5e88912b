"""Linear and mixed-integer programs as arrays, and their results."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.search.problem import Array, SearchError

CONSTRAINT_SLACK = 2e-6
"""More than a solution may break a constraint whose bound is 1."""


class LinearSolverError(SearchError):
    """The solver failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearProgram:
    """Minimise costs @ x with row_lower <= A x <= row_upper and lower <= x <= upper.

    rows, columns, coefficients: the entries of A in any order, without duplicates. num_wanted: how
    many of the first values are returned.
    """

    costs: Array
    lower: Array
    upper: Array
    integer: Array
    rows: Array
    columns: Array
    coefficients: Array
    row_lower: Array
    row_upper: Array
    num_wanted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearResult:
    """values: the best solution, or None. bound: a lower bound on the cost; -inf if unknown."""

    values: Array | None
    cost: float
    bound: float
    optimal: bool
    infeasible: bool
