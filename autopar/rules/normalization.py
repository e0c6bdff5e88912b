"""Normalisation: layer, group and RMS norms are free outside; batch norm reduces inside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from autopar.graph import Op, Value
from autopar.mesh import Mesh
from autopar.rules.base import (
    Choice,
    InternalCollective,
    LocalContext,
    Space,
    SpaceBuilder,
    layout,
    register,
)

Outputs = Sequence[Value | None]


@register("aten.layer_norm.default", "aten.rms_norm.default")
def layer_norm_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """The normalised dimensions stay whole."""
    shape, num_normalized = inputs[0].shape, len(op.args[1])
    builder = SpaceBuilder()
    free = builder.dims("d", shape[: len(shape) - num_normalized])
    normalized = [builder.whole(size) for size in shape[len(free) :]]
    weights = [layout(*normalized) for _ in inputs[1:]]
    x = layout(*free, *normalized)
    return builder.build([x, *weights], [x], padded=free)


@register("aten._weight_norm.default", "aten._weight_norm_interface.default")
def weight_norm_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``g v / |v|``: free in the dimension that has a norm for each of its elements."""
    shape, norms = inputs[0].shape, inputs[1].shape
    given = int(op.args[2]) if len(op.args) > 2 else 0
    if not shape or len(norms) != len(shape) or given == -1:  # -1: one norm of all
        return None
    dim = given % len(shape)
    builder = SpaceBuilder()
    names = [builder.dim(f"d{d}", s) if d == dim else builder.whole(s) for d, s in enumerate(shape)]
    v = layout(*names)
    g = tuple((names[d],) if d == dim else () for d in range(len(shape)))
    return builder.build([v, g], [v, g][: len(outputs)])


def _group_norm_local(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    groups = int(context.space.sizes["g"]) // context.num_shards("g")
    return context.op.target(args[0], groups, *args[2:], **kwargs)


@register("aten.group_norm.default", lower=_group_norm_local)
def group_norm_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``x[n, (g c), ...]``: free in batch and groups."""
    shape, groups = inputs[0].shape, int(op.args[1])
    builder = SpaceBuilder()
    n, g = builder.dim("n", shape[0]), builder.dim("g", groups)
    c = builder.whole(shape[1] // groups)
    rest = [builder.whole(size) for size in shape[2:]]
    x = layout(n, (g, c), *rest)
    return builder.build([x, *(layout((g, c)) for _ in inputs[1:])], [x])


@register("aten.instance_norm.default")
def instance_norm_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``x[n, c, ...]``: free in batch and channels, unless running statistics join the batch."""
    if op.args[3] is not None or op.args[4] is not None:
        return None
    shape = inputs[0].shape
    builder = SpaceBuilder()
    n, c = builder.dim("n", shape[0]), builder.dim("c", shape[1])
    x = layout(n, c, *(builder.whole(size) for size in shape[2:]))
    return builder.build([x, *(layout(c) for _ in inputs[1:])], [x])


@register("aten._native_batch_norm_legit_no_training.default")
def batch_norm_inference_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """With given statistics it is element-wise; the saved statistics come out empty."""
    shape = inputs[0].shape
    builder = SpaceBuilder()
    dims = (builder.dim("n", shape[0]), builder.dim("c", shape[1]), *builder.dims("l", shape[2:]))
    empty = layout(builder.whole(0))
    return builder.build(
        [layout(*dims), *(layout(dims[1]) for _ in inputs[1:])],
        [layout(*dims), empty, empty],
        reduced=frozenset(dims),
    )


def _shard_norm_local(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Batch norm with the statistics of this shard; running ones are its part of the shards' mean.

    Micro-batches are no part of that mean: they change the running statistics one after the other.
    """
    out, *statistics = context.op.target(*args, **kwargs)
    axes = [a for a in context.axes_of("n") if not context.mesh.is_sequential(a)]
    num = context.mesh.size(axes)
    return out, *(s if num == 1 else s / num for s in statistics)


def _batch_norm_local(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Batch norm with the statistics of the whole batch, as on one device.

    Mean and variance are all-reduced; because each device normalises its own share with them,
    their gradients are all-reduced too.
    """
    if context.op.per_shard:
        return _shard_norm_local(context, args, kwargs)
    x, weight, bias, running_mean, running_var, training, momentum, eps = args
    batch_dims = [d for d in context.space.sizes if d in context.space.reduced]
    axes = context.axes_of(*batch_dims)
    num = context.mesh.size(axes)
    if not training or num == 1:
        return context.op.target(*args, **kwargs)
    dims = [d for d in range(x.dim()) if d != 1]
    shape = [1, -1, *([1] * (x.dim() - 2))]
    mean = context.all_reduce(x.mean(dims) / num, axes, varying=True)
    centred = x - mean.view(shape)
    variance = context.all_reduce((centred * centred).mean(dims) / num, axes, varying=True)
    rstd = torch.rsqrt(variance + eps)
    out = centred * rstd.view(shape)
    if weight is not None:
        out = out * weight.view(shape)
    if bias is not None:
        out = out + bias.view(shape)
    count = num * math.prod(x.shape[d] for d in dims)
    unbiased = variance.detach() * (count / max(count - 1, 1))
    new_mean = running_mean * (1 - momentum) + mean.detach() * momentum
    new_var = running_var * (1 - momentum) + unbiased * momentum
    return out, mean.detach(), rstd.detach(), new_mean, new_var


def _batch_norm_collectives(
    op: Op, space: Space, choice: Choice, mesh: Mesh, inputs: Sequence[Value]
) -> tuple[InternalCollective, ...]:
    axes = tuple(sorted(a for d in space.reduced for a in choice.axes_of(d)))
    if mesh.size(axes) == 1 or not op.args[5] or op.per_shard:
        return ()
    channels = space.sizes["c"] // mesh.size(choice.axes_of("c"))
    one = InternalCollective(
        kind="all_reduce", axes=axes, size_bytes=channels * inputs[0].dtype.itemsize
    )
    return (one,) * 4


@register(
    "aten._native_batch_norm_legit_functional.default",
    lower=_batch_norm_local,
    collectives=_batch_norm_collectives,
)
def batch_norm_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``x[n, c, ...]`` with per-channel operands; statistics come out complete.

    Per shard of the batch, they come out as sums over the shards; places inside an image are not
    split then.
    """
    shape = inputs[0].shape
    builder = SpaceBuilder()
    n, c = builder.dim("n", shape[0]), builder.dim("c", shape[1])
    rest = [builder.whole(s) for s in shape[2:]] if op.per_shard else builder.dims("l", shape[2:])
    x = layout(n, c, *rest)
    stats = [
        layout(c) if o is None or o.shape == (shape[1],) else layout(builder.whole(0))
        for o in outputs[1:]
    ]
    return builder.build(
        [x, *(layout(c) for _ in inputs[1:])],
        [x, *stats],
        sums=frozenset({n} if op.per_shard else ()),
        reduced=frozenset(() if op.per_shard else {n, *rest}),
    )
