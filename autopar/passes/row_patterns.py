"""What single ops do with rows, read off their operators and arguments, for `row_order`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.graph import Op
from autopar.rules.space import Space

SORTS = ("aten.sort.default", "aten.sort.stable")
ARGSORTS = ("aten.argsort.default", "aten.argsort.stable")
GROUPED_PRODUCTS = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
CASTS = ("aten._to_copy.default", "aten.clone.default", "aten.alias.default")
RESHAPES = (
    "aten.view.default", "aten.reshape.default", "aten._unsafe_view.default",
    "aten.unsqueeze.default", "aten.squeeze.dim", "aten.expand.default",
)  # fmt: skip
LIKES = ("aten.empty_like.default", "aten.zeros_like.default")
_FLOOR_DIVISIONS = ("aten.div.Scalar_mode", "aten.div.Tensor_mode")


def sorts_ascending(op: Op) -> bool:
    """Whether an op sorts, the least first."""
    positional = op.args[2] if len(op.args) > 2 else False
    is_sort = op.target_name in (*SORTS, *ARGSORTS)
    return is_sort and not dict(op.kwargs).get("descending", positional)


def floor_divisor(op: Op) -> int | None:
    """The positive whole number by which an op divides its operand, rounding down."""
    rounds_down = dict(op.kwargs).get("rounding_mode") == "floor"
    is_floor = op.target_name == "aten.floor_divide.default" or (
        op.target_name in _FLOOR_DIVISIONS and rounds_down
    )
    divisor = op.args[1] if len(op.args) > 1 else None
    return divisor if is_floor and type(divisor) is int and divisor > 0 else None


@dataclass(frozen=True, slots=True)
class Bins:
    """The bins of a histogram of expert numbers, one for each of ``num`` experts; with ``has_end``
    the last bin also counts the number ``num`` itself."""

    num: int
    has_end: bool


def counted_in(op: Op) -> Bins | None:
    """The bins in which an op counts the rows of each expert, if it does."""
    if op.target_name != "aten.histc.default":
        return None
    given = dict(zip(("bins", "min", "max"), op.args[1:])) | dict(op.kwargs)
    bins, last = given.get("bins", 100), given.get("max", 0)
    is_each = given.get("min", 0) == 0 and last in (bins - 1, bins) and (last > 0 or bins == 1)
    return Bins(int(bins), has_end=last == bins) if is_each else None


def adds_rows(op: Op) -> bool:
    """Whether an op adds rows to those of its first operand that an index names."""
    if len(op.inputs) != 3:
        return False
    if op.target_name == "aten.index_put.default":
        return len(op.args) == 4 and op.args[3] is True and len(op.args[1]) == 1
    adds = op.target_name in ("aten.index_add.default", "aten.scatter_add.default")
    return adds and op.args[1] == 0 and not op.kwargs


def writes_rows(op: Op) -> bool:
    """Whether an op writes rows in place of those of its first operand that an index names."""
    if len(op.inputs) != 3:
        return False
    if op.target_name == "aten.index_put.default":
        return len(op.args) == 3 and len(op.args[1]) == 1
    writes = op.target_name in ("aten.index_copy.default", "aten.scatter.src")
    return writes and op.args[1] == 0 and not op.kwargs


def is_row_wise(space: Space, op: Op, ordered: Sequence[bool]) -> bool:
    """Whether the first dimension of some operands, the ``ordered``, and of the results is free."""
    leading = {layout[:1] for layout, yes in zip(space.inputs, ordered) if yes}
    leading |= {lay[:1] for lay, out in zip(space.outputs, op.outputs) if out is not None}
    if len(leading) != 1 or not (first := leading.pop()) or len(first[0]) != 1:
        return False
    (rows,) = first[0]
    others = [layout for layout, yes in zip(space.inputs, ordered) if not yes]
    is_free = rows in space.splittable() and rows not in space.plain | space.sums | space.reduced
    return is_free and not any(rows in factors for layout in others for factors in layout)
