"""Row sums: operators that map each row of their operands to a number, and add these up.

They are generated from a captured graph (`autopar.frontend.rewrites.selected_losses`). Each takes a
list of operands and returns a list of one sum.
"""

from __future__ import annotations

from dataclasses import dataclass

NAMESPACE = "autopar_row_sums"


@dataclass(frozen=True, slots=True)
class RowSum:
    """Which dimensions of a row sum's operands are rows.

    An operand that ``have_rows`` marks begins with ``num_dims`` row dimensions; the others are
    shared by all rows.
    """

    num_dims: int
    have_rows: tuple[bool, ...]


ROW_SUMS: dict[str, RowSum] = {}
"""Row sums by the name of their operator, as in ``str(op)``."""
