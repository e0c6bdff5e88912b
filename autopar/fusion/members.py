"""The models of an array as the user gives them: how each is trained, and the batches of each.

Input: the arguments of ``autopar.compile([...], ...)``. Output: one `Member` a model, and a batch
for each; what an array does not take is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.base.errors import InputError
from autopar.frontend.capture import check_model
from autopar.frontend.copies import copy_with
from autopar.frontend.targets import LossFn
from autopar.runtime.options import RunOptions
from autopar.runtime.state.optimizers import MakeOptimizer, MakeScheduler

LEAVE = "leave"
"""The value of ``nonfinite`` by which a model leaves its array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One model of an array, and how it is trained."""

    model: nn.Module
    loss_fn: LossFn | None
    optimizer: MakeOptimizer
    lr_scheduler: MakeScheduler | None = None
    max_grad_norm: float | None = None
    seed: int = 0

    def apart(self) -> Member:
        """The member with modules of its own, over the same tensors: whatever the user changes on
        the model later (its mode, attributes, layers), the array stays as it is."""
        memo: dict[int, Any] = {}
        model = copy_with(Tensor.detach, self.model, memo)
        return replace(self, model=model, loss_fn=copy_with(Tensor.detach, self.loss_fn, memo))


_OF_ARRAYS = frozenset(
    {
        "mesh", "constraints", "batch_norm", "plan", "check_gradients", "profile_limit_s",
        "start_timeout_s", "call_timeout_s", "kernels", "cuda_graphs", "time_limit_s",
    }
)  # fmt: skip
"""Keywords of `autopar.compile` that an array takes as one model does."""


def check_array(models: Sequence[Any], example_inputs: Any, keywords: Mapping[str, Any]) -> None:
    """Raise InputError for what cannot be compiled as an array."""
    if not models:
        raise InputError("the list of models is empty; pass at least one torch.nn.Module")
    for model in models:
        check_model(model)
    if len({id(m) for m in models}) < len(models):
        raise InputError(
            "the same model is in the list twice: each model of an array has parameters of its "
            "own; pass copy.deepcopy(model) for the second"
        )
    _refuse_shared(models)
    if example_inputs is None:
        raise InputError(
            "an array is compiled at once: pass example_inputs=, a batch for all models or a list "
            "with a batch for each"
        )
    for name, given in keywords.items():
        is_one = type(given) is int and given == 1  # one stage, one micro-batch: as by default
        if name not in _OF_ARRAYS and not (given is None or given is False or is_one):
            raise InputError(
                f"{name}={given!r} is not for an array of models, which has no pipeline, no "
                "micro-batches, no offloading and no precision but its models' own; leave it out, "
                "or compile the models one by one"
            )


def _refuse_shared(models: Sequence[nn.Module]) -> None:
    """Raise InputError for a parameter that several models would train."""
    owners: dict[int, tuple[int, str]] = {}
    for number, model in enumerate(models):
        for name, parameter in model.named_parameters():
            first, known = owners.setdefault(id(parameter), (number, name))
            if first != number and parameter.requires_grad:
                raise InputError(
                    f"models {first} and {number} share the parameter {known!r}, which both would "
                    "train: each model of an array has parameters of its own. Pass a "
                    "copy.deepcopy() of one of the models, or freeze what they share: "
                    "parameter.requires_grad_(False)"
                )


def members_of(
    models: Sequence[nn.Module],
    *,
    loss_fn: Any,
    optimizer: Any,
    lr_scheduler: Any,
    max_grad_norm: Any,
    seed: Any,
) -> list[Member]:
    """The members of an array; an option given as a list has one entry per model.

    An option that is not a list applies to all models. Raises InputError for lists of another
    length and for a missing optimizer, and the errors of RunOptions.
    """
    num = len(models)
    default_seed = torch.initial_seed() & (2**63 - 1)
    columns = {
        "loss_fn": loss_fn,
        "optimizer": optimizer,
        "lr_scheduler": lr_scheduler,
        "max_grad_norm": max_grad_norm,
        "seed": seed,
    }
    rows = {name: _each(name, given, num) for name, given in columns.items()}
    members = []
    for place, model in enumerate(models):
        given = {name: row[place] for name, row in rows.items()}
        if given["optimizer"] is None:
            raise InputError(
                "the models of an array are compiled to be trained: pass optimizer=, one for all "
                "or a list with one for each, such as "
                "[functools.partial(torch.optim.AdamW, lr=lr) for lr in (1e-3, 3e-4)]"
            )
        RunOptions(**given)  # refuses what a model alone refuses
        number = given.pop("seed")
        seed_ = default_seed if number is None else number & (2**63 - 1)
        members.append(Member(model=model, seed=seed_, **given))
    return members


def _each(name: str, given: Any, num: int) -> list[Any]:
    if not isinstance(given, list | tuple):
        return [given] * num
    if len(given) != num:
        raise InputError(
            f"{name} has {len(given)} entries for {num} models; pass one for all, or a list with "
            "one for each"
        )
    return list(given)


def batches_of(example_inputs: Any, num: int) -> tuple[list[Any], bool]:
    """A batch for each model, and whether all models share it.

    Raises InputError for a list of another number of batches.
    """
    if has_batches(example_inputs, num, "example_inputs"):
        return list(example_inputs), False
    return [example_inputs] * num, True


def has_batches(inputs: Any, num: int, name: str) -> bool:
    """Whether the input is a list with a batch per model.

    A list of tensors is not: it is the positional arguments of one batch. Raises InputError, which
    calls the input by its ``name``, for a list of another number of batches.
    """
    if not (isinstance(inputs, list) and inputs):
        return False
    if not all(isinstance(batch, tuple | Mapping) for batch in inputs):
        return False
    if len(inputs) != num:
        raise InputError(
            f"{name} is a list of {len(inputs)} batches for {num} models; give one batch for each, "
            "or for one that all share a tuple of its arguments, or a mapping"
        )
    return True
