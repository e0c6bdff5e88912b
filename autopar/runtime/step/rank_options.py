"""The options of a rank's runtime, besides its program."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from autopar.ir.precision import Precision
from autopar.movement.execution import Movement
from autopar.runtime.state.model_options import ArrayOptions
from autopar.runtime.state.optimizers import MakeOptimizer, MakeScheduler
from autopar.runtime.step.agreement import NonFinite


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """The options of a rank's runtime, besides the program; equal on all ranks.

    ``keys`` pairs each key of the model's ``state_dict()`` with the name of the tensor in the
    program (tied parameters share one). ``seed`` is for random operators. Gradients are clipped to
    ``max_grad_norm`` before each update. ``nonfinite`` says what to do with a step whose loss or
    gradients are not finite. ``array`` says how each model trains if the program is one of several.
    ``precision`` says how the loss of a program in mixed precision is scaled. ``default_dtype`` is
    torch's where the model was compiled, which some operators compute in. ``movement``: what moves
    to the host, by pipeline rank; empty if nothing does. ``cuda_graphs``: whether passes may be
    recorded (`autopar.runtime.step.graphs`).
    """

    keys: tuple[tuple[str, str], ...]
    optimizer: MakeOptimizer | None = None
    lr_scheduler: MakeScheduler | None = None
    seed: int = 0
    max_grad_norm: float | None = None
    nonfinite: NonFinite = NonFinite.RAISE
    array: ArrayOptions | None = None
    precision: Precision | None = None
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    movement: tuple[Movement, ...] = ()
    cuda_graphs: bool = True
