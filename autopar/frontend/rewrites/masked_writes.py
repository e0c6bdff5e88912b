"""Writes under a boolean mask as selections.

``x[mask] = value`` is exported as ``index_put``, which looks for the rows that a mask selects: how
many there are depends on data, so nothing of it can be split, and a GPU makes the host wait. Where
the value is the same however many rows are selected, ``where`` computes the same.

Input: an exported, functional program. Output: the same program with ``where`` in place of such
writes. The value may be a number, a row, or rows that the same mask selects elsewhere, also after
an addition or a multiplication by a number. Other operators are left alone: ``where`` evaluates
them in all rows, and where a derivative is infinite in a row that is not selected, the gradient
becomes zero times infinity, which is NaN.

``masked_scatter`` with a mask of whole rows, as models that put the features of images among those
of words have it, reads the k-th row of its source for the k-th row that is selected: a lookup at
counted positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.frontend.rewrites.edit import Ops, value_of
from autopar.frontend.rewrites.row_masks import RowMask, is_fixed, mask_of

_ATEN = torch.ops.aten
_SUMS = frozenset({_ATEN.add.Tensor, _ATEN.sub.Tensor})
_PRODUCTS = frozenset({
    _ATEN.mul.Tensor, _ATEN.mul.Scalar, _ATEN.div.Tensor, _ATEN.div.Scalar, _ATEN.neg.default,
    _ATEN.clone.default, _ATEN._to_copy.default,
})  # fmt: skip
"""Operators whose derivative is a number if their first operand is their only tensor."""


def select_by_masks(module: fx.GraphModule) -> None:
    """Rewrite the writes under masks of a functional graph."""
    graph, num_known = module.graph, len(module.graph.nodes)
    for node in list(graph.nodes):
        if node.target not in _SELECTIONS or not is_fixed(node):
            continue
        with graph.inserting_before(node):
            result = _SELECTIONS[node.target](Ops(graph, node), *node.args)
        if result is not None and _layout(result) == _layout(node):
            node.replace_all_uses_with(result)
    if len(graph.nodes) > num_known:
        graph.eliminate_dead_code()
        module.recompile()


def _layout(node: fx.Node) -> tuple[torch.Size, tuple[int, ...]]:
    return value_of(node).shape, value_of(node).stride()


def _put(
    ops: Ops, into: fx.Node, indices: Any, values: fx.Node, accumulates: bool = False
) -> fx.Node | None:
    mask = mask_of(into, indices)
    if mask is None or value_of(into).dtype is not value_of(values).dtype:
        return None
    value = _whole(ops, mask, value_of(into).shape, values)
    if value is None:
        return None
    if accumulates:
        value = ops(_ATEN.add.Tensor, into, value)
    return ops(_ATEN.where.self, mask.wide(ops), value, into)


def _scattered(ops: Ops, into: fx.Node, mask: fx.Node, source: fx.Node) -> fx.Node | None:
    """None if the mask tells elements of the last dimension apart, or the source has no rows."""
    if not (is_fixed(mask) and is_fixed(source)):
        return None
    shape, given = value_of(into).shape, value_of(mask)
    num_row_dims = given.dim()
    while num_row_dims and (
        given.shape[num_row_dims - 1] == 1 or given.stride()[num_row_dims - 1] == 0
    ):
        num_row_dims -= 1
    num_behind, width = len(shape) - num_row_dims, math.prod(shape[num_row_dims:])
    num_elements = value_of(source).numel()
    if given.dim() != len(shape) or given.shape[:num_row_dims] != shape[:num_row_dims]:
        return None
    if not (num_behind and width and num_elements) or num_elements % width:
        return None
    rows = mask
    for _ in range(num_behind):
        rows = ops(_ATEN.select.int, rows, -1, 0)
    counted = ops(_ATEN.cumsum.default, ops.reshaped(rows, [-1]), 0)
    places = ops(_ATEN.clamp.default, ops(_ATEN.sub.Tensor, counted, 1), 0)
    found = ops(_ATEN.embedding.default, ops.reshaped(source, [-1, width]), places)
    selected = RowMask(rows, 0, num_behind).wide(ops)
    return ops(_ATEN.where.self, selected, ops.reshaped(found, shape), into)


_SELECTIONS: dict[Any, Callable[..., fx.Node | None]] = {
    _ATEN.index_put.default: _put,
    _ATEN.masked_scatter.default: _scattered,
}
"""What replaces a write; None if it stays as it is."""


def _whole(ops: Ops, mask: RowMask, shape: torch.Size, rows: Any) -> Any:
    """A value of a shape, or that broadcasts to it, whose selected rows are ``rows``; None if there
    is no such value with finite derivatives in all rows."""
    if not isinstance(rows, fx.Node):
        return rows
    if is_fixed(rows):
        return mask.repeated(ops, rows)
    if rows.target is _ATEN.index.Tensor:
        source, indices = rows.args
        is_alike = mask_of(source, indices) == mask and value_of(source).shape == shape  # type: ignore[arg-type]
        return source if is_alike else None
    num_tensors = sum(isinstance(argument, fx.Node) for argument in rows.args)
    if rows.target in _SUMS or (rows.target in _PRODUCTS and num_tensors == 1):
        args = [_whole(ops, mask, shape, argument) for argument in rows.args]
        return None if None in args else ops(rows.target, *args, **rows.kwargs)
    return None
