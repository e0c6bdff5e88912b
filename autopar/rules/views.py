"""Views and rearrangements: dimensions are renamed, merged, split, dropped or repeated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar.ir.graph import Op, Value
from autopar.rules.context import LocalContext
from autopar.rules.derivative import KEEPS_NOTHING
from autopar.rules.registry import Arguments, register
from autopar.rules.space import Layout, Space, SpaceBuilder, layout

Outputs = Sequence[Value | None]


def _to_local_shape(
    context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    return (args[0], context.output_shapes[0]), {}


@register(
    "aten.view.default",
    "aten.reshape.default",
    "aten._unsafe_view.default",
    "aten.flatten.using_ints",
    "aten.unflatten.int",
    "aten.unsqueeze.default",
    "aten.squeeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    arguments=_to_local_shape,
    runs_as=torch.ops.aten.reshape.default,  # a shard may have other strides than at capture
    keeps=KEEPS_NOTHING,
)
def reshape_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """Dimensions on both sides are products of common factors, as in einops."""
    source, target = inputs[0].shape, outputs[0].shape  # type: ignore[union-attr]
    if math.prod(source) == 0:
        return None
    builder = SpaceBuilder()
    left: list[tuple[str, ...]] = []
    right: list[tuple[str, ...]] = []
    for group_source, group_target in _matched_groups(source, target):
        factors = _common_factors(group_source, group_target)
        if factors is None:
            left += [(builder.whole(size),) for size in group_source]
            right += [(builder.whole(size),) for size in group_target]
            continue
        names = [builder.dim(f"d{len(builder.sizes)}", f) for f in factors]
        left += _products(group_source, names, factors)
        right += _products(group_target, names, factors)
    return builder.build([tuple(left)], [tuple(right)], clean=builder.sizes, linear=frozenset({0}))


def _matched_groups(
    source: Sequence[int], target: Sequence[int]
) -> list[tuple[list[int], list[int]]]:
    """The shortest runs of dimensions on both sides with equal products."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(source) or j < len(target):
        left, right = [], []
        product_left = product_right = 1
        while True:
            if product_left <= product_right and i < len(source):
                product_left *= source[i]
                left.append(source[i])
                i += 1
            elif j < len(target):
                product_right *= target[j]
                right.append(target[j])
                j += 1
            elif i < len(source):
                product_left *= source[i]
                left.append(source[i])
                i += 1
            if product_left == product_right and (
                (left and right) or (i == len(source) and j == len(target))
            ):
                break
        groups.append((left, right))
    return groups


def _common_factors(source: Sequence[int], target: Sequence[int]) -> list[int] | None:
    """Factors whose runs multiply to the dimensions on both sides; None where they interleave."""
    cuts = sorted({*_prefixes(source), *_prefixes(target), 1})
    factors = []
    for before, after in itertools.pairwise(cuts):
        if after % before:
            return None
        factors.append(after // before)
    return factors


def _prefixes(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[: i + 1]) for i in range(len(sizes))]


def _products(
    sizes: Sequence[int], names: Sequence[str], factors: Sequence[int]
) -> list[tuple[str, ...]]:
    """Each size as the run of factors that multiply to it."""
    result, position = [], 0
    for size in sizes:
        run: list[str] = []
        product = 1
        while product < size:
            run.append(names[position])
            product *= factors[position]
            position += 1
        result.append(tuple(run))
    return result


@register(
    "aten.transpose.int",
    "aten.t.default",
    "aten.permute.default",
    "aten.movedim.int",
    "aten.movedim.intlist",
    keeps=KEEPS_NOTHING,
)
def permute_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    shape = inputs[0].shape
    rank = len(shape)
    order = list(range(rank))
    if op.target_name == "aten.permute.default":
        order = [d % rank for d in op.args[1]]
    elif op.target_name.startswith("aten.movedim"):
        order = _moved_order(op.args[1], op.args[2], rank)
    elif rank >= 2:
        first, second = op.args[1:3] if len(op.args) > 1 else (0, 1)
        order[first % rank], order[second % rank] = order[second % rank], order[first % rank]
    builder = SpaceBuilder()
    dims = builder.dims("d", shape)
    return builder.build(
        [layout(*dims)],
        [layout(*(dims[d] for d in order))],
        clean=dims,
        linear=frozenset({0}),
    )


def _moved_order(source: Any, target: Any, rank: int) -> list[int]:
    """The source dimension of each output dimension of a movedim."""
    sources = [d % rank for d in ((source,) if isinstance(source, int) else source)]
    targets = [d % rank for d in ((target,) if isinstance(target, int) else target)]
    others = iter(d for d in range(rank) if d not in sources)
    placed = dict(zip(targets, sources))
    return [placed[d] if d in placed else next(others) for d in range(rank)]


