"""Similarity of calls: whether they run the same kernels, and how far their sizes differ."""

import math
from collections.abc import Iterable

from autopar.cost_models.calls import OpCall, TensorSpec, map_tensors
from autopar.cost_models.op_work import work

Position = tuple[float, float]


def position_of(call: OpCall) -> Position:
    """The logarithms of a call's operations and bytes."""
    forward = work(call).forward
    return (math.log(max(forward.flops, 1)), math.log(max(forward.size_bytes, 1)))


def pattern(call: OpCall) -> OpCall:
    """The call without its sizes: calls of one pattern run the same kernels."""

    def blank(spec: TensorSpec) -> TensorSpec:
        rank = len(spec.shape)
        order = None if spec.is_contiguous else _order(spec)
        return TensorSpec((0,) * rank, spec.dtype, order, spec.requires_grad, spec.is_parameter)

    blanked = map_tensors(call, blank)
    return OpCall(
        blanked.target,
        tuple(_without_sizes(value) for value in blanked.args),
        tuple((name, _without_sizes(value)) for name, value in blanked.kwargs),
    )


def _order(spec: TensorSpec) -> tuple[int, ...]:
    """The rank of each dimension by stride; -1 if it is expanded."""
    ascending = sorted(range(len(spec.shape)), key=lambda dim: spec.strides[dim])
    ranks = {dim: rank for rank, dim in enumerate(ascending)}
    return tuple(-1 if spec.strides[dim] == 0 else ranks[dim] for dim in ranks)


def _without_sizes(value: object) -> object:
    """Drop lists of numbers (mostly sizes), and keep single numbers (mostly options)."""
    if isinstance(value, tuple):
        if value and all(type(item) is int for item in value):
            return len(value)
        return tuple(_without_sizes(item) for item in value)
    return value


class Thinned:
    """Thins out calls: no two of one pattern are within ``factor`` in operations and bytes."""

    def __init__(self, factor: float) -> None:
        self._reach = math.log(factor)
        self._taken: dict[OpCall, list[Position]] = {}

    def take(self, calls: Iterable[OpCall]) -> list[OpCall]:
        """The calls, in order, that are far from all taken before."""
        return [call for call in calls if self._is_far(call)]

    def _is_far(self, call: OpCall) -> bool:
        here = position_of(call)
        taken = self._taken.setdefault(pattern(call), [])
        is_near = any(all(abs(a - b) < self._reach for a, b in zip(here, other)) for other in taken)
        if not is_near:
            taken.append(here)
        return not is_near
