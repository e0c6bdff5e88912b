"""Losses: split over rows they are partial sums; cross-entropy also splits over classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.cost_models.calls import OpCall, TensorSpec
from autopar.ir.choice import Choice
from autopar.ir.graph import Op, Ref, Value
from autopar.ir.mesh import Mesh
from autopar.rules.context import LocalContext
from autopar.rules.derivative import Keeps
from autopar.rules.elementwise import broadcast_layout
from autopar.rules.kernels import InternalCollective, LocalCall, kernel_calls
from autopar.rules.registry import register
from autopar.rules.space import Space, SpaceBuilder, layout
from autopar.rules.totals import EarlyOp, SumAndTotal

Outputs = Sequence[Value | None]
NONE, MEAN, SUM = 0, 1, 2


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = ("self", "target", "weight", "reduction", "ignore_index", "label_smoothing")
    defaults = {"weight": None, "reduction": MEAN, "ignore_index": -100, "label_smoothing": 0.0}
    return {**defaults, **dict(zip(names, args)), **kwargs}


def _cross_entropy_local(
    context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    call = _arguments(args, kwargs)
    x, reduction = call["self"], call["reduction"]
    target = _ignoring_padding(context, call["target"], call["ignore_index"])
    row_axes = context.axes_of(*(d for d in context.space.sizes if d not in ("c",)))
    if context.num_shards("c") > 1:
        per_row = _vocabulary_parallel(context, x, target, call["ignore_index"])
        total = per_row if reduction == NONE else per_row.sum()
    else:
        mode = "none" if reduction == NONE else "sum"
        total = F.cross_entropy(
            x,
            target,
            call["weight"],
            ignore_index=call["ignore_index"],
            reduction=mode,
            label_smoothing=call["label_smoothing"],
        )
    if reduction != MEAN:
        return total
    count = _weight_of_rows(x, target, call["weight"], call["ignore_index"])
    return total / context.all_reduce_data(count, row_axes)


def _sum_and_total(
    op: Op, inputs: Sequence[Value], early: Callable[[EarlyOp], Ref]
) -> SumAndTotal | None:
    """The loss as a sum, and the weight of all rows: the sum of class weights over counted rows."""
    call = _arguments(op.args, dict(op.kwargs))
    if call["reduction"] != MEAN:
        return None
    kwargs = dict(op.kwargs)
    if len(op.args) > 3:
        args = (*op.args[:3], SUM, *op.args[4:])
    else:
        args, kwargs["reduction"] = op.args, SUM
    x, target = inputs[:2]
    if target.dtype.is_floating_point:  # probabilities: every row counts
        classes = target.shape[1 if len(x.shape) > 1 else 0]
        total: Ref | float = float(math.prod(target.shape) // classes)
    else:
        total = _total_of_rows(x.dtype, target, inputs[2:], call["ignore_index"], early)
    return SumAndTotal(args=args, kwargs=tuple(kwargs.items()), total=total)


def _total_of_rows(
    dtype: torch.dtype,
    target: Value,
    weights: Sequence[Value],
    ignored: int,
    early: Callable[[EarlyOp], Ref],
) -> Ref:
    aten, rows, index = torch.ops.aten, target.shape, Ref(target.index)
    valid = early(
        EarlyOp(target=aten.ne.Scalar, args=(index, ignored), shape=rows, dtype=torch.bool)
    )
    if weights:
        (weight,) = weights
        classes, dtype = weight.shape[0], weight.dtype
        column = early(
            EarlyOp(
                target=aten.view.default, args=(Ref(weight.index), (classes, 1)),
                shape=(classes, 1), dtype=dtype,
            )
        )  # fmt: skip
        known = early(
            EarlyOp(
                target=aten.where.ScalarOther, args=(valid, index, 0),
                shape=rows, dtype=target.dtype,
            )
        )  # fmt: skip
        picked = early(
            EarlyOp(
                target=aten.embedding.default, args=(column, known),
                shape=(*rows, 1), dtype=dtype,
            )
        )  # fmt: skip
        flat = early(EarlyOp(target=aten.squeeze.dim, args=(picked, -1), shape=rows, dtype=dtype))
        counted = early(
            EarlyOp(target=aten.mul.Tensor, args=(flat, valid), shape=rows, dtype=dtype)
        )
    else:
        counted = early(
            EarlyOp(
                target=aten._to_copy.default, args=(valid,), kwargs=(("dtype", dtype),),
                shape=rows, dtype=dtype,
            )
        )  # fmt: skip
    return early(EarlyOp(target=aten.sum.default, args=(counted,), shape=(), dtype=dtype))


def _ignoring_padding(context: LocalContext, target: Tensor, ignore_index: int) -> Tensor:
    """Class indices, with those of padding rows set to be ignored."""
    for dim, (name,) in enumerate(context.space.inputs[1]):
        if context.is_padded(name):
            filled = context.is_filled(target, name).view(-1, *[1] * (target.dim() - 1 - dim))
            target = torch.where(filled, target, ignore_index)
    return target


def _weight_of_rows(x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """The divisor of a mean: the number of counted rows, or the sum of their weights."""
    if target.is_floating_point():
        rows = target.numel() // target.shape[1 if target.dim() > 1 else 0]
        return torch.full((), float(rows), dtype=x.dtype, device=x.device)
    valid = target != ignore_index
    if weight is None:
        return valid.sum().to(x.dtype)
    picked = weight.detach()[torch.where(valid, target, 0)]
    return torch.where(valid, picked, 0).sum()


def _nll_local(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The sum over this device's rows; a mean divides by the weight of all rows."""
    call = _arguments(args, kwargs)
    x, weight, ignored = (call[k] for k in ("self", "weight", "ignore_index"))
    target = _ignoring_padding(context, call["target"], ignored)
    if call["reduction"] == NONE:
        return F.nll_loss(x, target, weight, ignore_index=ignored, reduction="none")
    total = F.nll_loss(x, target, weight, ignore_index=ignored, reduction="sum")
    if call["reduction"] == SUM:
        return total
    axes = context.axes_of(*context.space.sums)
    return total / context.all_reduce_data(_weight_of_rows(x, target, weight, ignored), axes)


