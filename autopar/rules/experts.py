"""Products of rows with the weights of their experts: rows, columns, inner dimension, experts free.

`autopar.ir.routed_product` takes the expert of each row; PyTorch's grouped product takes rows that
are sorted by expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.comm.ops import ALL_TO_ALL, with_gradient
from autopar.cost_models.calls import OpCall, TensorSpec
from autopar.cost_models.matrix_work import product
from autopar.cost_models.work import MatrixShape, OpWork, Work
from autopar.ir.choice import EXPERTS, ROWS_AND_EXPERTS, Choice
from autopar.ir.graph import Op, Value
from autopar.ir.mesh import Mesh
from autopar.ir.routed_product import ROUTED_PRODUCT
from autopar.ir.row_exchange import MOST_ROWS, PACK_NUMBERS, PACK_ROWS, UNPACK_ROWS
from autopar.rules.context import LocalContext
from autopar.rules.derivative import KEEPS_FACTORS
from autopar.rules.kernels import InternalCollective, LocalCall, Phase
from autopar.rules.registry import register
from autopar.rules.space import Space, SpaceBuilder, layout

Outputs = Sequence[Value | None]
_PRODUCT = str(ROUTED_PRODUCT)


# --- rows in any order ---------------------------------------------------------------------
def _routed_local(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The product on a shard; where experts are split, rows of other devices' experts are zero.

    Where rows and experts are split together, rows go to the devices of their experts and back.
    """
    x, weight, expert = args
    if context.num_shards(ROWS_AND_EXPERTS) > 1:
        return exchanged(
            context, x, expert, weight.shape[0],
            lambda rows, numbers: context.op.target(rows, weight, numbers),
        )  # fmt: skip
    result: Tensor = context.op.target(x, weight, own_experts(context, expert))
    return result


