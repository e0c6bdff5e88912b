"""Collectives of several tensors as one, which travel beside what is computed next.

In: tensors of one dtype, the digit of each (see `autopar.ir.placement`), their process group and
its size. Out: a call that waits for the results. One collective of a block's small parameters costs
a fraction of one for each: what a collective costs however small it is counts once. Where a group
has a `DirectExchange`, the collective is over when it has begun: its messages would take the cores
that compute, and handing them to other threads costs more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.comm.ops import assemble, disassemble
from autopar.comm.transports.direct_exchange import DirectExchange
from autopar.comm.transports.reduce_scatter import start_reduce_scatter

# torch 2.13 gave it this name, and warns of the old one.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Wait = Callable[[], Sequence[Tensor]]
Digits = Sequence[tuple[int, int]]
"""Of each tensor the dimension that is split, and the sizes of the splits outside of it."""


def start_sum(
    parts: Sequence[Tensor], process_group: Any, direct: DirectExchange | None = None
) -> Wait:
    """Begin to sum each tensor over the group.

    The results are views of one new buffer: an operand may be read elsewhere, as where one tensor
    is the gradient of two parameters.
    """
    flat = torch.cat([part.reshape(-1) for part in parts])
    if direct is None:
        arrive = dist.all_reduce(flat, group=process_group, async_op=True).wait
    else:
        direct.all_reduce(flat)
        arrive = _nothing
    shapes = [part.shape for part in parts]

    def wait() -> Sequence[Tensor]:
        arrive()
        pieces = flat.split([shape.numel() for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes)]

    return wait


def start_gather(
    parts: Sequence[Tensor],
    digits: Digits,
    process_group: Any,
    num: int,
    direct: DirectExchange | None = None,
) -> Wait:
    """Begin to make tensors whole of which each of ``num`` ranks has a part."""
    flat = _flat([part.reshape(1, -1) for part in parts])
    gathered = flat.new_empty(num * flat.numel())
    if direct is None:
        own = flat.view(-1)
        arrive = all_gather_single(gathered, own, group=process_group, async_op=True).wait
    else:
        direct.all_gather(gathered, flat.view(-1))
        arrive = _nothing
    shapes = [part.shape for part in parts]

    def wait() -> Sequence[Tensor]:
        arrive()
        pieces = gathered.view(num, -1).split([shape.numel() for shape in shapes], dim=1)
        return [
            assemble(piece.reshape(num, *shape), *digit)
            for piece, shape, digit in zip(pieces, shapes, digits)
        ]

    return wait


def start_scatter(
    wholes: Sequence[Tensor],
    digits: Digits,
    process_group: Any,
    num: int,
    direct: DirectExchange | None = None,
) -> Wait:
    """Begin to sum tensors over the group; each of ``num`` ranks gets its part of the sums.

    The results are views of one new buffer.
    """
    parts = [disassemble(whole, num, *digit) for whole, digit in zip(wholes, digits)]
    flat = _flat([part.view(num, -1) for part in parts])
    shapes = [part.shape[1:] for part in parts]

    def split(own: Tensor) -> Sequence[Tensor]:
        pieces = own.split([shape.numel() for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes)]

    if direct is not None:
        results = split(direct.reduce_scatter(flat.view(-1)))
        return lambda: results
    own_part = start_reduce_scatter(flat.view(-1), process_group, num)
    return lambda: split(own_part())


class Once:
    """Waits the first time it is called; from then on it holds the results alone, and none of what
    was sent and received for them."""

    def __init__(self, wait: Wait) -> None:
        self._wait: Wait | None = wait
        self._results: Sequence[Tensor] = ()

    def __call__(self) -> Sequence[Tensor]:
        if self._wait is not None:
            self._results, self._wait = self._wait(), None
        return self._results


def _nothing() -> None:
    """There is nothing to wait for."""


def _flat(rows: Sequence[Tensor]) -> Tensor:
    """Tensors of equally many rows side by side; a single one is not copied."""
    return rows[0].contiguous() if len(rows) == 1 else torch.cat(list(rows), dim=1)
