"""The user's function that makes a learning-rate scheduler, and the check of what it makes."""

from __future__ import annotations

import functools
from typing import Any

import torch

from autopar.base.errors import InputError, OptimizerError
from autopar.runtime.state.optimizers import MakeOptimizer, MakeScheduler

_FIX = (
    "lr_scheduler=functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=100), or a "
    "function that returns a scheduler"
)
_METHODS = "step", "state_dict", "load_state_dict"


def check_makes_scheduler(make: object, optimizer: MakeOptimizer | None) -> None:
    """Raise OptimizerError for anything that makes no scheduler, or without an optimizer."""
    if make is not None and (optimizer is None or not callable(make)):
        raise OptimizerError(
            f"lr_scheduler is {make!r}, with optimizer={optimizer!r}; pass a callable that makes a "
            f"scheduler from the optimizer, and the optimizer: {_FIX}"
        )


def checked_scheduler(make: MakeScheduler | None) -> MakeScheduler | None:
    """``make``, but it raises InputError where it returns no scheduler, and OptimizerError where it
    fails."""
    return None if make is None else functools.partial(_made, make)


def _made(make: MakeScheduler, optimizer: torch.optim.Optimizer) -> Any:
    try:
        scheduler = make(optimizer)
    except Exception as error:
        raise OptimizerError(
            f"lr_scheduler(optimizer) raised {type(error).__name__}: {error}. Pass {_FIX}"
        ) from error
    can_step = all(callable(getattr(scheduler, name, None)) for name in _METHODS)
    if not can_step or isinstance(scheduler, torch.optim.Optimizer | type):
        raise InputError(
            f"lr_scheduler(optimizer) returned a {type(scheduler).__name__}; it must return a "
            f"learning-rate scheduler, which has {', '.join(_METHODS)}: {_FIX}"
        )
    return scheduler