@register("aten.nll_loss_nd.default", lower=_nll_local, keeps=Keeps(copies=2), mean=_sum_and_total)
def nll_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``log_p[n, c, ...]`` against classes ``[n, ...]``; the classes stay whole."""
    shape = inputs[0].shape
    builder = SpaceBuilder()
    class_dim = 1 if len(shape) > 1 else 0
    rows = [builder.dim(f"n{d}", s) for d, s in enumerate(shape) if d != class_dim]
    c = builder.whole(shape[class_dim])
    operands = [layout(*rows[:class_dim], c, *rows[class_dim:]), layout(*rows), layout(c)]
    summed = _arguments(op.args, dict(op.kwargs))["reduction"] != NONE
    return builder.build(
        operands[: len(inputs)],
        [() if summed else layout(*rows)],
        sums=frozenset(rows) if summed else frozenset(),
        clean=rows,
    )


class _VocabularyParallel(torch.autograd.Function):
    """Cross-entropy per row over classes split across devices, without gathering the logits.

    The maximum of the shards' log-sum-exp, the sum of their exponentials relative to it, and the
    target's logit are all-reduced, one number per row each. Backward is the softmax minus one at
    the target, recomputed from the logits and one number per row; the automatic derivative would
    keep the exponentials and pass over them once per term.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, target: Tensor, context: LocalContext, dim: int, ignore_index: int
    ) -> Tensor:
        axes = context.axes_of("c")
        own = x.logsumexp(dim)
        peak = context.all_reduce_max(own, axes)
        whole = peak + context.all_reduce_data((own - peak).exp(), axes).log()
        index = target - context.shard_start(x, "c")
        is_mine = (index >= 0) & (index < x.shape[dim])
        index = torch.where(is_mine, index, 0).unsqueeze(dim)
        picked = torch.where(is_mine, x.gather(dim, index).squeeze(dim), 0)
        picked = context.all_reduce_data(picked, axes)
        counts = target != ignore_index
        ctx.dim = dim
        ctx.save_for_backward(x, whole, index, is_mine, counts)
        return torch.where(counts, whole - picked, 0)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        x, whole, index, is_mine, counts = ctx.saved_tensors
        rows = torch.where(counts, cotangent, 0)
        softmax = (x - whole.unsqueeze(ctx.dim)).exp()
        at_target = torch.where(is_mine, -rows, 0).unsqueeze(ctx.dim)
        gradient = (softmax * rows.unsqueeze(ctx.dim)).scatter_add(ctx.dim, index, at_target)
        return gradient, None, None, None, None


def _vocabulary_parallel(
    context: LocalContext, x: Tensor, target: Tensor, ignore_index: int
) -> Tensor:
    """The loss of each row with its classes split; see `_VocabularyParallel`."""
    dim = 1 if x.dim() > 1 else 0
    if context.is_padded("c"):
        filled = context.is_filled(x, "c").view(-1, *[1] * (x.dim() - 1 - dim))
        x = torch.where(filled, x, -torch.inf)
    loss: Tensor = _VocabularyParallel.apply(x, target, context, dim, ignore_index)
    return loss


def _cross_entropy_collectives(
    op: Op, space: Space, choice: Choice, mesh: Mesh, inputs: Sequence[Value]
) -> tuple[InternalCollective, ...]:
    classes = choice.axes_of("c")
    rows = tuple(sorted(a for d in space.sizes if d != "c" for a in choice.axes_of(d)))
    result = []
    if mesh.size(rows) > 1 and _arguments(op.args, dict(op.kwargs))["reduction"] == MEAN:
        result.append(InternalCollective(kind="all_reduce", axes=rows, size_bytes=4))
    if mesh.size(classes) > 1:
        count = math.prod(s for d, s in space.sizes.items() if d != "c") // mesh.size(rows)
        one = InternalCollective(
            kind="all_reduce", axes=classes, size_bytes=count * inputs[0].dtype.itemsize
        )
        result += [one] * 3
    return tuple(result)


