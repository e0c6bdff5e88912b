"""Efficiency of each family of operations: the fraction of a device's peaks that it reaches.

A matrix product on a GPU is computed in tiles, and a wave of tiles takes as long as its slowest:
the efficiency is the fraction of full waves times a factor that grows with the inner dimension. On
a CPU core the efficiency grows with each dimension towards that of the library's inner kernel.
Everything else is bound by memory or by element-wise arithmetic.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.cost_models.hardware import DeviceSpec
from autopar.cost_models.work import Family, MatrixShape, Work

NOT_FITTED_FACTOR = 2.0
"""The assumed error factor of families that are not fitted to measurements.

It is the widest of the published ranges behind the table of CUDA devices: depthwise convolutions at
0.3 to 0.6 of the bandwidth.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyEfficiency:
    """The efficiency of a family on a kind of device.

    ``compute`` and ``memory`` are the fractions of the peaks at large sizes. ``half_k`` is the
    inner dimension at which half of ``compute`` is reached (0: no such loss). ``half_side`` is the
    same for each outer dimension. ``kernel_s`` is a fixed cost per kernel besides its launch.
    ``error_factor`` is the median factor by which predictions are off in either direction.
    """

    compute: float
    memory: float
    half_k: float = 0.0
    half_side: float = 0.0
    kernel_s: float = 0.0
    error_factor: float = NOT_FITTED_FACTOR


@dataclass(frozen=True, slots=True, kw_only=True)
class EfficiencyTable:
    """The families of one kind of device; ``default`` for those not listed.

    ``tile`` is the side of the square tile of a matrix product's output (0: no tiles).
    """

    default: FamilyEfficiency
    families: Mapping[Family, FamilyEfficiency] = field(default_factory=dict)
    tile: int = 0

    def of(self, family: Family) -> FamilyEfficiency:
        return self.families.get(family, self.default)


# From published ranges, not fitted, so every family has the assumed error. # Large bfloat16
# products reach 0.65 to 0.75 of a datasheet's dense rate (clocks fall under load), fused attention
# 0.5 to 0.6 forward; memory-bound kernels 0.85 to 0.9 of the bandwidth, depthwise convolutions
# about half of it, as neighbouring outputs read the same inputs.
CUDA = EfficiencyTable(
    default=FamilyEfficiency(compute=0.5, memory=0.85),
    families={
        Family.MATMUL: FamilyEfficiency(compute=0.72, memory=0.85, half_k=64),
        Family.CONVOLUTION: FamilyEfficiency(compute=0.55, memory=0.8, half_k=64),
        Family.DEPTHWISE: FamilyEfficiency(compute=0.25, memory=0.45),
        Family.ATTENTION: FamilyEfficiency(compute=0.5, memory=0.8, half_k=16),
        Family.RECURRENT: FamilyEfficiency(compute=0.4, memory=0.7, half_k=64),
        Family.NORMALIZATION: FamilyEfficiency(compute=0.5, memory=0.75),
        Family.SOFTMAX: FamilyEfficiency(compute=0.5, memory=0.75),
        Family.INDEXING: FamilyEfficiency(compute=0.5, memory=0.5),
        Family.RANDOM: FamilyEfficiency(compute=0.3, memory=0.75),
    },
    tile=128,
)

