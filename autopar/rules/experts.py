"""Grouped matrix products (mixture of experts): rows, columns, inner dimension, experts free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.cost_models.calls import OpCall, TensorSpec
from autopar.ir.choice import Choice
from autopar.ir.graph import Op, Value
from autopar.ir.mesh import Mesh
from autopar.rules.context import LocalContext
from autopar.rules.kernels import LocalCall, Phase
from autopar.rules.registry import register
from autopar.rules.space import Space, SpaceBuilder, layout

Outputs = Sequence[Value | None]


def _grouped_local(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The grouped product on a shard; ``offs`` has the end row of each expert.

    Ends are recounted for local rows. Where experts are split, a device moves the rows of its own
    experts to the front; the rows of other experts come out as zeros.
    """
    x, weight = args[0], args[1]
    ends = args[2] if len(args) > 2 else kwargs["offs"]
    if context.num_shards("s") > 1:
        ends = (ends - context.shard_start(x, "s")).clamp(0, x.shape[0]).to(ends.dtype)
    if context.num_shards("e") == 1:
        result: Tensor = context.op.target(x, weight, ends)
        return result
    rows, first = torch.arange(x.shape[0], device=x.device), context.shard_start(x, "e")
    experts = torch.arange(weight.shape[0], device=x.device) + first
    start = torch.where(ends.new_zeros(()) + first > 0, ends[(experts[:1] - 1).clamp(min=0)][0], 0)
    own_ends = (ends[experts] - start).to(ends.dtype)
    # The kernel does not write the rows after the last end, nor their gradients.
    own = (rows < own_ends[-1]).unsqueeze(-1)
    moved = torch.where(own, x[(rows + start) % x.shape[0]], 0)
    out = torch.where(own, context.op.target(moved, weight, own_ends), 0)
    result = out[(rows - start) % x.shape[0]]
    return result


def _grouped_kernels(
    op: Op, space: Space, choice: Choice, mesh: Mesh, plain: OpCall
) -> tuple[LocalCall, ...] | None:
    """The calls for split experts: moves of rows, and a product of this device's rows."""
    num = mesh.size(choice.axes_of("e"))
    if num == 1:
        return None
    x, weight, ends = plain.tensors()
    own = replace(x, shape=(max(1, x.shape[0] // num), x.shape[1]))
    own_ends = replace(ends, shape=weight.shape[:1])
    out = replace(x, shape=(x.shape[0], weight.shape[2]))
    moves = [
        call
        for rows in (x, out)
        for call in (
            OpCall("aten.index.Tensor", (rows, (TensorSpec(rows.shape[:1], torch.int64),))),
            OpCall("aten.where.ScalarOther", (TensorSpec((rows.shape[0], 1), torch.bool), rows, 0)),
        )
    ]
    product = OpCall(plain.target, (own, weight, own_ends))
    return tuple(LocalCall(call=call, phase=Phase.BOTH) for call in (*moves, product))


@register(
    "aten._grouped_mm.default",
    "transformers.grouped_mm_fallback.default",
    lower=_grouped_local,
    kernels=_grouped_kernels,
)
def grouped_product_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``x[s, k] w[e, k, n]``, where each row s is multiplied by the weight of its expert.

    PyTorch's kernel requires rows and columns that are multiples of 16 bytes.
    """
    if len(inputs) != 3 or len(inputs[0].shape) != 2 or len(inputs[1].shape) != 3:
        return None
    if len(op.args) > 3 or any(k != "offs" for k, _ in op.kwargs):
        return None
    x, weight = inputs[0].shape, inputs[1].shape
    builder = SpaceBuilder()
    s, e = builder.dim("s", x[0]), builder.dim("e", weight[0])
    unit = 16 // inputs[1].dtype.itemsize if op.target_name.startswith("aten.") else 1
    if weight[1] % unit or weight[2] % unit:
        return None
    k = (builder.dim("k", weight[1] // unit), builder.whole(unit))
    n = (builder.dim("n", weight[2] // unit), builder.whole(unit))
    return builder.build(
        [layout(s, k), layout(e, k, n), ((),)],
        [layout(s, n)],
        sums=frozenset({"k", e}),
        plain=frozenset({s, e}),
        anchor=True,
    )
