"""Writes under a boolean mask as selections.

``x[mask] = value`` is exported as ``index_put``, which looks for the rows that a mask selects: how
many there are depends on data, so nothing of it can be split, and a GPU makes the host wait. Where
the value is the same however many rows are selected, ``where`` computes the same.

Input: an exported, functional program. Output: the same program with ``where`` in place of such
writes. The value may be a row or a number, or rows that the same mask selects elsewhere, also with
something added to them, or multiplied by a number: no more, as zero times the derivative in rows
that are not selected is added to gradients, and must be finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.frontend.rewrites.edit import Ops, meta_of, value_of

_ATEN = torch.ops.aten
_SUMS = frozenset({_ATEN.add.Tensor, _ATEN.sub.Tensor})
_PRODUCTS = frozenset({
    _ATEN.mul.Tensor, _ATEN.mul.Scalar, _ATEN.div.Tensor, _ATEN.div.Scalar, _ATEN.neg.default,
    _ATEN.clone.default, _ATEN._to_copy.default,
})  # fmt: skip
"""Operators whose derivative is a number if their first operand is their only tensor."""


def select_by_masks(module: fx.GraphModule) -> None:
    """Rewrite the writes under masks of a functional graph."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.target is not _ATEN.index_put.default or not _is_fixed(node):
            continue
        into, indices, values, accumulates = (*node.args, False)[:4]
        mask = _mask_of(indices)
        if mask is None or value_of(into).dtype is not value_of(values).dtype:
            continue
        with graph.inserting_before(node):
            ops = Ops(graph, node)
            rows = _Rows(ops, mask, value_of(into))
            value = rows.of(values)
            if value is None:
                continue
            if accumulates:
                value = ops(_ATEN.add.Tensor, into, value)
            result = ops(_ATEN.where.self, rows.selected(), value, into)
        if value_of(result).stride() == value_of(node).stride():
            node.replace_all_uses_with(result)
            node.replace_input_with(values, into)
        _erase_unused(graph, [result, node, values])
    module.recompile()


@dataclass(frozen=True, slots=True)
class _Mask:
    """A boolean mask, and the first dimension of what it selects from."""

    node: fx.Node
    first: int

    @property
    def num_dims(self) -> int:
        return value_of(self.node).dim()


def _mask_of(indices: Any) -> _Mask | None:
    """The mask of fixed shape that is the only index."""
    given = [(place, index) for place, index in enumerate(indices) if index is not None]
    if len(given) != 1:
        return None
    ((first, node),) = given
    if not isinstance(node, fx.Node) or not _is_fixed(node):
        return None
    is_mask = value_of(node).dtype is torch.bool and value_of(node).dim() > 0
    return _Mask(node, first) if is_mask else None


@dataclass(frozen=True, slots=True)
class _Rows:
    """What a mask selects from tensors like ``like``: the mask's dimensions become one of rows."""

    ops: Ops
    mask: _Mask
    like: Tensor

    @property
    def num_behind(self) -> int:
        """The dimensions behind that of rows."""
        return self.like.dim() - self.mask.first - self.mask.num_dims

    def selected(self) -> fx.Node:
        """The mask, such that it broadcasts to what it selects from."""
        shape = [*value_of(self.mask.node).shape, *[1] * self.num_behind]
        return self.ops.reshaped(self.mask.node, shape)

    def of(self, rows: Any) -> Any:
        """A value whose selected rows are ``rows``, or that broadcasts to one; None if there is no
        such value with finite derivatives in all rows."""
        if not isinstance(rows, fx.Node):
            return rows
        if _is_fixed(rows):
            return self._repeated(rows)
        if rows.target is _ATEN.index.Tensor:
            source, indices = rows.args
            is_alike = meta_of(source).shape == self.like.shape  # type: ignore[arg-type]
            return source if is_alike and _mask_of(indices) == self.mask else None
        num_tensors = sum(isinstance(argument, fx.Node) for argument in rows.args)
        if rows.target in _SUMS or (rows.target in _PRODUCTS and num_tensors == 1):
            args = [self.of(argument) for argument in rows.args]
            return None if None in args else self.ops(rows.target, *args, **rows.kwargs)
        return None

    def _repeated(self, value: fx.Node) -> fx.Node | None:
        """A value that is the same for every row, with the mask's dimensions in place of theirs."""
        shape = list(value_of(value).shape)
        if len(shape) <= self.num_behind:
            return value
        before, num_rows = shape[: -self.num_behind - 1], shape[-self.num_behind - 1]
        behind = shape[len(shape) - self.num_behind :]
        if num_rows != 1:
            return None
        return self.ops.reshaped(value, [*before, *[1] * self.mask.num_dims, *behind])


def _is_fixed(node: fx.Node) -> bool:
    value = meta_of(node)
    return isinstance(value, Tensor) and all(type(size) is int for size in value.shape)


def _erase_unused(graph: fx.Graph, nodes: list[Any]) -> None:
    """Erase calls that nobody reads, and what they alone read."""
    while nodes:
        node = nodes.pop(0)
        is_call = isinstance(node, fx.Node) and node.op == "call_function"
        if is_call and not node.users and node in graph.nodes:
            nodes += node.all_input_nodes
            graph.erase_node(node)
