"""The work of operations that are matrix products."""

import math
from collections.abc import Callable
from dataclasses import replace
from math import prod

from autopar.cost_models.calls import OpCall, TensorSpec
from autopar.cost_models.shapes import outputs
from autopar.cost_models.work import NO_WORK, Family, MatrixShape, OpWork, Work, output_bytes


def _product(
    call: OpCall, a: TensorSpec, b: TensorSpec, shape: MatrixShape, bias: TensorSpec | None
) -> OpWork:
    return product(a, b, shape, output_bytes(call), bias)


def product(
    a: TensorSpec,
    b: TensorSpec,
    shape: MatrixShape,
    out_bytes: int,
    bias: TensorSpec | None = None,
) -> OpWork:
    """``a @ b`` and its two gradients, each a product of the same three sizes.

    A complex multiply-add counts as four real ones.
    """
    is_complex = a.dtype.is_complex
    num_real = 4 if is_complex else 1
    forward = Work(
        flops=num_real * shape.flops,
        size_bytes=a.size_bytes + b.size_bytes + out_bytes + (bias.size_bytes if bias else 0),
        num_kernels=1,
        matrix=shape,
    )
    m, n, k, batch = shape.m, shape.n, shape.k, shape.batch
    sides = {True: NO_WORK, False: NO_WORK}
    grad_shapes = (
        (a, b, MatrixShape(m=m, n=k, k=n, batch=batch)),
        (b, a, MatrixShape(m=k, n=n, k=m, batch=batch)),
    )
    for operand, other, grad_shape in grad_shapes:
        if operand.requires_grad:
            sides[operand.is_parameter] += Work(
                flops=num_real * grad_shape.flops,
                size_bytes=out_bytes + other.size_bytes + operand.size_bytes,
                num_kernels=1,
                matrix=grad_shape,
            )
    if bias is not None and bias.requires_grad:
        sides[bias.is_parameter] += Work(size_bytes=out_bytes + bias.size_bytes, num_kernels=1)
    return OpWork(
        family=Family.MATMUL,
        dtype=a.dtype.to_real() if is_complex else a.dtype,
        forward=forward,
        input_grad=sides[False],
        weight_grad=sides[True],
    )


def _linear(call: OpCall) -> OpWork:
    x, weight = call.tensor(0, "input"), call.tensor(1, "weight")
    bias = call.argument(2, "bias")
    shape = MatrixShape(m=prod(x.shape[:-1]), n=prod(weight.shape[:-1]), k=x.shape[-1])
    return _product(call, x, weight, shape, bias)


def _matmul(call: OpCall) -> OpWork:
    a, b = call.tensor(0, "self"), call.tensor(1, "other")
    return _product(call, a, b, _matmul_shape(a, b, _broadcast_batch(call, a, b)), None)


def _broadcast_batch(call: OpCall, a: TensorSpec, b: TensorSpec) -> int:
    out = outputs(call)[0]
    core = (len(a.shape) > 1) + (len(b.shape) > 1)
    return prod(out.shape[: len(out.shape) - core])


def _matmul_shape(a: TensorSpec, b: TensorSpec, batch: int) -> MatrixShape:
    m = a.shape[-2] if len(a.shape) > 1 else 1
    n = b.shape[-1] if len(b.shape) > 1 else 1
    if len(b.shape) == 2:
        # torch folds the batch of the left operand into its rows.
        return MatrixShape(m=m * batch, n=n, k=a.shape[-1])
    return MatrixShape(m=m, n=n, k=a.shape[-1], batch=batch)


def _grouped_matmul(call: OpCall) -> OpWork:
    """Groups of rows, each times its own matrix (the experts of a layer)."""
    rows, weights = call.tensor(0, "self"), call.tensor(1, "mat2")
    if len(rows.shape) == 3 and len(weights.shape) == 3:
        return _product(call, rows, weights, _matmul_shape(rows, weights, rows.shape[0]), None)
    shape = MatrixShape(m=rows.shape[-2], n=weights.shape[-1], k=rows.shape[-1])
    return _product(call, rows, weights, shape, None)


def _added_matmul(call: OpCall) -> OpWork:
    bias, a, b = (call.tensor(i, n) for i, n in enumerate(("self", "mat1", "mat2")))
    batch = a.shape[0] if len(a.shape) == 3 else 1
    return _product(call, a, b, _matmul_shape(a, b, batch), bias)


def _scaled_matmul(call: OpCall) -> OpWork:
    a, b = call.tensor(0, "self"), call.tensor(1, "mat2")
    return _product(call, a, b, _matmul_shape(a, b, 1), call.argument(4, "bias"))


