"""Layers of experts: rows, inner columns and experts free; rows move to their experts once.

`autopar.ir.routed_layers` has two products, or more, and an element-wise function between.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.cost_models.calls import OpCall
from autopar.cost_models.op_work import work
from autopar.cost_models.shapes import outputs
from autopar.cost_models.work import Family, OpWork, Work, arithmetic_dtype
from autopar.ir.choice import EXPERTS, ROWS_AND_EXPERTS, Choice
from autopar.ir.graph import Op, Value
from autopar.ir.mesh import Mesh
from autopar.ir.routed_layers import PART, ROUTED_LAYERS, Between, routed_layers
from autopar.rules.context import LocalContext
from autopar.rules.derivative import Keeps, Operands
from autopar.rules.experts import (
    exchanged,
    exchanges,
    move_of,
    own_experts,
    own_products,
    packed,
    product_of,
)
from autopar.rules.kernels import LocalCall, Phase
from autopar.rules.registry import register
from autopar.rules.space import Space, SpaceBuilder, layout

Outputs = Sequence[Value | None]


def _local(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The layer on a shard; where rows and experts are split together, rows go there and back."""
    x, first, second, expert, between = args
    if context.num_shards(ROWS_AND_EXPERTS) > 1:
        return exchanged(
            context, x, expert, second.shape[0],
            lambda rows, numbers: routed_layers(rows, first, second, numbers, between),
        )  # fmt: skip
    return routed_layers(x, first, second, own_experts(context, expert), between)


def _kernels(
    op: Op, space: Space, choice: Choice, mesh: Mesh, plain: OpCall
) -> tuple[LocalCall, ...]:
    """The products, the activation between them, and the packing and unpacking of rows."""
    both, num = mesh.size(choice.axes_of(ROWS_AND_EXPERTS)), mesh.size(choice.axes_of(EXPERTS))
    return tuple(LocalCall(call=call, phase=Phase.BOTH) for call in _calls(plain, both, num))


def _calls(plain: OpCall, both: int, num: int) -> list[OpCall]:
    """The calls on a device that shares rows and experts with ``both``, or experts with ``num``."""
    x, first, second, expert, between = plain.args
    rows, numbers = packed(x, expert, both) if both > 1 else (x, expert)
    calls = [move_of(rows)] if both > 1 else []
    hidden = []
    for weight in first:
        calls += own_products(rows, weight, numbers, num)
        hidden.append(product_of(rows, weight, numbers))

    def called(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == PART:
            matrix, num_parts = args
            shape = matrix.shape[0], matrix.shape[1] // num_parts
            return (replace(matrix, shape=shape),) * num_parts
        calls.append(call := OpCall.of(name, args, kwargs))
        has_gradient = any(spec.requires_grad for spec in call.tensors())
        return replace(outputs(call)[0], stride=None, requires_grad=has_gradient)

    inner = Between.of_text(between)(hidden, called)
    calls += own_products(inner, second, numbers, num)
    if both > 1:
        calls.append(move_of(product_of(inner, second, numbers)))
    return calls


def _work(call: OpCall) -> OpWork:
    """The sum of the work of its calls on one device."""
    found = [work(each) for each in _calls(call, 1, 1)]
    return OpWork(
        family=Family.MATMUL,
        dtype=arithmetic_dtype(call),
        forward=sum((each.forward for each in found), Work()),
        input_grad=sum((each.input_grad for each in found), Work()),
        weight_grad=sum((each.weight_grad for each in found), Work()),
    )


def _kept_inside(op: Op, out: Value) -> float:
    """Bytes of the values between the products, per byte of the result."""
    return float(Between.of_text(op.args[4]).num_columns / max(1, out.shape[1]))


@functools.cache
def _at_zeros(between: str, parts: tuple[int, ...]) -> tuple[bool, bool]:
    """Whether the activation and its gradients are finite at zero, and whether it is zero there.

    Padded rows and columns are zeros.
    """
    zeros = [torch.zeros(1, num, device="cpu", requires_grad=True) for num in parts]
    with torch.enable_grad():
        found = Between.of_text(between)(zeros)
        gradients = torch.autograd.grad(found.sum(), zeros, allow_unused=True)
    is_finite = all(bool(x.isfinite().all()) for x in (found, *gradients) if x is not None)
    return is_finite, bool((found == 0).all())


@register(
    str(ROUTED_LAYERS),
    lower=_local,
    collectives=exchanges,
    kernels=_kernels,
    keeps=Keeps(operands=Operands.FACTORS, further=_kept_inside),
    work=_work,
)
def routed_layers_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``x[t, k]``, first weights ``[e, k, (h, m)]``, second ``[e, m, n]``: ``[(t, r), n]``.

    ``h`` are the parts of columns that are combined; ``r`` is the number of experts of each row.
    """
    x, *first, second, expert = (v.shape for v in inputs)
    builder = SpaceBuilder()
    t, k = builder.dim("t", x[0]), builder.whole(x[1], "k")
    e, m, n = (
        builder.dim(name, size) for name, size in zip((EXPERTS, "m", "n"), second, strict=True)
    )
    r = builder.whole(expert[0] // max(1, x[0]))
    parts = tuple(weight[2] // max(1, second[1]) for weight in first)
    a = builder.dim(ROWS_AND_EXPERTS, math.gcd(x[0], second[0]))
    is_finite, is_zero = _at_zeros(op.args[4], parts)
    return builder.build(
        [
            layout(t, k),
            *(layout(e, k, (builder.whole(num), m)) for num in parts),
            layout(e, m, n),
            layout((t, r)),
        ],
        [layout((t, r), n)],
        sums=frozenset({m, e}),
        plain=frozenset({e, a}),
        padded=(t, m) if is_finite else (),
        clean=(e, n, t, m) if is_finite and is_zero else (e, n),
        joint={a: (t, e)},
        anchor=True,
    )