def _cross_entropy_kernels(
    op: Op, space: Space, choice: Choice, mesh: Mesh, plain: OpCall
) -> tuple[LocalCall, ...] | None:
    """The kernels of `_VocabularyParallel` that pass over all logits."""
    if mesh.size(choice.axes_of("c")) == 1:
        return None
    given, target = plain.tensor(0, "self"), plain.tensor(1, "target")
    x = TensorSpec(given.shape, given.dtype)
    dim = 1 if len(x.shape) > 1 else 0
    one = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
    rows, index = TensorSpec(one, x.dtype), TensorSpec(one, target.dtype)
    forward = [
        OpCall("aten.logsumexp.default", (x, (dim,))),
        OpCall("aten.gather.default", (x, dim, index)),
    ]
    backward = [
        OpCall("aten.sub.Tensor", (x, rows)),
        OpCall("aten.exp.default", (x,)),
        OpCall("aten.mul.Tensor", (x, rows)),
        OpCall("aten.scatter_add.default", (x, dim, index, rows)),
    ]
    return kernel_calls(forward, backward)


@register(
    "aten.cross_entropy_loss.default",
    lower=_cross_entropy_local,
    collectives=_cross_entropy_collectives,
    kernels=_cross_entropy_kernels,
    # At the loss all kept tensors are alive, and so are working copies of the logits: their
    # log-probabilities, the gradient of those, and the gradient of the logits.
    keeps=Keeps(copies=3),
    mean=_sum_and_total,
)
def cross_entropy_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``x[n, c, ...]`` against class indices ``[n, ...]`` or probabilities ``[n, c, ...]``."""
    call = _arguments(op.args, dict(op.kwargs))
    shape = inputs[0].shape
    builder = SpaceBuilder()
    probabilities = inputs[1].dtype.is_floating_point
    plain_classes = not (probabilities or call["weight"] or call["label_smoothing"])
    class_dim = 1 if len(shape) > 1 else 0
    rows = [builder.dim(f"n{d}", s) for d, s in enumerate(shape) if d != class_dim]
    classes = shape[class_dim]
    c = builder.dim("c", classes) if plain_classes else builder.whole(classes)
    x = layout(*rows[:class_dim], c, *rows[class_dim:])
    operands = [x, x if probabilities else layout(*rows), layout(c)][: len(inputs)]
    return builder.build(
        operands,
        [layout(*rows) if call["reduction"] == NONE else ()],
        sums=frozenset() if call["reduction"] == NONE else frozenset(rows),
        reduced=frozenset({"c"}) if plain_classes else frozenset(),
        plain=frozenset({"c"}) if plain_classes else frozenset(),
        clean={c, *rows} if not probabilities else {c},
        anchor=True,
    )


_REDUCTION_POSITION = {
    "aten.mse_loss.default": 2,
    "aten.l1_loss.default": 2,
    "aten.smooth_l1_loss.default": 2,
    "aten.huber_loss.default": 2,
    "aten.soft_margin_loss.default": 2,
    "aten.kl_div.default": 2,
    "aten.binary_cross_entropy.default": 3,
    "aten.binary_cross_entropy_with_logits.default": 4,
}


_ZERO_AT_EQUALS = frozenset(
    {
        "aten.mse_loss.default",
        "aten.l1_loss.default",
        "aten.smooth_l1_loss.default",
        "aten.huber_loss.default",
    }
)


def _reduction(op: Op) -> int:
    position = _REDUCTION_POSITION[op.target_name]
    value = op.args[position] if len(op.args) > position else dict(op.kwargs).get("reduction", 1)
    return int(value)


def _pointwise_loss_local(
    context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """A mean over this device's elements, weighted by its share of all elements."""
    result: Tensor = context.op.target(*args, **kwargs)
    if _reduction(context.op) != MEAN:
        return result
    return context.weighted(result, *context.space.sums)


@register(*_REDUCTION_POSITION, lower=_pointwise_loss_local)
def pointwise_loss_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """An element-wise loss, reduced by nothing, a mean or a sum over all elements."""
    shape = inputs[0].shape
    builder = SpaceBuilder()
    dims = builder.dims("d", shape)
    summed = _reduction(op) != NONE
    same = all(v.shape == shape for v in inputs)
    return builder.build(
        [broadcast_layout(v.shape, dims, shape) for v in inputs],
        [() if summed else layout(*dims)],
        sums=frozenset(dims) if summed else frozenset(),
        clean=dims if same and op.target_name in _ZERO_AT_EQUALS else (),
    )
