"""Batch norm: element-wise with given statistics; with those of the batch it reduces inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.cost_models.calls import OpCall, TensorSpec
from autopar.ir.choice import Choice
from autopar.ir.graph import Op, Value
from autopar.ir.mesh import Mesh
from autopar.rules.context import LocalContext
from autopar.rules.kernels import InternalCollective, LocalCall, kernel_calls
from autopar.rules.registry import register
from autopar.rules.space import Space, SpaceBuilder, layout
from autopar.rules.traced import register_traced

Outputs = Sequence[Value | None]
aten = torch.ops.aten


@register("aten._native_batch_norm_legit_no_training.default")
def batch_norm_inference_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """Batch norm with given statistics is element-wise; the saved statistics come out empty."""
    shape = inputs[0].shape
    builder = SpaceBuilder()
    dims = (builder.dim("n", shape[0]), builder.dim("c", shape[1]), *builder.dims("l", shape[2:]))
    empty = layout(builder.whole(0))
    return builder.build(
        [layout(*dims), *(layout(dims[1]) for _ in inputs[1:])],
        [layout(*dims), empty, empty],
        reduced=frozenset(dims),
    )


def _shard_norm_local(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Batch norm with the statistics of this shard; running ones are averaged over the shards.

    The average does not extend over micro-batches, which update the running statistics one after
    another.
    """
    out, *statistics = context.op.target(*args, **kwargs)
    axes = [a for a in context.axes_of("n") if not context.mesh.is_sequential(a)]
    num = context.mesh.size(axes)
    return out, *(s if num == 1 else s / num for s in statistics)


