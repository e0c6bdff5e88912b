"""Steps of an element-wise optimizer over some of its parameters, or over rows of one.

In: the optimizer, and gradients of a part of what it trains. Out: that part updated, with its
state, as a step over everything would update it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.runtime.state.optimizers import is_like_parameter, update


class PartialSteps:
    """Partial steps of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._before: dict[nn.Parameter, dict[str, Any]] = {}

    def step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Update these parameters with their gradients."""
        self._step({parameter: parameter for parameter in parameters})

    def step_rows(self, parameter: nn.Parameter, first: int, end: int, gradient: Tensor) -> None:
        """Update rows of a parameter, in order; the last rows complete its step.

        State that counts steps changes once, and state of the parameter's shape row by row.
        """
        state = self.optimizer.state[parameter]
        if first == 0:
            self._before[parameter] = {
                key: value if is_like_parameter(value, parameter) else _copied(value)
                for key, value in state.items()
            }
        before = self._before[parameter] if end < len(parameter) else self._before.pop(parameter)
        rows = nn.Parameter(parameter.detach()[first:end], requires_grad=parameter.requires_grad)
        rows.grad = gradient
        self.optimizer.state[rows] = {
            key: value[first:end] if is_like_parameter(value, parameter) else _copied(value)
            for key, value in before.items()
        }
        try:
            self._step({parameter: rows})
        finally:
            after = self.optimizer.state.pop(rows)
        for key, value in after.items():
            if not is_like_parameter(value, rows):
                state[key] = value
                continue
            if not isinstance(state.get(key), Tensor):  # made in the first step
                state[key] = torch.empty_like(parameter, dtype=value.dtype)
            kept = state[key][first:end]
            if kept.data_ptr() != value.data_ptr():
                kept.copy_(value)

    def _step(self, chosen: dict[nn.Parameter, nn.Parameter]) -> None:
        """A step in which each key's group has its value instead of all that it has."""
        groups = self.optimizer.param_groups
        whole = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [chosen[p] for p in group["params"] if p in chosen]
            update(self.optimizer)
        finally:
            for group, params in zip(groups, whole):
                group["params"] = params


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
