"""Attention: the models extend the batch; with dropout, attention is written out in products."""

from __future__ import annotations

import math

import torch

from autopar.fusion.forms.base import Call, Results, aten, form
from autopar.fusion.forms.dropout import dropped
from autopar.fusion.lanes import Operand
from autopar.ir.graph import Ref

_ATTENTION = "aten.scaled_dot_product_attention.default"


@form("rows of all models", _ATTENTION)
def attention_form(call: Call) -> Results | None:
    """One attention over ``[B n, h, s, d]``, where nothing is dropped."""
    if call.draws or any(rank != 4 for rank in call.ranks[:3]):
        return None
    operands = [call.at(place, 0) for place in range(3)]
    rows = max(call.shape(x)[1] for x in operands)
    query, key, value = (call.fold(_with_rows(call, x, rows), 0) for x in operands)
    mask = _mask(call)
    if mask is not None and len(call.shape(mask)) == 5:
        mask = call.fold(_with_rows(call, mask, rows), 0)
    out = call.emit(
        aten.scaled_dot_product_attention.default, query, key, value, mask, 0.0,
        call.argument("is_causal"), scale=call.argument("scale"),
        enable_gqa=call.argument("enable_gqa"),
    )  # fmt: skip
    return (Operand(call.unfold(out, 0, call.num), 0),)


def _with_rows(call: Call, x: Ref, rows: int) -> Ref:
    """``[B, n, ...]``, whose one row for each model is repeated if the batch has more."""
    size = call.shape(x)
    return x if size[1] == rows else call.expand(x, (size[0], rows, *size[2:]))


def _mask(call: Call) -> Ref | None:
    """The mask, shared where it is the same for all models and all rows of the batch."""
    place = call.operand_of("attn_mask")
    if place is None:
        return None
    operand, rank = call.operands[place], call.ranks[place]
    if operand.dim is None and (rank < 4 or call.shape(operand.ref)[0] == 1):
        return operand.ref
    mask = call.at(place, 0)
    size = call.shape(mask)
    return call.reshape(mask, (size[0], *(1,) * (4 - rank), *size[1:]))


@form("products, dropout by model", _ATTENTION)
def dropped_attention_form(call: Call) -> Results | None:
    """``dropout(softmax(q k / sqrt(d) + mask)) v``, as torch computes attention with dropout.

    A row that the mask hides as a whole attends to nothing.
    """
    if not call.draws:
        return None
    query, key, value = (call.at(place, 0) for place in range(3))
    size, width = call.shape(query), call.shape(query)[-1]
    if call.argument("enable_gqa"):
        key, value = (
            call.emit(aten.repeat_interleave.self_int, x, size[-3] // call.shape(x)[-3], -3)
            for x in (key, value)
        )
    scale = call.argument("scale") or 1 / math.sqrt(width)
    turned = call.emit(aten.transpose.int, key, -2, -1)
    left = call.emit(aten.mul.Tensor, query, math.sqrt(scale))
    right = call.emit(aten.mul.Tensor, turned, math.sqrt(scale))
    scores = call.emit(aten.matmul.default, left, right)
    if call.argument("is_causal"):
        rows, columns = size[-2], call.shape(key)[-2]
        ones = call.emit(aten.ones.default, (rows, columns), dtype=torch.bool)
        upper = call.emit(aten.triu.default, ones, 1)
        scores = call.emit(aten.masked_fill.Scalar, scores, upper, -math.inf)
    place = call.operand_of("attn_mask")
    if place is not None:
        mask = _mask(call)
        assert mask is not None
        if call.builder.value(mask).dtype is torch.bool:
            without = call.emit(aten.logical_not.default, mask)
            scores = call.emit(aten.masked_fill.Scalar, scores, without, -math.inf)
        else:
            scores = call.emit(aten.add.Tensor, scores, mask)
    softmax = aten.softmax.int if place is None else aten._safe_softmax.default
    shares = call.emit(softmax, scores, -1)
    kept, _ = dropped(call, shares, call.argument("dropout_p"))
    return (Operand(call.emit(aten.matmul.default, kept, value), 0),)