def _batch_norm_local(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Batch norm with the statistics of the whole batch, as on one device."""
    if context.op.per_shard:
        return _shard_norm_local(context, args, kwargs)
    x, weight, bias, running_mean, running_var, _, momentum, eps = args
    axes = _synchronized_axes(context.op, context.space, context.choice, context.mesh)
    if not axes:
        return context.op.target(*args, **kwargs)
    num = context.mesh.size(axes)
    out, mean, variance = _SynchronizedBatchNorm.apply(x, weight, bias, eps, context, axes)
    count = num * (x.numel() // x.shape[1])
    unbiased = variance * (count / max(count - 1, 1))
    mean, rstd, unbiased = (
        t.to(running_mean.dtype) for t in (mean, torch.rsqrt(variance + eps), unbiased)
    )
    new_mean = running_mean * (1 - momentum) + mean * momentum
    new_var = running_var * (1 - momentum) + unbiased * momentum
    return out, mean, rstd, new_mean, new_var


class _SynchronizedBatchNorm(torch.autograd.Function):
    """``y = (x - mean) rstd weight + bias`` with the mean and variance over all devices' shards.

    There is one collective per pass: forward gathers the shards' means and variances; backward
    all-reduces the sums of ``dy`` and ``dy h``, with ``h = (x - mean) rstd``, for

        dx = weight rstd (dy - mean(dy) - h mean(dy h)).

    In both passes the normalization is that of fixed statistics, a single kernel. The gradients of
    weight and bias are those of this shard. Outputs: y, and the mean and biased variance of each
    channel, in float32 for lower precisions; no gradient flows through the statistics.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        context: LocalContext,
        axes: tuple[int, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        means, variances = context.all_gather_data(torch.stack(_statistics(x)), axes).unbind(1)
        mean = means.mean(0)
        # For equal parts: the mean of their variances, plus the variance of their means.
        variance = variances.mean(0) + (means - mean).square().mean(0)
        ctx.eps, ctx.context, ctx.axes = eps, context, axes
        ctx.dtypes = [None if t is None else t.dtype for t in (weight, bias)]
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.mark_non_differentiable(mean, variance)
        return _normalized(x, weight, bias, mean, variance, eps), mean, variance

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, *_: Any) -> Any:
        x, weight, mean, variance = ctx.saved_tensors
        context, axes = ctx.context, ctx.axes
        by_h, by_one = _sums(cotangent, x, mean, variance, ctx.eps)
        grad = None
        if ctx.needs_input_grad[0]:
            total = context.all_reduce_data(torch.stack([by_h, by_one]), axes)
            count = context.mesh.size(axes) * (x.numel() // x.shape[1])
            scale = torch.rsqrt(variance + ctx.eps)
            if weight is not None:
                scale = scale * weight
            slope, offset = (total * (-scale / count)).unbind(0)
            rest = _normalized(x, slope, offset, mean, variance, ctx.eps)
            shape = (1, -1, *(1 for _ in x.shape[2:]))
            grad = torch.addcmul(rest, cotangent, scale.to(x.dtype).view(shape))
        own = (None if to is None else by.to(to) for by, to in zip((by_h, by_one), ctx.dtypes))
        return grad, *own, None, None, None


def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel, ``[c]`` each, in two passes over the data."""
    if x.dtype.itemsize < torch.float32.itemsize:
        x = x.float()
    dims = [d for d in range(x.dim()) if d != 1]
    mean = x.mean(dims, keepdim=True)
    return mean.flatten(), (x - mean).square().mean(dims)


def _sums(
    cotangent: Tensor, x: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The sums of ``dy h`` and ``dy`` of each channel, in the dtype of the statistics.

    On CPUs they are the weight gradients of fixed statistics, one kernel. That of CUDA computes
    them only together with the gradient of ``x``.
    """
    if x.device.type == "cpu":
        _, *found = aten.native_batch_norm_backward.default(
            cotangent, x, None, mean, variance, None, None, False, eps, [False, True, True]
        )
        # For lower precisions they are float32, though traced kernels claim the dtype of x.
        by_h, by_one = (by.to(mean.dtype) for by in found)
        return by_h, by_one
    return _sums_of_products(cotangent, x, mean, variance, eps)


def _sums_of_products(
    cotangent: Tensor, x: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    dims, shape = [d for d in range(x.dim()) if d != 1], (1, -1, *(1 for _ in x.shape[2:]))
    centred = (x.to(mean.dtype) - mean.view(shape)) * cotangent.to(mean.dtype)
    by_h = centred.sum(dims) * torch.rsqrt(variance + eps)
    return by_h, cotangent.sum(dims, dtype=mean.dtype)


def _normalized(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    eps: float,
) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) weight + bias``.

    The kernels require all per-channel operands in one precision.
    """
    weight, bias = (None if t is None else t.to(mean.dtype) for t in (weight, bias))
    out: Tensor = aten._native_batch_norm_legit_no_training.default(
        x, weight, bias, mean, variance, 0.0, eps
    )[0]
    return out


def _synchronized_axes(op: Op, space: Space, choice: Choice, mesh: Mesh) -> tuple[int, ...]:
    """The axes over which statistics are gathered; empty where a device has all that it needs."""
    axes = tuple(sorted(a for d in space.reduced for a in choice.axes_of(d)))
    return () if mesh.size(axes) == 1 or not op.args[5] or op.per_shard else axes


def _batch_norm_collectives(
    op: Op, space: Space, choice: Choice, mesh: Mesh, inputs: Sequence[Value]
) -> tuple[InternalCollective, ...]:
    axes = _synchronized_axes(op, space, choice, mesh)
    if not axes:
        return ()
    channels = space.sizes["c"] // mesh.size(choice.axes_of("c"))
    size_bytes = 2 * channels * max(inputs[0].dtype.itemsize, torch.float32.itemsize)
    num = mesh.size(axes)
    return (
        InternalCollective(kind="all_gather", axes=axes, size_bytes=num * size_bytes),
        InternalCollective(kind="all_reduce", axes=axes, size_bytes=size_bytes),
    )


def _batch_norm_kernels(
    op: Op, space: Space, choice: Choice, mesh: Mesh, plain: OpCall
) -> tuple[LocalCall, ...] | None:
    """The kernels of `_SynchronizedBatchNorm`, with most of the small ones on ``[c]``."""
    if not _synchronized_axes(op, space, choice, mesh):
        return None
    x = replace(plain.tensor(0, "input"), requires_grad=False)
    dims = tuple(d for d in range(len(x.shape)) if d != 1)
    channels = TensorSpec(x.shape[1:2], torch.promote_types(x.dtype, torch.float32))
    each = TensorSpec((1, x.shape[1], *(1 for _ in x.shape[2:])), x.dtype)
    product = OpCall("aten.mul.Tensor", (channels, channels))
    total = OpCall("aten.add.Tensor", (channels, channels))
    normalized = OpCall(
        "aten._native_batch_norm_legit_no_training.default",
        (x, channels, channels, channels, channels, 0.0, 1e-5),
    )
    forward = [
        OpCall("aten.mean.dim", (x, dims)),
        OpCall("aten.sub.Tensor", (x, each)),
        OpCall("aten.pow.Tensor_Scalar", (x, 2)),
        OpCall("aten.mean.dim", (x, dims)),
        normalized,
        *[product] * 5,
        *[total] * 3,
    ]
    sums = OpCall(
        "aten.native_batch_norm_backward.default",
        (x, x, None, channels, channels, None, None, False, 1e-5, (False, True, True)),
    )
    backward = [
        sums,
        normalized,
        OpCall("aten.addcmul.default", (x, x, each)),
        OpCall("aten.rsqrt.default", (channels,)),
        OpCall("aten.neg.default", (channels,)),
        product,
    ]
    return kernel_calls(forward, backward)


@register(
    "aten._native_batch_norm_legit_functional.default",
    lower=_batch_norm_local,
    collectives=_batch_norm_collectives,
    kernels=_batch_norm_kernels,
)
def batch_norm_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``x[n, c, ...]`` with per-channel operands; statistics come out complete.

    With statistics per shard, they come out as sums over the shards of the batch, and the
    dimensions of the image stay whole.
    """
    shape = inputs[0].shape
    builder = SpaceBuilder()
    n, c = builder.dim("n", shape[0]), builder.dim("c", shape[1])
    rest = [builder.whole(s) for s in shape[2:]] if op.per_shard else builder.dims("l", shape[2:])
    x = layout(n, c, *rest)
    stats = [
        layout(c) if o is None or o.shape == (shape[1],) else layout(builder.whole(0))
        for o in outputs[1:]
    ]
    return builder.build(
        [x, *(layout(c) for _ in inputs[1:])],
        [x, *stats],
        sums=frozenset({n} if op.per_shard else ()),
        reduced=frozenset(() if op.per_shard else {n, *rest}),
    )


def _backward_scratch(_: Any, args: tuple[Any, ...], num_threads: int) -> int:
    """A second copy of the input's gradient, where input and cotangent have the same strides."""
    cotangent, x, *_, (needs_input, _, _) = args
    return x.nbytes if needs_input and cotangent.stride() == x.stride() else 0


register_traced("aten.native_batch_norm_backward.default", cpu_scratch=_backward_scratch)
