"""The context of a lowering: the shard that it runs on, and the communication it may use."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.comm.ops import ALL_GATHER, ALL_REDUCE, ALL_REDUCE_MAX, AXIS_INDEX, apply_move
from autopar.ir.choice import Choice
from autopar.ir.graph import Op
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Move, MoveKind, P, R, V
from autopar.rules.space import Space


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalContext:
    """The context of a lowering function: the op, its choice, local shapes, collectives.

    ``axes`` in its methods are mesh axes; the group of a collective is all devices along them.
    ``output_shapes``: the local shape of each output.
    """

    op: Op
    space: Space
    choice: Choice
    mesh: Mesh
    output_shapes: tuple[tuple[int, ...], ...]
    device: torch.device | None = None
    """The device of the program, for arguments that name the device of the capture."""

    def axes_of(self, *dims: str) -> tuple[int, ...]:
        """The mesh axes that split any of ``dims``, in ascending order."""
        return tuple(sorted(a for dim in dims for a in self.choice.axes_of(dim)))

    def num_shards(self, *dims: str) -> int:
        """The number of shards that ``dims`` are split into together."""
        return self.mesh.size(self.axes_of(*dims))

    def all_reduce(self, x: Tensor, axes: tuple[int, ...], *, varying: bool = False) -> Tensor:
        """The sum over the group; ``varying`` where each device uses it on a share of its own."""
        if self.mesh.size(axes) == 1:
            return x
        target = V if varying else R
        move = Move(MoveKind.ALL_REDUCE, axes, P, target, 1, 1, 0, 0, tuple(x.shape))
        return apply_move(x, move, self.mesh)

    def all_reduce_max(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """The maximum over the group; no gradient flows through it."""
        if self.mesh.size(axes) == 1:
            return x
        result: Tensor = ALL_REDUCE_MAX(
            x.detach(), self.mesh.axes_label(axes), self.mesh.size(axes)
        )
        return result

    def all_reduce_data(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """The sum over the group of values without a gradient (counts, statistics)."""
        if self.mesh.size(axes) == 1:
            return x
        result: Tensor = ALL_REDUCE(x.detach(), self.mesh.axes_label(axes), self.mesh.size(axes))
        return result

    def all_gather_data(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """The values of all devices of the group, in its order: ``[num, *shape]``.

        No gradient flows through them.
        """
        own = x.detach().unsqueeze(0)
        if self.mesh.size(axes) == 1:
            return own
        result: Tensor = ALL_GATHER(own, self.mesh.axes_label(axes), self.mesh.size(axes), 0, 1)
        return result

    def local_size(self, dim: str) -> int:
        """The size of this device's shard of ``dim``, padding included."""
        return -(-self.space.sizes[dim] // self.num_shards(dim))

    def shard_start(self, like: Tensor, dim: str) -> Tensor | int:
        """The global index of this device's first element of ``dim`` (contiguous splits only)."""
        axes = self.axes_of(dim)
        if self.mesh.size(axes) == 1:
            return 0
        index: Tensor = AXIS_INDEX(like, self.mesh.axes_label(axes), self.mesh.size(axes))
        return index * self.local_size(dim)

    def weighted(self, mean: Tensor, *dims: str) -> Tensor:
        """A mean over this device's shard of ``dims``, times the shard's share of them."""
        share = math.prod(self.local_size(d) / self.space.sizes[d] for d in dims)
        return mean if share == 1 else mean * share

    def is_padded(self, dim: str) -> bool:
        """Whether the shards of ``dim`` contain padding."""
        return self.space.sizes[dim] % self.num_shards(dim) != 0

    def is_filled(self, like: Tensor, dim: str) -> Tensor:
        """For each local element of ``dim``, whether it is not padding: ``bool[local]``."""
        local = torch.arange(self.local_size(dim), device=like.device)
        return local + self.shard_start(like, dim) < self.space.sizes[dim]
