"""Numbers that modules keep as attributes, and what a call makes of them.

A captured graph has such numbers as constants, so a call that changes one may compute what a later
call of the model would not.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from autopar.base.torch_private import FakeTensorMode, pytree, without_logs_of_missing_data
from autopar.frontend.capture import Step
from autopar.frontend.copies import copy_with
from autopar.frontend.reader import loss_fn_name
from autopar.frontend.signature import Arguments
from autopar.frontend.targets import LossFn, find_targets


def plain_attributes(model: nn.Module, loss_fn: LossFn | None) -> dict[str, int | float]:
    """The numbers that modules keep as attributes, by name."""
    return {
        name_of(f"{prefix}.{name}".lstrip(".")): value
        for owner, name_of in ((model, str), (loss_fn, loss_fn_name))
        if isinstance(owner, nn.Module)
        for prefix, module in owner.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, int | float)
    }


def attributes_after(
    model: nn.Module, call: Arguments, loss_fn: LossFn | None
) -> dict[str, int | float]:
    """The same after a call of copies without data; empty where the call needs data."""
    mode, memo = FakeTensorMode(allow_non_fake_inputs=False), dict[int, Any]()

    def fake(tensor: Tensor) -> Tensor:
        with mode:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

    model, loss_fn = copy_with(fake, model, memo), copy_with(fake, loss_fn, memo)
    args, kwargs = pytree.tree_map_only(Tensor, fake, (tuple(call.args), dict(call.kwargs)))
    targets = None if loss_fn is None else find_targets(loss_fn, model, args, kwargs)
    step = Step(model, loss_fn, targets, with_loss=loss_fn is not None)
    with warnings.catch_warnings(), without_logs_of_missing_data(), mode:
        warnings.simplefilter("ignore")
        try:
            step(*args, **kwargs)
        except Exception:  # capture, which comes next, says what it makes of this call
            return {}
    return plain_attributes(model, loss_fn)
