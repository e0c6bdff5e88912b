"""Dropout of an array of models: every dimension is free, the model dimension included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import autopar.ir.model_dropout  # noqa: F401 - defines the operator
from autopar.ir.graph import Op, Value
from autopar.rules.context import LocalContext
from autopar.rules.derivative import Keeps, Operands
from autopar.rules.registry import register
from autopar.rules.space import Space, SpaceBuilder, layout


def _model_dropout_local(
    context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Dropout on a shard: shards draw differently, a model's draws are the same on any device."""
    others = context.axes_of(*(d for d in context.space.sizes if d != "m"))
    axes = context.mesh.axes_label(others) if others else ""
    return context.op.target(*args[:3], axes)


def _mask_bytes(op: Op, output: Value) -> float:
    """One bool per element."""
    return 1 / output.dtype.itemsize


@register(
    "autopar.model_dropout.default",
    lower=_model_dropout_local,
    keeps=Keeps(operands=Operands.NONE, further=_mask_bytes),
)
def model_dropout_space(
    op: Op, inputs: Sequence[Value], outputs: Sequence[Value | None]
) -> Space | None:
    """``x[m, ...]`` with the draws of the models, ``[m, 3]``."""
    builder = SpaceBuilder()
    m = builder.dim("m", inputs[0].shape[0])
    rest = builder.dims("d", inputs[0].shape[1:])
    whole, draws = layout(m, *rest), layout(m, builder.whole(inputs[1].shape[1]))
    return builder.build([whole, draws], [whole for _ in outputs], padded=(m, *rest))
