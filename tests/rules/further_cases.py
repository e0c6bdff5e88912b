"""Generators of calls of the rarer operators; see `op_cases`."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from tests.rules.op_cases import (
    BOOL,
    SIZES,
    SMALL,
    Draw,
    New,
    broadcast,
    case,
    dim_of,
    shape_of,
)


@case("aten.type_as.default")
def type_as(draw: Draw, new: New):
    shape = shape_of(draw)
    other = broadcast(draw, shape) if draw(BOOL) else shape_of(draw)
    return new(*shape), torch.zeros(other, dtype=draw(st.sampled_from([torch.float64, torch.int])))


@case("aten.new_empty.default", integers=True)
def new_empty(draw: Draw, new: New):
    return new(*shape_of(draw)), shape_of(draw)


@case("aten.view_as_complex.default")
def view_as_complex(draw: Draw, new: New):
    return (New(torch.float32, new.generator)(*shape_of(draw), 2),)


@case("aten.view_as_real.default")
def view_as_real(draw: Draw, new: New):
    return (torch.view_as_complex(New(torch.float32, new.generator)(*shape_of(draw), 2)),)


@case("aten.empty_like.default")
def empty_like(draw: Draw, new: New):
    return (new(*shape_of(draw)),)


@case("aten.prelu.default")
def prelu(draw: Draw, new: New):
    shape = shape_of(draw, 2, 4)
    return new(*shape), new(shape[1] if draw(BOOL) else 1)


@case("aten._prelu_kernel.default")
def prelu_kernel(draw: Draw, new: New):
    shape = shape_of(draw)
    return new(*shape), new(*broadcast(draw, shape))


@case("aten.one_hot.default")
def one_hot(draw: Draw, new: New):
    num_classes = draw(SIZES)
    return new.index(num_classes, *shape_of(draw, 0, 2)), num_classes


@case("aten.bilinear.default")
def bilinear(draw: Draw, new: New):
    rows, i, j, n = shape_of(draw, 1, 2), draw(SMALL), draw(SMALL), draw(SIZES)
    bias = (new(n),) if draw(BOOL) else ()
    return (new(*rows, i), new(*rows, j), new(n, i, j), *bias)


@case("aten.cdist.default")
def cdist(draw: Draw, new: New):
    m, n, k = draw(SIZES), draw(SIZES), draw(SMALL)
    batch = shape_of(draw, 0, 1)
    power = draw(st.sampled_from([2.0, 1.0, 3.0]))
    return new(*broadcast(draw, batch), m, k), new(*batch, n, k), power


@case("aten._weight_norm.default", "aten._weight_norm_interface.default")
def weight_norm(draw: Draw, new: New):
    shape = shape_of(draw, 1, 3)
    dim = draw(st.sampled_from([0, len(shape) - 1]))
    norms = tuple(size if d == dim else 1 for d, size in enumerate(shape))
    return new(*shape), new(*norms), dim


@case("aten.median.dim", "aten.nanmedian.dim", "aten.mode.default")
def median(draw: Draw, new: New):
    shape = shape_of(draw)
    return new.distinct(*shape), dim_of(draw, shape), draw(BOOL)


@case("aten.kthvalue.default")
def kthvalue(draw: Draw, new: New):
    shape = shape_of(draw)
    dim = dim_of(draw, shape)
    return new.distinct(*shape), draw(st.integers(1, shape[dim])), dim, draw(BOOL)


@case("aten.logcumsumexp.default")
def logcumsumexp(draw: Draw, new: New):
    shape = shape_of(draw)
    return new(*shape), dim_of(draw, shape)


@case(
    "aten.var.correction", "aten.std.correction", "aten.var_mean.correction",
    "aten.std_mean.correction", "aten.var.dim", "aten.std.dim", "aten.var_mean.dim",
    "aten.std_mean.dim",
)  # fmt: skip
def variance(draw: Draw, new: New, target: str = ""):
    shape = (*shape_of(draw, 0, 2), draw(st.sampled_from([4, 6, 12])))  # more than one to measure
    dims = sorted({dim_of(draw, shape) % len(shape), len(shape) - 1})
    keep = draw(BOOL)
    if target.endswith(".dim"):
        return new(*shape), dims, draw(BOOL), keep
    dims = dims if draw(BOOL) else None
    return new(*shape), dims, {"correction": draw(st.sampled_from([0, 1, 2])), "keepdim": keep}
