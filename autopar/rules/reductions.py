"""Reductions: sums split into partial sums; others keep the reduced dimensions whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from autopar.graph import Op, Value
from autopar.rules.base import LocalContext, Space, SpaceBuilder, layout, register

Outputs = Sequence[Value | None]


def _reduced_dims(op: Op, rank: int) -> tuple[int, ...]:
    dims = op.args[1] if len(op.args) > 1 else dict(op.kwargs).get("dim")
    if op.target_name.endswith((".default", ".dtype")) and op.target_name.split(".")[1] in (
        "sum",
        "mean",
    ):
        dims = None
    if dims is None or dims == ():
        return tuple(range(rank))
    if isinstance(dims, int):
        dims = (dims,)
    return tuple(d % rank for d in dims)


def _reduction_space(
    inputs: Sequence[Value], outputs: Outputs, reduced: tuple[int, ...], *, sums: bool
) -> Space:
    shape = inputs[0].shape
    builder = SpaceBuilder()
    names = [
        builder.whole(size) if d in reduced and not sums else builder.dim(f"d{d}", size)
        for d, size in enumerate(shape)
    ]
    first = next(o for o in outputs if o is not None)
    if len(first.shape) == len(shape):
        out = tuple(() if d in reduced else (names[d],) for d in range(len(shape)))
    else:
        out = tuple((names[d],) for d in range(len(shape)) if d not in reduced)
    return builder.build(
        [layout(*names)],
        [out for _ in outputs],
        sums=frozenset(names[d] for d in reduced) if sums else frozenset(),
        padded=[names[d] for d in reduced] if sums else (),
        clean=[n for d, n in enumerate(names) if d not in reduced] if sums else (),
    )


@register("aten.sum.default", "aten.sum.dim_IntList")
def sum_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    reduced = _reduced_dims(op, len(inputs[0].shape))
    return _reduction_space(inputs, outputs, reduced, sums=True)


def _mean_local(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The local mean, weighted by this device's share of the elements."""
    result: Tensor = context.op.target(*args, **kwargs)
    return context.weighted(result, *context.space.sums)


@register("aten.mean.default", "aten.mean.dim", lower=_mean_local)
def mean_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    reduced = _reduced_dims(op, len(inputs[0].shape))
    return _reduction_space(inputs, outputs, reduced, sums=True)


@register(
    "aten.amax.default",
    "aten.amin.default",
    "aten.any.dim",
    "aten.all.dim",
    "aten.argmax.default",
    "aten.argmin.default",
    "aten.max.dim",
    "aten.min.dim",
    "aten.logsumexp.default",
    "aten.prod.dim_int",
    "aten.var.correction",
    "aten.var.dim",
    "aten.std.correction",
    "aten.linalg_vector_norm.default",
    "aten.norm.ScalarOpt_dim",
)
def whole_reduction_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    rank = len(inputs[0].shape)
    position = 2 if "norm" in op.target_name else 1
    dims = op.args[position] if len(op.args) > position else dict(op.kwargs).get("dim")
    if dims is None or dims == () or rank == 0:
        return None
    reduced = tuple(d % rank for d in ((dims,) if isinstance(dims, int) else dims))
    return _reduction_space(inputs, outputs, reduced, sums=False)


@register(
    "aten.softmax.int",
    "aten._softmax.default",
    "aten.log_softmax.int",
    "aten._log_softmax.default",
)
def softmax_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """Free in every dimension but the normalised one."""
    shape = inputs[0].shape
    if not shape:
        return None
    dim = op.args[1] % len(shape)
    builder = SpaceBuilder()
    names = [
        builder.whole(size) if d == dim else builder.dim(f"d{d}", size)
        for d, size in enumerate(shape)
    ]
    return builder.build([layout(*names)], [layout(*names)], padded=names)
