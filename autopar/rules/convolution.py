"""Convolutions and pooling: batch and channels are free; the window's dimensions stay whole.

oneDNN's convolutions copy their operands and results into blocked layouts. The formulas for these
copies were compared with torch's profiler on random shapes: they hold closely from 16 channels
upwards, and are rough for strided convolutions with fewer channels and for gradients of weights,
where the copies are small in a whole model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ir.graph import Op, Value
from autopar.rules.context import LocalContext
from autopar.rules.derivative import KEEPS_FACTORS, KEEPS_NOTHING, Keeps
from autopar.rules.registry import Arguments, Layer, register
from autopar.rules.space import Space, SpaceBuilder, layout
from autopar.rules.traced import register_traced

Outputs = Sequence[Value | None]

CONVOLUTIONS = (
    "aten.conv1d.default",
    "aten.conv2d.default",
    "aten.conv3d.default",
    "aten.conv1d.padding",
    "aten.conv2d.padding",
    "aten.conv3d.padding",
    "aten.convolution.default",
)
TRANSPOSED_CONVOLUTIONS = (
    "aten.conv_transpose1d.default",
    "aten.conv_transpose2d.input",
    "aten.conv_transpose3d.input",
)

_GROUPS = {"aten.convolution.default": 8}


def _groups(op: Op) -> int:
    position = _GROUPS.get(op.target_name, 6)
    groups = op.args[position] if len(op.args) > position else dict(op.kwargs).get("groups", 1)
    return int(groups)


def _local_groups(
    context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    """The arguments with the number of groups on this device."""
    position = _GROUPS.get(context.op.target_name, 6)
    groups = _groups(context.op) // context.num_shards("g")
    if len(args) > position:
        args = (*args[:position], groups, *args[position + 1 :])
    elif "groups" in kwargs:
        kwargs = {**kwargs, "groups": groups}
    return args, kwargs


@register(
    *CONVOLUTIONS,
    arguments=_local_groups,
    keeps=KEEPS_FACTORS,
    layer=Layer.CONVOLUTION,
)
def conv_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``x[n, (g i), ...] w[(g o), i, ...] + b[(g o)]``; a bias enters the sum over i once."""
    x, weight = inputs[0].shape, inputs[1].shape
    out = outputs[0].shape  # type: ignore[union-attr]
    if len(x) != len(weight) or (op.target_name == "aten.convolution.default" and op.args[6]):
        return None
    groups = _groups(op)
    builder = SpaceBuilder()
    n, g = builder.dim("n", x[0]), builder.dim("g", groups)
    i, o = builder.dim("i", x[1] // groups), builder.dim("o", out[1] // groups)
    window = [builder.whole(size) for size in weight[2:]]
    space_in = [builder.whole(size) for size in x[2:]]
    space_out = [builder.whole(size) for size in out[2:]]
    operands = [layout(n, (g, i), *space_in), layout((g, o), i, *window), layout((g, o))]
    return builder.build(
        operands[: len(inputs)],
        [layout(n, (g, o), *space_out)],
        sums=frozenset({i}),
        partial_inputs=frozenset({2}),
        padded={n},
        clean={i, o} if len(inputs) > 2 else {n, i, o},
        anchor=True,
    )


@register(
    *TRANSPOSED_CONVOLUTIONS,
    arguments=_local_groups,
    keeps=KEEPS_FACTORS,
    layer=Layer.CONVOLUTION,
)
def conv_transpose_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``x[n, (g i), ...] w[(g i), o, ...] + b[(g o)]``; a bias enters the sum over i once."""
    x, weight = inputs[0].shape, inputs[1].shape
    if len(x) != len(weight):
        return None
    groups = _groups(op)
    builder = SpaceBuilder()
    n, g = builder.dim("n", x[0]), builder.dim("g", groups)
    i, o = builder.dim("i", x[1] // groups), builder.dim("o", weight[1])
    window = [builder.whole(size) for size in weight[2:]]
    space_in = [builder.whole(size) for size in x[2:]]
    space_out = [builder.whole(size) for size in outputs[0].shape[2:]]  # type: ignore[union-attr]
    operands = [layout(n, (g, i), *space_in), layout((g, i), o, *window), layout((g, o))]
    return builder.build(
        operands[: len(inputs)],
        [layout(n, (g, o), *space_out)],
        sums=frozenset({i}),
        partial_inputs=frozenset({2}),
        padded={n},
        clean={i, o} if len(inputs) > 2 else {n, i, o},
        anchor=True,
    )


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


def _forward_scratch(y: Tensor, args: tuple[Any, ...], num_threads: int) -> int:
    """Bytes of all copies read and written, or of the result's copy with the result itself."""
    x, weight, _, *options = args
    copies = _copies(x, weight, y, tuple(options), num_threads)
    if copies is None:
        return 0
    return max(copies.read + copies.weight + copies.y - y.nbytes, copies.y)


def _backward_scratch(_: Any, args: tuple[Any, ...], num_threads: int) -> int:
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


register_traced("aten.convolution.default", cpu_scratch=_forward_scratch)
register_traced(
    "aten.convolution_backward.default", cpu_scratch=_backward_scratch, gradient_mask=10
)


@register(
    "aten.max_pool1d.default",
    "aten.max_pool2d.default",
    keeps=Keeps(further=lambda op, out: 8 / out.dtype.itemsize),  # 64-bit indices
)
@register(
    "aten.adaptive_avg_pool1d.default", "aten.adaptive_avg_pool2d.default", keeps=KEEPS_NOTHING
)
@register(
    "aten.max_pool3d.default",
    "aten.avg_pool1d.default",
    "aten.avg_pool2d.default",
    "aten.avg_pool3d.default",
    "aten.adaptive_avg_pool3d.default",
    "aten.adaptive_max_pool2d.default",
    "aten.max_pool2d_with_indices.default",
)
def pool_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """Batch and channels are free."""
    spatial = int(op.target_name.split("pool")[1][0])
    shape = inputs[0].shape
    builder = SpaceBuilder()
    free = builder.dims("d", shape[: len(shape) - spatial])
    before = [builder.whole(size) for size in shape[len(free) :]]
    first = next(o for o in outputs if o is not None)
    after = [builder.whole(size) for size in first.shape[len(free) :]]
    return builder.build(
        [layout(*free, *before)],
        [layout(*free, *after) for _ in outputs],
        padded=free,
        clean=free if len(outputs) == 1 else (),
    )
