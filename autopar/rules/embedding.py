"""Embeddings: a table split by rows yields partial sums, one split by columns yields columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ir.graph import Op, Value
from autopar.rules.context import LocalContext
from autopar.rules.derivative import KEEPS_NOTHING
from autopar.rules.registry import register
from autopar.rules.space import Space, SpaceBuilder, layout

Outputs = Sequence[Value | None]


def _embedding_local(
    context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """The look-up on a shard; rows held by other devices come out as zeros."""
    weight, index = args[0], args[1]
    padding = args[2] if len(args) > 2 else -1
    if context.num_shards("v") == 1:
        whole: Tensor = context.op.target(*args, **kwargs)
        return whole
    local = index - context.shard_start(weight, "v")
    mine = (local >= 0) & (local < weight.shape[0])
    rows = F.embedding(torch.where(mine, local, 0), weight)
    rows = torch.where(mine.unsqueeze(-1), rows, 0)
    if padding >= 0:
        rows = torch.where((index == padding).unsqueeze(-1), rows.detach(), rows)
    return rows


@register("aten.embedding.default", lower=_embedding_local, keeps=KEEPS_NOTHING)
def embedding_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``w[v, h]`` looked up at ``index[...]``."""
    weight, index = inputs[0].shape, inputs[1].shape
    builder = SpaceBuilder()
    # Frequencies are counted over all positions and rows, so neither may be split.
    counts = len(op.args) > 3 and bool(op.args[3])
    if counts:
        positions = tuple(builder.whole(size) for size in index)
        v, h = builder.whole(weight[0]), builder.dim("h", weight[1])
        return builder.build([layout(v, h), layout(*positions)], [layout(*positions, h)])
    positions = builder.dims("d", index)
    v, h = builder.dim("v", weight[0]), builder.dim("h", weight[1])
    return builder.build(
        [layout(v, h), layout(*positions)],
        [layout(*positions, h)],
        sums=frozenset({v}),
        plain=frozenset({v}),
        padded=positions,
        clean={v, h},
        anchor=True,
    )


def _one_hot_local(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The encoding on a shard; classes held by other devices come out as zeros."""
    index = args[0]
    classes = torch.arange(context.local_size("c"), device=index.device)
    return (index.unsqueeze(-1) == classes + context.shard_start(index, "c")).to(index.dtype)


@register("aten.one_hot.default", lower=_one_hot_local)
def one_hot_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``out[..., c]``: positions are free, and so are classes where their number is given."""
    given = op.args[1] if len(op.args) > 1 else dict(op.kwargs).get("num_classes", -1)
    if given < 1:
        return None
    builder = SpaceBuilder()
    positions = builder.dims("d", inputs[0].shape)
    c = builder.dim("c", given)
    return builder.build(
        [layout(*positions)],
        [layout(*positions, c)],
        plain=frozenset({c}),
        padded=positions,
        clean={c},
    )


SUM, MEAN = 0, 1
_BAG_NAMES = (
    "weight", "indices", "offsets", "scale_grad_by_freq", "mode", "sparse",
    "per_sample_weights", "include_last_offset", "padding_idx",
)  # fmt: skip


def _bag_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "scale_grad_by_freq": False, "mode": SUM, "sparse": False, "per_sample_weights": None,
        "include_last_offset": False, "padding_idx": None,
    }  # fmt: skip
    return {**defaults, **dict(zip(_BAG_NAMES, args)), **kwargs}


def _bag_local(
    context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, ...]:
    """The bags on a shard; rows held by other devices count as zeros.

    A mean divides by the number of rows in the whole bag. The operator's outputs besides the bags
    do not depend on the table's rows: they are computed with a table of one column, and only the
    first device contributes them.
    """
    if context.num_shards("v") == 1:
        whole: tuple[Tensor, ...] = context.op.target(*args, **kwargs)
        return whole
    call = _bag_arguments(args, kwargs)
    weight, index, offsets = call["weight"], call["indices"], call["offsets"]
    start = context.shard_start(weight, "v")
    local = index - start
    mine = (local >= 0) & (local < weight.shape[0])
    counted = torch.ones_like(index, dtype=torch.bool)
    if call["padding_idx"] is not None:  # a negative index counts from the end of the whole table
        counted = index != call["padding_idx"] % context.space.sizes["v"]
    rows = F.embedding(torch.where(mine, local, 0), weight)
    if call["per_sample_weights"] is not None:
        rows = rows * call["per_sample_weights"].unsqueeze(-1)
    rows = torch.where((mine & counted).unsqueeze(-1), rows, 0)
    position = torch.arange(index.shape[0], device=index.device, dtype=offsets.dtype)
    bag = torch.bucketize(position, offsets, right=True) - 1
    num_bags = context.output_shapes[0][0]
    out = rows.new_zeros((num_bags, weight.shape[1])).index_add(0, bag, rows)
    if call["mode"] == MEAN:
        count = torch.zeros(num_bags, dtype=weight.dtype, device=weight.device)
        count = count.index_add(0, bag, counted.to(weight.dtype))
        out = out / count.clamp(min=1).unsqueeze(-1)
    column = weight.detach().new_zeros((context.space.sizes["v"], 1))
    others = context.op.target(column, *args[1:], **kwargs)[1:]
    return out, *(x * (start == 0) for x in others)


@register("aten.embedding_bag.default", "aten.embedding_bag.padding_idx", lower=_bag_local)
def embedding_bag_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``w[v, h]`` looked up at ``indices[i]``, summed over the bags that start at ``offsets``."""
    call = _bag_arguments(op.args, dict(op.kwargs))
    if call["mode"] not in (SUM, MEAN) or call["scale_grad_by_freq"] or call["sparse"]:
        return None
    if len(inputs[1].shape) != 1 or outputs[0] is None:
        return None
    builder = SpaceBuilder()
    weight = inputs[0].shape
    v, h = builder.dim("v", weight[0]), builder.dim("h", weight[1])
    others = [layout(*(builder.whole(s) for s in x.shape)) for x in inputs[1:]]
    bags = builder.whole(outputs[0].shape[0])
    rest = [() if o is None else layout(*map(builder.whole, o.shape)) for o in outputs[1:]]
    return builder.build(
        [layout(v, h), *others],
        [layout(bags, h), *rest],
        sums=frozenset({v}),
        reduced=frozenset({h}),
        plain=frozenset({v}),
        clean={v, h},
        anchor=True,
    )
