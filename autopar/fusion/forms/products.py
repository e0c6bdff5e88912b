"""Linear layers: one product where the models share their input, else a batched product."""

from __future__ import annotations

import math

from autopar.fusion.forms.base import Call, Results, aten, form
from autopar.fusion.lanes import Operand


@form("one product of a shared input", "aten.linear.default")
def shared_linear_form(call: Call) -> Results | None:
    """``x [..., k]`` times ``w [B, n, k]`` as ``[B n, k]``; the models end up next to last."""
    x, weight = call.operands[:2]
    if x.dim is not None or weight.dim is None or len(call.shape(weight.ref)) != 3:
        return None
    given = [call.fold(call.at(place, 0), 0) for place in range(1, len(call.operands))]
    out = call.emit(aten.linear.default, x.ref, *given)
    rank = call.out_ranks[0]
    return (Operand(call.unfold(out, rank - 1, call.num), rank - 1),)


@form("batched product", "aten.linear.default")
def batched_linear_form(call: Call) -> Results | None:
    """``x [B, m, k]`` times the transposed ``w [B, n, k]``, plus ``b [B, 1, n]``."""
    if call.ranks[1] != 2:
        return None
    x, weight = call.at(0, 0), call.at(1, 0)
    size = call.shape(x)
    rows = math.prod(size[1:-1])
    flat = call.reshape(x, (call.num, rows, size[-1]))
    turned = call.emit(aten.transpose.int, weight, 1, 2)
    if len(call.operands) > 2:
        bias = call.emit(aten.unsqueeze.default, call.at(2, 0), 1)
        out = call.emit(aten.baddbmm.default, bias, flat, turned)
    else:
        out = call.emit(aten.bmm.default, flat, turned)
    return (Operand(call.reshape(out, (*size[:-1], call.shape(weight)[1])), 0),)
