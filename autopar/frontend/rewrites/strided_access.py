"""Strided views of memory as reads and writes at indices.

``torch.as_strided`` counts in the elements of memory, which a shard that was gathered or cut out of
padding arranges in another way. ``fill_diagonal_`` and writes into it are exported as
``as_strided_scatter``, whose derivative in torch (2.11 to 2.13) gives no gradient to the elements
that were not written.

Input: an exported, functional program. Output: the same program with ``index`` and ``index_put`` on
the value flattened in storage order.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from autopar.base.errors import CaptureError
from autopar.frontend.rewrites.edit import Ops, value_of

_ATEN = torch.ops.aten


def index_strided_access(module: fx.GraphModule) -> None:
    """Rewrite every ``as_strided`` and ``as_strided_scatter`` of a functional graph.

    Raises CaptureError where elements of the value share memory, or the view leaves the value.
    """
    rewrites = {
        _ATEN.as_strided.default: _indexed_read,
        _ATEN.as_strided_scatter.default: _indexed_write,
    }
    for node in list(module.graph.nodes):
        if node.target in rewrites:
            with module.graph.inserting_before(node):
                result = rewrites[node.target](Ops(module.graph, node), node)
            node.replace_all_uses_with(result)
            module.graph.erase_node(node)
    module.recompile()


def _indexed_read(ops: Ops, node: fx.Node) -> fx.Node:
    source, size, stride, offset = _arguments(node, "self", "size", "stride", "storage_offset")
    flat, _ = _flattened(ops, source)
    index = _positions(ops, value_of(source), size, stride, offset)
    return ops.reshaped(ops(_ATEN.index.Tensor, flat, [index]), size)


def _indexed_write(ops: Ops, node: fx.Node) -> fx.Node:
    names = ("self", "src", "size", "stride", "storage_offset")
    into, source, size, stride, offset = _arguments(node, *names)
    flat, order = _flattened(ops, into)
    index = _positions(ops, value_of(into), size, stride, offset)
    values = ops.reshaped(source, [math.prod(size)])
    put = ops(_ATEN.index_put.default, flat, [index], values)
    back = [order.index(d) for d in range(len(order))]
    shape = [value_of(into).shape[d] for d in order]
    return ops.permuted(ops.reshaped(put, shape), back)


def _flattened(ops: Ops, node: fx.Node) -> tuple[fx.Node, list[int]]:
    """The value as a vector in storage order, and the order of its dimensions there."""
    value = value_of(node)
    strides = list(value.stride())
    order = sorted(range(value.dim()), key=lambda d: (-strides[d], d))
    stored = ops.permuted(node, order)
    if not value_of(stored).is_contiguous():
        raise CaptureError(
            f"as_strided of a value of shape {tuple(value.shape)} with strides {value.stride()}: "
            "its elements are not contiguous in memory. Call .contiguous() on it first"
        )
    return ops.reshaped(stored, [value.numel()]), order


def _arguments(node: fx.Node, *names: str) -> tuple[Any, ...]:
    given = dict(zip(names, node.args)) | node.kwargs
    return tuple(given.get(name) for name in names)


def _positions(ops: Ops, like: Tensor, size: Any, stride: Any, offset: int | None) -> fx.Node:
    """The positions of a strided view within a value, flattened: a constant made from ranges."""
    begin = int(like.storage_offset())
    first = 0 if offset is None else offset - begin
    last = first + sum((count - 1) * step for count, step in zip(size, stride))
    if math.prod(size) and not 0 <= first <= last < like.numel():
        raise CaptureError(
            f"as_strided with size {tuple(size)}, stride {tuple(stride)} and offset {offset} of a "
            f"value that holds the elements {begin} to {begin + like.numel() - 1} of its memory: "
            "it reaches others. Call as_strided of the value that holds them all"
        )
    with like.fake_mode:  # type: ignore[attr-defined]
        total = ops(_ATEN.full.default, [], first, dtype=torch.int64, device=like.device)
        for dim, (count, step) in enumerate(zip(size, stride)):
            along = ops(_ATEN.arange.default, count, dtype=torch.int64, device=like.device)
            along = ops(_ATEN.mul.Tensor, along, step)
            along = ops(_ATEN.view.default, along, [-1] + [1] * (len(size) - dim - 1))
            total = ops(_ATEN.add.Tensor, total, along)
        return ops.reshaped(total, [math.prod(size)])
