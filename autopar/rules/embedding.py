"""Table look-ups: a table split by rows gives partial sums, split by columns gives columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.graph import Op, Value
from autopar.rules.base import LocalContext, Space, SpaceBuilder, layout, register

Outputs = Sequence[Value | None]


def _embedding_local(
    context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Rows that another device holds count as zeros here."""
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


@register("aten.embedding.default", lower=_embedding_local)
def embedding_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``w[v, h]`` looked up at ``index[...]``."""
    weight, index = inputs[0].shape, inputs[1].shape
    builder = SpaceBuilder()
    positions = builder.dims("d", index)
    v, h = builder.dim("v", weight[0]), builder.dim("h", weight[1])
    return builder.build(
        [layout(v, h), layout(*positions)],
        [layout(*positions, h)],
        sums=frozenset({v}),
        plain=frozenset({v}),
        anchor=True,
    )