@register("aten.expand.default", arguments=_to_local_shape, keeps=KEEPS_NOTHING)
def expand_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """A repeated dimension belongs to the output only."""
    source, target = inputs[0].shape, outputs[0].shape  # type: ignore[union-attr]
    builder = SpaceBuilder()
    dims = builder.dims("d", target)
    offset = len(target) - len(source)
    left = tuple(
        (dims[offset + i],) if size == target[offset + i] else () for i, size in enumerate(source)
    )
    kept = {name for factors in left for name in factors}
    return builder.build([left], [layout(*dims)], padded=dims, clean=kept, linear=frozenset({0}))


def _one_dim_apart(
    inputs: Sequence[Value],
    outputs: Outputs,
    dim: int,
    *,
    keeps_dim: bool = True,
    keeps_zeros: bool = True,
    is_linear: bool = False,
) -> Space:
    """All dimensions are free but ``dim``, which stays whole or is dropped from the outputs."""
    shape = inputs[0].shape
    builder = SpaceBuilder()
    free = {d: builder.dim(f"d{d}", size) for d, size in enumerate(shape) if d != dim}

    def of(value_shape: Sequence[int]) -> Layout:
        return tuple(
            (free[d],) if d != dim else (builder.whole(size),) for d, size in enumerate(value_shape)
        )

    dropped = tuple((free[d],) for d in range(len(shape)) if d != dim)
    rights = [() if o is None else (of(o.shape) if keeps_dim else dropped) for o in outputs]
    kept = [right for right, o in zip(rights, outputs)]
    result = builder.build(
        [of(v.shape) for v in inputs],
        kept,
        padded=free.values(),
        clean=free.values() if keeps_zeros else (),
        linear=frozenset(range(len(inputs)) if is_linear else ()),
    )
    return _ignore_unused(result, outputs)


def _ignore_unused(space: Space, outputs: Outputs) -> Space:
    """Give unused outputs the layout of the first used one."""
    used = next((lay for lay, o in zip(space.outputs, outputs) if o is not None), space.outputs[0])
    outs = tuple(used if o is None else lay for lay, o in zip(space.outputs, outputs))
    return replace(space, outputs=outs)


@register("aten.slice.Tensor", "aten.narrow.default", "aten.cumsum.default", keeps=KEEPS_NOTHING)
@register(
    "aten.cumprod.default",
    "aten.logcumsumexp.default",
    "aten.glu.default",
    "aten.sort.default",
    "aten.topk.default",
    "aten.index_select.default",
)
def slice_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    position = {"aten.topk.default": 2}.get(op.target_name, 1)
    from_last = ("aten.topk.default", "aten.sort.default", "aten.glu.default")
    default = -1 if op.target_name in from_last else 0
    dim = op.args[position] if len(op.args) > position else default
    if not inputs[0].shape or (op.target_name == "aten.narrow.default" and len(inputs) > 1):
        return None
    if op.target_name == "aten.index_select.default":
        return _index_select_space(op, inputs, outputs, dim % len(inputs[0].shape))
    keeps_zeros = op.target_name not in (
        "aten.topk.default",
        "aten.sort.default",
        "aten.logcumsumexp.default",
    )
    return _one_dim_apart(
        inputs[:1],
        outputs,
        dim % len(inputs[0].shape),
        keeps_zeros=keeps_zeros,
        is_linear=op.target_name in ("aten.slice.Tensor", "aten.narrow.default"),
    )


