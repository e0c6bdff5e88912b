"""Copies of a model with other tensors in place of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def without_data(model: nn.Module, loss_fn: Any) -> tuple[nn.Module, Any]:
    """Copies to capture from later, with the same modes and names but no tensor data."""

    def empty(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    memo: dict[int, Any] = {}
    return copy_with(empty, model, memo), copy_with(empty, loss_fn, memo)


def copy_with(make: Callable[[Tensor], Tensor], module: Any, memo: dict[int, Any]) -> Any:
    """A copy of ``module`` with other tensors, made by ``make``; tied ones stay tied."""
    if not isinstance(module, nn.Module):
        return module
    for tensor in [*module.parameters(), *module.buffers()]:
        if id(tensor) not in memo:
            made = make(tensor)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = made
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, Tensor) and not value.is_leaf:  # left by an earlier call
                memo[id(value)] = value.detach()
    return copy.deepcopy(module, memo)
