"""Checkpoints of a rank runtime: one folder of safetensors files and plain JSON.

A checkpoint holds ``model`` (the model's own keys), ``optimizer`` (by parameter name) and
``trainer`` (steps done and skipped, seed, loss scale, norm to clip by, learning-rate schedule). It
can be read on any mesh and any number of ranks, and by ``torch.distributed.checkpoint`` with its
`HuggingFaceStorageReader`; checkpoints that this module wrote can be read here. A checkpoint that
is overwritten stays complete until the new one is, whatever dies meanwhile. Loading runs no code,
and loads all or nothing.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan

from autopar.base.errors import InputError
from autopar.comm.groups import Communicator
from autopar.runtime.state.background import BackgroundSave, BackgroundWriter
from autopar.runtime.state.checkpoint_format import (
    MANIFEST,
    Chunk,
    Stamp,
    StoredTensor,
    check_file,
    damaged,
    is_covered,
    read_rows,
)
from autopar.runtime.state.checkpoint_paths import Path
from autopar.runtime.state.checkpoint_writer import CheckpointWriter, write_tensors
from autopar.runtime.state.checks import check_plain_state
from autopar.runtime.state.dcp_checkpoint import METADATA, DcpCheckpoint, open_dcp
from autopar.runtime.state.manifest import Manifest, manifest_limit, read_manifest
from autopar.runtime.state.optimizer_state import refused_by_all
from autopar.runtime.state.plain import to_plain
from autopar.runtime.step.loss_scale import is_state
from autopar.runtime.step.rank import RankRuntime


def save(runtime: RankRuntime, path: Path, *, allow_nonfinite: bool = False) -> None:
    """Write the state of all ranks to the folder ``path``. Collective.

    Raises InputError if it cannot be written, or if a weight is not finite and ``allow_nonfinite``
    is False; an earlier checkpoint is kept, and training can continue.
    """
    _save(runtime, path, CheckpointWriter, allow_nonfinite=allow_nonfinite)


def begin_save(runtime: RankRuntime, path: str, keep: int, limit_s: float) -> BackgroundSave:
    """As `save`, but the files are written in the background, from copies. Collective.

    Of the numbered checkpoints beside ``path`` ``keep`` are kept, this one included. The first rank
    waits for the others' files for ``limit_s``.
    """
    writer = _save(runtime, path, BackgroundWriter, allow_nonfinite=False)
    return BackgroundSave(writer, keep, limit_s)


_Writer = TypeVar("_Writer", bound=CheckpointWriter)


def _save(
    runtime: RankRuntime,
    path: Path,
    make_writer: Callable[[Path, Mapping[str, Any]], _Writer],
    *,
    allow_nonfinite: bool,
) -> _Writer:
    """Save by a writer; returns it."""
    communicator, tensors = runtime.communicator, _tensors(runtime)
    refusal: str | None = None
    plain: dict[str, Any] = {}
    scalars: dict[str, Any] = {}
    try:
        plain, scalars = _plain(runtime)
    except InputError as error:
        refusal = f"the checkpoint cannot be written: {error}"
    bad = None if allow_nonfinite else _first_nonfinite(runtime)
    gathered = communicator.from_all_ranks((refusal, bad, scalars))
    _raise_first([found[0] for found in gathered])
    _refuse_nonfinite([found[1] for found in gathered], path)
    if "optimizer" in plain:
        every = {name: entry for found in gathered for name, entry in found[2].items()}
        plain["optimizer"]["state"] = every
    writer = make_writer(path, plain)
    write_tensors(writer, path, tensors, is_alone=communicator.is_alone)
    return writer


def load(runtime: RankRuntime, path: Path) -> None:
    """Read what `save` wrote, on this mesh or another. Collective.

    Raises InputError, and changes nothing, if the checkpoint does not fit, or if anything in it is
    missing or damaged.
    """
    communicator = runtime.communicator
    with contextlib.ExitStack() as stack:
        if runtime.options.optimizer is not None:
            stack.enter_context(runtime.optimizer_state.materialized())
        stack.enter_context(refused_by_all(communicator))
        tensors = _tensors(runtime)
        source = _opened(os.fspath(path), tensors)
        wanted = source.saved_of(tensors)
        planner, plan = _planned(wanted, source)
        optimizer = _optimizer_state(runtime, wanted, source)
        trainer = source.trainer
        _check_trainer(runtime, trainer, source.place)
        stamps = source.stamps()
    with refused_by_all(communicator):  # every rank has its stamps
        source.verify(plan, communicator)
    with refused_by_all(communicator):
        _read(planner, plan, source, stamps)
    model = {k.removeprefix("model."): v for k, v in wanted.items() if k.startswith("model.")}
    runtime.load_state_dict(model)
    if optimizer is not None:
        runtime.load_optimizer_state_dict(optimizer)
    runtime.take_progress(
        trainer.get("num_steps"),
        trainer.get("seed"),
        trainer.get("loss_scale"),
        trainer.get("grad_norm"),
    )
    runtime.num_skipped_steps = trainer.get("num_skipped_steps", runtime.num_skipped_steps)
    if runtime.lr_scheduler is not None:
        runtime.lr_scheduler.load_state_dict(trainer["lr_scheduler"])


# --- saving --------------------------------------------------------------------------------


def _tensors(runtime: RankRuntime) -> dict[str, Tensor]:
    """The tensors of model and optimizer by their keys in a checkpoint. Collective."""
    found = {f"model.{key}": tensor for key, tensor in runtime.state_dict().items()}
    if runtime.options.optimizer is not None:
        for name, entries in runtime.optimizer_state_dict()["state"].items():
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    found[f"optimizer.state.{name}.{key}"] = value
    return found


def _plain(runtime: RankRuntime) -> tuple[dict[str, Any], dict[str, Any]]:
    """The plain data, and this rank's entries of optimizer state in it. Collective."""
    trainer: dict[str, Any] = {
        "num_steps": runtime.num_steps,
        "num_skipped_steps": runtime.num_skipped_steps,
        "seed": runtime.seed,
    }
    plain: dict[str, Any] = {"trainer": trainer}
    if runtime.updates.scale is not None:
        trainer["loss_scale"] = runtime.updates.scale.state()
    clipping = runtime.updates.clipping
    if clipping is not None and clipping.last_norm is not None:
        trainer["grad_norm"] = clipping.last_norm.item()
    scalars: dict[str, Any] = {}
    state = runtime.optimizer_state_dict() if runtime.options.optimizer is not None else None
    if runtime.lr_scheduler is not None:
        held = runtime.lr_scheduler.state_dict()
        trainer["lr_scheduler"] = to_plain(held, "the state of the learning-rate scheduler")
    if state is not None:
        groups = to_plain(state["param_groups"], "the optimizer's param_groups")
        plain["optimizer"] = {"param_groups": groups}
        for name, entries in state["state"].items():
            own = {
                key: to_plain(value, f"{key!r} in the optimizer state of {name!r}")
                for key, value in entries.items()
                if not isinstance(value, Tensor)
            }
            if own:
                scalars[name] = own
    return plain, scalars


