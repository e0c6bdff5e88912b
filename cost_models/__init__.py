"""Cost models of compute, communication and memory; every price carries its source.

Names are imported on first use, so that a cluster is read without torch; see ``__init__.pyi``.
"""

from importlib import import_module
from typing import Any

_PLACES = {
    "Allocator": "allocator",
    "Calibration": "calibration",
    "Category": "allocator",
    "Cluster": "cluster",
    "Collective": "communication",
    "CollectiveGrid": "collective_measure",
    "CommunicationModel": "communication",
    "ComputeModel": "compute",
    "CostError": "estimate",
    "DeviceSpec": "hardware",
    "Estimate": "estimate",
    "GraphMemory": "memory",
    "Level": "hardware",
    "OpCall": "calls",
    "OpEstimate": "estimate",
    "PeakFlops": "hardware",
    "ProfileStore": "store",
    "ProfileSummary": "profiler",
    "Profiler": "profiler",
    "RooflineModel": "compute",
    "Source": "estimate",
    "StoreWarning": "store",
    "TensorSpec": "calls",
    "Uncertainty": "calibration",
    "all_measured": "collective_measure",
    "bytes_moved": "op_work",
    "calibrate": "calibration",
    "default_store_path": "store",
    "flops": "op_work",
    "graph_memory": "memory",
    "is_group_of": "collective_measure",
    "measure_collectives": "collective_measure",
    "measured_model": "collective_measure",
}

__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    return found
