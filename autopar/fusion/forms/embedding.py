"""Embeddings: one table with the rows of all models, and indices offset per model."""

from __future__ import annotations

import torch

from autopar.fusion.forms.base import Call, Results, aten, form
from autopar.fusion.lanes import Operand
from autopar.ir.graph import ValueKind


@form("one table", "aten.embedding.default")
def embedding_form(call: Call) -> Results | None:
    """``w [B v, h]`` looked up at ``index + v i`` for model i.

    An index that is not in the model's own table becomes one that is in no table, which the
    operator refuses as it refuses the index of a model alone. Each model has its own
    ``padding_idx`` row, but the operator takes only one such index; so gradients of the padding
    rows are stopped explicitly.
    """
    if call.argument("scale_grad_by_freq"):
        return None
    weight = call.at(0, 0)
    num_rows = call.shape(weight)[1]
    index = call.at(1, 0)
    rank = len(call.shape(index))
    starts = call.builder.add(
        ValueKind.CONSTANT, "starts", (call.num, *(1,) * (rank - 1)), torch.int64, fixed=True,
        data=(torch.arange(call.num) * num_rows).view(-1, *(1,) * (rank - 1)),
    )  # fmt: skip
    nearest = call.emit(aten.clamp.default, index, 0, num_rows - 1)
    is_own = call.emit(aten.eq.Tensor, index, nearest)
    where = call.emit(aten.add.Tensor, index, starts)
    where = call.emit(aten.where.ScalarOther, is_own, where, call.num * num_rows)
    found = call.emit(aten.embedding.default, call.fold(weight, 0), where)
    padding = call.argument("padding_idx")
    if padding is not None and padding >= 0:
        is_padding = call.emit(aten.eq.Scalar, index, padding)
        mask = call.emit(aten.unsqueeze.default, is_padding, rank)
        still = call.emit(aten.detach.default, found)
        found = call.emit(aten.where.self, mask, still, found)
    return (Operand(found, 0),)
