"""Snapshots: the state of single models of an array, in memory and as a checkpoint.

In: snapshots by the number of the model. Out: a folder of safetensors files and plain JSON, and
the snapshots again; see `autopar.runtime.state.whole_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import asdict
from torch import Tensor

from autopar.base.errors import InputError
from autopar.runtime.state.checkpoint_format import damaged
from autopar.runtime.state.checkpoint_paths import Path
from autopar.runtime.state.model_optimizers import ModelState
from autopar.runtime.state.whole_checkpoint import read, write

_STATE, _OPTIMIZER = "state", "optimizer"
_BYTES_OF_OTHER_DATA = 64 << 20
_COPIES = 16
"""How much larger than the weights a checkpoint may be: the optimizer's states, in wider dtypes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of one model: weights and buffers by name, and the state of its training."""

    state: Mapping[str, Tensor]
    training: ModelState


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What a checkpoint holds of an array: a snapshot of each model, those that were still
    training, and the steps that each skipped."""

    snapshots: Mapping[int, Snapshot]
    active: Collection[int]
    num_skipped_steps: Sequence[int]


class _Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    optimizer: dict[str, Any]
    scheduler: dict[str, Any] | None
    num_steps: int


class _Content(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The plain data of a checkpoint."""

    models: list[_Model]
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
            _Model(
                optimizer={**training.optimizer, "state": scalars},
                scheduler=training.scheduler,
                num_steps=training.num_steps,
            )
        )
    content = _Content(
        models=models, active=sorted(saved.active), num_skipped_steps=list(saved.num_skipped_steps)
    )
    plain = {**asdict(content), "models": [asdict(model) for model in models]}
    write(path, tensors, {"array": plain})


def load_array(path: Path, like: Mapping[int, Snapshot]) -> Saved:
    """Read what `save_array` wrote of an array whose present snapshots are ``like`` the saved.

    Raises InputError for a checkpoint that is damaged, or of another array.
    """
    state_bytes = sum(x.nbytes for one in like.values() for x in one.state.values())
    num_tensors = sum(len(one.state) for one in like.values())
    tensors, plain = read(
        path, _COPIES * (num_tensors + 1), _COPIES * state_bytes + _BYTES_OF_OTHER_DATA
    )
    if "array" not in plain:
        raise InputError(
            f"the checkpoint in {path!s} is not of an array; load it where its model was compiled, "
            "or save one by array.save(path)"
        )
    try:
        return _saved(msgspec.convert(plain["array"], _Content), tensors, len(like))
    except (ValueError, LookupError) as error:  # msgspec's error is a ValueError
        raise damaged(str(path), f"has no state of an array ({error})"[:300]) from error


def _saved(content: _Content, tensors: Mapping[str, Tensor], num_models: int) -> Saved:
    if len(content.models) != num_models:
        raise InputError(
            f"the checkpoint is of an array of {len(content.models)} models, and this one has "
            f"{num_models}; compile as many"
        )
    states: list[dict[str, Tensor]] = [{} for _ in content.models]
    optimizers = [dict[int, dict[str, Any]](model.optimizer["state"]) for model in content.models]
    for key, tensor in tensors.items():
        number, kind, name = key.split(".", 2)
        if kind == _STATE:
            states[int(number)][name] = tensor
        else:
            place, _, entry = name.partition(".")
            optimizers[int(number)].setdefault(int(place), {})[entry] = tensor
    trainings = [
        ModelState(
            optimizer={**model.optimizer, "state": own},
            scheduler=model.scheduler,
            num_steps=model.num_steps,
        )
        for model, own in zip(content.models, optimizers)
    ]
    snapshots = [Snapshot(state=s, training=t) for s, t in zip(states, trainings)]
    return Saved(
        snapshots=dict(enumerate(snapshots)),
        active=content.active,
        num_skipped_steps=content.num_skipped_steps,
    )
