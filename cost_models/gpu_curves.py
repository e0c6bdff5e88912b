"""Times of CUDA kernels as curves of shape and size, with parameters fitted to measurements.

A matrix product is computed in tiles by blocks; the tile and the number of parts that the inner
dimension is split into are the fastest of those that libraries have. Each block runs for as long as
its inner dimension and a start-up lasts; what the blocks read goes through the second-level cache.
A 3x3 convolution is the same product undivided, or Winograd's: in one kernel with 2.25 times
fewer multiplications, or in several with 4 times fewer, which write and read what they exchange.
Everything else moves bytes. Each kernel also has a fixed time, some of it beside the rest.

No curve goes below the device's peaks. None falls with size, but for products from a side that is
no multiple of 8 to one that is, on chips where that was measured. The functions take numbers or
arrays, so that the fit (`benchmarks/fit_gpu_prices.py`) and the planner ask the same code.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from autopar.cost_models.hardware import DeviceSpec

_TILES = (
    (128, 128), (128, 64), (128, 32), (128, 16), (64, 128), (64, 64), (64, 32), (32, 64), (32, 32),
    (16, 16),
)  # fmt: skip
_SPLITS = (1, 2, 4, 8, 16, 32)
_CONFIGS = np.array([(m, n, s) for m, n in _TILES for s in _SPLITS], dtype=float).T
_UNDIVIDED = _CONFIGS[:, _CONFIGS[2] == 1]
# Libraries choose among tiles for the last wave; assumed to win back half of its idle units. Fits
# of products with 0 to 1 differ by 0.2 percentage points of median error on unseen shapes.
_WAVE = 0.5
_ACCUMULATOR_BYTES = 4
_WIDE_COLUMNS = 16384
# Boards of 75 W hold their clock for some milliseconds of work; fits with 5 and 20 ms err alike.
_LASTING_S = 1e-2


class ProductCurve(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Matrix products of one kind on one chip.

    ``compute`` and ``memory`` are the parts of the peaks that large products reach. ``cache`` is
    the rate at which blocks read their operands, over the memory's. ``start_up`` is the inner
    dimension that a block's start and end cost. ``fixed_s`` is what any call takes.

    ``winograd`` is the part of the peak that Winograd's products reach in one kernel,
    ``transformed`` in kernels of their own, between those that transform (0: there are none).
    Products with a side that is no multiple of 8 reach the part ``ragged`` of ``compute``, tiles of
    fewer than 128 rows the part ``narrow``. Those of far more than 16,384 columns take longer by
    the part ``wide``, those that last much longer than 10 ms by the part ``slowed``.
    """

    compute: float
    memory: float
    cache: float
    start_up: float
    fixed_s: float
    winograd: float = 0.0
    transformed: float = 0.0
    ragged: float = 1.0
    narrow: float = 1.0
    wide: float = 0.0
    slowed: float = 0.0


