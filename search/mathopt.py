"""The adapter to OR-Tools MathOpt, which solves the programs of `autopar.search.linear`.

No other module of this package uses OR-Tools. The model is passed as one protocol buffer, which is
much faster than adding variables one by one.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import math
import os
import sys
import threading
from collections.abc import Iterator

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from autopar.search.linear import LinearProgram, LinearResult, LinearSolverError
from autopar.search.problem import Array


class Stdout:
    """The process's standard output, where HiGHS prints a debugging line of its own whenever it
    repairs a solution, whatever its options; a user may have a pipe there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._saved: int | None = None

    @contextlib.contextmanager
    def on_stderr(self) -> Iterator[None]:
        """Write to standard error instead, until the last thread leaves."""
        with self._lock:
            if self._num_users == 0:
                self._saved = self._redirected()
            self._num_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
                if self._num_users == 0 and self._saved is not None:
                    ctypes.CDLL(None).fflush(None)  # C's own buffer
                    os.dup2(self._saved, 1)
                    os.close(self._saved)
                    self._saved = None

    def _redirected(self) -> int | None:
        """A copy of the descriptor that was replaced, or None if one of both is closed."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
        try:
            saved = os.dup(1)
        except OSError:
            return None
        try:
            ctypes.CDLL(None).fflush(None)
            os.dup2(2, 1)
        except OSError:
            os.close(saved)
            return None
        return saved


STDOUT = Stdout()


def solve(
    program: LinearProgram,
    *,
    time_limit_s: float | None,
    relaxed: bool,
    hint: Array | None,
    relative_gap: float,
    small: bool,
) -> LinearResult:
    """See `autopar.search.linear.solve_linear`."""
    model = mathopt.Model.from_model_proto(_proto(program, relaxed=relaxed))
    is_integer = bool(program.integer.any()) and not relaxed
    parameters = mathopt.SolveParameters(
        time_limit=None if time_limit_s is None else _seconds(time_limit_s),
        relative_gap_tolerance=relative_gap if is_integer else None,
        absolute_gap_tolerance=0.0 if is_integer else None,
    )
    wanted = [model.get_variable(index) for index in range(program.num_wanted)]
    model_parameters = mathopt.ModelSolveParameters(
        variable_values_filter=mathopt.VariableFilter(filtered_items=wanted),
        solution_hints=[] if hint is None else [_hint(model, hint)],
    )
    try:
        with STDOUT.on_stderr():
            result = mathopt.solve(
                model,
                mathopt.SolverType.GLOP if small else mathopt.SolverType.HIGHS,
                params=parameters,
                model_params=model_parameters,
            )
    except (RuntimeError, ValueError, AttributeError) as error:
        # ortools 9.15 raises an AttributeError in its wrapper for some failures of the solvers
        raise LinearSolverError(
            f"the solver failed on {len(program.costs)} variables: {error.__context__ or error}"
        ) from error
    return _read(result, wanted, bounds=is_integer)


def _read(
    result: mathopt.SolveResult, wanted: list[mathopt.Variable], *, bounds: bool
) -> LinearResult:
    """``bounds``: whether an unfinished run gives a valid bound; a simplex run does not."""
    reason = result.termination.reason
    values, cost = None, math.inf
    if result.has_primal_feasible_solution():
        values = np.array(result.variable_values(wanted))
        cost = float(result.objective_value())
    optimal = reason is mathopt.TerminationReason.OPTIMAL
    bound = float(result.termination.objective_bounds.dual_bound)
    return LinearResult(
        values=values,
        cost=cost,
        bound=bound if math.isfinite(bound) and (bounds or optimal) else -math.inf,
        optimal=optimal,
        infeasible=reason
        in (
            mathopt.TerminationReason.INFEASIBLE,
            mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED,
        ),
    )


def _seconds(time_s: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=max(0.01, time_s))


def _hint(model: mathopt.Model, hint: Array) -> mathopt.SolutionHint:
    values = {model.get_variable(k): float(value) for k, value in enumerate(hint)}
    return mathopt.SolutionHint(variable_values=values)


def _proto(program: LinearProgram, *, relaxed: bool) -> model_pb2.ModelProto:
    proto = model_pb2.ModelProto()
    num_columns, num_rows = len(program.costs), len(program.row_lower)
    proto.variables.ids.extend(range(num_columns))
    proto.variables.lower_bounds.extend(program.lower.tolist())
    proto.variables.upper_bounds.extend(program.upper.tolist())
    integer = np.zeros(num_columns, dtype=bool) if relaxed else program.integer.astype(bool)
    proto.variables.integers.extend(integer.tolist())
    charged = np.flatnonzero(program.costs)
    proto.objective.linear_coefficients.ids.extend(charged.tolist())
    proto.objective.linear_coefficients.values.extend(program.costs[charged].tolist())
    proto.linear_constraints.ids.extend(range(num_rows))
    proto.linear_constraints.lower_bounds.extend(program.row_lower.tolist())
    proto.linear_constraints.upper_bounds.extend(program.row_upper.tolist())
    order = np.lexsort((program.columns, program.rows))
    matrix = proto.linear_constraint_matrix
    matrix.row_ids.extend(program.rows[order].tolist())
    matrix.column_ids.extend(program.columns[order].tolist())
    matrix.coefficients.extend(program.coefficients[order].tolist())
    return proto