def _first_nonfinite(runtime: RankRuntime) -> tuple[int, str] | None:
    """The first trained parameter, or buffer that training changes, that is not finite."""
    held = runtime.held_parts()
    changed = [b.name for b in runtime.program.buffers if b.following is not None]
    names = [p.name for p in runtime.program.parameters if p.trainable] + changed
    for place, name in enumerate(names):
        part = held.get(name)
        if part is None or not part.numel() or not (part.is_floating_point() or part.is_complex()):
            continue
        if not bool(torch.isfinite(part.detach()).all()):
            return place, name
    return None


def _refuse_nonfinite(found: list[tuple[int, str] | None], path: Path) -> None:
    first = min((bad for bad in found if bad is not None), default=None)
    if first is not None:
        raise InputError(
            f"{first[1]!r} holds numbers that are not finite, so nothing is written to "
            f"{os.fspath(path)!r}: a checkpoint that was there before is as it was. Load the last "
            "good one, or save this state all the same: compiled.save(path, allow_nonfinite=True)"
        )


def _raise_first(refusals: list[str | None]) -> None:
    first = next((text for text in refusals if text is not None), None)
    if first is not None:
        raise InputError(first)


# --- loading -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A checkpoint whose metadata has been read, our own or torch's (``foreign``)."""

    place: str
    folder: str
    tensors: dict[str, StoredTensor]
    optimizer: dict[str, Any] | None
    trainer: dict[str, Any]
    own: Manifest | None = None
    foreign: DcpCheckpoint | None = None

    def saved_of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors without the optimizer state of parameters that never had a gradient."""
        prefix = "optimizer.state."
        names = {k.rpartition(".")[0] for k in self.tensors if k.startswith(prefix)}
        scalars = (self.optimizer or {}).get("state") or {}
        return {
            key: tensor
            for key, tensor in tensors.items()
            if not key.startswith(prefix)
            or key.rpartition(".")[0] in names
            or key.rpartition(".")[0].removeprefix(prefix) in scalars
        }

    def chunk(self, key: str, offsets: Any) -> Chunk:
        at = tuple(offsets or ())
        return next(c for c in self.tensors[key].chunks if c.offsets == at)

    def stamps(self) -> dict[str, Stamp]:
        """The stamps of its files, by name, which show changes between verification and reading."""
        return {} if self.own is None else self.own.stamps()

    def verify(self, plan: LoadPlan, communicator: Communicator) -> None:
        """Verify every file, each by one rank; chunks of a foreign checkpoint by their readers."""
        if self.own is not None:
            for file in self.own.files[communicator.world_rank :: communicator.num_ranks]:
                check_file(self.folder, file)
        if self.foreign is not None:
            for key, offset in {(i.storage_index.fqn, i.storage_index.offset) for i in plan.items}:
                self.foreign.read_chunk(key, self.chunk(key, offset))

    def read(
        self, key: str, chunk: Chunk, first: int, num: int, stamps: Mapping[str, Stamp]
    ) -> Tensor:
        if self.foreign is not None:  # which is verified as it is read
            whole = self.foreign.read_chunk(key, chunk)
            return whole[first : first + num] if chunk.sizes else whole
        dtype = self.tensors[key].dtype
        return read_rows(self.folder, chunk, dtype, first, num, stamps[chunk.name])


def _opened(folder: str, expected: Mapping[str, Tensor]) -> _Source:
    if not os.path.lexists(os.path.join(folder, MANIFEST)):
        return _opened_foreign(folder, len(expected))
    num_bytes = sum(t.numel() * t.element_size() for t in expected.values())
    own = read_manifest(folder, num_tensors=len(expected), num_bytes=num_bytes)
    return _Source(
        place=own.place,
        folder=folder,
        tensors=own.tensors,
        optimizer=own.plain.get("optimizer"),
        trainer=_mapping(own.plain.get("trainer"), own.place),
        own=own,
    )


def _opened_foreign(folder: str, num_tensors: int) -> _Source:
    foreign = open_dcp(folder, manifest_limit(num_tensors))
    place = os.path.join(folder, METADATA)
    scalars = [key for key in foreign.entries if key.startswith("optimizer.state.")]
    plain = foreign.nested("trainer", "optimizer.param_groups", *scalars)
    return _Source(
        place=place,
        folder=folder,
        tensors=foreign.tensors,
        optimizer=plain.get("optimizer"),
        trainer=_mapping(plain.get("trainer", {}), place),
        foreign=foreign,
    )


def _mapping(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise damaged(place, "has no mapping of what the trainer had done")
    return value


def _planned(
    wanted: Mapping[str, Tensor], source: _Source
) -> tuple[dcp.DefaultLoadPlanner, LoadPlan]:
    """Plan which boxes of which chunks this rank reads; InputError if a tensor does not fit."""
    metadata = {}
    for key, tensor in wanted.items():
        stored = source.tensors.get(key)
        problem = None
        if stored is None:
            problem = "is not in it"
        elif stored.shape != tuple(tensor.shape):
            problem = f"has shape {stored.shape} there instead of {tuple(tensor.shape)}"
        elif _kind(stored.dtype) != _kind(tensor.dtype):
            problem = f"has dtype {stored.dtype} there instead of {tensor.dtype}"
        elif not is_covered(stored):
            raise damaged(source.place, f"does not have every element of {key!r} once")
        if problem is not None or stored is None:
            raise InputError(
                f"the checkpoint in {source.folder!r} does not fit: {key!r} {problem}. Load what "
                "was saved from the same model with an optimizer of the same kind, or build the "
                "model that was saved"
            )
        metadata[key] = TensorStorageMetadata(
            properties=TensorProperties(dtype=stored.dtype),
            size=torch.Size(stored.shape),
            chunks=[
                ChunkStorageMetadata(offsets=torch.Size(c.offsets), sizes=torch.Size(c.sizes))
                for c in stored.chunks
            ],
        )
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner(dict(wanted), Metadata(state_dict_metadata=metadata))  # type: ignore[arg-type]
    return planner, planner.create_local_plan()


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point or dtype.is_complex:
        return "complex" if dtype.is_complex else "real"
    return str(dtype)


def _optimizer_state(
    runtime: RankRuntime, wanted: Mapping[str, Tensor], source: _Source
) -> dict[str, Any] | None:
    """A state dict for `RankRuntime.load_optimizer_state_dict`, whose tensors are not read yet."""
    if runtime.options.optimizer is None:
        return None
    held = source.optimizer
    if not isinstance(held, dict) or "param_groups" not in held:
        raise InputError(
            f"the checkpoint in {source.folder!r} does not fit: it has no optimizer state. Load "
            "what was saved with an optimizer of the same kind, or leave optimizer= out"
        )
    state: dict[str, dict[str, Any]] = {}
    for key, tensor in wanted.items():
        if key.startswith("optimizer.state."):
            name, _, entry = key.removeprefix("optimizer.state.").rpartition(".")
            state.setdefault(name, {})[entry] = tensor
    for name, entries in _mapping(held.get("state") or {}, source.place).items():
        state.setdefault(name, {}).update(_mapping(entries, source.place))
    known = {p.name for p in runtime.program.parameters}
    prefix = "optimizer.state."
    saved = {
        k.removeprefix(prefix).rpartition(".")[0] for k in source.tensors if k.startswith(prefix)
    }
    if unknown := sorted((saved | state.keys()) - known):
        raise damaged(source.place, f"has optimizer state of {unknown[:3]}, which the model lacks")
    found = {"state": state, "param_groups": held["param_groups"]}
    runtime.optimizer_state.check(found)
    return found


def _check_trainer(runtime: RankRuntime, trainer: dict[str, Any], place: str) -> None:
    for key in ("num_steps", "num_skipped_steps", "seed"):
        value = trainer.get(key)
        if key in trainer and (type(value) is not int or not 0 <= value < 2**63):
            raise damaged(place, f"has {key} = {str(value)[:40]}")
    norm = trainer.get("grad_norm")
    if norm is not None and not (type(norm) is float and 0 <= norm < math.inf):
        raise damaged(place, f"has grad_norm = {str(norm)[:40]}")
    if "loss_scale" in trainer and not is_state(trainer["loss_scale"]):
        raise damaged(place, f"has loss_scale = {str(trainer['loss_scale'])[:40]}")
    if runtime.lr_scheduler is not None:
        if "lr_scheduler" not in trainer:
            raise InputError(
                f"the checkpoint file {place!r} does not fit: it has no learning-rate schedule. "
                "Load what was saved with one, or leave lr_scheduler= out"
            )
        check_plain_state(trainer["lr_scheduler"], runtime.lr_scheduler.state_dict(), place)


def _read(
    planner: dcp.DefaultLoadPlanner,
    plan: LoadPlan,
    source: _Source,
    stamps: Mapping[str, Stamp],
) -> None:
    """Copy the planned chunks, all of which have been verified, into the state."""
    with torch.no_grad():
        for item in plan.items:
            key = item.storage_index.fqn
            chunk = source.chunk(key, item.storage_index.offset)
            starts, lengths = list(item.storage_offsets), list(item.lengths)
            first, num = (starts[0], lengths[0]) if starts else (0, 1)
            part = source.read(key, chunk, first, num, stamps)
            for dim in range(1, len(lengths)):
                part = part.narrow(dim, starts[dim], lengths[dim])
            target = planner.resolve_tensor(item)
            target.detach().copy_(part)
            planner.commit_tensor(item, target)
