"""Means as sums divided by a total that can be known before the sum is.

Micro-batches add up sums, one after another. What a mean divides by is the total of all of them, so
an op that computes a mean says how its sum is computed alone, and the total from its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir.graph import Op, Ref, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyOp:
    """A call in front of all others; arguments refer to inputs of the op it is made for, and to the
    results of such calls before it."""

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class SumAndTotal:
    """Arguments with which the op computes a sum, and what makes a mean of it."""

    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    total: Ref | float


MeanFn = Callable[[Op, Sequence[Value], Callable[[EarlyOp], Ref]], SumAndTotal | None]
"""None where this call of the op is no mean. The function given adds an early op."""
