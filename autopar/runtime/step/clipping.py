"""Gradient clipping by global norm: one norm over the gradients of all shards, and one factor.

In: this rank's shards of the gradients, in stored placement. Out: the shards scaled as
``torch.nn.utils.clip_grad_norm_`` scales the whole gradients, and the norm before. Each rank sums
the squares of the shards that no lower rank holds, so that replicas count once; padding is zero.
One number is communicated per step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from autopar.base.errors import InputError
from autopar.comm.groups import Communicator
from autopar.lowering.types import ParameterProgram
from autopar.runtime.state.shards import holder

EPSILON = 1e-6
"""The epsilon of ``torch.nn.utils.clip_grad_norm_``."""


def check_max_grad_norm(max_grad_norm: Any) -> None:
    """Raise InputError unless the limit is None or a positive finite number."""
    if max_grad_norm is None:
        return
    is_number = isinstance(max_grad_norm, Real) and not isinstance(max_grad_norm, bool)
    if not is_number or not 0 < max_grad_norm < math.inf:
        raise InputError(
            f"max_grad_norm is {max_grad_norm!r}; it must be a positive finite number, the "
            "largest 2-norm of all gradients together, such as max_grad_norm=1.0, or None"
        )


class Clipper:
    """Clips the gradients of one rank. Making it, and every call, is collective.

    ``programs`` are the trainable parameters of all devices of the pipeline.
    """

    def __init__(
        self,
        max_grad_norm: float,
        programs: Sequence[ParameterProgram],
        communicator: Communicator,
    ) -> None:
        mesh, rank, world = communicator.mesh, communicator.rank, communicator.world
        here = communicator.pipeline_device
        self.max_grad_norm = max_grad_norm
        self.device = communicator.device
        # The dtype of all parameters, as every rank adds to one number.
        is_double = any(p.dtype.to_real() is torch.float64 for p in programs)
        self._dtype = torch.float64 if is_double else torch.float32
        self._counted = {
            p.name
            for p in programs
            if p.devices[0] == here and holder(p.stored, mesh, rank) == rank
        }
        self._sum = communicator.bind_in_place(world.axes_label(range(world.num_axes)))

    def norm(self, gradients: Mapping[str, Tensor], *, is_void: bool = False) -> Tensor:
        """The 2-norm of all gradients, the same on all ranks; NaN if any rank's step is void."""
        total = self.no_squares()
        for name, gradient in gradients.items():
            self.add_square(total, name, gradient)
        return self.norm_of(total, is_void=is_void)

    def no_squares(self) -> Tensor:
        """A sum of squares, of nothing yet."""
        return self.number(0.0)

    def number(self, value: float) -> Tensor:
        """A number in the dtype of norms."""
        return torch.full((), value, dtype=self._dtype, device=self.device)

    def add_square(
        self, total: Tensor, name: str, gradient: Tensor, *, scaled_by: float = 1.0
    ) -> None:
        """Add the square of a gradient, or of rows of one, where this rank counts it."""
        if name in self._counted:
            precise = torch.promote_types(gradient.dtype, torch.float32)
            norm = torch.linalg.vector_norm(gradient, dtype=precise)
            total += (norm.to(self._dtype) / scaled_by).square()

    def norm_of(self, total: Tensor, *, is_void: bool = False) -> Tensor:
        """The norm over all ranks from each one's sum of squares. Collective."""
        if is_void:
            total.fill_(math.nan)
        return self._sum(total).sqrt()

    def factor(self, norm: Tensor, limit: float | None = None) -> Tensor:
        """The factor to scale every gradient by, at most 1; ``limit`` is by default its own."""
        limit = self.max_grad_norm if limit is None else limit
        return (limit / (norm + EPSILON)).clamp(max=1.0)
