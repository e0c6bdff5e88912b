"""Real tensors for a call, with values that are valid for its operation.

Indices are within their table, class targets are classes, offsets of bags and groups increase,
variances are positive, arguments of logarithms and roots are in their domain, probabilities are
between 0 and 1. Other floating-point values are normally distributed.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from autopar.cost_models.calls import OpCall, TensorSpec, resolve
from autopar.cost_models.shapes import is_creation

_NUM_DRAWN = 1 << 16
_POSITIVE_DOMAIN = frozenset(("sqrt", "rsqrt", "log", "log2", "log10", "log1p", "pow", "div"))
_PROBABILITIES = frozenset(("binary_cross_entropy",))


class RealCall:
    """A call on real tensors of a device, which can be run repeatedly.

    ``inputs`` and ``parameters`` are its floating-point tensors that require a gradient.
    """

    def __init__(self, call: OpCall, device: torch.device, seed: int = 0) -> None:
        self._target = resolve(call.target)
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._device = device
        self._bounds = _index_bounds(call)
        self._positive = _positive_tensors(call)
        self._call = call
        self._position = 0
        self.inputs: list[torch.Tensor] = []
        self.parameters: list[torch.Tensor] = []
        self.args = [self._build(value) for value in call.args]
        self.kwargs = {name: self._build(value) for name, value in call.kwargs}
        if is_creation(call):
            self.kwargs["device"] = device

    def __call__(self) -> Any:
        return self._target(*self.args, **self.kwargs)

    def _build(self, value: Any) -> Any:
        if isinstance(value, TensorSpec):
            return self._tensor(value)
        if isinstance(value, tuple):
            return [self._build(item) for item in value]
        return value

    def _tensor(self, spec: TensorSpec) -> torch.Tensor:
        position = self._position
        self._position += 1
        reach = sum((n - 1) * t for n, t in zip(spec.shape, spec.strides)) + 1
        length = 0 if 0 in spec.shape else reach
        values = self._values(length, spec.dtype, position)
        tensor = values.as_strided(spec.shape, spec.strides)
        if spec.requires_grad and spec.dtype.is_floating_point:
            (self.parameters if spec.is_parameter else self.inputs).append(tensor)
        return tensor

    def _values(self, length: int, dtype: torch.dtype, position: int) -> torch.Tensor:
        options: dict[str, Any] = {"device": self._device, "generator": self._generator}
        if dtype == torch.bool:
            return torch.rand(length, **options) < 0.9
        if position == 2 and self._call.name in _PARTS:
            rows = _PARTS[self._call.name](self._call)
            borders = torch.linspace(0, rows, length + 1, device=self._device)
            starts = self._call.name == "embedding_bag"
            return (borders[:-1] if starts else borders[1:]).to(dtype)
        if not (dtype.is_floating_point or dtype.is_complex):
            high = self._bounds.get(position, 2)
            return torch.randint(0, max(high, 1), (length,), dtype=dtype, **options)
        values = _normal(length, options)
        if self._call.name in _PROBABILITIES:
            values = values.sigmoid()
        if position in self._positive:
            values = values.abs() + 0.5
        return values.to(dtype)


def normal_like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, dtype and layout with normal values, the same ones each time."""
    values = torch.empty_like(tensor)
    block = _drawn(tensor.device)
    memory = values.as_strided((values.numel(),), (1,))
    whole = len(memory) // _NUM_DRAWN * _NUM_DRAWN
    memory[:whole].view(-1, _NUM_DRAWN).copy_(block)
    memory[whole:].copy_(block[: len(memory) - whole])
    return values


@lru_cache(maxsize=8)
def _drawn(device: torch.device) -> torch.Tensor:
    return torch.randn(_NUM_DRAWN, device=device)


def _normal(length: int, options: dict[str, Any]) -> torch.Tensor:
    """Normal values; a block of them is repeated, since drawing many takes longer than most ops."""
    block = torch.randn(min(length, _NUM_DRAWN), **options)
    return block if length <= _NUM_DRAWN else block.repeat(-(-length // _NUM_DRAWN))[:length]


def _index_bounds(call: OpCall) -> dict[int, int]:
    """The exclusive upper bounds of integer tensors, by position among the tensors."""
    rule = _BOUND_RULES.get(call.name)
    return rule(call) if rule is not None else {}


def _embedding_bounds(call: OpCall) -> dict[int, int]:
    return {1: call.tensor(0, "weight").shape[0]}


def _class_bounds(call: OpCall) -> dict[int, int]:
    scores = call.tensor(0, "self").shape
    return {1: scores[1] if len(scores) > 1 else scores[0]}


def _along_dim_bounds(call: OpCall) -> dict[int, int]:
    return {1: call.tensor(0, "self").shape[call.argument(1, "dim")]}


def _index_list_bounds(call: OpCall) -> dict[int, int]:
    """Bounds for a list of indices, one per dimension; a mask of n dimensions covers n of them."""
    sizes = call.tensor(0, "self").shape
    bounds = {}
    position, dim = 1, 0
    for index in call.argument(1, "indices"):
        if index is None:
            dim += 1
            continue
        is_mask = index.dtype == torch.bool
        if not is_mask:
            bounds[position] = sizes[dim]
        dim += len(index.shape) if is_mask else 1
        position += 1
    return bounds


_PARTS = {
    "embedding_bag": lambda call: call.tensor(1, "indices").num_elements,
    "_grouped_mm": lambda call: call.tensor(0, "self").shape[0],
    "transformers.grouped_mm_fallback": lambda call: call.tensor(0, "input").shape[0],
}
"""For calls whose third tensor has offsets into another one: the length of that one."""
_BOUND_RULES: dict[str, Callable[[OpCall], dict[int, int]]] = {
    "embedding": _embedding_bounds,
    "embedding_bag": _embedding_bounds,
    "cross_entropy_loss": _class_bounds,
    "nll_loss": _class_bounds,
    "nll_loss_forward": _class_bounds,
    "nll_loss_nd": _class_bounds,
    "gather": _along_dim_bounds,
    "index_select": _along_dim_bounds,
    "scatter": _along_dim_bounds,
    "scatter_add": _along_dim_bounds,
    "index_add": _along_dim_bounds,
    "index": _index_list_bounds,
    "index_put": _index_list_bounds,
    "_unsafe_index": _index_list_bounds,
    "autopar.routed_product": lambda call: {2: call.tensor(1, "weight").shape[0]},
}


def _positive_tensors(call: OpCall) -> frozenset[int]:
    count = len(call.tensors())
    if call.name in _POSITIVE_DOMAIN:
        return frozenset(range(count))
    if "batch_norm" in call.name:
        # Input, weight, bias, running mean, running variance: those that are given.
        return frozenset(range(1, count))
    if call.name == "_fused_adamw_":
        return frozenset({3})  # the mean of the squared gradients
    return frozenset()
