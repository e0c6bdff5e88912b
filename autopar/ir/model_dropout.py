"""Dropout of several models at once, each with random numbers of its own.

The first dimension is that of the models. ``draws`` ``[models, 3]`` has for each its number and,
as they are in its own graph, the index of the draw's block and the draw's position there. Each row
is what ``aten.native_dropout`` makes of it, after a runtime has set the model's seed (see
`autopar.runtime.machine.randomness`); called by itself it draws row by row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op(
    "autopar::model_dropout", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def model_dropout(x: Tensor, draws: Tensor, p: float, axes: str) -> tuple[Tensor, Tensor]:
    """``(dropped, mask)`` like ``x``; ``axes`` are the mesh axes that split it otherwise than by
    models."""
    return rows_dropped(x, draws, p, lambda *_: None)


def rows_dropped(
    x: Tensor, draws: Tensor, p: float, begin: Callable[[int, int, int], Any]
) -> tuple[Tensor, Tensor]:
    """Each row dropped by itself; ``begin`` is called with its model, block and place first."""
    dropped = torch.empty_like(x, memory_format=torch.contiguous_format)
    mask = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    for row, draw in enumerate(draws.tolist()):
        begin(*draw)
        dropped[row], mask[row] = torch.ops.aten.native_dropout(x[row], p, True)
    return dropped, mask


@model_dropout.register_fake
def _(x: Tensor, draws: Tensor, p: float, axes: str) -> tuple[Tensor, Tensor]:
    dropped = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dropped, torch.empty(x.shape, dtype=torch.bool, device=x.device)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.scale = 0.0 if inputs[2] == 1 else 1 / (1 - inputs[2])


def _backward(ctx: Any, cotangent: Tensor, _: Any) -> tuple[Any, ...]:
    (mask,) = ctx.saved_tensors
    grad = torch.ops.aten.native_dropout_backward(cotangent, mask, ctx.scale)
    return grad, None, None, None


model_dropout.register_autograd(_backward, setup_context=_keep)
MODEL_DROPOUT = torch.ops.autopar.model_dropout.default
