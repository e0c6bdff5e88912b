"""Copies of a model with other tensors in place of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autopar.base.errors import CaptureError
from autopar.base.torch_private import pytree
from autopar.frontend.checking.failing import first_line


def without_data(model: nn.Module, loss_fn: Any) -> tuple[nn.Module, Any]:
    """Copies to capture from later, with the same modes and names but no tensor data."""

    memo: dict[int, Any] = {}
    return copy_with(on_meta, model, memo), copy_with(on_meta, loss_fn, memo)


def on_meta(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and dtype that holds no data."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


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
        for value in pytree.tree_leaves(list(vars(part).values())):
            if isinstance(value, Tensor) and not value.is_leaf:  # left by an earlier call
                memo[id(value)] = value.detach()
    return _deep_copy(module, memo)


def _deep_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Raises CaptureError, with the name of the attribute, for a module that cannot be copied."""
    given = dict(memo)
    try:
        return copy.deepcopy(module, memo)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise CaptureError(
            f"the model is captured from a copy, and copy.deepcopy() of {type(module).__name__} "
            f"fails{_at_attribute(module, given)}: {type(error).__name__}: {first_line(error)}\n"
            "How to fix it: remove the attribute or hook before compiling and set it again "
            "afterwards; detach() a tensor that is kept from an earlier call; or define "
            "__deepcopy__ or __getstate__ in the class of what cannot be copied"
        ) from error


def _at_attribute(module: nn.Module, memo: dict[int, Any]) -> str:
    """The first attribute or hook that cannot be copied, for an error; empty if none is found."""
    memo |= {id(part): part for part in module.modules()}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:
                if name.startswith("_") and name.endswith("_hooks"):
                    return f" at a hook in {name} of " + (f"its module {path!r}" if path else "it")
                full = f"{path}.{name}".lstrip(".")
                return f" at its attribute {full!r} of type {type(value).__name__}"
    return ""
