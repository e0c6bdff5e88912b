"""Steps in which tensors move to the host: what moves of a rank's state, and when."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.base.errors import OptimizerError
from autopar.movement.execution import PARAMETER, Movement
from autopar.runtime.machine.mover import Mover
from autopar.runtime.machine.process import ProcessMachine
from autopar.runtime.state.optimizers import is_elementwise, is_like_parameter


def on_host_at_first(movement: Movement | None, optimizer: Any) -> Collection[int]:
    """The parameters that go to the host before the first step, as the device may not hold all at
    once: those that are there whenever a step starts. None unless the ``optimizer`` is one of
    `torch.optim`, or a partial call of one; others may read parameters when they are made."""
    while isinstance(optimizer, functools.partial):
        optimizer = optimizer.func
    is_torchs = any(optimizer is each for each in vars(torch.optim).values())
    return movement.parameters_on_host.keys() if movement is not None and is_torchs else ()


def without_memory(like: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device like another, whose storage holds no memory."""
    made = torch.empty_like(like, device=device)
    made.untyped_storage().resize_(0)
    return made


def mover_of(
    movement: Movement | None,
    device: torch.device,
    parameters: Mapping[int, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
) -> Mover | None:
    """The mover of a rank's parameters, by value, and their optimizer states.

    Raises OptimizerError where the optimizer cannot update them in the groups of the plan.
    """
    if movement is None:
        return None

    def stored(place: tuple[int, int]) -> Tensor | None:
        value, number = place
        parameter = parameters[value]
        if number == PARAMETER:
            return parameter
        entries = {} if optimizer is None else optimizer.state.get(parameter, {})
        states = [state for state in entries.values() if is_like_parameter(state, parameter)]
        return states[number] if number < len(states) else None

    mover = Mover(movement, device, stored)
    if optimizer is not None and not is_elementwise(optimizer) and len(mover.updates) > 1:
        raise OptimizerError(
            f"the movement plan updates {len(mover.updates)} groups of parameters one after the "
            f"other, and {type(optimizer).__name__} may combine them; plan again with this "
            "optimizer, or without offload"
        )
    return mover


@contextlib.contextmanager
def moving(mover: Mover | None, machine: ProcessMachine) -> Iterator[None]:
    """Execute the movement of a step that runs on ``machine``, if there is any."""
    if mover is None:
        yield
        return
    mover.begin_step()
    machine.mover = mover
    try:
        yield
    finally:
        machine.mover = None
        mover.end_step()
