"""Collectives of several tensors as one, which run while the next blocks compute.

In: tensors of one dtype, how each is split (see `autopar.ir.placement`), and the collectives of
their group. Out: a call that waits for the results. The fixed cost of a collective is paid once for
all small parameters of a block. Over a transport that does not overlap
(`autopar.comm.transports.base.Traits`) the collective is over when the call returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from autopar.comm.ops import assemble, disassemble
from autopar.comm.transports.base import Collectives

ALONE_BYTES = 4 << 20
"""A tensor of which a rank sends more than this is gathered or scattered alone: joining copies."""
MAX_SCATTERS = 2
"""How many reduce-scatters are in flight at most, so that whole gradients do not pile up."""

Wait = Callable[[], Sequence[Tensor]]
Digits = Sequence[tuple[int, int]]
"""For each tensor the dimension that is split, and the sizes of the splits outside of it."""


def travels_alone(size_bytes: int, *, is_sum: bool) -> bool:
    """Whether a tensor of which a rank sends so many bytes is not joined with others.

    A sum is copied in any case, and so always joined.
    """
    return not is_sum and size_bytes > ALONE_BYTES


def start_sum(parts: Sequence[Tensor], collectives: Collectives) -> Wait:
    """Start an all-reduce of several tensors.

    The results are views of one new buffer: an operand may be read elsewhere, as when one tensor is
    the gradient of two parameters.
    """
    flat = torch.cat([part.reshape(-1) for part in parts])
    arrive = collectives.all_reduce(flat, overlapped=True)
    shapes = [part.shape for part in parts]

    def wait() -> Sequence[Tensor]:
        arrive()
        pieces = flat.split([shape.numel() for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes)]

    return wait


def start_gather(
    parts: Sequence[Tensor], digits: Digits, collectives: Collectives, num: int
) -> Wait:
    """Begin to gather whole tensors, of which each of ``num`` ranks has a shard."""
    flat = _flat([part.reshape(1, -1) for part in parts])
    gathered = flat.new_empty(num * flat.numel())
    arrive = collectives.all_gather(gathered, flat.view(-1), overlapped=True)
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
    wholes: Sequence[Tensor], digits: Digits, collectives: Collectives, num: int
) -> Wait:
    """Begin to sum tensors over the group; each of ``num`` ranks gets its shard of the sums.

    The results are views of one new buffer.
    """
    parts = [disassemble(whole, num, *digit) for whole, digit in zip(wholes, digits)]
    flat = _flat([part.view(num, -1) for part in parts])
    shapes = [part.shape[1:] for part in parts]
    own_part = collectives.reduce_scatter(flat.view(-1), overlapped=True)

    def wait() -> Sequence[Tensor]:
        pieces = own_part().split([shape.numel() for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes)]

    return wait


class Once:
    """A wait that is called any number of times; after the first it holds nothing but the results,
    and no buffer of the collective."""

    def __init__(self, wait: Wait) -> None:
        self._wait: Wait | None = wait
        self._results: Sequence[Tensor] = ()

    def __call__(self) -> Sequence[Tensor]:
        if self._wait is not None:
            self._results, self._wait = self._wait(), None
        return self._results


def _flat(rows: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors of equally many rows along their rows; a single one is not copied."""
    return rows[0].contiguous() if len(rows) == 1 else torch.cat(list(rows), dim=1)
