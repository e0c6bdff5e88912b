"""Checkpoints of a rank runtime by ``torch.distributed.checkpoint``.

A checkpoint holds ``model`` (the model's own keys), ``optimizer`` (by parameter name) and
``trainer`` (steps done, learning-rate schedule). It can be read on any mesh and any number of
ranks, and by plain ``torch.distributed.checkpoint`` tools. One that is written over another leaves
that whole until it is whole itself, whatever dies meanwhile.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from autopar.base.errors import InputError
from autopar.base.torch_private import CheckpointWriter
from autopar.runtime.step.rank import RankRuntime

Path = str | os.PathLike[str]


def save(runtime: RankRuntime, path: Path) -> None:
    """Write the state of all ranks to the folder ``path``. Collective.

    Raises InputError where it cannot be written; what was there, and the training, go on.
    """
    try:
        dcp.save(_state(runtime), storage_writer=CheckpointWriter(path))
    except dcp.CheckpointException as error:
        raise InputError(
            f"the checkpoint cannot be written to {os.fspath(path)!r}: {_reason(error)}. Nothing "
            "is lost: pass another folder, such as compiled.save('checkpoint')"
        ) from error


def load(runtime: RankRuntime, path: Path) -> None:
    """Read what `save` wrote, on this mesh or another. Collective.

    Raises InputError where the checkpoint does not fit, or files are missing or cut short, and
    leaves everything as it was; damage inside of a file is found when it is read.
    """
    with runtime.made_optimizer_state(), runtime.refused_by_all():
        state = _state(runtime)
        metadata = _metadata(path)
        _drop_what_was_not_saved(state, metadata)
        _check_fits(state, metadata, path)
        _check_files(metadata, path)
    try:
        dcp.load(state, checkpoint_id=path)
    except dcp.CheckpointException as error:
        raise InputError(
            f"the checkpoint in {os.fspath(path)!r} is damaged: {_reason(error)}. The model may "
            "hold parts of it by now: load another checkpoint before it is trained on"
        ) from error
    runtime.load_state_dict(state["model"])
    if "optimizer" in state:
        runtime.load_optimizer_state_dict(state["optimizer"])
    trainer = state["trainer"]
    runtime.num_steps = trainer["num_steps"]
    if "lr_scheduler" in trainer and runtime.lr_scheduler is not None:
        runtime.lr_scheduler.load_state_dict(trainer["lr_scheduler"])


def check_exists(path: Path) -> None:
    """Raise InputError where there is no checkpoint."""
    _check_path(path)
    if not os.path.isfile(os.path.join(path, ".metadata")):
        raise InputError(
            f"there is no checkpoint in {os.fspath(path)!r}: a folder that compiled.save(path) or "
            "torch.distributed.checkpoint.save wrote holds a file .metadata"
        )


def check_writable(path: Path) -> None:
    """Raise InputError where no folder can be made or written to."""
    _check_path(path)
    name = os.fspath(path)
    existing = os.path.abspath(path)
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        raise InputError(
            f"cannot save to {name!r}: a checkpoint is a folder, and {existing!r} is a file; pass "
            "the name of a new folder, such as compiled.save('checkpoint')"
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(
            f"cannot save to {name!r}: nothing may be written in {existing!r}; pass a folder of "
            "your own, such as compiled.save('checkpoint')"
        )


def _check_path(path: Any) -> None:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise InputError(
            f"a checkpoint cannot be at {path!r}; pass the name of a folder, such as "
            "compiled.save('checkpoint')"
        )


def _metadata(path: Path) -> Metadata:
    try:
        return dcp.FileSystemReader(path).read_metadata()
    except Exception as error:
        raise InputError(
            f"the file .metadata in {os.fspath(path)!r} cannot be read ({error!r}); load a folder "
            "that compiled.save(path) or torch.distributed.checkpoint.save wrote to the end"
        ) from error


def _check_fits(state: dict[str, Any], metadata: Metadata, path: Path) -> None:
    """Raise InputError where something is not in the checkpoint, or has another size there."""
    planner = dcp.DefaultLoadPlanner()
    try:
        planner.set_up_planner(state_dict=state, metadata=metadata)
        planner.create_local_plan()
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"the checkpoint in {os.fspath(path)!r} does not fit: {error}. Load what was saved "
            "from the same model with an optimizer of the same kind, or build the model that was "
            "saved"
        ) from error


def _check_files(metadata: Metadata, path: Path) -> None:
    """Raise InputError where a file ends before what should be in it."""
    ends: dict[str, int] = {}
    for place in (metadata.storage_data or {}).values():
        end = place.offset + place.length
        ends[place.relative_path] = max(end, ends.get(place.relative_path, 0))
    for name, end in ends.items():
        file = os.path.join(path, name)
        size = os.path.getsize(file) if os.path.isfile(file) else None
        if size is None or size < end:
            found = "is missing" if size is None else f"has {size} bytes instead of {end}"
            raise InputError(
                f"the checkpoint in {os.fspath(path)!r} is not whole: the file {name!r} {found}; "
                "copy it again, or load another checkpoint"
            )


def _reason(error: dcp.CheckpointException) -> str:
    """What went wrong on the first of the ranks."""
    for rank, (failure, _) in sorted(error.failures.items()):
        if not isinstance(failure, Exception):  # Ctrl-C
            raise failure
        # The first sentence: torch goes on with advice for other cases.
        return f"rank {rank}: {type(failure).__name__}: {str(failure).split('. ')[0]}"
    return str(error)


def _state(runtime: RankRuntime) -> dict[str, Any]:
    state: dict[str, Any] = {"model": runtime.state_dict()}
    state["trainer"] = {"num_steps": runtime.num_steps}
    if runtime.lr_scheduler is not None:
        state["trainer"]["lr_scheduler"] = runtime.lr_scheduler.state_dict()
    if runtime.options.optimizer is not None:
        state["optimizer"] = runtime.optimizer_state_dict()
    return state


def _drop_what_was_not_saved(state: dict[str, Any], metadata: Metadata) -> None:
    """A parameter that never had a gradient has no optimizer state."""
    saved = metadata.state_dict_metadata
    if "optimizer" not in state:
        return
    of_parameters = state["optimizer"]["state"]
    for name, entries in list(of_parameters.items()):
        if not any(f"optimizer.state.{name}.{key}" in saved for key in entries):
            del of_parameters[name]
