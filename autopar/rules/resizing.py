"""Repeating, resizing and unfolding: the dimensions of a window or scale factor stay whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.ir.graph import Op, Value
from autopar.rules.context import LocalContext
from autopar.rules.derivative import KEEPS_NOTHING
from autopar.rules.registry import Arguments, register
from autopar.rules.space import Space, SpaceBuilder, layout

Outputs = Sequence[Value | None]


def _local_repeats(
    context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    return (args[0], tuple(n // context.num_shards(f"r{i}") for i, n in enumerate(args[1]))), {}


@register("aten.repeat.default", arguments=_local_repeats, keeps=KEEPS_NOTHING)
def repeat_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``x[d] -> [(r d)]``: the repeats are the outer factor, which only the output has."""
    shape, repeats = inputs[0].shape, op.args[1]
    offset = len(repeats) - len(shape)
    builder = SpaceBuilder()
    times = builder.dims("r", repeats)
    dims = builder.dims("d", shape)
    out = [(r,) if i < offset else (r, dims[i - offset]) for i, r in enumerate(times)]
    return builder.build([layout(*dims)], [layout(*out)])


def _local_interleaved(
    context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    return (args[0], args[1] // context.num_shards("r"), *args[2:]), kwargs


@register("aten.repeat_interleave.self_int", arguments=_local_interleaved, keeps=KEEPS_NOTHING)
def repeat_interleave_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``x[d] -> [(d r)]``: the repeats are the inner factor."""
    shape = inputs[0].shape
    if len(op.args) < 3 or op.args[2] is None or not shape:
        return None
    dim = op.args[2] % len(shape)
    builder = SpaceBuilder()
    dims = builder.dims("d", shape)
    r = builder.dim("r", op.args[1])
    out = [(d, r) if i == dim else d for i, d in enumerate(dims)]
    return builder.build([layout(*dims)], [layout(*out)])


@register("aten.upsample_nearest2d.vec", "aten.upsample_nearest2d.default", keeps=KEEPS_NOTHING)
@register(
    "aten.upsample_nearest1d.vec",
    "aten.upsample_nearest3d.vec",
    "aten.upsample_linear1d.vec",
    "aten.upsample_bilinear2d.vec",
    "aten.upsample_bicubic2d.vec",
    "aten.upsample_trilinear3d.vec",
    "aten.upsample_bilinear2d.default",
    "aten.reflection_pad1d.default",
    "aten.reflection_pad2d.default",
    "aten.replication_pad1d.default",
    "aten.replication_pad2d.default",
)
def resize_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """Batch and channels are free; the resized dimensions are the last ones."""
    before, after = inputs[0].shape, outputs[0].shape  # type: ignore[union-attr]
    spatial = {"1": 1, "2": 2, "3": 3}[op.target_name.split("d.")[0][-1]]
    builder = SpaceBuilder()
    free = builder.dims("d", before[: len(before) - spatial])
    sides = [[builder.whole(s) for s in shape[len(free) :]] for shape in (before, after)]
    return builder.build([layout(*free, *sides[0])], [layout(*free, *sides[1])])


@register("aten.pixel_shuffle.default")
def pixel_shuffle_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``x[..., (c p q), h, w] -> [..., c, (h p), (w q)]``."""
    shape, factor = inputs[0].shape, op.args[1]
    builder = SpaceBuilder()
    batch = builder.dims("b", shape[:-3])
    c = builder.dim("c", shape[-3] // factor**2)
    h, w = builder.dim("h", shape[-2]), builder.dim("w", shape[-1])
    p, q = builder.whole(factor), builder.whole(factor)
    return builder.build([layout(*batch, (c, p, q), h, w)], [layout(*batch, c, (h, p), (w, q))])


@register("aten.im2col.default")
def im2col_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``x[n, c, h, w] -> [n, (c window), positions]``."""
    before, after = inputs[0].shape, outputs[0].shape  # type: ignore[union-attr]
    builder = SpaceBuilder()
    batch = builder.dims("n", before[:-3])
    c, window = builder.dim("c", before[-3]), builder.whole(after[-2] // before[-3])
    space = [builder.whole(s) for s in before[-2:]]
    return builder.build(
        [layout(*batch, c, *space)], [layout(*batch, (c, window), builder.whole(after[-1]))]
    )


@register("aten.unfold.default")
def unfold_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``x[..., d, ...] -> [..., windows, ..., size]``: the other dimensions are free."""
    shape = inputs[0].shape
    if not shape:
        return None
    dim = op.args[1] % len(shape)
    builder = SpaceBuilder()
    free = {d: builder.dim(f"d{d}", s) for d, s in enumerate(shape) if d != dim}
    x = [free[d] if d != dim else builder.whole(s) for d, s in enumerate(shape)]
    sizes = outputs[0].shape  # type: ignore[union-attr]
    out = [free[d] if d != dim else builder.whole(sizes[dim]) for d in range(len(shape))]
    return builder.build([layout(*x)], [layout(*out, builder.whole(sizes[-1]))])


@register("aten.tril.default", "aten.triu.default")
def triangle_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """The batch is free; rows and columns decide which elements stay."""
    shape = inputs[0].shape
    builder = SpaceBuilder()
    dims = [*builder.dims("b", shape[:-2]), *(builder.whole(s) for s in shape[-2:])]
    return builder.build([layout(*dims)], [layout(*dims)])
