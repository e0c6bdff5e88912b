"""The work of memory-bound operations: element-wise, norms, softmax, lookups, views."""

from collections.abc import Callable
from dataclasses import replace

from autopar.cost_models.calls import OpCall, TensorSpec
from autopar.cost_models.shapes import outputs
from autopar.cost_models.work import (
    NO_WORK,
    Family,
    OpWork,
    Work,
    arithmetic_dtype,
    generic,
    output_bytes,
    sides,
)

# Nominal floating-point operations per element; 1 if not listed.
ELEMENT_FLOPS = {
    "div": 4, "reciprocal": 4, "sqrt": 4, "rsqrt": 4, "exp": 8, "log": 8, "erf": 12, "tanh": 12,
    "sigmoid": 10, "silu": 11, "gelu": 14, "sin": 12, "cos": 12, "pow": 4, "softplus": 16,
    "mish": 24, "log_sigmoid_forward": 16, "elu": 9,
}  # fmt: skip


# Their gradients are a few products with the output, however expensive the function is.
_GRADIENT_FROM_OUTPUT = frozenset(("tanh", "sigmoid", "exp", "sqrt", "rsqrt", "reciprocal"))


def pointwise_work(call: OpCall) -> OpWork:
    per_element = ELEMENT_FLOPS.get(call.name, 1)
    # The gradient of a product with a scalar needs no tensor of the forward pass.
    scaled = call.name in ("mul", "div") and len(call.tensors()) == 1
    base = generic(call, Family.POINTWISE, per_element=per_element, saved=not scaled)
    if call.name in _GRADIENT_FROM_OUTPUT:
        cheap = generic(call, Family.POINTWISE, per_element=2)
        return replace(base, input_grad=cheap.input_grad, weight_grad=cheap.weight_grad)
    if call.name not in ("add", "sub", "rsub", "neg", "alias"):
        return base
    # The gradient of a sum passes through; only broadcast operands need a sum, of one kernel.
    out = outputs(call)[0]
    inputs, weights = sides(call.tensors())

    def gradient(side: list[TensorSpec]) -> Work:
        reduced = [s for s in side if s.shape != out.shape]
        return Work(
            flops=out.num_elements * len(reduced),
            size_bytes=sum(out.size_bytes + s.size_bytes for s in reduced),
            num_kernels=len(reduced),
        )

    return OpWork(
        family=Family.POINTWISE,
        dtype=base.dtype,
        forward=base.forward,
        input_grad=gradient(inputs),
        weight_grad=gradient(weights),
    )


def view_work(call: OpCall) -> OpWork:
    """No work forward; the gradient of a selection is padded, that of an expansion is summed."""
    source = call.tensors()[0]
    backward = NO_WORK
    if call.name in ("slice", "select", "narrow", "diagonal", "as_strided", "unfold"):
        part = output_bytes(call)
        backward = Work(size_bytes=source.size_bytes + 2 * part, num_kernels=2)
    elif call.name in ("split", "split_with_sizes", "chunk", "unbind"):
        backward = Work(size_bytes=2 * source.size_bytes, num_kernels=1)
    elif call.name in ("expand", "expand_as", "broadcast_to"):
        out = outputs(call)[0]
        if out.num_elements != source.num_elements:
            repeated = out.num_elements * out.dtype.itemsize
            backward = Work(
                flops=out.num_elements, size_bytes=repeated + source.size_bytes, num_kernels=1
            )
    inputs, weights = sides((source,))
    return OpWork(
        family=Family.VIEW,
        dtype=arithmetic_dtype(call),
        forward=NO_WORK,
        input_grad=backward if inputs else NO_WORK,
        weight_grad=backward if weights else NO_WORK,
    )


