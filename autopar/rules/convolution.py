"""Convolutions and pooling: batch and channels are free; the window's dimensions stay whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.ir.graph import Op, Value
from autopar.rules.context import LocalContext
from autopar.rules.derivative import KEEPS_FACTORS, KEEPS_NOTHING, Keeps
from autopar.rules.registry import Arguments, Layer, register
from autopar.rules.space import Space, SpaceBuilder, layout

Outputs = Sequence[Value | None]

CONVOLUTIONS = (
    "aten.conv1d.default",
    "aten.conv2d.default",
    "aten.conv3d.default",
    "aten.conv1d.padding",
    "aten.conv2d.padding",
    "aten.conv3d.padding",
    "aten.convolution.default",
)
TRANSPOSED_CONVOLUTIONS = (
    "aten.conv_transpose1d.default",
    "aten.conv_transpose2d.input",
    "aten.conv_transpose3d.input",
)

_GROUPS = {"aten.convolution.default": 8}


def _groups(op: Op) -> int:
    position = _GROUPS.get(op.target_name, 6)
    groups = op.args[position] if len(op.args) > position else dict(op.kwargs).get("groups", 1)
    return int(groups)


def _local_groups(
    context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    """The arguments with the number of groups on this device."""
    position = _GROUPS.get(context.op.target_name, 6)
    groups = _groups(context.op) // context.num_shards("g")
    if len(args) > position:
        args = (*args[:position], groups, *args[position + 1 :])
    elif "groups" in kwargs:
        kwargs = {**kwargs, "groups": groups}
    return args, kwargs


@register(
    *CONVOLUTIONS,
    arguments=_local_groups,
    keeps=KEEPS_FACTORS,
    layer=Layer.CONVOLUTION,
)
def conv_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``x[n, (g i), ...] w[(g o), i, ...] + b[(g o)]``; a bias enters the sum over i once."""
    x, weight = inputs[0].shape, inputs[1].shape
    out = outputs[0].shape  # type: ignore[union-attr]
    if len(x) != len(weight) or (op.target_name == "aten.convolution.default" and op.args[6]):
        return None
    groups = _groups(op)
    builder = SpaceBuilder()
    n, g = builder.dim("n", x[0]), builder.dim("g", groups)
    i, o = builder.dim("i", x[1] // groups), builder.dim("o", out[1] // groups)
    window = [builder.whole(size) for size in weight[2:]]
    space_in = [builder.whole(size) for size in x[2:]]
    space_out = [builder.whole(size) for size in out[2:]]
    operands = [layout(n, (g, i), *space_in), layout((g, o), i, *window), layout((g, o))]
    return builder.build(
        operands[: len(inputs)],
        [layout(n, (g, o), *space_out)],
        sums=frozenset({i}),
        partial_inputs=frozenset({2}),
        padded={n},
        clean={i, o} if len(inputs) > 2 else {n, i, o},
        anchor=True,
    )


@register(
    *TRANSPOSED_CONVOLUTIONS,
    arguments=_local_groups,
    keeps=KEEPS_FACTORS,
    layer=Layer.CONVOLUTION,
)
def conv_transpose_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``x[n, (g i), ...] w[(g i), o, ...] + b[(g o)]``; a bias enters the sum over i once."""
    x, weight = inputs[0].shape, inputs[1].shape
    if len(x) != len(weight):
        return None
    groups = _groups(op)
    builder = SpaceBuilder()
    n, g = builder.dim("n", x[0]), builder.dim("g", groups)
    i, o = builder.dim("i", x[1] // groups), builder.dim("o", weight[1])
    window = [builder.whole(size) for size in weight[2:]]
    space_in = [builder.whole(size) for size in x[2:]]
    space_out = [builder.whole(size) for size in outputs[0].shape[2:]]  # type: ignore[union-attr]
    operands = [layout(n, (g, i), *space_in), layout((g, i), o, *window), layout((g, o))]
    return builder.build(
        operands[: len(inputs)],
        [layout(n, (g, o), *space_out)],
        sums=frozenset({i}),
        partial_inputs=frozenset({2}),
        padded={n},
        clean={i, o} if len(inputs) > 2 else {n, i, o},
        anchor=True,
    )


@register(
    "aten.max_pool1d.default",
    "aten.max_pool2d.default",
    keeps=Keeps(further=lambda op, out: 8 / out.dtype.itemsize),  # 64-bit indices
)
@register(
    "aten.adaptive_avg_pool1d.default", "aten.adaptive_avg_pool2d.default", keeps=KEEPS_NOTHING
)
@register(
    "aten.max_pool3d.default",
    "aten.avg_pool1d.default",
    "aten.avg_pool2d.default",
    "aten.avg_pool3d.default",
    "aten.adaptive_avg_pool3d.default",
    "aten.adaptive_max_pool2d.default",
    "aten.max_pool2d_with_indices.default",
)
def pool_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """Batch and channels are free."""
    spatial = int(op.target_name.split("pool")[1][0])
    shape = inputs[0].shape
    builder = SpaceBuilder()
    free = builder.dims("d", shape[: len(shape) - spatial])
    before = [builder.whole(size) for size in shape[len(free) :]]
    first = next(o for o in outputs if o is not None)
    after = [builder.whole(size) for size in first.shape[len(free) :]]
    return builder.build(
        [layout(*free, *before)],
        [layout(*free, *after) for _ in outputs],
        padded=free,
        clean=free if len(outputs) == 1 else (),
    )
