"""Element-wise ops: every dimension of the output is free; broadcast operands lack some of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from autopar.ir.graph import Op, Value
from autopar.rules.context import LocalContext
from autopar.rules.derivative import (
    KEEPS_FACTORS,
    KEEPS_NOTHING,
    KEEPS_OUTPUT,
    Keeps,
    Operands,
)
from autopar.rules.registry import Arguments, Rule, register, register_pointwise
from autopar.rules.space import Layout, Space, SpaceBuilder, layout
from autopar.rules.traced import register_traced


def broadcast_layout(shape: Sequence[int], dims: Sequence[str], sizes: Sequence[int]) -> Layout:
    """The layout of an operand broadcast to ``dims`` of ``sizes``, aligned at the right."""
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
    operands = [broadcast_layout(v.shape, dims, shape) for v in inputs]
    padded, clean = _paddable(op, dims, operands)
    return builder.build(
        operands, [full for _ in outputs], padded=padded, clean=clean, linear=_linear_operands(op)
    )


def _linear_operands(op: Op) -> frozenset[int]:
    """The operands that may be partial sums; none where a constant is added, as in ``x + 1``."""
    name = op.target_name.split(".")[1]
    if name in ("mul", "div"):
        return frozenset({0})
    if name in ("add", "sub"):
        return frozenset({0, 1} if len(op.inputs) > 1 else ())
    return frozenset({0} if name in ("neg", *_COPIES) else ())


_COPIES = frozenset({"clone", "contiguous", "_to_copy", "to"})


_KEEP_ZEROS = frozenset(
    {
        "mul", "neg", "abs", "relu", "gelu", "silu", "tanh", "sin", "erf", "elu", "celu", "selu",
        "leaky_relu", "hardtanh", "relu6", "hardswish", "mish", "square", "sign", "trunc", "round",
        "floor", "ceil", "expm1", "log1p", "dropout", "native_dropout", "clone", "contiguous",
        "_to_copy", "to", "detach", "zeros_like", "alias", "positive", "sinh", "asinh", "atan",
        "multiply", "_prelu_kernel", "empty_like",
    }
)  # fmt: skip
"""f(0) = 0 (for a product: 0 times anything), with a finite derivative at 0."""

_FINITE_AT_ZERO = frozenset(
    {
        "add", "sub", "rsub", "where", "masked_fill", "clamp", "maximum", "minimum", "eq", "ne",
        "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "bitwise_and",
        "bitwise_or", "__and__", "__or__", "lerp",
    }
)  # fmt: skip
"""Functions of several operands, finite with finite derivatives where one of them is 0."""

_DIVIDES = frozenset({"div", "true_divide", "floor_divide", "remainder", "fmod"})


def _paddable(
    op: Op, dims: Sequence[str], operands: Sequence[Layout]
) -> tuple[Sequence[str], Sequence[str]]:
    """Dimensions that may be padded with zeros, and those where zeros stay zeros.

    Where every operand has the dimension, whatever the op computes in the padding stays there; an
    operand without the dimension would sum it into its gradient.
    """
    name = op.target_name.split(".")[1]
    shared = [d for d in dims if all((d,) in layout for layout in operands)]
    if name in _KEEP_ZEROS:
        return dims, dims
    if name in _DIVIDES:
        divisor = operands[1] if len(operands) > 1 else ()
        kept = [d for d in dims if (d,) not in divisor]
        return kept, kept
    if name in ("add", "sub") and len(operands) > 1:
        return dims, shared
    return (dims if name in _FINITE_AT_ZERO else shared), ()


def _local_size(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    return (args[0], context.output_shapes[0], *args[2:]), kwargs


@register(
    "aten.new_zeros.default",
    "aten.new_ones.default",
    "aten.new_full.default",
    "aten.new_empty.default",
    arguments=_local_size,
)
def filled_space(op: Op, inputs: Sequence[Value], outputs: Sequence[Value | None]) -> Space | None:
    """The op reads only the dtype of its operand, so any shard of it yields the whole result.

    Dimensions of the same size in the same place are split alike, so that nothing is gathered.
    """
    made_shape = outputs[0].shape  # type: ignore[union-attr]
    builder = SpaceBuilder()
    made = builder.dims("d", made_shape)
    pairs = itertools.zip_longest(inputs[0].shape, made_shape)
    given = [
        made[d] if own == other else builder.dim(f"i{d}", own)
        for d, (own, other) in enumerate(pairs)
        if own is not None
    ]
    return builder.build(
        [layout(*given)], [layout(*made)], reduced=frozenset(given) - set(made), padded=made
    )


@register("aten.type_as.default")
def type_as_space(op: Op, inputs: Sequence[Value], outputs: Sequence[Value | None]) -> Space | None:
    """The op reads only the dtype of its second operand, which is split likewise where possible."""
    shape, other = inputs[0].shape, inputs[1].shape
    builder = SpaceBuilder()
    dims = builder.dims("d", shape)
    named = dict(zip(range(-len(dims), 0), dims))
    alike = tuple(
        (named[d],) if builder.sizes.get(named.get(d, "")) == size else (builder.whole(size),)
        for d, size in zip(range(-len(other), 0), other)
    )
    return builder.build([layout(*dims), alike], [layout(*dims)], clean=dims)


@register("aten.prelu.default")
def prelu_space(op: Op, inputs: Sequence[Value], outputs: Sequence[Value | None]) -> Space | None:
    """``x[n, c, ...]`` with one slope per channel, or one for all."""
    shape, slopes = inputs[0].shape, inputs[1].shape
    builder = SpaceBuilder()
    dims = builder.dims("d", shape)
    per_channel = len(slopes) == 1 and slopes[0] > 1
    weight = layout(dims[1]) if per_channel else ((),) * len(slopes)
    return builder.build([layout(*dims), weight], [layout(*dims)], clean=dims)


register("aten.broadcast_tensors.default", "aten._prelu_kernel.default")(elementwise_space)
register(
    "aten.clone.default",
    "aten.contiguous.default",
    "aten._to_copy.default",
    "aten.to.dtype",
    "aten.to.dtype_layout",
    "aten.to.device",
    "aten.copy.default",
    "aten.detach.default",
    "aten.masked_fill.Scalar",
    "aten.masked_fill.Tensor",
    "aten.where.self",
    "aten.where.ScalarOther",
    "aten.where.ScalarSelf",
    "aten.where.Scalar",
    keeps=KEEPS_NOTHING,
)(elementwise_space)
register(
    "aten.native_dropout.default",
    keeps=Keeps(operands=Operands.NONE, further=lambda op, out: 1 / out.dtype.itemsize),  # a mask
)(elementwise_space)
register(
    "aten.detach_.default",
    "aten.bernoulli.default",
    "aten.bernoulli.p",
    "aten.exponential.default",
    "aten.rsub.Tensor",
    "aten.rand_like.default",
    "aten.randn_like.default",
    "aten.zeros_like.default",
    "aten.ones_like.default",
    "aten.empty_like.default",
    "aten.full_like.default",
    "aten.floor_divide.default",
    "aten.fill.Tensor",
    "aten.fill.Scalar",
    "aten.gelu.default",
    "aten.__and__.Tensor",
    "aten.__or__.Tensor",
    "aten.multiply.Tensor",
)(elementwise_space)


_POINTWISE = {
    **dict.fromkeys(("add", "sub", "neg"), Rule(space=elementwise_space, keeps=KEEPS_NOTHING)),
    **dict.fromkeys(("mul", "div"), Rule(space=elementwise_space, keeps=KEEPS_FACTORS)),
    **dict.fromkeys(
        ("relu", "tanh", "sigmoid", "exp", "sqrt", "rsqrt", "reciprocal"),
        Rule(space=elementwise_space, keeps=KEEPS_OUTPUT),
    ),
}
_OTHERS = Rule(space=elementwise_space)


@register_pointwise
def pointwise_rule(op: Op) -> Rule:
    """The rule of an operator that torch tags as pointwise."""
    return _POINTWISE.get(op.target_name.split(".")[1], _OTHERS)


def _dropout_scratch(_: Any, args: tuple[Any, ...], num_threads: int) -> int:
    """The mask in the operand's dtype, or what is kept before it is scaled."""
    return int(args[0].nbytes)


register_traced("aten.native_dropout.default", cpu_scratch=_dropout_scratch)
register_traced("aten.native_dropout_backward.default", cpu_scratch=_dropout_scratch)
