"""Kernels that redistribute one value outside blocks: parameters, inputs and outputs.

In: a `Redistribution`, all that its graphs depend on. Out: its F and I graphs. They are traced once
per process, since the programs of many strategies, and of many models, need the same ones.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.comm.ops import move, with_gradient_of
from autopar.ir.graph import Mixed, Value
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placements, local_shape
from autopar.lowering.accumulate import accumulated
from autopar.lowering.differentiate import trace_joint
from autopar.lowering.types import Kernel, TensorMeta

_NUM_KEPT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Redistribution:
    """A value of global ``shape`` moved from ``source`` to ``target``.

    With ``mixed`` the shard is cast to ``dtype`` before it is moved, so that the low precision is
    sent, and gradients are summed in a dtype of their own.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    mixed: Mixed | None
    source: Placements
    target: Placements
    differentiable: bool
    mesh: Mesh

    @classmethod
    def of(
        cls,
        value: Value,
        source: Placements,
        target: Placements,
        mesh: Mesh,
        *,
        differentiable: bool,
        mixed: Mixed | None = None,
    ) -> Redistribution:
        return cls(
            shape=value.shape, dtype=value.dtype, mixed=mixed, source=source, target=target,
            differentiable=differentiable, mesh=mesh,
        )  # fmt: skip

    def run(self, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The target shard, contiguous as the kernels of blocks expect it."""
        (local,) = operands
        if self.mixed is None:
            return (self._moved(local),)
        low = self._moved(local.detach().to(self.dtype))
        if not self.differentiable:
            return (low,)
        return (with_gradient_of(low, self._moved(local.to(self.mixed.reduced))),)

    def _moved(self, local: Tensor) -> Tensor:
        return move(local, self.source, self.target, self.shape, self.mesh).contiguous()


@functools.lru_cache(maxsize=_NUM_KEPT)
def redistribution_kernel(
    wanted: Redistribution, device: torch.device, *, training: bool
) -> Kernel:
    """Its kernel, with sums over micro-batches left to the executor."""
    stored = wanted.dtype if wanted.mixed is None else wanted.mixed.stored
    shape = local_shape(wanted.shape, wanted.source, wanted.mesh)
    joint = trace_joint(
        wanted.run,
        [TensorMeta.contiguous(shape, stored)],
        [wanted.differentiable],
        [False],
        device,
        training=training,
    )
    return accumulated(joint.kernel(), wanted.mesh.num_microbatches)