def exchanged(
    context: LocalContext,
    x: Tensor,
    expert: Tensor,
    num_local: int,
    compute: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Send rows to the devices of their experts, ``compute(rows, experts)`` there, and send back.

    The axes that split the rows split the experts too, ``num_local`` on each device.
    """
    axes = context.axes_of(ROWS_AND_EXPERTS)
    num, label = context.mesh.size(axes), context.mesh.axes_label(axes)

    def there(packed: Tensor) -> Tensor:
        found: Tensor = ALL_TO_ALL(packed, label, num, 1, 1, 0, 1)
        return found

    def back(rows: Tensor) -> Tensor:
        found: Tensor = ALL_TO_ALL(rows, label, num, 0, 1, 1, 1)
        return found

    most = context.all_reduce_max(MOST_ROWS(expert, num, num_local), axes)
    rows = with_gradient(PACK_ROWS(x, expert, most, num, num_local), there, back)
    numbers = there(PACK_NUMBERS(expert, most, num, num_local))
    out = compute(rows.squeeze(0), numbers.squeeze(0)).unsqueeze(0)
    result: Tensor = UNPACK_ROWS(with_gradient(out, back, there), expert, most, num_local)
    return result


def own_experts(context: LocalContext, expert: Tensor) -> Tensor:
    """The experts of rows as a device counts its own, where experts are split alone."""
    if context.is_padded(EXPERTS):  # the padding is no expert
        expert = torch.where(expert < context.space.sizes[EXPERTS], expert, -1)
    if context.num_shards(EXPERTS) > 1:
        expert = expert - context.shard_start(expert, EXPERTS)
    return expert


def _most(num_rows: float, num: int) -> int:
    """The most rows that one of ``num`` gets, of ``num_rows`` on average.

    For rows that choose at random, ``sqrt(2 num_rows ln(num))`` more than the average.
    """
    return math.ceil(num_rows + math.sqrt(2 * num_rows * math.log(num)))


def exchanges(
    op: Op, space: Space, choice: Choice, mesh: Mesh, inputs: Sequence[Value]
) -> tuple[InternalCollective, ...]:
    """The exchanges of rows, the first operand, and of their results, forward and backward."""
    axes = choice.axes_of(ROWS_AND_EXPERTS)
    num = mesh.size(axes)
    if num == 1:
        return ()
    x, expert = inputs[0], inputs[-1]
    rows = expert.shape[0] / mesh.size((*axes, *choice.axes_of("t")))
    packed = num * _most(rows / num, num * num)
    there, back = (
        InternalCollective(
            kind="all_to_all",
            axes=axes,
            size_bytes=packed
            * -(-space.sizes[dim] // mesh.size(choice.axes_of(dim)))
            * x.dtype.itemsize,
        )
        for dim in ("k", "n")
    )
    agreed = InternalCollective(kind="all_reduce", axes=axes, size_bytes=8)
    backward = (there, back) if x.differentiable else ()
    return (agreed, there, back, *backward)


def _routed_kernels(
    op: Op, space: Space, choice: Choice, mesh: Mesh, plain: OpCall
) -> tuple[LocalCall, ...] | None:
    """The calls for split experts. The slowest device has the most rows."""
    x, weight, expert = plain.tensors()
    both, num = mesh.size(choice.axes_of(ROWS_AND_EXPERTS)), mesh.size(choice.axes_of(EXPERTS))
    if both > 1:
        rows, numbers = packed(x, expert, both)
        routed = OpCall(plain.target, (rows, weight, numbers))
        calls = [move_of(rows), routed, move_of(product_of(rows, weight, numbers))]
    elif num > 1:
        calls = [*own_products(x, weight, expert, num)]
    else:
        return None
    return tuple(LocalCall(call=call, phase=Phase.BOTH) for call in calls)


def packed(x: TensorSpec, expert: TensorSpec, num: int) -> tuple[TensorSpec, TensorSpec]:
    """The rows of a device's experts, and their numbers, with ``num`` devices in a group."""
    most = _most(expert.shape[0], num)
    return replace(x, shape=(most, x.shape[1])), replace(expert, shape=(most,))


def move_of(rows: TensorSpec) -> OpCall:
    """The packing of rows for their devices, or their unpacking."""
    places = TensorSpec(rows.shape[:1], torch.int64)
    return OpCall("aten.index.Tensor", (rows, (places,)))


def product_of(x: TensorSpec, weight: TensorSpec, expert: TensorSpec) -> TensorSpec:
    """The result of a product."""
    has_gradient = x.requires_grad or weight.requires_grad
    return TensorSpec((expert.shape[0], weight.shape[2]), x.dtype, None, has_gradient)


def own_products(
    x: TensorSpec, weight: TensorSpec, expert: TensorSpec, num: int
) -> tuple[OpCall, ...]:
    """The product of the rows, among those of all, that one of ``num`` devices has experts for."""
    if num == 1:
        return (OpCall(_PRODUCT, (x, weight, expert)),)
    repeats = max(1, expert.shape[0] // max(1, x.shape[0]))
    most = min(expert.shape[0], _most(expert.shape[0] / num, num))
    num_rows = max(1, math.ceil(most / repeats))
    own = replace(expert, shape=(num_rows * repeats,))
    out = product_of(x, weight, expert)
    is_other = TensorSpec((out.shape[0], 1), torch.bool)
    return (
        OpCall(_PRODUCT, (replace(x, shape=(num_rows, x.shape[1])), weight, own)),
        OpCall("aten.where.ScalarOther", (is_other, out, 0)),
    )


def _routed_work(call: OpCall) -> OpWork:
    """A product of every row, and the gathering and scattering of rows by expert."""
    x, weight, expert = call.tensors()
    sizes = MatrixShape(m=expert.shape[0], n=weight.shape[2], k=x.shape[1])
    rows = replace(x, shape=(sizes.m, sizes.k))
    out_bytes = sizes.m * sizes.n * x.dtype.itemsize
    found = product(rows, weight, sizes, out_bytes)
    moved = Work(size_bytes=2 * (rows.size_bytes + out_bytes), num_kernels=2)
    return replace(
        found,
        forward=found.forward + moved,
        input_grad=found.input_grad + moved if x.requires_grad else found.input_grad,
        weight_grad=found.weight_grad + moved if weight.requires_grad else found.weight_grad,
    )


@register(
    _PRODUCT,
    lower=_routed_local,
    collectives=exchanges,
    kernels=_routed_kernels,
    keeps=KEEPS_FACTORS,
    work=_routed_work,
)
def routed_product_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``x[t, k] w[e, k, n]`` for the ``r`` experts of each row: ``[(t, r), n]``.

    Split along `ROWS_AND_EXPERTS`, each device has a part of the rows and a part of the experts.
    """
    x, weight, expert = (v.shape for v in inputs)
    builder = SpaceBuilder()
    t, k = builder.dim("t", x[0]), builder.dim("k", x[1])
    e, n = builder.dim(EXPERTS, weight[0]), builder.dim("n", weight[2])
    r = builder.whole(expert[0] // max(1, x[0]))
    a = builder.dim(ROWS_AND_EXPERTS, math.gcd(x[0], weight[0]))
    return builder.build(
        [layout(t, k), layout(e, k, n), layout((t, r))],
        [layout((t, r), n)],
        sums=frozenset({k, e}),
        plain=frozenset({e, a}),
        clean=(t, k, n, e),
        joint={a: (t, e)},
        anchor=True,
    )


# --- rows sorted by expert -----------------------------------------------------------------


def _grouped_local(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The grouped product on a shard; ``offs`` has the end row of each expert.

    Ends are recounted for local rows. Where experts are split, a device moves the rows of its own
    experts to the front; the rows of other experts come out as zeros.
    """
    x, weight = args[0], args[1]
    ends = args[2] if len(args) > 2 else kwargs["offs"]
    if context.num_shards("s") > 1:
        ends = (ends - context.shard_start(x, "s")).clamp(0, x.shape[0]).to(ends.dtype)
    if context.num_shards(EXPERTS) == 1:
        result: Tensor = context.op.target(x, weight, ends)
        return result
    rows, first = torch.arange(x.shape[0], device=x.device), context.shard_start(x, EXPERTS)
    experts = torch.arange(weight.shape[0], device=x.device) + first
    start = torch.where(ends.new_zeros(()) + first > 0, ends[(experts[:1] - 1).clamp(min=0)][0], 0)
    own_ends = (ends[experts] - start).to(ends.dtype)
    # The kernel does not write the rows after the last end, nor their gradients.
    own = (rows < own_ends[-1]).unsqueeze(-1)
    moved = torch.where(own, x[(rows + start) % x.shape[0]], 0)
    out = torch.where(own, context.op.target(moved, weight, own_ends), 0)
    result = out[(rows - start) % x.shape[0]]
    return result


def _grouped_kernels(
    op: Op, space: Space, choice: Choice, mesh: Mesh, plain: OpCall
) -> tuple[LocalCall, ...] | None:
    """The calls for split experts: moves of rows, and a product of this device's rows."""
    num = mesh.size(choice.axes_of(EXPERTS))
    if num == 1:
        return None
    x, weight, ends = plain.tensors()
    own = replace(x, shape=(max(1, x.shape[0] // num), x.shape[1]))
    own_ends = replace(ends, shape=weight.shape[:1])
    out = replace(x, shape=(x.shape[0], weight.shape[2]))
    moves = [
        call
        for rows in (x, out)
        for call in (
            OpCall("aten.index.Tensor", (rows, (TensorSpec(rows.shape[:1], torch.int64),))),
            OpCall("aten.where.ScalarOther", (TensorSpec((rows.shape[0], 1), torch.bool), rows, 0)),
        )
    ]
    grouped = OpCall(plain.target, (own, weight, own_ends))
    return tuple(LocalCall(call=call, phase=Phase.BOTH) for call in (*moves, grouped))


@register(
    "aten._grouped_mm.default",
    "transformers.grouped_mm_fallback.default",
    lower=_grouped_local,
    kernels=_grouped_kernels,
)
def grouped_product_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``x[s, k] w[e, k, n]``, where each row s is multiplied by the weight of its expert.

    PyTorch's kernel requires rows and columns that are multiples of 16 bytes.
    """
    if len(inputs) != 3 or len(inputs[0].shape) != 2 or len(inputs[1].shape) != 3:
        return None
    if len(op.args) > 3 or any(k != "offs" for k, _ in op.kwargs):
        return None
    x, weight = inputs[0].shape, inputs[1].shape
    builder = SpaceBuilder()
    s, e = builder.dim("s", x[0]), builder.dim(EXPERTS, weight[0])
    unit = 16 // inputs[1].dtype.itemsize if op.target_name.startswith("aten.") else 1
    if weight[1] % unit or weight[2] % unit:
        return None
    k = (builder.dim("k", weight[1] // unit), builder.whole(unit))
    n = (builder.dim("n", weight[2] // unit), builder.whole(unit))
    return builder.build(
        [layout(s, k), layout(e, k, n), ((),)],
        [layout(s, n)],
        sums=frozenset({"k", e}),
        plain=frozenset({s, e}),
        anchor=True,
    )
