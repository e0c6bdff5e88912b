"""Prices of compute, communication and memory, each with its source."""

from autopar.cost_models.calls import OpCall, TensorSpec
from autopar.cost_models.cluster import Cluster, DeviceSpec, Level, PeakFlops
from autopar.cost_models.communication import Collective, CommunicationModel
from autopar.cost_models.compute import ComputeModel, RooflineModel
from autopar.cost_models.estimate import CostError, Estimate, OpEstimate, Source
from autopar.cost_models.op_work import bytes_moved, flops

__all__ = [
    "Cluster",
    "Collective",
    "CommunicationModel",
    "ComputeModel",
    "CostError",
    "DeviceSpec",
    "Estimate",
    "Level",
    "OpCall",
    "OpEstimate",
    "PeakFlops",
    "RooflineModel",
    "Source",
    "TensorSpec",
    "bytes_moved",
    "flops",
]
