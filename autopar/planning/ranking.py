"""The order of candidates without a pipeline, deterministic among equally fast ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.ir.mesh import Mesh
from autopar.pricing.candidate import Candidate
from autopar.pricing.step_time import time_parts

_LAST = (math.inf, 0, ())


def cheapest(candidates: Sequence[Candidate]) -> Candidate:
    """The fastest candidate; ties (within rounding) go to fewer axes, then to a fixed order."""
    return min(candidates, key=rank)


def rank(candidate: Candidate) -> tuple[float, int, tuple[int, ...]]:
    """Sort key of candidates without a pipeline, deterministic among equally fast ones."""
    return ranked(time_parts(candidate).step_s, candidate.mesh) if candidate.is_found else _LAST


def ranked(time_s: float, mesh: Mesh) -> tuple[float, int, tuple[int, ...]]:
    """Sort key: time to nine digits, then fewer axes, then smaller outer axes."""
    return float(f"{time_s:.9g}"), mesh.num_axes, mesh.axis_sizes
