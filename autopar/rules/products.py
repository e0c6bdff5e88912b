"""Matrix products: batch dimensions, output rows and columns, and the summed inner dimension."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from autopar.base.torch_private import is_profiling
from autopar.ir.graph import Op, Value
from autopar.rules.derivative import KEEPS_FACTORS
from autopar.rules.elementwise import broadcast_layout
from autopar.rules.measured import MOST_MEASURED, measured_scratch
from autopar.rules.registry import Layer, register
from autopar.rules.space import Space, SpaceBuilder, layout
from autopar.rules.traced import register_traced

Outputs = Sequence[Value | None]


@register("aten.linear.default", keeps=KEEPS_FACTORS, layer=Layer.DENSE)
def linear_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``x[..., k] w[n, k] + b[n]``; the bias enters the sum over k once."""
    x, weight = inputs[0].shape, inputs[1].shape
    if len(weight) != 2:
        return None
    builder = SpaceBuilder()
    rows = builder.dims("m", x[:-1])
    n, k = builder.dim("n", weight[0]), builder.dim("k", weight[1])
    operands = [layout(*rows, k), layout(n, k), layout(n)][: len(inputs)]
    return builder.build(
        operands,
        [layout(*rows, n)],
        sums=frozenset({k}),
        partial_inputs=frozenset({2}),
        padded=rows,  # a bias makes padding rows non-zero
        clean={n, k} if len(inputs) > 2 else {n, k, *rows},
        anchor=True,
    )


@register("aten.baddbmm.default", keeps=KEEPS_FACTORS)
@register("aten.addmm.default", keeps=KEEPS_FACTORS, layer=Layer.DENSE)
def addmm_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``bias + a[..., m, k] b[..., k, n]``; the bias enters the sum over k once."""
    bias, left, right = (v.shape for v in inputs)
    builder = SpaceBuilder()
    batch = builder.dims("b", left[:-2])
    m, k = builder.dim("m", left[-2]), builder.dim("k", left[-1])
    n = builder.dim("n", right[-1])
    out = (*batch, m, n)
    bias_layout = broadcast_layout(bias, out, [builder.sizes[d] for d in out])
    return builder.build(
        [bias_layout, layout(*batch, m, k), layout(*batch, k, n)],
        [layout(*out)],
        sums=frozenset({k}),
        partial_inputs=frozenset({0}),
        padded=out,
        clean={k, *(d for d in out if (d,) in bias_layout)},
        anchor=True,
    )


@register("aten.mm.default", keeps=KEEPS_FACTORS, layer=Layer.DENSE)
@register(
    "aten.bmm.default",
    "aten.matmul.default",
    "aten.mv.default",
    "aten.dot.default",
    keeps=KEEPS_FACTORS,
)
def matmul_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``a[..., m, k] b[..., k, n]`` with broadcast batch dimensions; a vector has no m or n."""
    left, right = inputs[0].shape, inputs[1].shape
    out = outputs[0].shape  # type: ignore[union-attr]
    builder = SpaceBuilder()
    rows = [builder.dim("m", left[-2])] if len(left) > 1 else []
    columns = [builder.dim("n", right[-1])] if len(right) > 1 else []
    k = builder.dim("k", left[-1])
    batch_sizes = out[: len(out) - len(rows) - len(columns)]
    batch = builder.dims("b", batch_sizes)
    left_batch = broadcast_layout(left[:-2], batch, batch_sizes)
    right_batch = broadcast_layout(right[:-2], batch, batch_sizes)
    return builder.build(
        [left_batch + layout(*rows, k), right_batch + layout(k, *columns)],
        [layout(*batch, *rows, *columns)],
        sums=frozenset({k}),
        clean=(*batch, *rows, k, *columns),
        anchor=True,
    )


@register("aten.einsum.default")
def einsum_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """One dimension per letter; letters that are not in the result are summed."""
    equation = str(op.args[0]).replace(" ", "")
    if "->" not in equation or "." in equation:
        return None
    left, result = equation.split("->")
    terms = left.split(",")
    if any(len(set(term)) != len(term) for term in (*terms, result)):
        return None
    builder = SpaceBuilder()
    for term, value in zip(terms, inputs):
        for letter, size in zip(term, value.shape):
            builder.dim(letter, max(size, builder.sizes.get(letter, 1)))
    operands = [
        tuple((c,) if s == builder.sizes[c] else () for c, s in zip(term, v.shape))
        for term, v in zip(terms, inputs)
    ]
    summed = frozenset(builder.sizes) - set(result)
    paired = [c for c in builder.sizes if c in result or sum(c in term for term in terms) > 1]
    return builder.build(operands, [layout(*result)], sums=summed, clean=paired, anchor=True)


@register("aten.bilinear.default")
def bilinear_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``x[..., i] w[n, i, j] y[..., j] + b[n]``; the bias enters the sums over i and j once."""
    left, right, weight = (v.shape for v in inputs[:3])
    builder = SpaceBuilder()
    rows = builder.dims("m", left[:-1])
    n, i, j = (builder.dim(name, size) for name, size in zip("nij", weight))
    if left[:-1] != right[:-1]:
        return None
    operands = [layout(*rows, i), layout(*rows, j), layout(n, i, j), layout(n)][: len(inputs)]
    return builder.build(
        operands,
        [layout(*rows, n)],
        sums=frozenset({i, j}),
        partial_inputs=frozenset({3}),
        padded=rows,  # a bias makes padding rows non-zero
        clean={n, i, j} if len(inputs) > 3 else {n, i, j, *rows},
        anchor=True,
    )


@register("aten.cdist.default")
def cdist_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """The distances between the rows of ``a[..., m, k]`` and ``b[..., n, k]``; k stays whole."""
    left, right = inputs[0].shape, inputs[1].shape
    batch_sizes = outputs[0].shape[:-2]  # type: ignore[union-attr]
    builder = SpaceBuilder()
    batch = builder.dims("b", batch_sizes)
    m, n, k = builder.dim("m", left[-2]), builder.dim("n", right[-2]), builder.whole(left[-1])
    sides = [
        broadcast_layout(shape[:-2], batch, batch_sizes) + layout(row, k)
        for shape, row in ((left, m), (right, n))
    ]
    return builder.build(sides, [layout(*batch, m, n)], anchor=True)


def _trilinear_scratch(_: Any, args: tuple[Any, ...], num_threads: int) -> int:
    """For the products of three tensors that a bilinear layer becomes; 0 for large ones."""
    sizes = []
    for operand, missing in zip(args[:3], args[3:6]):
        shape = list(operand.shape)
        for dim in sorted(missing):
            shape.insert(dim, 1)
        sizes.append(shape)
    if 2.0 * math.prod(map(max, *sizes)) > MOST_MEASURED or is_profiling():
        return 0
    return measured_scratch(torch.ops.aten._trilinear.default, args, num_threads)


register_traced("aten._trilinear.default", cpu_scratch=_trilinear_scratch)
