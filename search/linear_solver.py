"""The solver of linear and mixed-integer programs.

In: a ``LinearProgram``. Out: a ``LinearResult``. OR-Tools, behind `autopar.search.mathopt`, is
imported when it is first needed: a process that only trains needs it never.
"""

from __future__ import annotations

from autopar.search.linear import LinearProgram, LinearResult
from autopar.search.problem import Array


def solve_linear(
    program: LinearProgram,
    *,
    time_limit_s: float | None = None,
    relaxed: bool = False,
    hint: Array | None = None,
    relative_gap: float = 0.0,
    small: bool = False,
) -> LinearResult:
    """Solve with HiGHS; ``relaxed`` drops integrality; ``hint`` starts all variables.

    small: use GLOP, for linear programs of a few columns, on which HiGHS sometimes stops with
    "Unknown". Raises ``LinearSolverError`` if the solver fails.
    """
    from autopar.search import mathopt

    return mathopt.solve(
        program, time_limit_s=time_limit_s, relaxed=relaxed, hint=hint,
        relative_gap=relative_gap, small=small,
    )  # fmt: skip