def _convolution(call: OpCall) -> OpWork:
    """Each output element is a dot product over the kernel and the input channels of its group."""
    x, weight = call.tensor(0, "input"), call.tensor(1, "weight")
    bias = call.argument(2, "bias")
    out = outputs(call)[0]
    if call.name in ("convolution", "_convolution"):
        transposed, groups = call.argument(6, "transposed"), call.argument(8, "groups")
    else:
        transposed = call.name.startswith("conv_transpose")
        # Argument 6 in both: in transposed ones output_padding takes the place of dilation.
        groups = call.argument(6, "groups", 1)
    source, target = (out, x) if transposed else (x, out)
    channels_dim = 1 - len(weight.shape)  # there may be no batch dimension
    channels_in = source.shape[channels_dim] // groups
    channels_out = target.shape[channels_dim] // groups
    kernel = prod(weight.shape[2:])
    positions = prod(target.shape[:channels_dim]) * prod(target.shape[channels_dim + 1 :])
    shape = MatrixShape(m=positions, n=channels_out, k=channels_in * kernel, batch=groups)
    dense = _product(call, x, weight, shape, bias)
    if groups > 1 and channels_in == shape.n == 1:
        # With one channel per group, libraries use the vector units, not those for products.
        return OpWork(
            family=Family.DEPTHWISE,
            dtype=dense.dtype,
            forward=replace(dense.forward, matrix=None),
            input_grad=replace(dense.input_grad, matrix=None),
            weight_grad=replace(dense.weight_grad, matrix=None),
        )
    dense = replace(dense, family=Family.CONVOLUTION)
    plain = not transposed and groups == 1 and len(weight.shape) == 4
    if plain and tuple(weight.shape[2:]) == (3, 3) and _is_one(call, 3, 1) and _is_one(call, 5, 1):
        return _with_winograd(dense, target, channels_in)
    return dense


def _is_one(call: OpCall, index: int, default: int) -> bool:
    """Whether the stride (argument 3) or the dilation (5) is 1 in each dimension."""
    given = call.argument(index, "stride" if index == 3 else "dilation", default)
    return all(size == 1 for size in (given if isinstance(given, tuple) else (given,)))


def _with_winograd(dense: OpWork, out: TensorSpec, channels_in: int) -> OpWork:
    """The gradient of the input is a convolution of the same kind; that of the weight is not."""
    shape = dense.forward.matrix
    assert shape is not None
    small, large = (
        prod(out.shape[:-3]) * prod(tile * math.ceil(side / tile) for side in out.shape[-2:])
        for tile in (2, 4)
    )
    input_grad = dense.input_grad
    if input_grad.matrix is not None:
        back = MatrixShape(
            m=shape.m, n=channels_in, k=9 * shape.n, winograd_m=small, winograd_large_m=large
        )
        input_grad = replace(input_grad, matrix=back)
    tiled = replace(shape, winograd_m=small, winograd_large_m=large)
    forward = replace(dense.forward, matrix=tiled)
    return replace(dense, forward=forward, input_grad=input_grad)


def _time_batch_channel_convolution(call: OpCall) -> OpWork:
    """Input [time, batch, channels], weight [kernel, channels in, channels out]."""
    x, weight, bias = (call.tensor(i, n) for i, n in enumerate(("self", "weight", "bias")))
    kernel, channels_in, channels_out = weight.shape
    positions = prod(outputs(call)[0].shape[:2])
    shape = MatrixShape(m=positions, n=channels_out, k=channels_in * kernel)
    return replace(_product(call, x, weight, shape, bias), family=Family.CONVOLUTION)


def _attention(call: OpCall) -> OpWork:
    """Fused attention: two products forward; five backward, as the scores are recomputed."""
    query, key, value = (call.tensor(i, n) for i, n in enumerate(("query", "key", "value")))
    batch = prod(query.shape[:-2])
    rows, columns = query.shape[-2], key.shape[-2]
    scores = 2 * batch * rows * columns
    sizes = query.size_bytes + key.size_bytes + value.size_bytes + output_bytes(call)
    mask_bytes = sum(spec.size_bytes for spec in call.tensors()[3:])
    forward = Work(
        flops=scores * (query.shape[-1] + value.shape[-1]),
        size_bytes=sizes + mask_bytes,
        num_kernels=1,
        matrix=MatrixShape(m=rows, n=columns, k=query.shape[-1], batch=batch),
    )
    backward = NO_WORK
    if any(spec.requires_grad for spec in (query, key, value)):
        backward = Work(
            flops=scores * (3 * query.shape[-1] + 2 * value.shape[-1]),
            size_bytes=2 * sizes + mask_bytes,
            num_kernels=1,
            matrix=MatrixShape(m=rows, n=query.shape[-1], k=columns, batch=batch),
        )
    return OpWork(family=Family.ATTENTION, dtype=query.dtype, forward=forward, input_grad=backward)


ATTENTION_CAUSAL_AT = {
    "scaled_dot_product_attention": 5,
    "_scaled_dot_product_attention_math": 5,
    "_scaled_dot_product_fused_attention_overrideable": 5,
    "_scaled_dot_product_cudnn_attention": 6,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_flash_attention_for_cpu": 4,
}
"""Operators of attention, with the position of their argument ``is_causal``."""

MATRIX_RULES: dict[str, Callable[[OpCall], OpWork]] = {
    "linear": _linear,
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "_int_mm"), _matmul),
    **dict.fromkeys(("matmul", "linalg_matmul"), _matmul),
    **dict.fromkeys(("addmm", "addmv", "addbmm", "_addmm_activation"), _added_matmul),
    "_scaled_mm": _scaled_matmul,
    "_grouped_mm": _grouped_matmul,
    "_scaled_grouped_mm": _grouped_matmul,
    "transformers.grouped_mm_fallback": _grouped_matmul,
    "baddbmm": _added_matmul,
    "conv1d": _convolution,
    "conv2d": _convolution,
    "conv3d": _convolution,
    "convolution": _convolution,
    "_convolution": _convolution,
    "conv_transpose1d": _convolution,
    "conv_transpose2d": _convolution,
    "conv_transpose3d": _convolution,
    "conv_tbc": _time_batch_channel_convolution,
    **dict.fromkeys(ATTENTION_CAUSAL_AT, _attention),
}
