"""The work of operations that are matrix products at heart."""

from collections.abc import Callable
from dataclasses import replace
from math import prod

from autopar.cost_models.calls import OpCall, TensorSpec
from autopar.cost_models.shapes import outputs
from autopar.cost_models.work import NO_WORK, Family, MatrixShape, OpWork, Work, output_bytes


def _product(
    call: OpCall, a: TensorSpec, b: TensorSpec, shape: MatrixShape, bias: TensorSpec | None
) -> OpWork:
    """``a @ b`` with its two gradients, each a product of the same three sizes.

    A complex multiply-add is four real ones.
    """
    out_bytes, is_complex = output_bytes(call), a.dtype.is_complex
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
        # Torch folds the batch of the left side into its rows.
        return MatrixShape(m=m * batch, n=n, k=a.shape[-1])
    return MatrixShape(m=m, n=n, k=a.shape[-1], batch=batch)


def _grouped_matmul(call: OpCall) -> OpWork:
    """Rows in groups, each times a matrix of its own (the experts of a layer)."""
    rows, weights = call.tensor(0, "self"), call.tensor(1, "mat2")
    if len(rows.shape) == 3 and len(weights.shape) == 3:
        return _product(call, rows, weights, _matmul_shape(rows, weights, rows.shape[0]), None)
    shape = MatrixShape(m=rows.shape[-2], n=weights.shape[-1], k=rows.shape[-1])
    return _product(call, rows, weights, shape, None)


def _added_matmul(call: OpCall) -> OpWork:
    bias, a, b = (call.tensor(i, n) for i, n in enumerate(("self", "mat1", "mat2")))
    batch = a.shape[0] if len(a.shape) == 3 else 1
    shape = MatrixShape(m=a.shape[-2], n=b.shape[-1], k=a.shape[-1], batch=batch)
    return _product(call, a, b, shape, bias)


def _convolution(call: OpCall) -> OpWork:
    """Each output element is a dot product over the input channels of its group and the kernel."""
    x, weight = call.tensor(0, "input"), call.tensor(1, "weight")
    bias = call.argument(2, "bias")
    out = outputs(call)[0]
    if call.name == "convolution":
        transposed, groups = call.argument(6, "transposed"), call.argument(8, "groups")
    else:
        transposed = call.name.startswith("conv_transpose")
        # Either way argument 6: transposed ones put output_padding in dilation's place.
        groups = call.argument(6, "groups", 1)
    source, target = (out, x) if transposed else (x, out)
    channels_in = source.shape[1] // groups
    kernel = prod(weight.shape[2:])
    positions = target.shape[0] * prod(target.shape[2:])
    shape = MatrixShape(
        m=positions, n=target.shape[1] // groups, k=channels_in * kernel, batch=groups
    )
    product = _product(call, x, weight, shape, bias)
    if groups > 1 and channels_in == shape.n == 1:
        # One channel a group is no product: libraries run it on the element-wise units.
        return OpWork(
            family=Family.DEPTHWISE,
            dtype=product.dtype,
            forward=replace(product.forward, matrix=None),
            input_grad=replace(product.input_grad, matrix=None),
            weight_grad=replace(product.weight_grad, matrix=None),
        )
    return OpWork(
        family=Family.CONVOLUTION,
        dtype=product.dtype,
        forward=product.forward,
        input_grad=product.input_grad,
        weight_grad=product.weight_grad,
    )


def _attention(call: OpCall) -> OpWork:
    """Fused attention: two products forward; five backward, as the scores are made again."""
    query, key, value = (call.tensor(i, n) for i, n in enumerate(("query", "key", "value")))
    mask = call.argument(3, "attn_mask")
    batch = prod(query.shape[:-2])
    rows, columns = query.shape[-2], key.shape[-2]
    scores = 2 * batch * rows * columns
    sizes = query.size_bytes + key.size_bytes + value.size_bytes + output_bytes(call)
    mask_bytes = mask.size_bytes if isinstance(mask, TensorSpec) else 0
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


def _lstm(call: OpCall) -> OpWork:
    """Per layer, direction and step: four gates from the step's input and the hidden state."""
    x, states, weights = call.args[0], call.args[1], call.args[2]
    has_bias, num_layers = call.argument(3, "has_biases"), call.argument(4, "num_layers")
    directions = 2 if call.argument(7, "bidirectional") else 1
    steps_dim = 1 if call.argument(8, "batch_first") else 0
    steps = x.shape[steps_dim]
    rows = prod(x.shape[:-1])
    per_cell = len(weights) // (num_layers * directions)
    matrices = [w for w in weights if len(w.shape) == 2]
    total = sum(2 * rows * prod(w.shape) for w in matrices)
    weight_bytes = sum(w.size_bytes for w in weights)
    hidden_bytes = sum(
        rows * weights[cell * per_cell + 1].shape[-1] * x.dtype.itemsize
        for cell in range(num_layers * directions)
    )
    # Gates are written and read at every step, and the recurrent weights are read again.
    forward = Work(
        flops=total,
        size_bytes=x.size_bytes + steps * weight_bytes + 10 * hidden_bytes + output_bytes(call),
        num_kernels=num_layers * directions * (steps + 1),
        matrix=MatrixShape(m=rows // steps, n=matrices[0].shape[0], k=states[0].shape[-1]),
    )
    inputs = any(s.requires_grad for s in (x, *states))
    trained = [w for w in weights if w.requires_grad]
    first_layer = sum(2 * rows * prod(w.shape) for w in matrices[: 2 * directions : 2])
    # Gradients flow through time for either; only the first layer's input is left out without x's.
    through_time = Work(
        flops=total if inputs else total - first_layer,
        size_bytes=forward.size_bytes + 10 * hidden_bytes,
        num_kernels=2 * forward.num_kernels,
        matrix=forward.matrix,
    )
    weight_grad = NO_WORK
    if trained:
        weight_grad = Work(
            flops=sum(2 * rows * prod(w.shape) for w in trained if len(w.shape) == 2),
            size_bytes=x.size_bytes + 10 * hidden_bytes + weight_bytes,
            num_kernels=num_layers * directions * (3 if has_bias else 2),
            matrix=MatrixShape(m=matrices[0].shape[0], n=states[0].shape[-1], k=rows),
        )
    return OpWork(
        family=Family.RECURRENT,
        dtype=x.dtype,
        forward=forward,
        input_grad=through_time if inputs else NO_WORK,
        weight_grad=weight_grad if inputs or not trained else weight_grad + through_time,
    )


MATRIX_RULES: dict[str, Callable[[OpCall], OpWork]] = {
    "linear": _linear,
    "mm": _matmul,
    "bmm": _matmul,
    "matmul": _matmul,
    "addmm": _added_matmul,
    "_grouped_mm": _grouped_matmul,
    "grouped_mm_fallback": _grouped_matmul,  # of transformers
    "baddbmm": _added_matmul,
    "conv1d": _convolution,
    "conv2d": _convolution,
    "conv3d": _convolution,
    "convolution": _convolution,
    "conv_transpose1d": _convolution,
    "conv_transpose2d": _convolution,
    "conv_transpose3d": _convolution,
    "scaled_dot_product_attention": _attention,
    "lstm": _lstm,
}
