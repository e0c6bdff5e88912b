"""Writes under a boolean mask as selections.

``x[mask] = value`` is exported as ``index_put``, which looks for the rows that a mask selects: how
many there are depends on data, so nothing of it can be split, and a GPU makes the host wait. Where
the value is the same however many rows are selected, ``where`` computes the same.

Input: an exported, functional program. Output: the same program with ``where`` in place of such
writes. The value may be a number, a row, or rows that the same mask selects elsewhere, also after
an addition or a multiplication by a number. Other operators are left alone: ``where`` evaluates
them in all rows, and where a derivative is infinite in a row that is not selected, the gradient
becomes zero times infinity, which is NaN.
"""

from __future__ import annotations

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
        if node.target is not _ATEN.index_put.default or not is_fixed(node):
            continue
        into, indices, values, accumulates = (*node.args, False)[:4]
        mask = mask_of(into, indices)
        if mask is None or value_of(into).dtype is not value_of(values).dtype:
            continue
        with graph.inserting_before(node):
            ops = Ops(graph, node)
            value = _whole(ops, mask, value_of(into).shape, values)
            if value is None:
                continue
            if accumulates:
                value = ops(_ATEN.add.Tensor, into, value)
            result = ops(_ATEN.where.self, mask.wide(ops), value, into)
        if value_of(result).stride() == value_of(node).stride():
            node.replace_all_uses_with(result)
    if len(graph.nodes) > num_known:
        graph.eliminate_dead_code()
        module.recompile()


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
