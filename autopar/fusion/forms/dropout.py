"""Dropout: each model draws from its own stream, as it does when trained alone."""

from __future__ import annotations

import torch

from autopar.fusion.forms.base import Call, Results, aten, form
from autopar.fusion.lanes import Operand
from autopar.ir.graph import Ref, ValueKind
from autopar.ir.model_dropout import MODEL_DROPOUT


def dropped(call: Call, x: Ref, p: float) -> tuple[Ref, Ref]:
    """Dropout of ``x`` model by model, models first: the result, and the mask of kept elements."""
    numbers = [(m, draw.block, draw.place) for m, draw in zip(call.models, call.draws, strict=True)]
    draws = call.builder.add(
        ValueKind.CONSTANT, "draws", (call.num, 3), torch.int64, fixed=True,
        data=torch.tensor(numbers),
    )  # fmt: skip
    kept, mask = call.emit(MODEL_DROPOUT, x, draws, p, "")
    return kept, mask


@form("dropout by model", "aten.native_dropout.default")
def dropout_form(call: Call) -> Results | None:
    """The dropout of each model with its own seed; dropout with probability 0 returns its input."""
    if not call.draws:
        ones = call.emit(aten.ones_like.default, call.operands[0].ref, dtype=torch.bool)
        return call.operands[0], Operand(ones, call.operands[0].dim)
    kept, mask = dropped(call, call.at(0, 0), call.argument("p"))
    return Operand(kept, 0), Operand(mask, 0)
