"""Convolutions: models become groups of channels, or more output channels of a shared input.

Images have the model dimension before the channels, ``[n, B, c, ...]``, so that ``[n, B c, ...]``
is a view.
"""

from __future__ import annotations

from typing import Any

from autopar.fusion.forms.base import Call, Results, form
from autopar.fusion.lanes import Operand
from autopar.rules.convolution import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS


def _is_batched(call: Call) -> bool:
    return call.ranks[0] == call.ranks[1]


def _called(call: Call, x: Any, weight: Any, bias: Any, groups: int) -> Results:
    names = [a.name for a in call.op.target._schema.arguments]
    given = {name: call.argument(name) for name in names}
    given |= {names[0]: x, "weight": weight, "bias": bias, "groups": groups}
    out = call.emit(call.op.target, *given.values())
    return (Operand(call.unfold(out, 1, call.num), 1),)


@form("output channels of a shared input", *CONVOLUTIONS)
def shared_convolution_form(call: Call) -> Results | None:
    """One convolution with the output channels of all models, where they read the same input."""
    if call.operands[0].dim is not None or call.argument("groups") != 1 or not _is_batched(call):
        return None
    if call.op.target_name == "aten.convolution.default" and call.argument("transposed"):
        return None
    weight = call.fold(call.at(1, 0), 0)
    bias = call.fold(call.at(2, 0), 0) if len(call.operands) > 2 else None
    return _called(call, call.operands[0].ref, weight, bias, 1)


@form("grouped convolution", *CONVOLUTIONS, *TRANSPOSED_CONVOLUTIONS)
def grouped_convolution_form(call: Call) -> Results | None:
    """One convolution whose groups are those of all models."""
    if not _is_batched(call):
        return None
    x = call.fold(call.at(0, 1), 1)
    weight = call.fold(call.at(1, 0), 0)
    bias = call.fold(call.at(2, 0), 0) if len(call.operands) > 2 else None
    return _called(call, x, weight, bias, call.num * call.argument("groups"))


@form(
    "rows of all models",
    "aten.max_pool1d.default",
    "aten.max_pool2d.default",
    "aten.max_pool3d.default",
    "aten.avg_pool1d.default",
    "aten.avg_pool2d.default",
    "aten.avg_pool3d.default",
    "aten.adaptive_avg_pool1d.default",
    "aten.adaptive_avg_pool2d.default",
    "aten.adaptive_avg_pool3d.default",
    "aten.adaptive_max_pool2d.default",
    "aten.max_pool2d_with_indices.default",
    "aten.upsample_nearest2d.vec",
    "aten.upsample_bilinear2d.vec",
)
def pooling_form(call: Call) -> Results | None:
    """Pooling and resizing of all models' channels at once, wherever the model dimension is."""
    (operand,) = call.operands
    spatial = int(next(c for c in call.op.target_name if c.isdigit()))
    if call.ranks[0] != spatial + 2 or operand.dim is None or operand.dim > 1:
        return None
    args, kwargs = call.op.bind([call.fold(operand.ref, operand.dim)])
    made = call.emit(call.op.target, *args, **kwargs)
    results = made if isinstance(made, tuple) else (made,)
    return tuple(Operand(call.unfold(r, operand.dim, call.num), operand.dim) for r in results)
