"""`RunOptions`: how a compiled model trains, independent of its plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

from autopar.base.errors import InputError
from autopar.frontend.targets import LossFn, check_loss_fn
from autopar.ir.precision import Precision
from autopar.ir.update import Clipping, Update
from autopar.runtime.state.model_options import ArrayOptions
from autopar.runtime.state.optimizers import (
    MakeOptimizer,
    MakeScheduler,
    check_makes_optimizer,
)
from autopar.runtime.state.schedulers import check_makes_scheduler
from autopar.runtime.step.agreement import NonFinite, check_nonfinite
from autopar.runtime.step.clipping import check_max_grad_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a compiled model trains; checked when it is made.

    * ``loss_fn``: a loss function, without parameters to train.
    * ``optimizer``: a callable from a list of parameters to a ``torch.optim.Optimizer``;
      ``lr_scheduler``: one from the optimizer to a scheduler, stepped after each step.
    * ``max_grad_norm``: gradients are clipped to this global 2-norm before each update.
    * ``nonfinite``: what to do with a step whose loss or gradients are not finite: ``"raise"``,
      ``"skip"`` or ``"ignore"``.
    * ``seed``: for dropout and other random operators; by default ``torch.initial_seed()``.
    * ``array``: how each model trains, where several are compiled as one.
    * ``cuda_graphs``: whether steps on a GPU may be recorded and replayed.
    * ``start_timeout_s``, ``call_timeout_s``: limits on the start of workers and on one step of
      theirs, or under ``torchrun``.

    Raises InputError or OptimizerError.
    """

    loss_fn: LossFn | None = None
    optimizer: MakeOptimizer | None = None
    lr_scheduler: MakeScheduler | None = None
    max_grad_norm: float | None = None
    nonfinite: str = NonFinite.RAISE
    seed: int | None = None
    array: ArrayOptions | None = None
    cuda_graphs: bool = True
    start_timeout_s: float = 120.0
    call_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        check_loss_fn(self.loss_fn)
        check_max_grad_norm(self.max_grad_norm)
        check_nonfinite(self.nonfinite)
        check_makes_optimizer(self.optimizer)
        check_makes_scheduler(self.lr_scheduler, self.optimizer)
        _check_timeout("start_timeout_s", self.start_timeout_s)
        _check_timeout("call_timeout_s", self.call_timeout_s)
        if not isinstance(self.cuda_graphs, bool):
            raise InputError(
                f"cuda_graphs is {self.cuda_graphs!r}; it must be True (record steps where that "
                "is possible) or False"
            )
        if self.seed is not None and (
            isinstance(self.seed, bool) or not isinstance(self.seed, int)
        ):
            raise InputError(f"seed is {self.seed!r}; it must be an int, such as seed=0, or None")


def is_seconds(value: Any) -> bool:
    """Whether ``value`` is a number of seconds, at least 0: no bool, no NaN."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and value >= 0


def _check_timeout(name: str, value: object) -> None:
    if not is_seconds(value) or value in (0, math.inf):
        raise InputError(
            f"{name} is {value!r}; it must be a positive finite number of seconds, such as "
            f"{name}=600.0"
        )


def may_be_early(options: RunOptions, precision: Precision | None) -> bool:
    """Whether the planner may choose an early update for such a run by itself."""
    return _why_not_early(options, precision) is None


def check_early(update: Update | None, options: RunOptions, precision: Precision | None) -> None:
    """Raise InputError where an early update cannot keep what the run's options promise."""
    if update is None or not update.is_early:
        return
    if update.clipping is not None and options.max_grad_norm is None:
        raise InputError(
            f"clipping={update.clipping!r} without max_grad_norm: nothing is clipped. Write "
            "max_grad_norm=1.0, or leave out the update's clipping="
        )
    reason = _why_not_early(options, precision, update.clipping)
    if reason is not None:
        raise InputError(f"update='early' with {reason}, or update='at_end'")


def check_offloaded(options: RunOptions, *, is_offloaded: bool) -> None:
    """Raise InputError where a plan moves tensors to the host and the run cannot."""
    if is_offloaded and options.array is not None:
        raise InputError(
            "the plan moves tensors to the host, which an array of models does not; make one "
            "without offload"
        )


def _why_not_early(
    options: RunOptions, precision: Precision | None, clipping: str | None = None
) -> str | None:
    if options.array is not None:
        return "several models: each of them is updated only if all its gradients are finite"
    if options.max_grad_norm is not None and clipping is None:
        return (
            "max_grad_norm: the norm is known after the last gradient, when weights have changed. "
            "Clip by the norm of a second pass over each step, which takes about twice the time: "
            "update=autopar.Update(clipping='second_pass'); or by that of the step before: "
            "update=autopar.Update(clipping='last_norm')"
        )
    if clipping == Clipping.SECOND_PASS:  # tells before any update whether a step is finite
        return None
    if precision is not None and precision.is_scaled:
        return (
            "precision='fp16': whether the scaled gradients overflow is known after the last of "
            "them, when other weights would have changed. Use precision='bf16', or with "
            "max_grad_norm update=autopar.Update(clipping='second_pass'), which looks first"
        )
    if options.nonfinite == NonFinite.SKIP:
        return (
            "nonfinite='skip': whether a gradient is not finite is known after the last of them, "
            "when other weights have changed and the step cannot be skipped. Use nonfinite='raise' "
            "or 'ignore'"
        )
    return None
