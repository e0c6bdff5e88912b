"""Optimizers and schedulers that a loop made over a plain model, made again over shards.

In: a ``torch.optim`` optimizer over the model's parameters, and its learning-rate scheduler. Out:
the callables that `autopar.compile` takes as ``optimizer=`` and ``lr_scheduler=``, which make the
same ones on each device. They are pickled to the devices.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.base.errors import OptimizerError


@dataclass(frozen=True, slots=True, kw_only=True)
class SameOptimizer:
    """Makes an optimizer of class ``kind`` from the trainable parameters of a model, in order.

    ``groups``: the options of each parameter group, and the positions of its parameters.
    """

    kind: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
    groups: tuple[tuple[Mapping[str, Any], tuple[int, ...]], ...]

    def __call__(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        num = len(parameters)  # a trial, which measures an update, has a few only
        return self.kind(
            [
                {**copy.deepcopy(dict(options)), "params": [parameters[i] for i in own if i < num]}
                for options, own in self.groups
            ]
        )


def same_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> SameOptimizer:
    """A factory that makes ``optimizer`` again, over shards of ``model``'s parameters.

    Raises OptimizerError where it is not known from its class and its parameter groups.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    places = {id(parameter): place for place, parameter in enumerate(trainable)}
    name = type(optimizer).__name__
    groups = []
    for group in optimizer.param_groups:
        if not all(id(parameter) in places for parameter in group["params"]):
            raise OptimizerError(
                f"{name} holds tensors that are no trainable parameters of the "
                f"{type(model).__name__}, which alone is trained; make it from model.parameters()"
            )
        own = tuple(places[id(parameter)] for parameter in group["params"])
        groups.append((_options(group), own))
    found = SameOptimizer(kind=type(optimizer), groups=tuple(groups))
    try:
        again = [_options(group) for group in found(trainable).param_groups]
    except Exception as error:
        raise _not_known(name) from error
    if again != [options for options, _ in groups]:
        raise _not_known(name)
    return found


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _not_known(name: str) -> OptimizerError:
    return OptimizerError(
        f"{name} cannot be made again on each device from its class and its parameter groups "
        f"alone, as {name}(param_groups); use one of torch.optim, such as torch.optim.AdamW"
    )


class _Elsewhere:
    """Stands for the optimizer of a scheduler that is on its way to a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SameScheduler:
    """Makes a scheduler that continues as ``scheduler``, whose optimizer is a stand-in."""

    scheduler: Any

    def __call__(self, optimizer: torch.optim.Optimizer) -> Any:
        rates = [group["lr"] for group in optimizer.param_groups]
        # torch has schedulers note the optimizer's first step, and warn if they did not.
        torch.optim.lr_scheduler.LambdaLR(optimizer, _unchanged)
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate
        return copy.deepcopy(self.scheduler, {id(self.scheduler.optimizer): optimizer})


def _unchanged(_step: int) -> float:
    return 1.0


def same_scheduler(scheduler: Any) -> SameScheduler:
    """A factory that makes ``scheduler`` again in its present state, for the same groups.

    Raises OptimizerError for one that is stepped by a metric, which the devices do not know.
    """
    if "metrics" in inspect.signature(scheduler.step).parameters:
        raise OptimizerError(
            f"{type(scheduler).__name__} is stepped by a metric of the evaluation, which the "
            "devices do not know; use a schedule of steps, such as "
            "torch.optim.lr_scheduler.CosineAnnealingLR, or lr_scheduler_type='cosine'"
        )
    return SameScheduler(
        scheduler=copy.deepcopy(scheduler, {id(scheduler.optimizer): _Elsewhere()})
    )
