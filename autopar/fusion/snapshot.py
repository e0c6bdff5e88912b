"""Snapshots: the state of single models of an array, in memory and as a checkpoint.

In: snapshots by the number of the model. Out: a folder of safetensors files and plain JSON, and
the snapshots again; see `autopar.runtime.state.whole_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from torch import Tensor

from autopar.base.errors import InputError
from autopar.runtime.state.checkpoint_format import damaged
from autopar.runtime.state.checkpoint_paths import Path
from autopar.runtime.state.model_optimizers import ModelState
from autopar.runtime.state.whole_checkpoint import read, write

_STATE, _OPTIMIZER = "state", "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of one model: weights and buffers by name, and the state of its training."""

    state: Mapping[str, Tensor]
    training: ModelState


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The state of an array: a snapshot of each model, the models that still train, and the number
    of steps that each skipped."""

    snapshots: Mapping[int, Snapshot]
    active: Collection[int]
    num_skipped_steps: Sequence[int]


class _Content(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The plain data of a checkpoint; tensors of optimizers that are no scalars are apart."""

    models: list[ModelState]
    active: list[int]
    num_skipped_steps: list[int]


def save_array(path: Path, saved: Saved) -> None:
    """Write a checkpoint; raises InputError if that is impossible."""
    tensors: dict[str, Tensor] = {}
    models = []
    for number, snapshot in sorted(saved.snapshots.items()):
        tensors |= {f"{number}.{_STATE}.{name}": x for name, x in snapshot.state.items()}
        training, scalars = snapshot.training, dict[int, dict[str, Any]]()
        for place, state in training.optimizer["state"].items():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    tensors[f"{number}.{_OPTIMIZER}.{place}.{key}"] = value
                else:
                    scalars.setdefault(place, {})[key] = value
        models.append(
            {
                "optimizer": {**training.optimizer, "state": scalars},
                "scheduler": training.scheduler,
                "num_steps": training.num_steps,
            }
        )
    array = {
        "models": models,
        "active": sorted(saved.active),
        "num_skipped_steps": list(saved.num_skipped_steps),
    }
    write(path, tensors, {"array": array})


def load_array(path: Path, like: Mapping[int, Snapshot]) -> Saved:
    """Read what `save_array` wrote of an array whose present snapshots are ``like`` the saved.

    Raises InputError for a checkpoint that is damaged, or of another array.
    """
    present = [x for one in like.values() for x in one.state.values()]
    num_bytes = sum(x.nbytes for x in present)
    tensors, plain = read(path, num_tensors=len(present), num_bytes=num_bytes)
    if "array" not in plain:
        raise InputError(
            f"the checkpoint in {path!s} is not of an array; load it where its model was compiled, "
            "or save one by array.save(path)"
        )
    try:
        saved = _saved(msgspec.convert(plain["array"], _Content), tensors)
    except (ValueError, LookupError) as error:  # msgspec's error is a ValueError
        raise damaged(str(path), f"has no state of an array ({error})"[:300]) from error
    if len(saved.snapshots) != len(like):
        raise InputError(
            f"the checkpoint in {path!s} is of an array of {len(saved.snapshots)} models, and this "
            f"one has {len(like)}; compile as many"
        )
    return saved


def _saved(content: _Content, tensors: Mapping[str, Tensor]) -> Saved:
    states: list[dict[str, Tensor]] = [{} for _ in content.models]
    optimizers = [dict[int, dict[str, Any]](model.optimizer["state"]) for model in content.models]
    for key, tensor in tensors.items():
        number, kind, name = key.split(".", 2)
        if kind == _STATE:
            states[int(number)][name] = tensor
        else:
            place, _, entry = name.partition(".")
            optimizers[int(number)].setdefault(int(place), {})[entry] = tensor
    snapshots = [
        Snapshot(state=state, training=replace(model, optimizer={**model.optimizer, "state": own}))
        for model, state, own in zip(content.models, states, optimizers)
    ]
    return Saved(
        snapshots=dict(enumerate(snapshots)),
        active=content.active,
        num_skipped_steps=content.num_skipped_steps,
    )