# Fitted by calibration.calibrate to 171 calls on one core of a server with 512-bit vectors
# (float32, torch 2.13), then rounded. The errors are median ones of calls that the fit did not see:
# 1.2 to 1.3 for products, convolutions, attention, softmax and dropout, 1.5 to 1.9 for norms,
# lookups, recurrent layers and element-wise operations, and 4 for copies and reductions, which
# depend on the layout; the table has the upper end of each range.
CPU = EfficiencyTable(
    default=FamilyEfficiency(compute=0.08, memory=0.95, kernel_s=1e-6, error_factor=1.9),
    families={
        Family.MATMUL: FamilyEfficiency(
            compute=0.9, memory=0.9, half_k=16, half_side=4, kernel_s=2e-6, error_factor=1.3
        ),
        Family.CONVOLUTION: FamilyEfficiency(
            compute=0.95, memory=0.7, half_k=16, half_side=4, error_factor=1.3
        ),
        Family.DEPTHWISE: FamilyEfficiency(
            compute=0.2, memory=0.7, kernel_s=2e-6, error_factor=1.3
        ),
        Family.ATTENTION: FamilyEfficiency(
            compute=0.8, memory=0.7, half_k=16, half_side=8, error_factor=1.3
        ),
        Family.RECURRENT: FamilyEfficiency(
            compute=0.47, memory=0.7, half_k=16, half_side=8, error_factor=1.9
        ),
        Family.NORMALIZATION: FamilyEfficiency(
            compute=0.18, memory=0.95, kernel_s=4e-6, error_factor=1.9
        ),
        Family.SOFTMAX: FamilyEfficiency(compute=0.19, memory=0.95, error_factor=1.3),
        Family.REDUCTION: FamilyEfficiency(
            compute=0.1, memory=0.95, kernel_s=2e-6, error_factor=4.0
        ),
        Family.INDEXING: FamilyEfficiency(
            compute=0.013, memory=0.7, kernel_s=2e-6, error_factor=1.9
        ),
        Family.RANDOM: FamilyEfficiency(
            compute=0.0155, memory=0.7, kernel_s=4e-6, error_factor=1.3
        ),
        Family.COPY: FamilyEfficiency(compute=0.05, memory=0.5, kernel_s=4e-6, error_factor=4.0),
    },
)

TABLES = {"cuda": CUDA, "cpu": CPU}


def kernel_time_s(
    work: Work, family: Family, peak_flops_per_s: float, device: DeviceSpec, table: EfficiencyTable
) -> float:
    """Seconds of one direction of a call: the roofline at the fractions of the peaks it reaches."""
    if work.num_kernels == 0:
        return 0.0
    curve = table.of(family)
    compute_part = curve.compute * _matrix_part(work.matrix, curve, device, table)
    compute_s = work.flops / (peak_flops_per_s * compute_part)
    bandwidth = device.memory_bandwidth_bytes_per_s
    if work.size_bytes / work.num_kernels <= device.cache_bytes:
        bandwidth = max(bandwidth, device.cache_bandwidth_bytes_per_s)
    memory_s = work.size_bytes / (bandwidth * curve.memory)
    fixed_s = work.num_kernels * (device.kernel_launch_s + curve.kernel_s)
    return fixed_s + max(compute_s, memory_s)


def _matrix_part(
    shape: MatrixShape | None, curve: FamilyEfficiency, device: DeviceSpec, table: EfficiencyTable
) -> float:
    if shape is None or shape.flops == 0:
        return 1.0
    if not table.tile:
        part = shape.k / (shape.k + curve.half_k)
        for side in (shape.m, shape.n):
            part *= side / (side + curve.half_side)
        return part
    tiles = shape.batch * math.ceil(shape.m / table.tile) * math.ceil(shape.n / table.tile)
    used = shape.batch * shape.m * shape.n / (tiles * table.tile**2)
    waves = tiles / device.num_units
    # With few tiles, libraries split the inner dimension over idle units, down to 256 each.
    num_splits = max(1.0, min(shape.k / 256, 1 / waves))
    depth = shape.k / num_splits
    # Libraries choose among tile sizes, which recovers about half of the idle units of the last
    # wave.
    lasting = (math.ceil(waves) + waves) / 2 if waves > 1 else 1 / num_splits
    # Small outputs use smaller tiles, so not all padding is lost; the fullest tile is the slowest.
    fullest = min(shape.m, table.tile) * min(shape.n, table.tile) / table.tile**2
    padded = used / min(1.0, 2 * math.sqrt(fullest))
    return depth / (depth + curve.half_k) * waves / lasting * padded
