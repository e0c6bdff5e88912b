"""Writes a checkpoint: each rank its file, and then the manifest, which makes them the checkpoint.

In: the plan of ``torch.distributed.checkpoint``, which says which rank writes what. Out: the
folder. An earlier checkpoint there stays valid until the manifest is replaced, atomically; then the
files are renamed so that torch's `HuggingFaceStorageReader` finds them. Meanwhile a file that is no
safetensors file keeps that reader from taking some of them for all.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from autopar.base.errors import InputError
from autopar.runtime.state.checkpoint_format import (
    DTYPE_NAMES,
    MANIFEST,
    SUFFIX,
    UNFINISHED,
    ChunkRecord,
    Content,
    FileRecord,
    TensorRecord,
    decode_manifest,
    encode_manifest,
    read_bounded,
    remove_ours,
)
from autopar.runtime.state.checkpoint_paths import Path, unwritten

_BLOCK_BYTES = 1 << 22
_MAX_MANIFEST_BYTES = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """The file that a rank writes."""

    save_id: str
    rank: int

    @property
    def name(self) -> str:
        return f"autopar-{self.save_id}-{self.rank}{SUFFIX}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The file and the first byte of a chunk."""

    file: FileRecord
    begin: int


class CheckpointWriter(StorageWriter):
    """Writes into a folder that may hold an earlier checkpoint; ``plain`` is the plain data."""

    def __init__(self, path: str | os.PathLike[str], plain: Mapping[str, Any]) -> None:
        self.folder = os.fspath(path)
        self.plain = dict(plain)
        self._place: _Place | None = None
        self.is_coordinator = False
        self._made: list[str] = []

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer writes once, into the folder that it was made with."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.is_coordinator = is_coordinator
        if is_coordinator:
            self._make_folder()
            self._remove_strays()

    def _make_folder(self) -> None:
        missing, folder = [], os.path.abspath(self.folder)
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for folder in reversed(missing):
            os.mkdir(folder)
            self._made.append(folder)

    def _remove_strays(self) -> None:
        """Remove files that no manifest names; none if it cannot be read now."""
        names: list[str] = []
        if os.path.lexists(os.path.join(self.folder, MANIFEST)):
            try:
                data = read_bounded(self.folder, MANIFEST, _MAX_MANIFEST_BYTES)
                names = [record.name for record in decode_manifest(data, self.folder).files]
            except InputError:
                return
        remove_ours(self.folder, [*names, *(name + UNFINISHED for name in names)])

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        save_id = secrets.token_hex(8)
        return [
            replace(plan, storage_data=_Place(save_id=save_id, rank=rank))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        place = plan.storage_data
        self._place = place
        future: Future[list[WriteResult]] = Future()
        future.set_result(self._written(place.name, plan.items, planner) if plan.items else [])
        return future

    def _written(
        self, name: str, items: list[WriteItem], planner: SavePlanner
    ) -> list[WriteResult]:
        """Write this rank's file."""
        layout = layout_of(name, items)
        tensors = (resolved(planner, item) for item in layout.items)
        return layout.results(write_file(self.folder, layout, tensors))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank, make the files of all ranks the checkpoint."""
        assert self._place is not None
        written = {r.index: r.storage_data for by_rank in results for r in by_rank}
        content = _content(metadata, written, self.plain)
        save_id = self._place.save_id
        temporary = os.path.join(self.folder, f"{MANIFEST}.{save_id}")
        with open(temporary, "xb") as file:
            file.write(encode_manifest(content))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, os.path.join(self.folder, MANIFEST))
        _sync_folder(self.folder)
        self._made.clear()
        with contextlib.suppress(OSError):  # the checkpoint is valid; the rest is for other readers
            self._publish(save_id, [record.name for record in content.files])

    def _publish(self, save_id: str, names: list[str]) -> None:
        guard = f"autopar-{save_id}-publishing{SUFFIX}"
        with open(os.path.join(self.folder, guard), "xb"):
            pass
        unfinished = [name + UNFINISHED for name in names]
        remove_ours(self.folder, [*names, *unfinished, guard])
        for name in os.listdir(self.folder):  # torch's own checkpoint, which this one replaces
            if name == ".metadata" or (name.startswith("__") and name.endswith(".distcp")):
                os.unlink(os.path.join(self.folder, name))
        for name in names:
            path = os.path.join(self.folder, name)
            os.replace(path + UNFINISHED, path)
        _sync_folder(self.folder)
        os.unlink(os.path.join(self.folder, guard))

    def discard(self) -> None:
        """Remove the files of a save that failed, on the first rank.

        Another rank cannot know whether the first one, which may be dead by now, has made its file
        part of the checkpoint; what such a rank leaves goes with the next save.
        """
        if self.is_coordinator:
            self._remove_strays()
            for folder in reversed(self._made):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)


def write_tensors(
    writer: CheckpointWriter, path: Path, tensors: Mapping[str, Tensor], *, is_alone: bool
) -> None:
    """Write a checkpoint with the tensors of all ranks. Collective, unless a rank ``is_alone``.

    Raises InputError if that is impossible, and leaves nothing of it.
    """
    try:
        with warnings.catch_warnings():  # that a rank which is alone saves alone
            warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)")
            dcp.save(dict(tensors), storage_writer=writer, no_dist=is_alone)
    except dcp.CheckpointException as error:
        writer.discard()
        raise unwritten(path, _reason(error)) from error
    except BaseException:
        writer.discard()
        raise


def _reason(error: dcp.CheckpointException) -> str:
    """The failure of the first rank that failed."""
    for rank, (failure, _) in sorted(error.failures.items()):
        if not isinstance(failure, Exception):  # Ctrl-C
            raise failure
        # The first sentence: torch's advice after it is for other cases.
        return f"rank {rank}: {type(failure).__name__}: {str(failure).split('. ')[0]}"
    return str(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The layout of one rank's file: its header, and the first byte of each item's tensor."""

    name: str
    items: tuple[WriteItem, ...]
    header: bytes
    begins: tuple[int, ...]
    size_bytes: int

    def results(self, sha256: str) -> list[WriteResult]:
        """Where each item is, in the file with this checksum."""
        record = FileRecord(name=self.name, size_bytes=self.size_bytes, sha256=sha256)
        return [
            WriteResult(
                index=item.index, size_in_bytes=0, storage_data=Written(file=record, begin=begin)
            )
            for item, begin in zip(self.items, self.begins)
        ]


def layout_of(name: str, items: list[WriteItem]) -> Layout:
    """Lay out one safetensors file, which depends on no number in the tensors."""
    # The widest elements first, after a header of whole words, so that all are aligned.
    ordered = sorted(items, key=lambda item: (-_dtype(item).itemsize, item.index.fqn))
    header, begins, at = _header(ordered)
    return Layout(
        name=name, items=tuple(ordered), header=header, begins=tuple(begins), size_bytes=at
    )


def resolved(planner: SavePlanner, item: WriteItem) -> Tensor:
    """The tensor of an item, on its device."""
    held = planner.resolve_data(item)
    assert isinstance(held, Tensor)
    return held.detach()


def write_file(folder: str, layout: Layout, tensors: Iterable[Tensor]) -> str:
    """Write a file, tensor by tensor, and flush it to the disk; its SHA-256."""
    path = os.path.join(folder, layout.name + UNFINISHED)
    digest = hashlib.sha256(layout.header)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(path, flags, 0o644)
    try:
        _write_all(file, memoryview(layout.header))
        for tensor in tensors:
            _write_tensor(file, tensor, digest)
        os.fsync(file)
    except BaseException:
        with contextlib.suppress(OSError):  # the folder may be gone
            os.unlink(path)
        raise
    finally:
        os.close(file)
    return digest.hexdigest()


def _dtype(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype


def _header(items: list[WriteItem]) -> tuple[bytes, list[int], int]:
    """The file's header, each tensor's first byte, and the end of the file."""
    tensors: dict[str, Any] = {}
    offsets: dict[str, Any] = {}
    begins, at = [], 0
    for item in items:
        data, key = item.tensor_data, item.index.fqn
        assert data is not None
        dtype = data.properties.dtype
        if dtype not in DTYPE_NAMES:
            raise InputError(f"{key!r} is of {dtype}, which safetensors has no name for")
        is_pair = dtype == torch.complex128
        sizes, start = list(data.chunk.sizes), list(data.chunk.offsets)
        end = at + data.chunk.sizes.numel() * dtype.itemsize
        tensors[key] = {
            "dtype": "F64" if is_pair else DTYPE_NAMES[dtype],
            "shape": [*sizes, 2] if is_pair else sizes,
            "data_offsets": [at, end],
        }
        offsets[key] = {"saved_offsets": [*start, 0] if is_pair else start}
        begins.append(at)
        at = end
    about = {"format": "pt", "DCP_SHARDING_INFO": msgspec.json.encode(offsets).decode()}
    text = msgspec.json.encode({"__metadata__": about, **tensors})
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, [len(header) + begin for begin in begins], len(header) + at


def _write_tensor(file: int, tensor: Tensor, digest: Any) -> None:
    if not tensor.numel():
        return
    held = tensor.cpu().contiguous()
    held_bytes: Any = held.reshape(-1).view(torch.uint8).numpy()
    data = memoryview(held_bytes)
    for begin in range(0, len(data), _BLOCK_BYTES):
        block = data[begin : begin + _BLOCK_BYTES]
        digest.update(block)
        _write_all(file, block)


def _write_all(file: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(file, data) :]


def _content(
    metadata: Metadata, written: Mapping[MetadataIndex, Written], plain: dict[str, Any]
) -> Content:
    files = {w.file.name: w.file for w in written.values()}
    place = {name: i for i, name in enumerate(files)}
    tensors = {}
    for key, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        chunks = []
        for chunk in stored.chunks:
            found = written[MetadataIndex(key, chunk.offsets)]
            chunks.append(
                ChunkRecord(
                    file=place[found.file.name],
                    begin=found.begin,
                    offsets=tuple(chunk.offsets),
                    sizes=tuple(chunk.sizes),
                )
            )
        tensors[key] = TensorRecord(
            dtype=DTYPE_NAMES[stored.properties.dtype],
            shape=tuple(stored.size),
            chunks=tuple(chunks),
        )
    return Content(files=tuple(files.values()), tensors=tensors, plain=plain)


def _sync_folder(folder: str) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # some file systems do not support it
            os.fsync(file)
    finally:
        os.close(file)
