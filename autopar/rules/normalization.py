"""Normalization within a sample: the dimensions that are not normalized are free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.ir.graph import Op, Value
from autopar.rules.context import LocalContext
from autopar.rules.registry import Arguments, register
from autopar.rules.space import Space, SpaceBuilder, layout

Outputs = Sequence[Value | None]


@register("aten.layer_norm.default", "aten.rms_norm.default")
def layer_norm_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """The normalized dimensions stay whole."""
    shape, num_normalized = inputs[0].shape, len(op.args[1])
    builder = SpaceBuilder()
    free = builder.dims("d", shape[: len(shape) - num_normalized])
    normalized = [builder.whole(size) for size in shape[len(free) :]]
    weights = [layout(*normalized) for _ in inputs[1:]]
    x = layout(*free, *normalized)
    return builder.build([x, *weights], [x], padded=free)


@register("aten._weight_norm.default", "aten._weight_norm_interface.default")
def weight_norm_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``g v / |v|``: the dimension with one norm per element is free."""
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


def _local_groups(
    context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    return (args[0], args[1] // context.num_shards("g"), *args[2:]), kwargs


@register("aten.group_norm.default", arguments=_local_groups)
def group_norm_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``x[n, (g c), ...]``: batch and groups are free."""
    shape, groups = inputs[0].shape, int(op.args[1])
    builder = SpaceBuilder()
    n, g = builder.dim("n", shape[0]), builder.dim("g", groups)
    c = builder.whole(shape[1] // groups)
    rest = [builder.whole(size) for size in shape[2:]]
    x = layout(n, (g, c), *rest)
    return builder.build([x, *(layout((g, c)) for _ in inputs[1:])], [x])


@register("aten.instance_norm.default")
def instance_norm_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``x[n, c, ...]``: batch and channels are free; no split with running statistics."""
    if op.args[3] is not None or op.args[4] is not None:
        return None
    shape = inputs[0].shape
    builder = SpaceBuilder()
    n, c = builder.dim("n", shape[0]), builder.dim("c", shape[1])
    x = layout(n, c, *(builder.whole(size) for size in shape[2:]))
    return builder.build([x, *(layout(c) for _ in inputs[1:])], [x])
