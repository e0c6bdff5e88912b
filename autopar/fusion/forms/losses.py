"""Losses: one number per model, the mean or sum over the rows of that model alone."""

from __future__ import annotations

from typing import Any

from autopar.fusion.forms.base import Call, Results, aten, form
from autopar.fusion.lanes import Operand
from autopar.ir.graph import Ref

NONE, MEAN, SUM = 0, 1, 2


@form("rows of all models", "aten.cross_entropy_loss.default", "aten.nll_loss_nd.default")
def cross_entropy_form(call: Call) -> Results | None:
    """The per-row losses of all models, summed per model; a mean divides by the rows that count."""
    weight, reduction = call.argument("weight"), call.argument("reduction")
    if weight is not None or len(call.operands) != 2:
        return None
    x = call.at(0, 0)
    target = call.at(1, 0)
    if call.ranks[0] < 2 or call.builder.value(target).dtype.is_floating_point:
        return None
    ignored = call.argument("ignore_index")
    rows_of_target = call.fold(target, 0)
    extra: tuple[Any, ...] = ()
    if call.op.target_name == "aten.cross_entropy_loss.default":
        extra = (call.argument("label_smoothing"),)
    rows = call.emit(call.op.target, call.fold(x, 0), rows_of_target, None, NONE, ignored, *extra)
    each = call.unfold(rows, 0, call.num)
    if reduction == NONE:
        return (Operand(each, 0),)
    total = call.emit(aten.sum.dim_IntList, each, list(range(1, len(call.shape(each)))))
    if reduction == SUM:
        return (Operand(total, 0),)
    counts = call.emit(aten.ne.Scalar, target, ignored)
    count = call.emit(aten.sum.dim_IntList, counts, list(range(1, len(call.shape(target)))))
    dtype = call.builder.value(total).dtype
    return (Operand(call.emit(aten.div.Tensor, total, _as(call, count, dtype)), 0),)


def _as(call: Call, ref: Ref, dtype: Any) -> Ref:
    return call.emit(aten._to_copy.default, ref, dtype=dtype)


@form(
    "elements of all models",
    "aten.mse_loss.default",
    "aten.l1_loss.default",
    "aten.smooth_l1_loss.default",
    "aten.huber_loss.default",
    "aten.binary_cross_entropy.default",
    "aten.binary_cross_entropy_with_logits.default",
)
def elementwise_loss_form(call: Call) -> Results | None:
    """The per-element loss, then the mean or sum over the elements of each model."""
    if len(call.operands) != 2 or call.ranks[0] != call.ranks[1]:
        return None
    reduction = call.argument("reduction")
    names = [a.name for a in call.op.target._schema.arguments]
    given = {name: call.argument(name) for name in names}
    given |= {names[0]: call.at(0, 0), names[1]: call.at(1, 0), "reduction": NONE}
    each = call.emit(call.op.target, *given.values())
    dims = list(range(1, len(call.shape(each))))
    if reduction == NONE:
        return (Operand(each, 0),)
    reduce = aten.mean.dim if reduction == MEAN else aten.sum.dim_IntList
    return (Operand(call.emit(reduce, each, dims) if dims else each, 0),)
