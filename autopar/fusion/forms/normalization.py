"""Normalization: each model has its own statistics, weight and bias."""

from __future__ import annotations

from autopar.fusion.forms.base import Call, Results, aten, form
from autopar.fusion.lanes import Operand
from autopar.ir.graph import Ref

_BATCH_NORM = (
    "aten._native_batch_norm_legit_functional.default",
    "aten._native_batch_norm_legit_no_training.default",
)


@form("channels of all models", *_BATCH_NORM)
def batch_norm_form(call: Call) -> Results | None:
    """Batch norm over ``B c`` channels, whose statistics are per channel anyway."""
    x = call.fold(call.at(0, 1), 1)
    names = [a.name for a in call.op.target._schema.arguments]
    given = {name: call.argument(name) for name in names}
    for name, value in given.items():
        place = call.operand_of(name)
        if isinstance(value, Ref) and place:
            given[name] = call.fold(call.at(place, 0), 0)
    given[names[0]] = x
    out, *statistics = call.emit(call.op.target, *given.values())
    rows = [
        None if s is None or call.shape(s) == (0,) else Operand(call.unfold(s, 0, call.num), 0)
        for s in statistics
    ]
    return (Operand(call.unfold(out, 1, call.num), 1), *rows)


@form("norm, then weight and bias by model", "aten.layer_norm.default", "aten.rms_norm.default")
def layer_norm_form(call: Call) -> Results | None:
    """The normalization without affine parameters, then the weight and bias of each model."""
    operand, shape = call.operands[0], call.argument("normalized_shape")
    last = call.out_ranks[0] + 1 - len(shape)
    if operand.dim is None:
        operand = Operand(call.at(0, 0), 0)
    if operand.dim is None or operand.dim >= last:
        operand = Operand(call.moved(operand, 0), 0)
    assert operand.dim is not None
    eps = call.argument("eps")
    if call.op.target_name == "aten.layer_norm.default":
        out = call.emit(aten.layer_norm.default, operand.ref, shape, None, None, eps)
    else:
        out = call.emit(aten.rms_norm.default, operand.ref, shape, None, eps)
    for name, target in (("weight", aten.mul.Tensor), ("bias", aten.add.Tensor)):
        if name == "bias" and call.op.target_name == "aten.rms_norm.default":
            continue
        place = call.operand_of(name)
        if place is not None:
            out = call.emit(target, out, _along(call, place, operand.dim, len(shape)))
    return (Operand(out, operand.dim),)


def _along(call: Call, place: int, dim: int, num_normalized: int) -> Ref:
    """``[B, *normalized]``, broadcastable against ``x`` with the models along ``dim``."""
    operand = call.operands[place]
    if operand.dim is None:
        return operand.ref
    front = call.moved(operand, 0)
    between = call.out_ranks[0] - num_normalized - dim
    size = call.shape(front)
    return call.reshape(front, (size[0], *(1,) * between, *size[1:]))


@form("groups of channels of all models", "aten.group_norm.default")
def group_norm_form(call: Call) -> Results | None:
    """Group norm with the groups of all models."""
    x = call.fold(call.at(0, 1), 1)
    affine = []
    for name in ("weight", "bias"):
        place = call.operand_of(name)
        affine.append(None if place is None else call.fold(call.at(place, 0), 0))
    groups = call.num * call.argument("num_groups")
    out = call.emit(aten.group_norm.default, x, groups, *affine, call.argument("eps"))
    return (Operand(call.unfold(out, 1, call.num), 1),)
