"""Operators that sum over rows what they compute from each row alone.

They are made of regions of a captured graph (`autopar.frontend.rewrites.selected_losses`). Their
first argument is a list of operands, their result a list of one sum.
"""

from __future__ import annotations

from dataclasses import dataclass

NAMESPACE = "autopar_row_sums"


@dataclass(frozen=True, slots=True)
class RowSum:
    """What the operands of such an operator have to do with rows.

    ``num_dims``: how many dimensions the rows have, which are the first of the operands that
    ``have_rows``; the others are the same for all rows.
    """

    num_dims: int
    have_rows: tuple[bool, ...]


ROW_SUMS: dict[str, RowSum] = {}
"""The operators by name, as in ``str(op)``."""
