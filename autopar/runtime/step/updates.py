"""Updates of the weights: all at once behind a step, or stage by stage, also in the next step.

In: the optimizer, and a step's gradients as they come. Out: updated parameters. An optimizer that
works element by element updates any parameters without the others; one that may look at several,
and clipping by the norm of all gradients, wait for all of them. Where the schedule updates a stage
just before its next forward (U of the last step), the last reductions of a step and its updates
are still due when it ends; `settle` waits for them, as whoever looks at parameters must.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.runtime.faults.whereabouts import padded, say
from autopar.runtime.state.optimizers import is_elementwise, update
from autopar.runtime.step.reductions import Reductions

_LATE = padded("the last step's reductions and updates")


class Updates:
    """One rank's updates. ``trained`` are its parameters by value.

    ``clip`` is called when all gradients are in `Parameter.grad`, before the update; None where
    nothing is clipped. With ``is_late`` the schedule makes the updates of the last step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        lr_scheduler: Any,
        trained: Mapping[int, nn.Parameter],
        *,
        clip: Callable[[], None] | None,
        is_late: bool,
    ) -> None:
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.trained = trained
        self.clip = clip
        self.by_stage = clip is None and optimizer is not None and is_elementwise(optimizer)
        self.is_late = is_late and self.by_stage
        self._due: Reductions[Tensor] | None = None
        self._loss: Tensor | None = None

    def begin_step(self) -> None:
        """Forget the gradients of the last step, but for those that are due."""
        for parameter in self.trained.values():
            parameter.grad = None

    def update(self, values: Sequence[int], gradients: Reductions[Tensor]) -> None:
        """U: update those of these parameters whose gradients are complete."""
        if self.by_stage:
            self.settle()
            self._apply(gradients.take(values))

    def update_last(self, values: Sequence[int]) -> None:
        """U of the step before, whose gradients nobody sees any more."""
        if self._due is None:
            return
        taken = self._due.take(values)
        self._apply(taken)
        for value in taken:
            self.trained[value].grad = None

    def end_step(self, gradients: Reductions[Tensor], loss: Tensor) -> None:
        """What was not updated yet is now, or is due if the schedule will do it."""
        self.settle()
        self._due, self._loss = gradients, loss
        if not self.is_late:
            self.settle()

    def settle(self) -> None:
        """Wait for what is due, and update."""
        gradients, loss = self._due, self._loss
        if gradients is None or loss is None:
            return
        self._due = self._loss = None
        if self.is_late:
            say(_LATE)
        for arrived in gradients.arrivals():
            if self.by_stage:
                self._apply(arrived)
            else:
                self._keep(arrived)
        if self.clip is not None:
            self.clip()
        if self.optimizer is not None and not self.by_stage:
            update(self.optimizer)
        self._step_scheduler(loss)

    def _keep(self, gradients: Mapping[int, Tensor]) -> None:
        for value, gradient in gradients.items():
            self.trained[value].grad = gradient

    def _apply(self, gradients: Mapping[int, Tensor]) -> None:
        """Update these parameters alone."""
        self._keep(gradients)
        if self.optimizer is not None and gradients:
            step_of(self.optimizer, [self.trained[value] for value in gradients])

    def _step_scheduler(self, loss: Tensor) -> None:
        if isinstance(self.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.lr_scheduler.step(loss.item())
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step()


def step_of(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """A step of an element-wise optimizer over some of its parameters."""
    chosen = {id(parameter) for parameter in parameters}
    whole = [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in chosen]
        update(optimizer)
    finally:
        for group, params in zip(optimizer.param_groups, whole):
            group["params"] = params