class TrafficCurve(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Kernels that are bound by memory: the part of the bandwidth that large ones reach.

    ``fixed_s`` is what any call takes; ``overlap`` is the exponent of the power mean that joins it
    with the rest (1: one after the other).
    """

    memory: float
    fixed_s: float
    overlap: float = 1.0


class Spread(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Relative errors of a curve's predictions on calls that its fit did not see.

    ``left_out_median`` is the median over chips that the fit did not see at all.
    """

    median: float
    mean: float
    p90: float
    left_out_median: float


class Curves(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The curves of one chip in one precision. ``source`` is predicted where none was measured."""

    source: Literal["fitted", "predicted"]
    linear: ProductCurve
    batched: ProductCurve
    pointwise: TrafficCurve
    normalization: TrafficCurve
    softmax: TrafficCurve
    convolution: ProductCurve | None = None

    def without_fixed_times(self) -> Curves:
        """The same curves for the part of a kernel's time that grows with its size."""
        changed = {
            name: msgspec.structs.replace(curve, fixed_s=0.0)
            for name, curve in msgspec.structs.asdict(self).items()
            if isinstance(curve, ProductCurve | TrafficCurve)
        }
        return msgspec.structs.replace(self, **changed)


class Chip(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A chip by the names of its devices, with curves of single and of half precision."""

    names: tuple[str, ...]
    float32: Curves
    float16: Curves


class CurveFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fitted file: what it was fitted to, the chips, and the spread of each family."""

    provenance: dict[str, str]
    spread: dict[str, dict[str, Spread]]
    chips: dict[str, Chip]
    other: Chip


@lru_cache(maxsize=1)
def curve_file() -> CurveFile:
    """The fitted curves that come with the package."""
    text = Path(__file__).with_name("gpu_curves.json").read_bytes()
    return msgspec.json.decode(text, type=CurveFile)


@lru_cache(maxsize=256)
def chip_of(name: str) -> Chip:
    """The curves of the device called ``name``; predicted ones for names that are not known."""
    found = curve_file()
    return next((chip for chip in found.chips.values() if name in chip.names), found.other)


def joined_s(time_s: Any, fixed_s: float, overlap: float) -> Any:
    """Seconds of a kernel: its fixed time and the rest, joined by a power mean."""
    if overlap == 1 or not fixed_s:
        return time_s + fixed_s
    largest = np.maximum(time_s, fixed_s)
    parts = (time_s / largest) ** overlap + (fixed_s / largest) ** overlap
    return largest * parts ** (1 / overlap)


def lasting_waves(waves: Any) -> Any:
    """The waves that blocks last for, of a number or an array of full ones."""
    return np.maximum(1.0, (1 - _WAVE) * waves + _WAVE * np.ceil(waves))


def product_s(
    m: Any, n: Any, k: Any, batch: Any, *, item_bytes: int, peak: float, device: DeviceSpec,
    curve: ProductCurve, compute: float, divided: bool = True,
) -> Any:  # fmt: skip
    """Seconds of ``batch`` products m x k by k x n without the fixed time, at a part ``compute``.

    Sizes are numbers or arrays of one shape. ``divided``: the inner dimension may be split.
    """
    m, n, k, batch = (np.asarray(size, dtype=float)[..., None] for size in (m, n, k, batch))
    tile_m, tile_n, splits = _CONFIGS if divided else _UNDIVIDED
    blocks = batch * np.ceil(m / tile_m) * np.ceil(n / tile_n) * splits
    depth = k / splits
    waves = blocks / device.num_units
    lasting = lasting_waves(waves)
    part: Any = compute
    if curve.ragged < 1:
        part = part * np.where((m % 8 > 0) | (n % 8 > 0), curve.ragged, 1.0)
    if curve.narrow < 1:
        part = part * np.where(tile_m < 128, curve.narrow, 1.0)
    if curve.wide:
        width = np.square(np.square(n / _WIDE_COLUMNS))
        part = part / (1 + curve.wide * width / (1 + width))
    unit_rate = peak * part / device.num_units
    compute_s = lasting * 2 * tile_m * tile_n * (depth + curve.start_up) / unit_rate
    bandwidth = device.memory_bandwidth_bytes_per_s
    partial_bytes = np.where(splits > 1, 2 * splits * batch * m * n * _ACCUMULATOR_BYTES, 0.0)
    moved = batch * item_bytes * (m * k + k * n + m * n) + partial_bytes
    memory_s = moved / (bandwidth * curve.memory)
    read = blocks * (tile_m + tile_n) * depth * item_bytes
    cache_s = read / (bandwidth * curve.cache)
    time_s = _beside(compute_s, memory_s, cache_s).min(axis=-1)
    if curve.slowed:
        time_s = time_s * (1 + curve.slowed * time_s / (time_s + _LASTING_S))
    return time_s


def _beside(*parts_s: Any) -> Any:
    """Seconds of parts that overlap for the most part: their power mean of exponent 4.

    Exponent 1 is one after the other, infinity the larger alone. Fits with 2, 4 and 8 err alike on
    unseen shapes, with 1 by up to 2 percentage points more.
    """
    return np.sqrt(np.sqrt(sum(np.square(np.square(part)) for part in parts_s)))


def convolution_s(
    m: Any, n: Any, k: Any, batch: Any, *, item_bytes: int, peak: float, device: DeviceSpec,
    curve: ProductCurve, winograd_m: Any, winograd_large_m: Any,
) -> Any:  # fmt: skip
    """Seconds of a convolution as a product, or by Winograd's where that is faster.

    ``winograd_m`` counts the outputs in whole tiles of 2 x 2, ``winograd_large_m`` in whole tiles
    of 4 x 4 (0: no 3 x 3 kernel of stride 1).
    """
    common: Any = {"item_bytes": item_bytes, "device": device, "curve": curve, "divided": False}
    direct_s = product_s(m, n, k, batch, peak=peak, compute=curve.compute, **common)
    if not (np.any(winograd_m) and curve.winograd):
        return direct_s
    common["peak"] = peak
    tiles, channels = np.asarray(winograd_m, dtype=float) / 4, np.asarray(k, dtype=float) / 9
    batch = np.asarray(batch, dtype=float)
    # Outputs of 2 x 2 come from a product over the channels for each of 4 x 4 places, all in one
    # kernel; those of 4 x 4 from products for 6 x 6 places in kernels of their own.
    fused_s = product_s(tiles, n, channels, 16 * batch, compute=curve.winograd, **common)
    large = np.asarray(winograd_large_m, dtype=float) / 16
    numbers = batch * 36 * (large * (channels + n) + channels * n)
    moved_s = 2 * item_bytes * numbers / (device.memory_bandwidth_bytes_per_s * curve.memory)
    parted_s = product_s(large, n, channels, 36 * batch, compute=curve.transformed, **common)
    return np.minimum(direct_s, np.minimum(fused_s, parted_s + moved_s))


def traffic_s(size_bytes: Any, device: DeviceSpec, curve: TrafficCurve) -> Any:
    """Seconds of a kernel that moves ``size_bytes``, without the fixed time."""
    return size_bytes / (device.memory_bandwidth_bytes_per_s * curve.memory)
