"""Fused attention in half precision on CUDA devices: the part of the peak that its kernels reach.

PyTorch chooses among three kernels: cuDNN's on Hopper and Blackwell (as from PyTorch 2.11), else
FlashAttention-2, else the memory-efficient one, which older devices have, and which takes masks
where FlashAttention does not. Each has a curve: what long sequences reach by the width of a head,
and what a block's start costs, in columns. The parameters are fitted to published measurements by
`benchmarks/fit_gpu_attention.py`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from autopar.cost_models.gpu_curves import Spread, lasting_waves
from autopar.cost_models.hardware import DeviceSpec

Kernel = Literal["cudnn", "flash", "efficient"]
_BLOCKS = 64, 128
"""Sides of a block; the smaller one is for what fits it."""


class AttentionCurve(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kernel. ``forward`` and ``backward``: the part of the peak that long sequences without a
    mask reach, by the width of a head. A block of rows passes over the columns, in a backward pass
    a block of columns over the rows, and loses ``start_up`` or ``start_up_backward`` of them,
    ``causal_start_up`` more if the attention is causal, which reaches the part ``causal`` of the
    rest. Only scores that it computes are work.
    """

    forward: dict[int, float]
    backward: dict[int, float]
    start_up: float
    start_up_backward: float
    causal: float
    causal_start_up: float

    def part(
        self, width: Any, passed: Any, *, is_causal: bool = False, is_backward: bool = False
    ) -> Any:
        """The part of the peak for heads of a width and what a block passes over, or arrays.

        Between fitted widths it is interpolated over the logarithm; below the least it is in
        proportion, as exponentials take the time, and beyond the largest that of the largest.
        """
        parts = self.backward if is_backward else self.forward
        start = self.start_up_backward if is_backward else self.start_up
        if is_causal:
            start += self.causal_start_up
        widths = sorted(parts)
        at = np.log2(np.maximum(width, 1))
        reached = np.interp(at, np.log2(widths), [parts[w] for w in widths])
        reached = reached * np.minimum(1.0, np.asarray(width) / widths[0])
        return reached * (self.causal if is_causal else 1.0) * passed / (passed + start)


class AttentionFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fitted file: what it was fitted to, the curves, the names of the devices on which cuDNN's
    kernel comes first, and the relative errors of each kernel."""

    provenance: dict[str, str]
    kernels: dict[Kernel, AttentionCurve]
    on_cudnn: tuple[str, ...]
    spread: dict[Kernel, Spread]


@lru_cache(maxsize=1)
def attention_file() -> AttentionFile:
    """The fitted curves that come with the package."""
    text = Path(__file__).with_name("gpu_attention.json").read_bytes()
    return msgspec.json.decode(text, type=AttentionFile)


def kernel_of(device: DeviceSpec, *, is_masked: bool = False) -> Kernel:
    """The kernel that PyTorch chooses on a device in half precision."""
    if device.name in attention_file().on_cudnn:
        return "cudnn"
    # FlashAttention-2 needs the instructions that came with bfloat16.
    return "efficient" if is_masked or not device.peak_flops_per_s.bfloat16 else "flash"


def attention_part(
    device: DeviceSpec,
    query: tuple[int, ...],
    columns: int,
    *,
    visited: float,
    is_masked: bool,
    is_backward: bool,
) -> float:
    """The part of the device's peak for a query ``[..., rows, width]`` and a number of keys.

    ``visited``: the part of the scores that is computed, less than 1 if the attention is causal.
    """
    *batch, rows, width = query
    divided, passed = (columns, rows) if is_backward else (rows, columns)
    curve = attention_file().kernels[kernel_of(device, is_masked=is_masked)]
    part = float(curve.part(width, passed, is_backward=is_backward))
    if visited < 1:  # at most as long as all scores
        causal = curve.part(width, passed, is_causal=True, is_backward=is_backward)
        part = max(float(causal), visited * part)
    side = next(side for side in _BLOCKS if divided <= side or side == _BLOCKS[-1])
    blocks = math.ceil(divided / side)
    waves = math.prod(batch) * blocks / device.num_units
    return max(part * divided / (blocks * side) * waves / float(lasting_waves(waves)), 1e-6)
