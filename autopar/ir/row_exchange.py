"""Rows on their way to the devices of their experts, and back: what is sent is laid out here.

Each of ``num`` devices has ``num_local`` experts in a row. A device lays out its rows by the device
that they go to, as many for each, ``most``, so that an all-to-all of equal parts moves them. How
many that are depends on the data: it is the largest number of rows that any device has for another.
Traces hold its mean.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("autopar::most_rows", mutates_args=())
def most_rows(expert: Tensor, num: int, num_local: int) -> Tensor:
    """The largest number of rows for one device, ``int64[1]``, from the expert of each row."""
    return torch.bincount(_device_of(expert, num, num_local), minlength=num).max().view(1)


@torch.library.custom_op("autopar::pack_rows", mutates_args=())
def pack_rows(x: Tensor, expert: Tensor, most: Tensor, num: int, num_local: int) -> Tensor:
    """``[num, most, k]``: the rows for each device, zeros behind them.

    ``x[t, k]`` has the rows of ``expert[t * r]``, each ``r`` times.
    """
    order, slots = _slots(expert, most, num, num_local)
    packed = x.new_zeros(num * int(most), x.shape[1])
    packed[slots] = x[order // (expert.shape[0] // max(1, x.shape[0]))]
    return packed.view(num, int(most), x.shape[1])


@torch.library.custom_op("autopar::pack_numbers", mutates_args=())
def pack_numbers(expert: Tensor, most: Tensor, num: int, num_local: int) -> Tensor:
    """``int64[num, most]``: each packed row's expert, counted on its device; -1 behind them."""
    order, slots = _slots(expert, most, num, num_local)
    packed = expert.new_full((num * int(most),), -1)
    packed[slots] = (expert - _device_of(expert, num, num_local) * num_local)[order]
    return packed.view(num, int(most))


@torch.library.custom_op("autopar::unpack_rows", mutates_args=())
def unpack_rows(packed: Tensor, expert: Tensor, most: Tensor, num_local: int) -> Tensor:
    """``[s, n]``: the rows of ``packed[num, most, n]`` in the order of ``expert[s]``."""
    order, slots = _slots(expert, most, packed.shape[0], num_local)
    rows = packed.new_empty(expert.shape[0], packed.shape[2])
    rows[order] = packed.reshape(-1, packed.shape[2])[slots]
    return rows


def _device_of(expert: Tensor, num: int, num_local: int) -> Tensor:
    """The device of each row's expert; rows of no expert stay anywhere."""
    return torch.div(expert, num_local, rounding_mode="floor").clamp(0, num - 1)


def _slots(expert: Tensor, most: Tensor, num: int, num_local: int) -> tuple[Tensor, Tensor]:
    """The rows by device, and the place of each among ``num * most``."""
    devices, order = torch.sort(_device_of(expert, num, num_local), stable=True)
    starts = torch.searchsorted(devices, torch.arange(num, device=expert.device))
    places = torch.arange(expert.shape[0], device=expert.device) - starts[devices]
    return order, devices * most + places


def _mean(expert: Tensor, num: int) -> int:
    return max(1, -(-expert.shape[0] // num))


@most_rows.register_fake
def _(expert: Tensor, num: int, num_local: int) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device=expert.device)


@pack_rows.register_fake
def _(x: Tensor, expert: Tensor, most: Tensor, num: int, num_local: int) -> Tensor:
    return x.new_empty(num, _mean(expert, num), x.shape[1])


@pack_numbers.register_fake
def _(expert: Tensor, most: Tensor, num: int, num_local: int) -> Tensor:
    return expert.new_empty(num, _mean(expert, num))


@unpack_rows.register_fake
def _(packed: Tensor, expert: Tensor, most: Tensor, num_local: int) -> Tensor:
    return packed.new_empty(expert.shape[0], packed.shape[2])


def _keep_packing(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, expert, most, _, ctx.num_local = inputs
    ctx.num_rows = x.shape[0]
    ctx.save_for_backward(expert, most)


def _unpacked(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None, None, None]:
    expert, most = ctx.saved_tensors
    rows = unpack_rows(cotangent, expert, most, ctx.num_local)
    if expert.shape[0] != ctx.num_rows:
        rows = rows.view(ctx.num_rows, -1, rows.shape[1]).sum(1)
    return rows, None, None, None, None


def _keep_unpacking(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    packed, expert, most, ctx.num_local = inputs
    ctx.num = packed.shape[0]
    ctx.save_for_backward(expert, most)


def _packed(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None, None]:
    expert, most = ctx.saved_tensors
    return pack_rows(cotangent, expert, most, ctx.num, ctx.num_local), None, None, None


pack_rows.register_autograd(_unpacked, setup_context=_keep_packing)
unpack_rows.register_autograd(_packed, setup_context=_keep_unpacking)
MOST_ROWS = torch.ops.autopar.most_rows.default
PACK_ROWS = torch.ops.autopar.pack_rows.default
PACK_NUMBERS = torch.ops.autopar.pack_numbers.default
UNPACK_ROWS = torch.ops.autopar.unpack_rows.default
SIZED_BY_DATA = frozenset({PACK_ROWS, PACK_NUMBERS})
"""Operators whose results have sizes that depend on the data, as do those computed from them."""
