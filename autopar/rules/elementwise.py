"""Element-wise ops: every dimension of the output is free; broadcast operands lack theirs."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.graph import Op, Value
from autopar.rules.base import Layout, Rule, Space, SpaceBuilder, register, register_pointwise


def broadcast_layout(shape: Sequence[int], dims: Sequence[str], sizes: Sequence[int]) -> Layout:
    """Layout of an operand broadcast to ``dims`` of ``sizes``, aligned at the right."""
    offset = len(dims) - len(shape)
    return tuple(
        (dims[offset + i],) if size == sizes[offset + i] else () for i, size in enumerate(shape)
    )


def elementwise_space(
    op: Op, inputs: Sequence[Value], outputs: Sequence[Value | None]
) -> Space | None:
    shapes = {o.shape for o in outputs if o is not None}
    if len(shapes) != 1:
        return None
    (shape,) = shapes
    builder = SpaceBuilder()
    dims = builder.dims("d", shape)
    full = broadcast_layout(shape, dims, shape)
    return builder.build(
        [broadcast_layout(v.shape, dims, shape) for v in inputs], [full for _ in outputs]
    )


register(
    "aten.clone.default",
    "aten.contiguous.default",
    "aten._to_copy.default",
    "aten.to.dtype",
    "aten.to.dtype_layout",
    "aten.to.device",
    "aten.detach.default",
    "aten.detach_.default",
    "aten.native_dropout.default",
    "aten.bernoulli.default",
    "aten.bernoulli.p",
    "aten.rsub.Tensor",
    "aten.rand_like.default",
    "aten.randn_like.default",
    "aten.zeros_like.default",
    "aten.ones_like.default",
    "aten.full_like.default",
    "aten.masked_fill.Scalar",
    "aten.masked_fill.Tensor",
    "aten.where.self",
    "aten.where.ScalarOther",
    "aten.where.ScalarSelf",
    "aten.where.Scalar",
    "aten.floor_divide.default",
    "aten.copy.default",
    "aten.fill.Tensor",
    "aten.fill.Scalar",
    "aten.gelu.default",
)(elementwise_space)

register_pointwise(Rule(space=elementwise_space))
