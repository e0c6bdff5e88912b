"""Saved tensors: the forward values that an op's derivative reads, in memory until then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from autopar.ir.graph import Op, Value

BytesFn = Callable[[Op, Value], float]
"""Maps an op and its first output to the bytes kept per byte of that output."""


class Operands(Enum):
    """Which operands a derivative reads."""

    NONE = "none"
    FLOATING = "floating-point ones"
    FACTORS = "those of a product: one for the gradient of another"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeps:
    """The values that a derivative reads; by default every floating-point operand.

    ``operands``: which operands. ``copies``: bytes kept per byte of such an operand. ``output``:
    whether the first output is read too. ``further``: bytes, per byte of the first output, that the
    op makes only for its derivative (a mask, indices, gates).
    """

    operands: Operands = Operands.FLOATING
    copies: float = 1.0
    output: bool = False
    further: BytesFn | None = None


KEEPS_OPERANDS = Keeps()
"""The derivative reads every floating-point operand."""
KEEPS_FACTORS = Keeps(operands=Operands.FACTORS)
"""The derivative reads the factors of a product, each for the gradient of another."""
KEEPS_OUTPUT = Keeps(operands=Operands.NONE, output=True)
"""The derivative reads the output only, as for exp and tanh."""
KEEPS_NOTHING = Keeps(operands=Operands.NONE)
"""The derivative reads nothing, as for views and sums."""
