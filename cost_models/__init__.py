"""Cost models of compute, communication and memory; every price carries its source."""

from autopar.cost_models.calibration import Calibration, Uncertainty, calibrate
from autopar.cost_models.calls import OpCall, TensorSpec
from autopar.cost_models.cluster import Cluster
from autopar.cost_models.collective_measure import (
    CollectiveGrid,
    all_measured,
    is_group_of,
    measure_collectives,
    measured_model,
)
from autopar.cost_models.communication import Collective, CommunicationModel
from autopar.cost_models.compute import ComputeModel, RooflineModel
from autopar.cost_models.estimate import CostError, Estimate, OpEstimate, Source
from autopar.cost_models.hardware import DeviceSpec, Level, PeakFlops
from autopar.cost_models.memory import Allocator, Category, GraphMemory, graph_memory
from autopar.cost_models.op_work import bytes_moved, flops
from autopar.cost_models.profiler import Profiler, ProfileSummary
from autopar.cost_models.store import ProfileStore, StoreWarning, default_store_path

__all__ = [
    "Allocator",
    "Calibration",
    "Category",
    "Cluster",
    "Collective",
    "CollectiveGrid",
    "CommunicationModel",
    "ComputeModel",
    "CostError",
    "DeviceSpec",
    "Estimate",
    "GraphMemory",
    "Level",
    "OpCall",
    "OpEstimate",
    "PeakFlops",
    "ProfileStore",
    "ProfileSummary",
    "Profiler",
    "RooflineModel",
    "Source",
    "StoreWarning",
    "TensorSpec",
    "Uncertainty",
    "all_measured",
    "bytes_moved",
    "calibrate",
    "default_store_path",
    "flops",
    "graph_memory",
    "is_group_of",
    "measure_collectives",
    "measured_model",
]
