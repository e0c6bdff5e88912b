"""What a device's memory takes beyond the bytes of tensors: rounding, fragmentation, libraries.

In: bytes of tensors by category. Out: the bytes of the device, or of a CPU process.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from autopar.cost_models.hardware import DeviceSpec


class Category(StrEnum):
    """Categories of memory use."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    BUFFERS = "buffers"
    INPUTS = "inputs"
    ACTIVATIONS = "activations"
    COMMUNICATION = "communication"
    WORKSPACE = "workspace"

    __hash__ = str.__hash__  # as of its value, and much faster than an enumeration's


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocator:
    """Rounds sizes up to ``granule_bytes``; ``fragmentation`` is the fraction of the peak lost."""

    granule_bytes: int = 1
    fragmentation: float = 0.0

    def rounded(self, size_bytes: int) -> int:
        """The allocated size of a storage of ``size_bytes``."""
        return -(-size_bytes // self.granule_bytes) * self.granule_bytes


# PyTorch's caching allocator rounds to 512 bytes; its CPU allocator aligns to 64. The fragmentation
# of the former is assumed, not measured, and not part of a cluster's reserve (contexts,
# communicators and workspaces). That of the latter is in `resident_bytes`.
CUDA_ALLOCATOR = Allocator(granule_bytes=512, fragmentation=0.05)
CPU_ALLOCATOR = Allocator(granule_bytes=64)


def allocator_of(device: DeviceSpec) -> Allocator:
    return CPU_ALLOCATOR if device.kind == "cpu" else CUDA_ALLOCATOR


CPU_LIBRARIES_BYTES = 26 << 20
CPU_HELD_BACK = 0.17
"""Memory that libraries take in the first step, and the fraction of freed memory that is retained.

Freed are activations, workspaces and gradients; the heap of the process keeps holes. Both are
fitted to the growth of processes in benchmarks/fidelity.py.
"""
_FREED = (Category.ACTIVATIONS, Category.WORKSPACE, Category.GRADIENTS)


def resident_bytes(by_category: Mapping[str, int]) -> int:
    """The growth of a CPU process whose tensors take ``by_category`` at the peak."""
    freed = sum(by_category.get(category, 0) for category in _FREED)
    return sum(by_category.values()) + CPU_LIBRARIES_BYTES + int(CPU_HELD_BACK * freed)


def device_bytes(by_category: Mapping[str, int], device: DeviceSpec) -> int:
    """The memory of a device that a step takes whose tensors take ``by_category`` at the peak."""
    if device.kind == "cpu":
        return resident_bytes(by_category)
    return round(sum(by_category.values()) * (1 + allocator_of(device).fragmentation))
