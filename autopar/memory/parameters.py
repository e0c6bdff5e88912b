"""The bytes of parameters and their gradients on one device, in each dtype that they have, and of
buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.comm.coalesced import travels_alone
from autopar.comm.ops import ALL_GATHER, ALL_REDUCE
from autopar.cost_models.allocator import Allocator
from autopar.ir.placement import Placements, local_shape
from autopar.lowering.joined_move import joined_move
from autopar.lowering.printing import collective_nodes
from autopar.lowering.types import ParameterProgram, RankProgram, Role, graphs_of
from autopar.memory.kernel import made_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterBytes:
    """The bytes of one parameter on a device: as it is ``stored``, as blocks use it (``used``), as
    its gradient is ``summed``, and of its shard in the dtype that blocks use (``sent``) and in that
    of the sums (``received``).

    ``is_whole``: blocks use no more elements than are stored. ``is_cast``: they use another dtype.
    ``is_moved``: something is communicated between the two. ``num_summed``: the ranks that sum its
    gradient, where the sum is whole on each of them, or 1. ``alone``: which of its gather
    (F) and its reduction (I) run as graphs of their own, never joined with others; or, as a
    reduction that gathers what blocks use in shards, hold as much as if they did.
    """

    stored: int
    used: int
    summed: int
    sent: int
    received: int
    is_whole: bool
    is_cast: bool
    is_moved: bool
    num_summed: int
    alone: frozenset[str]

    @property
    def is_joined(self) -> bool:
        """Whether it is gathered together with other parameters of a block, if there are any."""
        is_gathered = "F" not in self.alone and not self.is_whole
        return is_gathered and not travels_alone(self.sent, is_sum=False)

    @staticmethod
    def of(
        parameter: ParameterProgram, program: RankProgram, allocator: Allocator
    ) -> ParameterBytes:
        p, kernel = parameter, parameter.kernel

        def size(placements: Placements, dtype: torch.dtype) -> int:
            return allocator.rounded(part_bytes(program, p.shape, placements, dtype))

        graphs = () if kernel is None else tuple(graphs_of(program.kernels[kernel]))
        return ParameterBytes(
            stored=size(p.stored, p.dtype),
            used=size(p.used, p.used_dtype),
            summed=size(p.used, p.reduced_dtype),
            sent=size(p.stored, p.used_dtype),
            received=size(p.stored, p.reduced_dtype),
            is_whole=size(p.used, p.used_dtype) <= size(p.stored, p.used_dtype),
            is_cast=p.used_dtype is not p.dtype,
            is_moved=any(next(collective_nodes(m), None) is not None for _, m in graphs),
            num_summed=max((_num_summed(m) for phase, m in graphs if phase == "I"), default=1),
            alone=frozenset(phase for phase, m in graphs if _is_alone(phase, m)),
        )


def _num_summed(module: fx.GraphModule) -> int:
    """Among how many ranks a graph sums; 1 if it does not."""
    sums: list[Any] = [n.args[2] for n in collective_nodes(module) if n.target is ALL_REDUCE]
    return max(sums, default=1)


def _is_alone(phase: str, module: fx.GraphModule) -> bool:
    move = joined_move(module)
    return move is None or (phase == "I" and move.op is ALL_GATHER)


def part_bytes(
    program: RankProgram, shape: tuple[int, ...], placements: Placements, dtype: torch.dtype
) -> int:
    """Bytes of one device's shard."""
    return math.prod(local_shape(shape, placements, program.mesh)) * dtype.itemsize


def buffer_bytes(program: RankProgram, allocator: Allocator) -> int:
    """Bytes of buffers, and of what is computed once and kept for all steps."""
    buffers = (allocator.rounded(math.prod(b.shape) * b.dtype.itemsize) for b in program.buffers)
    fixed = (b.kernel for b in program.blocks if b.role is Role.FIXED)
    return sum(buffers) + sum(
        made_bytes(program.kernels[kernel].forward.graph, allocator) for kernel in fixed
    )


def first_sum_bytes(parts: Sequence[tuple[ParameterBytes, int]], *, copies: bool) -> int:
    """Bytes held while contributions to gradients are added.

    ``parts``: the parameters, and the number of contributions that each has already. Second ones
    are added to first ones into new memory of the dtype of sums, later ones in place; with
    ``copies`` (on CPUs) another dtype is added by a copy.
    """
    most, grown = 0, 0
    for size, num in parts:
        is_copied = size.summed > size.used and copies
        added = size.summed if is_copied and num else 0
        if num == 1:
            added += size.summed
        most = max(most, grown + added)
        if num == 1:
            grown += size.summed - size.used
    return sum(size.used for size, _ in parts) + most if most else 0