def _normalization(call: OpCall) -> OpWork:
    """Layer, group, batch and RMS norms: statistics and scaling in one kernel."""
    x = call.tensor(0, "input")
    small = [s for s in call.tensors()[1:] if s.dtype.is_floating_point]
    small_bytes = sum(s.size_bytes for s in small)
    forward = Work(
        flops=8 * x.num_elements,
        size_bytes=2 * x.size_bytes + small_bytes,
        num_kernels=1,
    )
    weights = [s for s in small if s.requires_grad]
    return OpWork(
        family=Family.NORMALIZATION,
        dtype=x.dtype,
        forward=forward,
        input_grad=Work(
            flops=10 * x.num_elements, size_bytes=3 * x.size_bytes + small_bytes, num_kernels=1
        )
        if x.requires_grad
        else NO_WORK,
        weight_grad=Work(
            flops=4 * x.num_elements, size_bytes=2 * x.size_bytes + small_bytes, num_kernels=1
        )
        if weights
        else NO_WORK,
    )


def _softmax(call: OpCall) -> OpWork:
    """One pass over the input forward, one over the output and its gradient backward."""
    return generic(call, Family.SOFTMAX, per_element=12)


def _cross_entropy(call: OpCall) -> OpWork:
    """A log-softmax and a lookup of the targets; backward, the gradient of the softmax."""
    logits, target = call.tensor(0, "self"), call.tensor(1, "target")
    forward = Work(
        flops=12 * logits.num_elements,
        size_bytes=2 * logits.size_bytes + target.size_bytes,
        num_kernels=2,
    )
    backward = Work(
        flops=12 * logits.num_elements,
        size_bytes=4 * logits.size_bytes + target.size_bytes,
        num_kernels=3,
    )
    return OpWork(
        family=Family.SOFTMAX,
        dtype=logits.dtype,
        forward=forward,
        input_grad=backward if logits.requires_grad else NO_WORK,
    )


def _nll_loss(call: OpCall) -> OpWork:
    """Reads one element per row; the gradient is a table of zeros with these elements."""
    table, target = call.tensor(0, "self"), call.tensor(1, "target")
    picked = target.num_elements * table.dtype.itemsize
    backward = Work(size_bytes=table.size_bytes + picked, num_kernels=2)
    return OpWork(
        family=Family.INDEXING,
        dtype=table.dtype,
        forward=Work(
            flops=target.num_elements, size_bytes=target.size_bytes + picked, num_kernels=1
        ),
        input_grad=backward if table.requires_grad else NO_WORK,
    )


def _dropout(call: OpCall) -> OpWork:
    """A random mask and a product forward, a product with the saved mask backward."""
    x = call.tensor(0, "input")
    mask_bytes = x.num_elements
    trains = bool(call.argument(2, "train", True))
    forward = Work(
        flops=(12 if trains else 0) * x.num_elements,
        size_bytes=2 * x.size_bytes + mask_bytes,
        num_kernels=1,
    )
    backward = Work(
        flops=2 * x.num_elements, size_bytes=2 * x.size_bytes + mask_bytes, num_kernels=1
    )
    return OpWork(
        family=Family.RANDOM if trains else Family.COPY,
        dtype=x.dtype,
        forward=forward,
        input_grad=backward if x.requires_grad else NO_WORK,
    )


def _lookup(call: OpCall) -> OpWork:
    """Reads and writes rows once; the gradient is a table of zeros to which rows are added."""
    table = call.tensors()[0]
    others = call.tensors()[1:]
    moved = output_bytes(call)
    index_bytes = sum(s.size_bytes for s in others)
    forward = Work(size_bytes=2 * moved + index_bytes, num_kernels=1)
    backward = Work(
        flops=moved // table.dtype.itemsize,
        size_bytes=table.size_bytes + 3 * moved + index_bytes,
        num_kernels=2,
    )
    return _of_table(table, forward, backward)


def _embedding_bag(call: OpCall) -> OpWork:
    """Reads and sums rows; the gradient is a table of zeros to which rows are added."""
    table, index = call.tensor(0, "weight"), call.tensor(1, "indices")
    rows = index.num_elements * table.shape[1]
    moved = output_bytes(call) + rows * table.dtype.itemsize + index.size_bytes
    backward = Work(flops=rows, size_bytes=table.size_bytes + moved, num_kernels=2)
    return _of_table(table, Work(flops=rows, size_bytes=moved, num_kernels=1), backward)


