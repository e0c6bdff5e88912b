"""What an operation costs on a device: the interface, and the analytical model behind it.

``ComputeModel`` is what the planner asks. ``RooflineModel`` answers for any described device, also
one that is not there; the profiler answers with measurements and falls back on it.
"""

from typing import Protocol

from autopar.cost_models.calls import OpCall, TensorSpec
from autopar.cost_models.cluster import DeviceSpec
from autopar.cost_models.efficiency import TABLES, EfficiencyTable, kernel_time_s
from autopar.cost_models.estimate import OpEstimate, Source
from autopar.cost_models.op_work import bytes_moved, flops, work
from autopar.cost_models.work import Family, Work

__all__ = [
    "ComputeModel",
    "OpCall",
    "RooflineModel",
    "TensorSpec",
    "bytes_moved",
    "flops",
]

_MATRIX_FAMILIES = frozenset(
    (Family.MATMUL, Family.CONVOLUTION, Family.ATTENTION, Family.RECURRENT)
)


class ComputeModel(Protocol):
    """Prices calls on one kind of device."""

    def estimate(self, call: OpCall) -> OpEstimate:
        """Seconds of ``call`` in each direction; CostError where it cannot be priced."""


class RooflineModel:
    """Time is the launches plus the larger of arithmetic and memory traffic, at reachable rates.

    Views cost the device's ``dispatch_s`` and nothing else. Estimates are kept by call.
    """

    def __init__(self, device: DeviceSpec, efficiency: EfficiencyTable | None = None) -> None:
        self.device = device
        self.efficiency = efficiency or TABLES[device.kind]
        self._known: dict[OpCall, OpEstimate] = {}

    def estimate(self, call: OpCall) -> OpEstimate:
        """Seconds of ``call`` in each direction, always ANALYTICAL."""
        known = self._known.get(call)
        if known is None:
            known = self._known[call] = self._estimate(call)
        return known

    def _estimate(self, call: OpCall) -> OpEstimate:
        todo = work(call)
        is_matrix = todo.family in _MATRIX_FAMILIES
        peak = self.device.vector_flops_per_s
        if is_matrix:
            peak = self.device.matrix_flops_per_s(todo.dtype)

        def seconds(part: Work) -> float:
            return kernel_time_s(part, todo.family, peak, self.device, self.efficiency)

        forward_s = seconds(todo.forward) or self.device.dispatch_s
        return OpEstimate(
            forward_s, seconds(todo.input_grad), seconds(todo.weight_grad), Source.ANALYTICAL
        )
