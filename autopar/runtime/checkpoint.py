"""Checkpoints of a rank runtime by ``torch.distributed.checkpoint``.

A checkpoint holds ``model`` (the model's own keys), ``optimizer`` (by parameter name) and
``trainer`` (steps done, learning-rate schedule). It can be read on any mesh and any number of
ranks, and by plain ``torch.distributed.checkpoint`` tools.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from autopar.errors import InputError
from autopar.runtime.optimizers import materialize_state
from autopar.runtime.rank import RankRuntime

Path = str | os.PathLike[str]


def save(runtime: RankRuntime, path: Path) -> None:
    """Write the state of all ranks to the folder ``path``. Collective."""
    dcp.save(_state(runtime), checkpoint_id=path)


def load(runtime: RankRuntime, path: Path) -> None:
    """Read what `save` wrote, on this mesh or another. Collective."""
    if runtime.optimizer is not None:
        with torch.enable_grad():
            materialize_state(runtime.optimizer)
    state = _state(runtime)
    _drop_what_was_not_saved(state, path)
    dcp.load(state, checkpoint_id=path)
    runtime.load_state_dict(state["model"])
    if "optimizer" in state:
        runtime.load_optimizer_state_dict(state["optimizer"])
    trainer = state["trainer"]
    runtime.num_steps = trainer["num_steps"]
    if "lr_scheduler" in trainer:
        runtime.lr_scheduler.load_state_dict(trainer["lr_scheduler"])


def check_exists(path: Path) -> None:
    """Raise InputError where there is no checkpoint."""
    if not os.path.exists(os.path.join(path, ".metadata")):
        raise InputError(
            f"there is no checkpoint in {os.fspath(path)!r}: a folder that compiled.save(path) or "
            "torch.distributed.checkpoint.save wrote holds a file .metadata"
        )


def _state(runtime: RankRuntime) -> dict[str, Any]:
    state: dict[str, Any] = {"model": runtime.state_dict()}
    state["trainer"] = {"num_steps": runtime.num_steps}
    if runtime.lr_scheduler is not None:
        state["trainer"]["lr_scheduler"] = runtime.lr_scheduler.state_dict()
    if runtime.optimizer is not None:
        state["optimizer"] = runtime.optimizer_state_dict()
    return state


def _drop_what_was_not_saved(state: dict[str, Any], path: Path) -> None:
    """A parameter that never had a gradient has no optimizer state."""
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    if "optimizer" not in state:
        return
    of_parameters = state["optimizer"]["state"]
    for name, entries in list(of_parameters.items()):
        if not any(f"optimizer.state.{name}.{key}" in saved for key in entries):
            del of_parameters[name]
