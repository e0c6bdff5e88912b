"""Row sums of generated operators: split by rows, they are partial sums."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.graph import Op, Value
from autopar.ir.row_sums import NAMESPACE, ROW_SUMS
from autopar.rules.registry import Rule, register_namespace
from autopar.rules.space import Space, SpaceBuilder, layout


def row_sum_space(op: Op, inputs: Sequence[Value], outputs: Sequence[Value | None]) -> Space | None:
    """Row dimensions are free and summed over; all others stay whole."""
    found = ROW_SUMS[op.target_name]
    first = inputs[found.have_rows.index(True)]
    builder = SpaceBuilder()
    rows = builder.dims("r", first.shape[: found.num_dims])
    sides = [
        layout(*rows, *map(builder.whole, value.shape[found.num_dims :]))
        if has_rows
        else layout(*map(builder.whole, value.shape))
        for value, has_rows in zip(inputs, found.have_rows, strict=True)
    ]
    return builder.build(sides, [layout()], sums=frozenset(rows))


@register_namespace(NAMESPACE)
def row_sum_rule(op: Op) -> Rule:
    """The rule of a row sum."""
    return Rule(space=row_sum_space)
