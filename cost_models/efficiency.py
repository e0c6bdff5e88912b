"""Efficiency of each family of operations: the fraction of a device's peaks that it reaches.

Families that were measured on CUDA devices have curves of their own (`gpu_curves`). Elsewhere a
matrix product on a GPU is computed in tiles, and a wave of tiles takes as long as its slowest: the
efficiency is the fraction of full waves times a factor that grows with the inner dimension. On a
CPU core the efficiency grows with each dimension towards that of the library's inner kernel.
Everything else is bound by memory or by element-wise arithmetic.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from msgspec import structs

from autopar.cost_models.gpu_attention import attention_file, kernel_of
from autopar.cost_models.gpu_curves import (
    Chip,
    Curves,
    ProductCurve,
    chip_of,
    convolution_s,
    curve_file,
    joined_s,
    product_s,
    traffic_s,
)
from autopar.cost_models.hardware import DeviceSpec
from autopar.cost_models.work import Family, MatrixShape, Work

NOT_FITTED_FACTOR = 2.0
"""The assumed error factor of families that are not fitted to measurements."""


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

    ``tile`` is the side of the square tile of a matrix product's output (0: no tiles). ``curves``
    are a CUDA chip's, which price the families that were measured on CUDA devices.
    """

    default: FamilyEfficiency
    families: Mapping[Family, FamilyEfficiency] = field(default_factory=dict)
    tile: int = 0
    curves: Chip | None = None

    def of(self, family: Family) -> FamilyEfficiency:
        return self.families.get(family, self.default)

    def without_fixed_times(self) -> "EfficiencyTable":
        """The table whose curves leave out what every kernel takes, whatever its size."""
        if self.curves is None:
            return self
        chip = self.curves
        float32, float16 = (c.without_fixed_times() for c in (chip.float32, chip.float16))
        return replace(self, curves=structs.replace(chip, float32=float32, float16=float16))


# From published ranges, not fitted, so every family has the assumed error; `table_of` replaces that
# of the families with curves. Large bfloat16 products reach 0.65 to 0.75 of a datasheet's dense
# rate (clocks fall under load); memory-bound kernels 0.85 to 0.9 of the bandwidth, depthwise
# convolutions about half of it, as neighbouring outputs read the same inputs. Fused attention in
# half precision is in `gpu_attention`.
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

_FITTED = {
    Family.MATMUL: ("linear", "batched"),
    Family.CONVOLUTION: ("convolution",),
    Family.POINTWISE: ("pointwise",),
    Family.NORMALIZATION: ("normalization",),
    Family.SOFTMAX: ("softmax",),
}
# Convolutions on tensor cores were not measured: what they reach over products is that of the table
# of published ranges.
_TENSOR_CONVOLUTION = CUDA.of(Family.CONVOLUTION).compute / CUDA.of(Family.MATMUL).compute


@lru_cache(maxsize=256)
def table_of(device: DeviceSpec) -> EfficiencyTable:
    """The table of one device: a CUDA device's with its chip's curves and their spreads.

    The error of a chip that was not measured is that of chips left out of the fit.
    """
    if device.kind != "cuda":
        return TABLES[device.kind]
    chip = chip_of(device.name)
    families = dict(CUDA.families)
    for family, names in _FITTED.items():
        spreads = [
            spread.median if curves.source == "fitted" else spread.left_out_median
            for precision, curves in (("float32", chip.float32), ("float16", chip.float16))
            for name, spread in curve_file().spread[precision].items()
            if name in names
        ]
        families[family] = replace(CUDA.of(family), error_factor=1 + max(spreads))
    spread = attention_file().spread
    error = max(each.left_out_median for each in spread.values())
    if chip.float16.source == "fitted" and kernel_of(device) == "cudnn":
        error = spread["cudnn"].median  # the device of its measurements
    families[Family.ATTENTION] = replace(CUDA.of(Family.ATTENTION), error_factor=1 + error)
    return replace(CUDA, families=families, curves=chip)


def kernel_time_s(
    work: Work,
    family: Family,
    peak_flops_per_s: float,
    device: DeviceSpec,
    table: EfficiencyTable,
    dtype: torch.dtype = torch.float32,
    *,
    compute_part: float | None = None,
) -> float:
    """Seconds of one direction of a call: the roofline at the fractions of the peaks it reaches.

    ``compute_part`` is the fraction of the arithmetic one for families without a curve here, where
    it is known.
    """
    if work.num_kernels == 0:
        return 0.0
    peak = peak_flops_per_s
    if table.curves is not None:
        return _curve_s(work, family, peak, device, table, dtype, compute_part)
    return _roofline_s(work, family, peak, device, table, 0.0, compute_part)