def _of_table(table: TensorSpec, forward: Work, backward: Work) -> OpWork:
    return OpWork(
        family=Family.INDEXING,
        dtype=table.dtype,
        forward=forward,
        input_grad=backward if table.requires_grad and not table.is_parameter else NO_WORK,
        weight_grad=backward if table.requires_grad and table.is_parameter else NO_WORK,
    )


def _scatter(call: OpCall) -> OpWork:
    """A copy of the table, into which elements are written."""
    return generic(call, Family.INDEXING, per_element=0, saved=False)


def _reduction(call: OpCall) -> OpWork:
    """Reads the input once; the gradient has the size of the input."""
    base = generic(call, Family.REDUCTION, per_element=1)
    out_bytes = output_bytes(call)
    inputs, weights = sides(call.tensors())
    # The gradient of a sum is an expanded view, that of a mean a division before that.
    simple = call.name in ("sum", "mean")

    def gradient(side: list[TensorSpec]) -> Work:
        if not side:
            return NO_WORK
        if simple:
            return Work(size_bytes=2 * out_bytes, num_kernels=1)
        size_bytes = sum(2 * s.size_bytes for s in side) + out_bytes
        return Work(size_bytes=size_bytes, num_kernels=1)

    return OpWork(
        family=Family.REDUCTION,
        dtype=base.dtype,
        forward=base.forward,
        input_grad=gradient(inputs),
        weight_grad=gradient(weights),
    )


def _concatenation(call: OpCall) -> OpWork:
    """A copy forward; backward, views of the gradient."""
    base = generic(call, Family.COPY, per_element=0)
    return OpWork(family=Family.COPY, dtype=base.dtype, forward=base.forward)


def _pooling(call: OpCall) -> OpWork:
    """Reads every window once forward; the gradient is spread over the input backward."""
    return generic(call, Family.REDUCTION, per_element=4, saved=False)


_NORMS = [
    "layer_norm",
    "native_layer_norm",
    "group_norm",
    "native_group_norm",
    "rms_norm",
    "_fused_rms_norm",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
    "native_batch_norm",
    "batch_norm",
    "cudnn_batch_norm",
]
_REDUCTIONS = [
    "sum",
    "mean",
    "amax",
    "amin",
    "max",
    "min",
    "prod",
    "var",
    "std",
    "var_mean",
    "argmax",
    "argmin",
    "any",
    "all",
    "norm",
    "logsumexp",
    "linalg_vector_norm",
    "cumsum",
]
_LOOKUPS = ["embedding", "gather", "index", "index_select", "take_along_dim"]
_SCATTERS = ["scatter", "scatter_add", "index_put", "index_add", "masked_scatter", "slice_scatter"]
_POOLS = [
    "max_pool2d",
    "max_pool2d_with_indices",
    "avg_pool2d",
    "adaptive_avg_pool2d",
    "_adaptive_avg_pool2d",
    "adaptive_avg_pool1d",
    "avg_pool1d",
]

LAYER_RULES: dict[str, Callable[[OpCall], OpWork]] = {
    **dict.fromkeys(_NORMS, _normalization),
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax"), _softmax),
    **dict.fromkeys(_REDUCTIONS, _reduction),
    **dict.fromkeys(_LOOKUPS, _lookup),
    **dict.fromkeys(_SCATTERS, _scatter),
    **dict.fromkeys(_POOLS, _pooling),
    **dict.fromkeys(("cat", "stack", "concat"), _concatenation),
    **dict.fromkeys(("nll_loss", "nll_loss_forward", "nll_loss_nd"), _nll_loss),
    "native_dropout": _dropout,
    "embedding_bag": _embedding_bag,
    "cross_entropy_loss": _cross_entropy,
}
