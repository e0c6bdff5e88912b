"""Strategy search over plain numbers: exact, memory-aware, anytime, with bounds."""

from autopar.search.api import solve
from autopar.search.problem import (
    Constraint,
    Forbid,
    Force,
    Method,
    Pin,
    Problem,
    SearchError,
    Solution,
    Status,
    relative_gap,
)
from autopar.search.solver import OPTIMAL_GAP
from autopar.search.variants import solve_each

__all__ = [
    "OPTIMAL_GAP",
    "Constraint",
    "Forbid",
    "Force",
    "Method",
    "Pin",
    "Problem",
    "SearchError",
    "Solution",
    "Status",
    "relative_gap",
    "solve",
    "solve_each",
]
