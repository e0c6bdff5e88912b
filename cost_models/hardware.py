"""Descriptions of hardware: a kind of device, and levels of links between devices.

They are frozen and hashable, and refuse impossible values. `autopar.cost_models.cluster` makes them
from presets, from the local machine, and from JSON.
"""

import math
from typing import Literal

import msgspec

from autopar.base.documents import shown
from autopar.base.errors import ClusterError
from autopar.cost_models.described import (
    is_finite,
    require_counts,
    require_not_negative,
    require_positive,
    require_types,
)


class PeakFlops(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Peak rate of matrix products per dtype, in floating-point operations per second.

    A dtype with 0 has no units of its own and runs at float32's rate. ``vector`` is the rate of
    everything else (0: the same as float32).
    """

    float32: float
    float64: float = 0.0
    tensor_float32: float = 0.0
    float16: float = 0.0
    bfloat16: float = 0.0
    float8: float = 0.0
    vector: float = 0.0

    def __post_init__(self) -> None:
        require_types("peak_flops_per_s", self)


_DTYPE_FIELDS = {
    "torch.float64": "float64",
    "torch.float16": "float16",
    "torch.bfloat16": "bfloat16",
    "torch.float8_e4m3fn": "float8",
    "torch.float8_e5m2": "float8",
}
"""By the dtype's name, so that reading a description imports no torch."""


class DeviceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A device.

    ``memory_bandwidth_bytes_per_s`` is of reads and writes together. ``kernel_launch_s`` is the
    minimum time from one kernel launch to the next; ``dispatch_s`` is the cost of an operation that
    launches no kernel (a view). Kernels whose data fits ``cache_bytes`` move it at
    ``cache_bandwidth_bytes_per_s`` (0: no faster than memory). ``host_bandwidth_bytes_per_s`` is
    that of copies between the device and pinned memory of its host, each way (0: unknown).
    ``num_units`` is the number of
    multiprocessors (GPU) or cores (CPU) that share an operation. ``num_processes`` is the number of
    workers that share the host's memory and cores (CPU). ``allow_tensor_float32`` is PyTorch's
    setting for float32 matrix products, ``allow_tensor_float32_in_cudnn`` that for convolutions and
    recurrent layers, both with PyTorch's defaults. ``source`` says where the figures come from.
    """

    name: str
    kind: Literal["cuda", "cpu"]
    peak_flops_per_s: PeakFlops
    memory_bandwidth_bytes_per_s: float
    memory_bytes: int
    kernel_launch_s: float
    dispatch_s: float = 0.0
    num_units: int = 1
    num_threads: int = 1
    num_processes: int = 1
    cache_bytes: int = 0
    cache_bandwidth_bytes_per_s: float = 0.0
    host_bandwidth_bytes_per_s: float = 0.0
    allow_tensor_float32: bool = False
    allow_tensor_float32_in_cudnn: bool = True
    source: str = "the user's description"

    def __post_init__(self) -> None:
        require_types("the device", self)
        peaks = {
            f"peak_flops_per_s.{field}": peak
            for field, peak in msgspec.structs.asdict(self.peak_flops_per_s).items()
        }
        require_not_negative(self.name, peaks)
        require_positive(
            self.name,
            {
                "peak_flops_per_s.float32": self.peak_flops_per_s.float32,
                "memory_bandwidth_bytes_per_s": self.memory_bandwidth_bytes_per_s,
                "memory_bytes": self.memory_bytes,
            },
        )
        require_counts(
            self.name,
            {
                "num_units": self.num_units,
                "num_threads": self.num_threads,
                "num_processes": self.num_processes,
            },
        )
        require_not_negative(
            self.name,
            {
                "kernel_launch_s": self.kernel_launch_s,
                "dispatch_s": self.dispatch_s,
                "cache_bytes": self.cache_bytes,
                "cache_bandwidth_bytes_per_s": self.cache_bandwidth_bytes_per_s,
                "host_bandwidth_bytes_per_s": self.host_bandwidth_bytes_per_s,
            },
        )

    def matrix_flops_per_s(self, dtype: object, *, in_cudnn: bool = False) -> float:
        """Peak rate of matrix products in a torch dtype, in floating-point operations per second.

        ``in_cudnn``: for operations that cuDNN runs on a CUDA device.
        """
        peak: float = getattr(self.peak_flops_per_s, self.matrix_units(dtype, in_cudnn=in_cudnn))
        return peak

    def matrix_units(self, dtype: object, *, in_cudnn: bool = False) -> str:
        """The field of `PeakFlops` that has the rate of matrix products in a torch dtype."""
        peaks = self.peak_flops_per_s
        allowed = self.allow_tensor_float32_in_cudnn if in_cudnn else self.allow_tensor_float32
        if str(dtype) == "torch.float32" and allowed and peaks.tensor_float32:
            return "tensor_float32"
        field = _DTYPE_FIELDS.get(str(dtype), "float32")
        return field if getattr(peaks, field) else "float32"

    @property
    def vector_flops_per_s(self) -> float:
        """Peak rate of everything that is not a matrix product."""
        return self.peak_flops_per_s.vector or self.peak_flops_per_s.float32


class Level(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A level of links between ``size`` units: devices at the first level, nodes at the next.

    ``latency_s`` is the time of a step between two units. ``bandwidth_bytes_per_s`` is that of a
    unit's link in one direction: at the second level, of a whole node. A single device can use at
    most ``device_bandwidth_bytes_per_s`` of it (0: all of it). ``total_bandwidth_bytes_per_s`` is
    that of all units together if they share a medium, such as a bus or the memory of a host (0:
    every unit has its own link). ``efficiency`` is the fraction of these bandwidths that large
    collectives reach, ``message_efficiency`` that of a message between two devices (0: the same). A
    collective of ``ramp_bytes`` takes twice as long as at that rate (0: the rate holds for all
    sizes). ``in_node`` says that a level other than the first is inside a node too, ``is_direct``
    that devices reach the adapters of a network through switches of PCI Express alone, so that NCCL
    uses its protocol LL128.
    """

    name: str
    size: int
    latency_s: float
    bandwidth_bytes_per_s: float
    device_bandwidth_bytes_per_s: float = 0.0
    total_bandwidth_bytes_per_s: float = 0.0
    efficiency: float = 1.0
    message_efficiency: float = 0.0
    ramp_bytes: float = 0.0
    in_node: bool = False
    is_direct: bool = False
    source: str = "the user's description"

    def __post_init__(self) -> None:
        require_types(f"level {self.name!r}", self)
        require_counts(f"level {self.name!r}", {"size": self.size})
        require_positive(
            f"level {self.name!r}",
            {
                "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s,
                "efficiency": self.efficiency,
            },
        )
        require_not_negative(
            f"level {self.name!r}",
            {
                "latency_s": self.latency_s,
                "device_bandwidth_bytes_per_s": self.device_bandwidth_bytes_per_s,
                "total_bandwidth_bytes_per_s": self.total_bandwidth_bytes_per_s,
                "ramp_bytes": self.ramp_bytes,
                "message_efficiency": self.message_efficiency,
            },
        )
        for field in ("efficiency", "message_efficiency"):
            value = getattr(self, field)
            if value > 1:
                raise ClusterError(
                    f"level {self.name!r} has {field} {shown(value)}; it is the fraction of the "
                    f"bandwidth that is reached, so at most 1. For example, write {field}=0.8."
                )


class Hardware(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``num_devices`` equal devices joined by ``levels`` of links, innermost first.

    Rank r is in node ``r // devices_per_node``. ``memory_reserve_bytes`` is the memory of each
    device that the framework itself holds (contexts, communicators, library workspaces), which no
    plan may use. ``collective_launch_s`` is the fixed cost of a collective. ``overlap_slowdown`` is
    the factor by which computation is slower while a collective overlaps with it.
    """

    device: DeviceSpec
    levels: tuple[Level, ...] = ()
    memory_reserve_bytes: int = 0
    collective_launch_s: float = 0.0
    overlap_slowdown: float = 1.0
    backend: Literal["nccl", "gloo"] = "nccl"

    def __post_init__(self) -> None:
        require_types("the cluster", self)
        require_not_negative(
            "the cluster",
            {
                "memory_reserve_bytes": self.memory_reserve_bytes,
                "collective_launch_s": self.collective_launch_s,
            },
        )
        if self.levels and self.device.kind == "cpu" and self.backend == "nccl":
            raise ClusterError(
                "backend='nccl' does not work between CPUs; write backend='gloo' and set "
                "overlap_slowdown too: Cluster.preset('cpu') has typical figures."
            )
        if not (is_finite(self.overlap_slowdown) and self.overlap_slowdown >= 1):
            raise ClusterError(
                f"overlap_slowdown is {shown(self.overlap_slowdown)}; it is the factor by which "
                "computation is slower during a collective, so at least 1. Write "
                "overlap_slowdown=1.0 for no slowdown."
            )
        if self.memory_reserve_bytes >= self.device.memory_bytes:
            raise ClusterError(
                f"memory_reserve_bytes={self.memory_reserve_bytes} leaves nothing of "
                f"{self.device.name}'s {self.device.memory_bytes} bytes. Lower it."
            )

    @property
    def num_devices(self) -> int:
        return math.prod(level.size for level in self.levels)

    @property
    def devices_per_node(self) -> int:
        """The number of devices of the levels that are inside a node."""
        return math.prod(level.size for level in self.levels[: self.num_node_levels])

    @property
    def num_node_levels(self) -> int:
        """The number of levels inside a node: the first, and those after it that say so."""
        beyond = (i for i, level in enumerate(self.levels) if i and not level.in_node)
        return next(beyond, len(self.levels))

    @property
    def num_nodes(self) -> int:
        return self.num_devices // self.devices_per_node

    @property
    def usable_memory_bytes(self) -> int:
        """Bytes of each device's memory that a plan may use."""
        return self.device.memory_bytes - self.memory_reserve_bytes


def is_count(value: object) -> bool:
    """Whether ``value`` is an int of at least 1, and not a bool."""
    return type(value) is int and value >= 1
