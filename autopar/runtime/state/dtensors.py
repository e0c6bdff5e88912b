"""Converts local shards to ``DTensor``s, and back.

A split that torch can express as ``Shard`` (contiguous shards, several axes of one dimension nested
in mesh order) is converted without a copy, and without the padding at its end. Any other split (a
fused query-key-value projection split by heads, a padded dimension split over several axes) is
redistributed to such a split first, into a copy, so that every consumer of DTensors,
``torch.distributed.checkpoint`` above all, sees contiguous shards.

``torch.distributed.tensor`` is imported on first use: a worker that makes no DTensor starts in half
the time without it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.comm.groups import Communicator
from autopar.comm.ops import move_functions, pad_end
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Move, Placements, R, S, State, local_shape, paddings, redistribute
from autopar.runtime.state.shards import local_part, without_padding


def contiguous_placements(placements: Placements, shape: tuple[int, ...], mesh: Mesh) -> Placements:
    """The same axes on the same dimensions, as plain nested splits in mesh order.

    A padded dimension keeps its first axis only: torch would cut further axes differently.
    """
    reached: dict[int, int] = {}
    padding = paddings(placements, shape, mesh)
    plain = []
    for placement, size in zip(placements, mesh.axis_sizes):
        if placement.state is State.SHARD and placement.dim in reached and padding[placement.dim]:
            placement = R
        elif placement.state is State.SHARD:
            outer = reached.get(placement.dim, 1)
            reached[placement.dim] = outer * size
            placement = S(placement.dim, outer)
        plain.append(placement)
    return tuple(plain)


def torch_placements(placements: Placements) -> tuple[Any, ...]:
    """torch's placements for `contiguous_placements`."""
    from torch.distributed.tensor import Replicate, Shard

    return tuple(Shard(p.dim) if p.state is State.SHARD else Replicate() for p in placements)


class DTensorConverter:
    """Converts local shards to DTensors and back. Every call is collective."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.mesh = communicator.mesh

    def out(self, local: Tensor, placements: Placements, shape: tuple[int, ...]) -> Tensor:
        """The shard as a DTensor, which shares its memory unless it must be redistributed.

        A rank that is alone has no process group, and so no DTensors: its shard is the whole.
        """
        if self.communicator.is_alone:
            return local.detach()
        from torch.distributed.tensor import DTensor

        plain = contiguous_placements(placements, shape, self.mesh)
        local = self._moved(local.detach(), placements, plain, shape)
        local = without_padding(local, self._filled(plain, shape))
        result: Tensor = DTensor.from_local(
            local,
            self.communicator.device_mesh,
            torch_placements(plain),
            run_check=False,
            shape=torch.Size(shape),
            stride=_contiguous_strides(shape),
        )
        return result

    def into(self, local: Tensor, source: Tensor, placements: Placements) -> None:
        """Copy a whole tensor, or a DTensor on any mesh, into the local shard."""
        from torch.distributed.tensor import DTensor

        source = source.detach()
        if isinstance(source, DTensor):
            shape = tuple(source.shape)
            plain = contiguous_placements(placements, shape, self.mesh)
            same = source.device_mesh == self.communicator.device_mesh
            if same and tuple(source.placements) == torch_placements(plain):
                own = source.to_local().to(self.communicator.device)
                for dim, size in enumerate(local_shape(shape, plain, self.mesh)):
                    own = pad_end(own, dim, size - own.shape[dim])
                local.copy_(self._moved(own, plain, placements, shape))
                return
            source = source.full_tensor()
        local.copy_(local_part(source, placements, self.mesh, self.communicator.rank))

    def whole(self, local: Tensor, placements: Placements, shape: tuple[int, ...]) -> Tensor:
        """The whole tensor, on every rank; a copy."""
        local = local.detach()
        whole = self._moved(local, placements, (R,) * len(placements), shape)
        return whole.clone() if _is_view(whole, local) else whole

    def _filled(self, plain: Placements, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The local shape without padding."""
        sizes = list(local_shape(shape, plain, self.mesh))
        coordinate = self.mesh.coordinate(self.communicator.rank)
        for axis, placement in enumerate(plain):
            if placement.state is State.SHARD and paddings(plain, shape, self.mesh)[placement.dim]:
                start = coordinate[axis] * sizes[placement.dim]
                left = max(shape[placement.dim] - start, 0)
                sizes[placement.dim] = min(sizes[placement.dim], left)
        return tuple(sizes)

    def _moved(
        self, local: Tensor, source: Placements, target: Placements, shape: tuple[int, ...]
    ) -> Tensor:
        """Redistribute at once, by the communicator's own collectives."""
        for move in redistribute(source, target, shape, self.mesh):
            if self.mesh.size(move.axes) > 1:
                local = self._move(local, move)
        return local

    def _move(self, local: Tensor, move: Move) -> Tensor:
        label = self.mesh.axes_label(move.axes)
        forward, _ = move_functions(
            move, lambda op, *digits: self.communicator.bind(op, label, *digits)
        )
        return forward(local)


def _is_view(tensor: Tensor, of: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == of.untyped_storage().data_ptr()


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
