"""The outputs of a call, as specs.

Common operations have closed formulas, since running them on meta tensors is slow and a search
needs thousands of them. All other operations are run once on meta tensors.
"""

from functools import lru_cache, reduce
from typing import Any

import torch

from autopar.cost_models.calls import OpCall, TensorSpec, resolve
from autopar.cost_models.estimate import CostError

_COMPARISONS = frozenset(
    [
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "logical_and",
        "logical_or",
        "logical_not",
        "logical_xor",
        "isnan",
        "isinf",
    ]
)
_CREATIONS = frozenset(
    [
        "arange",
        "full",
        "zeros",
        "ones",
        "empty",
        "rand",
        "randn",
        "randint",
        "eye",
        "linspace",
        "scalar_tensor",
        "empty_strided",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "new_empty_strided",
        "zeros_like",
        "ones_like",
        "full_like",
        "empty_like",
        "rand_like",
        "randn_like",
        "randint_like",
        "empty_permuted",
        "tril_indices",
        "triu_indices",
    ]
)
_MAYBE_COPIES = frozenset(["reshape", "contiguous", "flatten", "to"])


def is_creation(call: OpCall) -> bool:
    """Whether the call creates a tensor whose values do not depend on other tensors."""
    return call.name in _CREATIONS


@lru_cache(maxsize=1 << 16)
def is_view(call: OpCall) -> bool:
    """Whether the call's outputs share storage with an input, so that no data is moved."""
    if call.name in ("detach", "alias", "lift_fresh"):
        return True
    if not resolve(call.target).is_view:
        return False
    if call.name not in _MAYBE_COPIES:
        return True
    source = call.tensors()[0]
    if call.name == "contiguous":
        return source.is_contiguous
    if call.name == "to":
        return all(out.dtype == source.dtype for out in outputs(call))
    if source.is_contiguous:
        return True
    try:
        _meta(source).view(outputs(call)[0].shape)
    except RuntimeError:
        return False
    return True


@lru_cache(maxsize=1 << 16)
def outputs(call: OpCall) -> tuple[TensorSpec, ...]:
    """Shape, dtype and stride of each output; raises CostError if they depend on data."""
    formula = _FORMULAS.get(call.name)
    if formula is not None:
        return formula(call)
    target = resolve(call.target)
    if torch.Tag.pointwise in target.tags and call.tensors():
        return (_pointwise(call),)
    return _on_meta(call, target)


def broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that ``shapes`` broadcast to; raises CostError if they do not."""
    rank = max((len(shape) for shape in shapes), default=0)
    result = [1] * rank
    for shape in shapes:
        for dim, size in enumerate(shape, start=rank - len(shape)):
            if size != 1 and result[dim] not in (1, size):
                raise CostError(f"shapes {shapes} do not broadcast.")
            if size != 1:
                result[dim] = size
    return tuple(result)


def _promote(specs: tuple[TensorSpec, ...]) -> torch.dtype:
    wide = [spec.dtype for spec in specs if spec.shape] or [spec.dtype for spec in specs]
    return reduce(torch.promote_types, wide)


def _pointwise(call: OpCall) -> TensorSpec:
    specs = call.tensors()
    shape = broadcast([spec.shape for spec in specs])
    dtype = call.argument(len(call.args), "dtype")
    if call.name in _COMPARISONS:
        dtype = torch.bool
    elif call.name == "where":
        dtype = _promote(specs[1:] or specs)
    elif not isinstance(dtype, torch.dtype):
        dtype = _promote(specs)
    # As in TensorIterator, the order of dimensions in memory is kept.
    model = next((s for s in specs if s.shape == shape and 0 not in s.strides), None)
    return TensorSpec(shape, dtype, None if model is None else _dense_stride(model))


def _dense_stride(spec: TensorSpec) -> tuple[int, ...] | None:
    """The dense strides with the same order of dimensions in memory as ``spec``."""
    if spec.is_contiguous:
        return None
    stride = [1] * len(spec.shape)
    expected = 1
    for dim in sorted(range(len(stride)), key=lambda d: (spec.strides[d], -d)):
        stride[dim] = expected
        expected *= max(spec.shape[dim], 1)
    return tuple(stride)


def _clone(call: OpCall) -> tuple[TensorSpec, ...]:
    source = call.tensor(0, "self")
    kept = call.argument(1, "memory_format", torch.preserve_format) == torch.preserve_format
    if kept or source.is_contiguous:
        return (_pointwise(OpCall(call.target, (source,))),)
    if call.argument(1, "memory_format") == torch.contiguous_format:
        return (TensorSpec(source.shape, source.dtype),)
    return _on_meta(call, resolve(call.target))


def _meta(spec: TensorSpec) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device="meta")


def _on_meta(call: OpCall, target: Any) -> tuple[TensorSpec, ...]:
    def build(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            return _meta(value)
        if isinstance(value, tuple):
            return [build(item) for item in value]
        return value

    kwargs = {name: build(value) for name, value in call.kwargs}
    if is_creation(call):
        kwargs["device"] = torch.device("meta")
    try:
        with torch.no_grad():
            result = target(*(build(value) for value in call.args), **kwargs)
    except Exception as error:
        raise CostError(
            f"the output shapes of {call.target} depend on its data: {error}"
        ) from error
    leaves = result if isinstance(result, (tuple, list)) else (result,)
    return tuple(TensorSpec.of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))


def _like_input(call: OpCall) -> tuple[TensorSpec, ...]:
    source = call.tensor(0, "input")
    return (TensorSpec(source.shape, source.dtype),)


def _linear(call: OpCall) -> tuple[TensorSpec, ...]:
    x, weight = call.tensor(0, "input"), call.tensor(1, "weight")
    return (TensorSpec(x.shape[:-1] + weight.shape[:-1], x.dtype),)


def _matmul(call: OpCall) -> tuple[TensorSpec, ...]:
    a, b = call.tensor(0, "self"), call.tensor(1, "other")
    if len(b.shape) == 1:
        return (TensorSpec(a.shape[:-1], a.dtype),)
    if len(a.shape) == 1:
        return (TensorSpec(b.shape[:-2] + b.shape[-1:], a.dtype),)
    batch = broadcast([a.shape[:-2], b.shape[:-2]])
    return (TensorSpec((*batch, a.shape[-2], b.shape[-1]), a.dtype),)


def _added_matmul(call: OpCall) -> tuple[TensorSpec, ...]:
    a, b = call.tensor(1, "mat1"), call.tensor(2, "mat2")
    return (TensorSpec((*a.shape[:-1], b.shape[-1]), a.dtype),)


def _embedding(call: OpCall) -> tuple[TensorSpec, ...]:
    weight, indices = call.tensor(0, "weight"), call.tensor(1, "indices")
    return (TensorSpec(indices.shape + weight.shape[1:], weight.dtype),)


def _attention(call: OpCall) -> tuple[TensorSpec, ...]:
    query, value = call.tensor(0, "query"), call.tensor(2, "value")
    return (TensorSpec((*query.shape[:-1], value.shape[-1]), query.dtype),)


def _dropout(call: OpCall) -> tuple[TensorSpec, ...]:
    source = call.tensor(0, "input")
    return (source, TensorSpec(source.shape, torch.bool))


def _batch_norm(call: OpCall) -> tuple[TensorSpec, ...]:
    source = call.tensor(0, "input")
    statistics = TensorSpec(source.shape[1:2], torch.promote_types(source.dtype, torch.float32))
    count = 4 if call.name.endswith("functional") else 2
    return (TensorSpec(source.shape, source.dtype, source.stride), *(statistics,) * count)


def _cross_entropy(call: OpCall) -> tuple[TensorSpec, ...]:
    logits, target = call.tensor(0, "self"), call.tensor(1, "target")
    unreduced = call.argument(3, "reduction", 1) == 0
    shape = logits.shape[:-1] if len(logits.shape) == 1 else logits.shape[:1] + logits.shape[2:]
    if target.dtype.is_floating_point:
        shape = logits.shape[:1] + logits.shape[2:]
    return (TensorSpec(shape if unreduced else (), logits.dtype),)


def _recurrent(call: OpCall) -> tuple[TensorSpec, ...]:
    if not call.target.endswith(".input"):
        return _on_meta(call, resolve(call.target))
    source, states = call.tensor(0, "input"), call.args[1]
    states = (states,) if isinstance(states, TensorSpec) else states
    hidden = states[0]
    directions = 2 if call.argument(7, "bidirectional") else 1
    size = hidden.shape[-1] * directions
    stride = None
    if call.argument(8, "batch_first"):
        # Computed step by step, and transposed at the end.
        batch, _steps, _ = source.shape
        stride = (size, batch * size, 1)
    out = TensorSpec((*source.shape[:-1], size), source.dtype, stride)
    return (out, *states)


_FORMULAS: dict[str, Any] = {
    "linear": _linear,
    "mm": _matmul,
    "bmm": _matmul,
    "matmul": _matmul,
    "addmm": _added_matmul,
    "baddbmm": _added_matmul,
    "embedding": _embedding,
    "scaled_dot_product_attention": _attention,
    "layer_norm": _like_input,
    "rms_norm": _like_input,
    "group_norm": _like_input,
    "_softmax": _like_input,
    "_log_softmax": _like_input,
    "clone": _clone,
    "native_dropout": _dropout,
    "_native_batch_norm_legit_functional": _batch_norm,
    "_native_batch_norm_legit": _batch_norm,
    "cross_entropy_loss": _cross_entropy,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
}