@register("aten.diff.default", keeps=KEEPS_NOTHING)
def diff_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``diff(x, n, dim, prepend, append)``; along ``dim`` all operands are whole."""
    if not inputs[0].shape:
        return None
    dim = op.args[2] if len(op.args) > 2 else dict(op.kwargs).get("dim", -1)
    return _one_dim_apart(inputs, outputs, dim % len(inputs[0].shape), is_linear=True)


def _index_select_space(
    op: Op, inputs: Sequence[Value], outputs: Outputs, dim: int
) -> Space | None:
    space = _one_dim_apart(inputs[:1], outputs, dim)
    return replace(space, inputs=(space.inputs[0], ((),)))


@register("aten.select.int", "aten.unbind.int", keeps=KEEPS_NOTHING)
def select_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    dim = op.args[1] if len(op.args) > 1 else 0
    return _one_dim_apart(
        inputs,
        outputs,
        dim % len(inputs[0].shape),
        keeps_dim=False,
        is_linear=op.target_name == "aten.select.int",
    )


@register("aten.view_as_complex.default", "aten.view_as_real.default", keeps=KEEPS_NOTHING)
def complex_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """Complex numbers as pairs of real ones, or back: all dimensions but that of the pair."""
    pairs = op.target_name.endswith("complex.default")
    shape = inputs[0].shape[:-1] if pairs else inputs[0].shape
    builder = SpaceBuilder()
    dims = builder.dims("d", shape)
    real, whole = layout(*dims, builder.whole(2)), layout(*dims)
    sides = (real, whole) if pairs else (whole, real)
    return builder.build([sides[0]], [sides[1]], clean=dims, linear=frozenset({0}))


@register(
    "aten.cat.default", "aten.concat.default", "aten.concatenate.default", keeps=KEEPS_NOTHING
)
def cat_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space:
    """All dimensions are free but the joined one; torch skips operands of shape ``(0,)``."""
    dim = op.args[1] if len(op.args) > 1 else dict(op.kwargs).get("dim", 0)
    joined = [i for i, value in enumerate(inputs) if value.shape != (0,)] or range(len(inputs))
    used = [inputs[i] for i in joined]
    space = _one_dim_apart(used, outputs, dim % len(used[0].shape), is_linear=True)
    layouts = dict(zip(joined, space.inputs))
    return replace(
        space,
        inputs=tuple(layouts.get(i, ((),)) for i in range(len(inputs))),
        linear=frozenset(joined),
    )


@register("aten.stack.default", keeps=KEEPS_NOTHING)
def stack_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    shape = inputs[0].shape
    dim = (op.args[1] if len(op.args) > 1 else 0) % (len(shape) + 1)
    builder = SpaceBuilder()
    dims = builder.dims("d", shape)
    stacked = builder.whole(len(inputs))
    return builder.build(
        [layout(*dims) for _ in inputs],
        [layout(*dims[:dim], stacked, *dims[dim:])],
        clean=dims,
        linear=frozenset(range(len(inputs))),
    )


@register("aten.flip.default", "aten.roll.default", keeps=KEEPS_NOTHING)
def flip_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    shape = inputs[0].shape
    position = 1 if op.target_name == "aten.flip.default" else 2
    moved = op.args[position] if len(op.args) > position else ()
    whole = {d % max(len(shape), 1) for d in (moved or range(len(shape)))}
    builder = SpaceBuilder()
    dims = [
        builder.whole(size) if d in whole else builder.dim(f"d{d}", size)
        for d, size in enumerate(shape)
    ]
    return builder.build([layout(*dims)], [layout(*dims)], clean=dims)


@register("aten.pad.default", "aten.constant_pad_nd.default", keeps=KEEPS_NOTHING)
def pad_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """Padded dimensions stay whole; ``pad`` lists pairs from the last dimension backwards."""
    shape, padding = inputs[0].shape, op.args[1]
    padded = {
        len(shape) - 1 - i for i in range(len(padding) // 2) if any(padding[2 * i : 2 * i + 2])
    }
    builder = SpaceBuilder()
    free = {d: builder.dim(f"d{d}", s) for d, s in enumerate(shape) if d not in padded}
    sides = [
        tuple((free[d],) if d in free else (builder.whole(s),) for d, s in enumerate(sizes))
        for sizes in (shape, outputs[0].shape)  # type: ignore[union-attr]
    ]
    return builder.build([sides[0]], [sides[1]], padded=free.values())


def _local_parts(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The arguments of a split on a shard: equal parts of what this device holds.

    Unequal parts only occur in a whole dimension, and stay as they are.
    """
    return (args[0], args[1] // context.num_shards("rest"), *args[2:]), kwargs


@register("aten.chunk.default", keeps=KEEPS_NOTHING)
@register("aten.split.Tensor", arguments=_local_parts, keeps=KEEPS_NOTHING)
def split_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """A split into equal parts: the dimension is (part, rest), and the parts stay whole."""
    shape = inputs[0].shape
    dim = (op.args[2] if len(op.args) > 2 else 0) % len(shape)
    if shape[dim] % len(outputs):
        return _one_dim_apart(inputs, outputs, dim)
    used = [o for o in outputs if o is not None]
    if any(o.shape[dim] * len(outputs) != shape[dim] for o in used):
        return _one_dim_apart(inputs, outputs, dim)
    builder = SpaceBuilder()
    free = [builder.dim(f"d{d}", s) for d, s in enumerate(shape) if d != dim]
    part = builder.whole(len(outputs))
    rest = builder.dim("rest", shape[dim] // len(outputs))
    source = layout(*free[:dim], (part, rest), *free[dim:])
    target = layout(*free[:dim], rest, *free[dim:])
    return builder.build([source], [target for _ in outputs], clean=free)


@register("aten.split_with_sizes.default", "aten.split.sizes", keeps=KEEPS_NOTHING)
def split_with_sizes_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    dim = (op.args[2] if len(op.args) > 2 else 0) % len(inputs[0].shape)
    return _one_dim_apart(inputs, outputs, dim)
