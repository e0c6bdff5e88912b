"""Means as sums divided by a total that is known before the sum.

Sums are accumulated over micro-batches, one after another. The divisor of a mean is the total over
all of them, so an op that computes a mean states how to compute its sum alone, and the total from
its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir.graph import Op, Ref, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyOp:
    """A call that runs before all other ops.

    ``args`` and ``kwargs`` refer to inputs of the op that it is made for, and to results of earlier
    such calls. ``shape`` and ``dtype`` are those of its result.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class SumAndTotal:
    """The arguments with which an op computes a sum, and the total that divides it into a mean."""

    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    total: Ref | float


MeanFn = Callable[[Op, Sequence[Value], Callable[[EarlyOp], Ref]], SumAndTotal | None]
"""Returns None where this call is not a mean. Its last argument is a function that adds an op."""
