"""Prices of operations on a device: the interface, and the analytical model.

``ComputeModel`` is the planner's interface. ``RooflineModel`` prices operations on any described
device, present or not; the profiler uses measurements and falls back on it.
"""

from dataclasses import replace
from typing import Protocol

from autopar.cost_models.calls import OpCall, TensorSpec
from autopar.cost_models.efficiency import EfficiencyTable, kernel_time_s, table_of
from autopar.cost_models.estimate import OpEstimate, Source
from autopar.cost_models.gpu_attention import attention_part
from autopar.cost_models.hardware import DeviceSpec
from autopar.cost_models.matrix_work import ATTENTION_CAUSAL_AT
from autopar.cost_models.op_work import bytes_moved, flops, work
from autopar.cost_models.work import Family, OpWork, Work

__all__ = [
    "ComputeModel",
    "OpCall",
    "RooflineModel",
    "TensorSpec",
    "bytes_moved",
    "flops",
    "is_product",
    "peak_flops_per_s",
]

_MATRIX_FAMILIES = frozenset(
    (Family.MATMUL, Family.CONVOLUTION, Family.ATTENTION, Family.RECURRENT)
)
# Depthwise convolutions are PyTorch's own kernels, or cuDNN's without tensor cores.
_CUDNN_FAMILIES = frozenset((Family.CONVOLUTION, Family.RECURRENT))


class ComputeModel(Protocol):
    """Prices calls on one kind of device."""

    def estimate(self, call: OpCall) -> OpEstimate:
        """Seconds of ``call`` in each direction; raises CostError if it cannot be priced."""


class RooflineModel:
    """The roofline: launches plus the larger of arithmetic and memory time, at achievable rates.

    Views cost only the device's ``dispatch_s``. Estimates are cached by call.
    """

    def __init__(self, device: DeviceSpec, efficiency: EfficiencyTable | None = None) -> None:
        self.device = device
        self.efficiency = efficiency or table_of(device)
        self._known: dict[OpCall, OpEstimate] = {}

    def estimate(self, call: OpCall) -> OpEstimate:
        """Seconds of ``call`` in each direction, always ANALYTICAL."""
        known = self._known.get(call)
        if known is None:
            known = self._known[call] = self._estimate(call)
        return known

    def _estimate(self, call: OpCall) -> OpEstimate:
        todo = work(call)
        peak = peak_flops_per_s(todo, self.device)

        def seconds(direction: Work) -> float:
            part = None
            if todo.family == Family.ATTENTION and direction.num_kernels:
                visited = _visited_part(call)
                part = _attention_part(
                    call, self.device, visited, is_backward=direction is todo.input_grad
                )
                direction = replace(direction, flops=round(direction.flops * visited))
            return kernel_time_s(
                direction, todo.family, peak, self.device, self.efficiency, todo.dtype,
                compute_part=part,
            )  # fmt: skip

        found = OpEstimate(
            seconds(todo.forward) or self.device.dispatch_s,
            seconds(todo.input_grad),
            seconds(todo.weight_grad),
            Source.ANALYTICAL,
        )
        for extra in _unfused(call, self.device):
            found = found + self.estimate(extra)
        return found


def is_product(todo: OpWork) -> bool:
    """Whether a call consists of matrix products, which devices have special units for."""
    return todo.family in _MATRIX_FAMILIES


def peak_flops_per_s(todo: OpWork, device: DeviceSpec) -> float:
    """The peak rate of the units that a call runs on."""
    if is_product(todo):
        return device.matrix_flops_per_s(todo.dtype, in_cudnn=todo.family in _CUDNN_FAMILIES)
    return device.vector_flops_per_s


def matrix_units(todo: OpWork, device: DeviceSpec) -> str:
    """The field of `PeakFlops` that has the rate of a product."""
    return device.matrix_units(todo.dtype, in_cudnn=todo.family in _CUDNN_FAMILIES)


def _visited_part(call: OpCall) -> float:
    """The fraction of the scores that a causal kernel computes: those on and below the diagonal."""
    if not call.argument(ATTENTION_CAUSAL_AT[call.name], "is_causal", False):
        return 1.0
    rows = call.tensor(0, "query").shape[-2]
    columns = call.tensor(1, "key").shape[-2]
    diagonal = min(rows, columns)
    visited = diagonal * (diagonal + 1) / 2 + (rows - diagonal) * columns
    return visited / max(rows * columns, 1)


def _attention_part(
    call: OpCall, device: DeviceSpec, visited: float, *, is_backward: bool
) -> float | None:
    """The part of the peak that fused attention reaches, where its kernels were measured."""
    query, key, *_ = call.tensors()
    if device.kind != "cuda" or query.dtype.itemsize != 2:
        return None
    return attention_part(
        device, query.shape, key.shape[-2], visited=visited, is_backward=is_backward,
        is_masked=len(call.tensors()) > 3,
    )  # fmt: skip


def _unfused(call: OpCall, device: DeviceSpec) -> tuple[OpCall, ...]:
    """Extra calls of attention where its kernel is not fused: with dropout on a CPU."""
    if call.name != "scaled_dot_product_attention" or device.kind != "cpu":
        return ()
    dropout = call.argument(4, "dropout_p", 0.0)
    if not dropout:
        return ()
    query, key = call.tensor(0, "query"), call.tensor(1, "key")
    scores = TensorSpec(
        (*query.shape[:-1], key.shape[-2]), query.dtype, requires_grad=query.requires_grad
    )
    return (
        OpCall("aten._softmax.default", (scores, -1, False)),
        OpCall("aten.native_dropout.default", (scores, dropout, True)),
    )
