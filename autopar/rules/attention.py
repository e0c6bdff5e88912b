"""Scaled dot-product attention: batch, heads and queries are free; keys stay whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.cost_models.calls import OpCall, TensorSpec
from autopar.ir.choice import Choice
from autopar.ir.graph import Op, Value
from autopar.ir.mesh import Mesh
from autopar.rules.context import LocalContext
from autopar.rules.derivative import Keeps
from autopar.rules.elementwise import broadcast_layout
from autopar.rules.kernels import LocalCall, Phase
from autopar.rules.registry import Layer, register
from autopar.rules.space import Space, SpaceBuilder, layout
from autopar.rules.traced import register_traced

Outputs = Sequence[Value | None]


def _attention_local(
    context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Attention on a shard; a causal one split along the queries gets the mask of its rows.

    With a mask keys are repeated for the query heads that share them: no kernel that keeps scores
    out of memory takes both a mask and shared keys. Values narrower than the queries are padded:
    flash kernels take one width only.
    """
    query, key, value, *rest = args
    mask = rest[0] if rest else kwargs.pop("attn_mask", None)
    dropout = rest[1] if len(rest) > 1 else kwargs.pop("dropout_p", 0.0)
    causal = rest[2] if len(rest) > 2 else kwargs.pop("is_causal", False)
    if causal and context.num_shards("s") > 1:
        start = context.shard_start(query, "s")
        rows = torch.arange(query.shape[-2], device=query.device) + start
        columns = torch.arange(key.shape[-2], device=query.device)
        mask, causal = rows[:, None] >= columns, False
        if kwargs.pop("enable_gqa", False):
            repeats = query.shape[-3] // key.shape[-3]
            key, value = (x.repeat_interleave(repeats, -3) for x in (key, value))
    width, missing = value.shape[-1], query.shape[-1] - value.shape[-1]
    if missing > 0:
        value = F.pad(value, (0, missing))
    result: Tensor = context.op.target(query, key, value, mask, dropout, causal, **kwargs)
    return result.narrow(-1, 0, width) if missing > 0 else result


def _attention_kernels(
    op: Op, space: Space, choice: Choice, mesh: Mesh, plain: OpCall
) -> tuple[LocalCall, ...] | None:
    """The call for split queries of a causal attention, whose mask does not save any scores."""
    if not plain.argument(5, "is_causal", False) or mesh.size(choice.axes_of("s")) == 1:
        return None
    query, key, value = plain.tensors()
    mask = TensorSpec((query.shape[-2], key.shape[-2]), torch.bool)
    if plain.argument(7, "enable_gqa", False):
        key, value = (
            replace(x, shape=(*x.shape[:-3], query.shape[-3], *x.shape[-2:]), stride=None)
            for x in (key, value)
        )
    kwargs = tuple(item for item in plain.kwargs if item[0] == "scale")
    args = query, key, value, mask, plain.argument(4, "dropout_p", 0.0), False
    call = OpCall(plain.target, args, kwargs)
    return (LocalCall(call=call, phase=Phase.BOTH),)


@register(
    "aten.scaled_dot_product_attention.default",
    lower=_attention_local,
    keeps=Keeps(output=True),
    layer=Layer.ATTENTION,
    heads=("h", "r"),
    kernels=_attention_kernels,
)
def attention_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``q[b, (h r), s, d] k[b, h, t, d] v[b, h, t, e]``; r query heads share one key head."""
    query, key, value = (v.shape for v in inputs[:3])
    if len(query) < 3 or len(key) != len(query) or query[:-3] != key[:-3]:
        return None
    if query[-3] % key[-3] or key[:-1] != value[:-1]:
        return None
    builder = SpaceBuilder()
    batch = builder.dims("b", query[:-3])
    heads = builder.dim("h", key[-3])
    repeat = builder.dim("r", query[-3] // key[-3])
    s, t = builder.dim("s", query[-2]), builder.whole(key[-2])
    d, e = builder.whole(query[-1]), builder.whole(value[-1])
    grouped = (heads, repeat) if query[-3] != key[-3] else (heads,)
    operands = [
        layout(*batch, grouped, s, d),
        layout(*batch, heads, t, d),
        layout(*batch, heads, t, e),
    ]
    if len(inputs) > 3:
        if grouped != (heads,):
            mask_heads = inputs[3].shape[-3] if len(inputs[3].shape) > 2 else 1
            if mask_heads != 1:
                return None
        dims = (*batch, heads, s, t)
        operands.append(broadcast_layout(inputs[3].shape, dims, [builder.sizes[x] for x in dims]))
    masked = any(s in factors for lay in operands[3:] for factors in lay)
    return builder.build(
        operands,
        [layout(*batch, grouped, s, e)],
        plain=frozenset({s}),
        padded=batch if masked else (*batch, s),  # a query with every key masked gives NaN
        anchor=True,
    )


def _forward_scratch(_: Any, args: tuple[Any, ...], num_threads: int) -> int:
    """Scores, their largest and their sums, and the output of a tile, for each thread."""
    query, key = args[:2]
    rows, columns = _tile(query, key)
    sums, scores = _sum_bytes(query), rows * columns * _score_bytes(query)
    return num_threads * (scores + sums * rows * (2 + query.shape[3]))


def _backward_scratch(_: Any, args: tuple[Any, ...], num_threads: int) -> int:
    """Scores and their gradients of a tile for each thread, and a cotangent that torch copies."""
    cotangent, query, key = args[:3]
    rows, columns = _tile(query, key)
    is_copied = not cotangent.transpose(1, 2).is_contiguous()
    tiles = 2 * num_threads * rows * columns * _score_bytes(query)
    return tiles + _sum_bytes(query) * rows + (cotangent.nbytes if is_copied else 0)


def _tile(query: Tensor, key: Tensor) -> tuple[int, int]:
    """The rows and columns of a tile in PyTorch's flash kernels for CPUs."""
    rows = query.shape[2]
    return min(rows, 256 if rows >= 768 else 64 if rows >= 192 else 32), min(key.shape[2], 512)


def _sum_bytes(query: Tensor) -> int:
    """Sums are float32, or wider."""
    return max(4, query.element_size())


def _score_bytes(query: Tensor) -> int:
    """Scores are summed, and copied to the dtype of the products if that is narrower."""
    return _sum_bytes(query) + (query.element_size() if query.element_size() < 4 else 0)


register_traced(
    "aten._scaled_dot_product_flash_attention_for_cpu.default", cpu_scratch=_forward_scratch
)
register_traced(
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
    cpu_scratch=_backward_scratch,
)
