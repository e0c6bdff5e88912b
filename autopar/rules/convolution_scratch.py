"""Memory that convolutions take on a CPU beside their operands and results.

oneDNN copies operands and results into blocked layouts, which depend on channels, strides, the
batch and the processor. Small convolutions are run on zeros, and their peak allocation is taken.
Large ones have formulas for the copies, which hold closely from 16 channels and 8 rows upwards, and
are rough for strided convolutions with fewer channels and for gradients of weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.base.torch_private import is_profiling
from autopar.rules.measured import MOST_MEASURED, measured_scratch
from autopar.rules.traced import register_traced

_LANES = 16
"""The channel block of oneDNN's layouts on x86; the last block is padded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copies:
    """The sizes in bytes of a convolution's operands and result in oneDNN's layouts."""

    x: int
    y: int
    weight: int
    is_read_in_place: bool
    is_input_last: bool
    """Whether the input's gradient is computed channels last, and copied once more."""

    @property
    def read(self) -> int:
        return 0 if self.is_read_in_place else self.x


def _copies(
    x: Tensor, weight: Tensor, y: Tensor, options: tuple[Any, ...], num_threads: int
) -> _Copies | None:
    """The copies of one call; None where nothing is copied.

    ``options`` are (stride, padding, dilation, ...). Inputs with few channels are read in place
    unless the kernel has size 1. On a single thread with fewer than 16 samples, kernels of size 1
    run as matrix products, as torch chooses (``use_mkldnn``).
    """
    stride, _, dilation, _, _, groups = options[:6]
    is_point = all(size == 1 for size in weight.shape[2:])
    is_strided = any(size > 1 for size in stride)
    is_product = is_point and not is_strided and max(dilation) == 1 and groups == 1
    if x.dtype is not torch.float32 or (is_product and num_threads == 1 and x.shape[0] < 16):
        return None
    is_by_channel = groups == x.shape[1] > 1
    sides = (groups,) if is_by_channel else weight.shape
    return _Copies(
        x=_in_lanes(x, x.shape[1]),
        y=_in_lanes(y, y.shape[1]),
        weight=_in_lanes(weight, *sides),
        is_read_in_place=x.shape[1] < _LANES and not is_point and not is_by_channel,
        is_input_last=is_strided and not is_by_channel,
    )


def _in_lanes(tensor: Tensor, *dims: int) -> int:
    """Bytes of a tensor whose channels are padded to a multiple of the lane width.

    ``dims``: the number of channels; for a weight all its sizes, channels first.
    """
    padded = math.prod(-(-size // _LANES) * _LANES for size in dims[:2])
    return tensor.nbytes // math.prod(dims[:2]) * padded


def _forward_copies(y: Tensor, args: tuple[Any, ...], num_threads: int) -> int:
    """Bytes of all copies read and written, or of the result's copy with the result itself."""
    x, weight, _, *options = args
    copies = _copies(x, weight, y, tuple(options), num_threads)
    if copies is None:
        return 0
    return max(copies.read + copies.weight + copies.y - y.nbytes, copies.y)


def _backward_copies(_: Any, args: tuple[Any, ...], num_threads: int) -> int:
    y, x, weight, _, *options, mask = args
    copies = _copies(x, weight, y, tuple(options), num_threads)
    if copies is None:
        return 0
    needs_input, needs_weight, _ = mask
    found = 0
    if needs_input:
        made, copied = (x.nbytes, x.nbytes) if copies.is_input_last else (copies.x, 0)
        found = max(copies.y + copies.weight + made - x.nbytes, made + copied)
    if needs_weight:
        found = max(found, copies.read + copies.y + copies.weight)
    return found


def _forward_scratch(y: Tensor, args: tuple[Any, ...], num_threads: int) -> int:
    if _work(y, args[1]) > MOST_MEASURED or is_profiling():
        return _forward_copies(y, args, num_threads)
    return measured_scratch(torch.ops.aten.convolution.default, args, num_threads)


def _backward_scratch(results: Any, args: tuple[Any, ...], num_threads: int) -> int:
    if sum(args[-1][:2]) * _work(args[0], args[2]) > MOST_MEASURED or is_profiling():
        return _backward_copies(results, args, num_threads)
    return measured_scratch(torch.ops.aten.convolution_backward.default, args, num_threads)


def _work(y: Tensor, weight: Tensor) -> float:
    """Multiplications and additions, or somewhat more if the convolution is transposed."""
    return 2.0 * y.numel() * weight[0].numel()


register_traced("aten.convolution.default", cpu_scratch=_forward_scratch)
register_traced(
    "aten.convolution_backward.default", cpu_scratch=_backward_scratch, gradient_mask=10
)