def _curve_s(
    work: Work,
    family: Family,
    peak: float,
    device: DeviceSpec,
    table: EfficiencyTable,
    dtype: torch.dtype,
    compute_part: float | None,
) -> float:
    """By the chip's curves; families without one keep the table's, with the chip's fixed time."""
    assert table.curves is not None
    on_tensor_cores = peak > device.vector_flops_per_s
    is_half = on_tensor_cores or dtype.itemsize < 4
    curves = table.curves.float16 if is_half else table.curves.float32
    bound_s = work.size_bytes / device.memory_bandwidth_bytes_per_s
    if family in (Family.MATMUL, Family.CONVOLUTION) and work.matrix and work.matrix.flops:
        gain = 4.0 if work.matrix.winograd_m and not on_tensor_cores else 1.0
        bound_s = max(bound_s, work.flops / (peak * gain))
        time_s, fixed_s = _product_s(work, family, peak, device, curves, dtype, on_tensor_cores)
        overlap = 1.0
    elif family in (Family.POINTWISE, Family.NORMALIZATION, Family.SOFTMAX):
        curve = getattr(curves, family.value)
        arithmetic_s = work.flops / (peak * table.of(family).compute)
        time_s = max(float(traffic_s(work.size_bytes, device, curve)), arithmetic_s)
        fixed_s, overlap = curve.fixed_s, curve.overlap
    else:
        least_kernel_s = curves.pointwise.fixed_s
        return _roofline_s(work, family, peak, device, table, least_kernel_s, compute_part)
    fixed_s = work.num_kernels * max(device.kernel_launch_s, fixed_s)
    return float(joined_s(max(time_s, bound_s), fixed_s, overlap))


def _product_s(
    work: Work,
    family: Family,
    peak: float,
    device: DeviceSpec,
    curves: Curves,
    dtype: torch.dtype,
    on_tensor_cores: bool,
) -> tuple[float, float]:
    """Seconds of a product or a convolution with what its kernels move besides, and fixed ones."""
    shape = work.matrix
    assert shape is not None
    sizes = (shape.m, shape.n, shape.k)
    common: Any = {"item_bytes": dtype.itemsize, "peak": peak, "device": device}
    if family == Family.CONVOLUTION and not on_tensor_cores and curves.convolution:
        curve = curves.convolution
        common |= {"winograd_m": shape.winograd_m, "winograd_large_m": shape.winograd_large_m}
        each_s = float(convolution_s(*sizes, shape.batch, curve=curve, **common))
    else:
        part = _TENSOR_CONVOLUTION if family == Family.CONVOLUTION else 1.0
        curve = curves.batched if shape.batch > 1 else curves.linear

        def products_s(curve: ProductCurve, batch: int) -> float:
            part_of_peak = curve.compute * part
            return float(product_s(*sizes, batch, curve=curve, compute=part_of_peak, **common))

        # A batch takes no less than one product alone, whose curve was fitted apart.
        each_s = max(products_s(curve, shape.batch), products_s(curves.linear, 1))
        curve = max(curve, curves.linear, key=lambda of: of.fixed_s)
    m, n, k = sizes
    operands = shape.batch * dtype.itemsize * (m * k + k * n + m * n)
    besides_s = float(traffic_s(max(0, work.size_bytes - operands), device, curves.pointwise))
    # A complex product is four; a contraction of many operands counts by its largest product.
    return each_s * max(1.0, work.flops / shape.flops) + besides_s, curve.fixed_s


def _roofline_s(
    work: Work,
    family: Family,
    peak_flops_per_s: float,
    device: DeviceSpec,
    table: EfficiencyTable,
    least_kernel_s: float,
    compute_part: float | None,
) -> float:
    curve = table.of(family)
    if compute_part is None:
        compute_part = curve.compute * _matrix_part(work.matrix, curve, device, table)
    compute_s = work.flops / (peak_flops_per_s * compute_part)
    bandwidth = device.memory_bandwidth_bytes_per_s
    if work.size_bytes / work.num_kernels <= device.cache_bytes:
        bandwidth = max(bandwidth, device.cache_bandwidth_bytes_per_s)
    memory_s = work.size_bytes / (bandwidth * curve.memory)
    launch_s = max(device.kernel_launch_s, least_kernel_s)
    fixed_s = work.num_kernels * (launch_s + curve.kernel_s)
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
