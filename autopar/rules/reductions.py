"""Reductions: sums split into partial sums; other reductions keep the reduced dimensions whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ir.choice import Choice
from autopar.ir.graph import Op, Value
from autopar.ir.mesh import Mesh
from autopar.rules.context import LocalContext
from autopar.rules.derivative import KEEPS_NOTHING, KEEPS_OUTPUT
from autopar.rules.kernels import InternalCollective
from autopar.rules.registry import register
from autopar.rules.space import Space, SpaceBuilder, layout

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
    return tuple(d % rank for d in dims) if rank else ()


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
        linear=frozenset({0} if sums else ()),
    )


@register("aten.sum.default", "aten.sum.dim_IntList", keeps=KEEPS_NOTHING)
def sum_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    reduced = _reduced_dims(op, len(inputs[0].shape))
    return _reduction_space(inputs, outputs, reduced, sums=True)


def _mean_local(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The local mean, weighted by this device's share of the elements."""
    result: Tensor = context.op.target(*args, **kwargs)
    return context.weighted(result, *context.space.sums)


@register("aten.mean.default", "aten.mean.dim", lower=_mean_local, keeps=KEEPS_NOTHING)
def mean_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    reduced = _reduced_dims(op, len(inputs[0].shape))
    return _reduction_space(inputs, outputs, reduced, sums=True)


_LAST_BY_DEFAULT = ("aten.mode.default", "aten.kthvalue.default")


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
    "aten.median.dim",
    "aten.nanmedian.dim",
    "aten.mode.default",
    "aten.kthvalue.default",
    "aten.linalg_vector_norm.default",
    "aten.norm.ScalarOpt_dim",
)
def whole_reduction_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    rank = len(inputs[0].shape)
    position = 2 if "norm" in op.target_name or "kthvalue" in op.target_name else 1
    default = -1 if op.target_name in _LAST_BY_DEFAULT else None
    dims = op.args[position] if len(op.args) > position else dict(op.kwargs).get("dim", default)
    if dims is None or dims == () or rank == 0:
        return None
    reduced = tuple(d % rank for d in ((dims,) if isinstance(dims, int) else dims))
    return _reduction_space(inputs, outputs, reduced, sums=False)


def _variance_local(
    context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | tuple[Tensor, Tensor]:
    """The variance on a shard: the mean is all-reduced, then the squared deviations from it."""
    op, space = context.op, context.space
    reduced = [d for d in space.sizes if d in space.reduced]
    axes = context.axes_of(*reduced)
    if context.mesh.size(axes) == 1:
        whole: Tensor | tuple[Tensor, Tensor] = op.target(*args, **kwargs)
        return whole
    x, keepdim = args[0], bool(_variance_argument(op, 3, "keepdim", False))
    precise = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    dims = [d for d, (name,) in enumerate(space.inputs[0]) if name in reduced]
    count = math.prod(space.sizes[d] for d in reduced)
    mean = context.all_reduce(precise.sum(dims, keepdim=True) / count, axes, varying=True)
    squares = context.all_reduce((precise - mean).square().sum(dims, keepdim=True), axes)
    result = squares / max(count - _correction(op), 0)
    if "std" in op.target_name:  # the derivative at 0 is 0
        result = torch.where(result == 0, 0.0, torch.where(result == 0, 1.0, result).sqrt())
    found = [result]
    if "_mean" in op.target_name:
        found.append(context.all_reduce(precise.sum(dims, keepdim=True) / count, axes))
    found = [r.to(x.dtype) if keepdim else r.to(x.dtype).squeeze(dims) for r in found]
    return (found[0], found[1]) if len(found) == 2 else found[0]


def _correction(op: Op) -> float:
    """The correction subtracted from the count: as given, or 1 where unbiased."""
    if op.target_name.endswith(".dim"):
        return 1.0 if _variance_argument(op, 2, "unbiased", True) else 0.0
    given = dict(op.kwargs).get("correction")
    return 1.0 if given is None else float(given)


def _variance_argument(op: Op, position: int, name: str, default: Any) -> Any:
    return op.args[position] if len(op.args) > position else dict(op.kwargs).get(name, default)


def _variance_collectives(
    op: Op, space: Space, choice: Choice, mesh: Mesh, inputs: Sequence[Value]
) -> tuple[InternalCollective, ...]:
    axes = tuple(sorted(a for d in space.reduced for a in choice.axes_of(d)))
    if mesh.size(axes) == 1:
        return ()
    kept = [d for d in space.sizes if d not in space.reduced]
    numel = math.prod(space.sizes[d] // mesh.size(choice.axes_of(d)) for d in kept)
    one = InternalCollective(
        kind="all_reduce", axes=axes, size_bytes=numel * max(inputs[0].dtype.itemsize, 4)
    )
    return (one,) * (3 if "_mean" in op.target_name else 2)


@register(
    "aten.var.correction",
    "aten.var.dim",
    "aten.std.correction",
    "aten.std.dim",
    "aten.var_mean.correction",
    "aten.var_mean.dim",
    "aten.std_mean.correction",
    "aten.std_mean.dim",
    lower=_variance_local,
    collectives=_variance_collectives,
)
def variance_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """Reduced dimensions may be split too; the variance comes out complete."""
    shape = inputs[0].shape
    if not shape or inputs[0].dtype.is_complex:
        return None
    reduced = _reduced_dims(op, len(shape))
    keepdim = bool(_variance_argument(op, 3, "keepdim", False))
    builder = SpaceBuilder()
    names = builder.dims("d", shape)
    out = tuple(
        () if d in reduced else (names[d],)
        for d in range(len(shape))
        if keepdim or d not in reduced
    )
    return builder.build(
        [layout(*names)],
        [out for _ in outputs],
        reduced=frozenset(names[d] for d in reduced),
    )


@register(
    "aten.softmax.int",
    "aten._softmax.default",
    "aten._safe_softmax.default",
    "aten.log_softmax.int",
    "aten._log_softmax.default",
    keeps=KEEPS_OUTPUT,
)
def softmax_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """All dimensions but the normalized one are free."""
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
