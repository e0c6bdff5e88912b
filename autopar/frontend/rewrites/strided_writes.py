"""Writes through strided views as writes at indices.

``fill_diagonal_`` and writes into ``torch.as_strided`` are exported as ``as_strided_scatter``,
whose derivative in torch (2.11 to 2.13) gives no gradient to the elements that were not written.

Input: an exported, functional program. Output: the same program with ``index_put`` on the value
flattened in storage order, whose derivative is right.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from autopar.base.errors import CaptureError
from autopar.frontend.rewrites.edit import Ops, value_of

_ATEN = torch.ops.aten


def index_strided_writes(module: fx.GraphModule) -> None:
    """Rewrite every ``as_strided_scatter`` of a functional graph.

    Raises CaptureError where elements of the written value share memory.
    """
    for node in list(module.graph.nodes):
        if node.target is _ATEN.as_strided_scatter.default:
            with module.graph.inserting_before(node):
                result = _indexed(Ops(module.graph, node), node)
            node.replace_all_uses_with(result)
            module.graph.erase_node(node)
    module.recompile()


def _indexed(ops: Ops, node: fx.Node) -> fx.Node:
    into, source, size, stride, *rest = _arguments(node)
    written = value_of(into)
    strides = list(written.stride())
    order = sorted(range(written.dim()), key=lambda d: (-strides[d], d))
    shape = [written.shape[d] for d in order]
    stored = ops.permuted(into, order)
    if not value_of(stored).is_contiguous():
        raise CaptureError(
            f"a write through as_strided into a value of shape {tuple(written.shape)} with strides "
            f"{written.stride()}: its elements are not contiguous in memory. Call "
            ".contiguous() on it first"
        )
    offset = (rest[0] if rest and rest[0] is not None else 0) - int(written.storage_offset())
    flat = ops.reshaped(stored, [math.prod(shape)])
    index = _positions(ops, written, size, stride, offset)
    values = ops.reshaped(source, [math.prod(size)])
    put = ops(_ATEN.index_put.default, flat, [index], values)
    back = [order.index(d) for d in range(len(order))]
    return ops.permuted(ops.reshaped(put, shape), back)


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    names = ("self", "src", "size", "stride", "storage_offset")
    given = dict(zip(names, node.args)) | node.kwargs
    return tuple(given.get(name) for name in names)


def _positions(ops: Ops, like: Tensor, size: Any, stride: Any, offset: int) -> fx.Node:
    """The storage positions of a strided view, flattened, as a constant computed from ranges."""
    with like.fake_mode:  # type: ignore[attr-defined]
        total = ops(_ATEN.full.default, [], offset, dtype=torch.int64, device=like.device)
        for dim, (count, step) in enumerate(zip(size, stride)):
            along = ops(_ATEN.arange.default, count, dtype=torch.int64, device=like.device)
            along = ops(_ATEN.mul.Tensor, along, step)
            along = ops(_ATEN.view.default, along, [-1] + [1] * (len(size) - dim - 1))
            total = ops(_ATEN.add.Tensor, total, along)
        return ops.reshaped(total, [math.prod(size)])
