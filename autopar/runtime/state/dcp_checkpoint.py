"""Reads checkpoints of ``torch.distributed.checkpoint`` without running any code in them.

Its ``.metadata`` is a pickle, and so is the header of each data entry. Both are read as data (see
`autopar.runtime.state.inert_pickle`), and only what torch itself writes is accepted.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import zipfile
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.state.checkpoint_format import (
    Chunk,
    StoredTensor,
    damaged,
    opened,
    read_bounded,
    read_exactly,
)
from autopar.runtime.state.inert_pickle import DATA_NAMES, Call, Name, Persistent, plain, read

METADATA = ".metadata"
_META = "torch.distributed.checkpoint.metadata."
_DTYPES = {
    f"torch.{name}": dtype
    for name in dir(torch)
    if isinstance(dtype := getattr(torch, name), torch.dtype)
}
_METADATA_NAMES = {
    *(
        _META + name
        for name in (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
            "ChunkStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
        )
    ),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.serialization._get_layout",
    "torch.Size",
    "pathlib.PosixPath",
    "pathlib.WindowsPath",
    "pathlib._local.PosixPath",
    "collections.OrderedDict",
    *_DTYPES,
}  # fmt: skip
_STORAGES = {
    "torch.DoubleStorage": torch.float64, "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16, "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64, "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16, "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8, "torch.BoolStorage": torch.bool,
    "torch.ComplexFloatStorage": torch.complex64, "torch.ComplexDoubleStorage": torch.complex128,
    "torch.storage.UntypedStorage": torch.uint8,
}  # fmt: skip
_REBUILDS = {"torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"}
_PARAMETER = "torch._utils._rebuild_parameter"
_ENTRY_NAMES = {*_REBUILDS, _PARAMETER, *_STORAGES, *DATA_NAMES, *_DTYPES}
_OVERHEAD_BYTES = 1 << 16
_MAX_PLAIN_BYTES = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpCheckpoint:
    """The index: tensors and plain data by key, and the nested position of each."""

    folder: str
    tensors: dict[str, StoredTensor]
    entries: dict[str, Chunk]
    paths: dict[str, tuple[str | int, ...]]

    def read_chunk(self, key: str, chunk: Chunk) -> Tensor:
        """Read one chunk of a tensor; InputError if it does not match the metadata."""
        stored = self.tensors[key]
        size = math.prod(chunk.sizes) * stored.dtype.itemsize
        found = _entry(self.folder, chunk, 2 * size + _OVERHEAD_BYTES)
        if not isinstance(found, Tensor) or found.dtype != stored.dtype:
            raise damaged(self._place(chunk), f"holds something else than the tensor {key!r}")
        if tuple(found.shape) != chunk.sizes:
            raise damaged(self._place(chunk), f"holds {key!r} with shape {tuple(found.shape)}")
        return found

    def read_plain(self, key: str) -> Any:
        if key in self.entries:
            return _entry(self.folder, self.entries[key], _MAX_PLAIN_BYTES)
        stored = self.tensors[key]
        if stored.shape or len(stored.chunks) != 1:
            raise damaged(os.path.join(self.folder, METADATA), f"holds {key!r} as a tensor")
        return self.read_chunk(key, stored.chunks[0])

    def nested(self, *prefixes: str) -> dict[str, Any]:
        """The data below one of these positions, in lists and mappings as it was saved."""
        root: dict[Any, Any] = {}
        for key in (*self.entries, *self.tensors):
            path = self.paths.get(key, (key,))
            name = ".".join(map(str, path))
            if not any(name == p or name.startswith(p + ".") for p in prefixes):
                continue
            held = root
            for step in path[:-1]:
                held = held.setdefault(step, {})
                if not isinstance(held, dict):
                    raise damaged(os.path.join(self.folder, METADATA), "nests two things as one")
            held[path[-1]] = self.read_plain(key)
        return {key: _listed(value) for key, value in root.items()}

    def _place(self, chunk: Chunk) -> str:
        return os.path.join(self.folder, chunk.name)


def _listed(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    items = {key: _listed(held) for key, held in value.items()}
    is_list = bool(items) and all(type(key) is int for key in items)
    return [items[key] for key in sorted(items)] if is_list else items


def open_dcp(folder: str, limit_bytes: int) -> DcpCheckpoint:
    place = os.path.join(folder, METADATA)
    data = read_bounded(folder, METADATA, limit_bytes)
    try:
        found = _understood(folder, read(data, _METADATA_NAMES))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise damaged(
            place, f"cannot be read as torch.distributed.checkpoint writes it ({error})"[:400]
        ) from error
    _check_files(found)
    return found


def _understood(folder: str, metadata: Any) -> DcpCheckpoint:
    state = _state(metadata, "Metadata")
    chunks: dict[str, dict[tuple[int, ...], Chunk]] = {}
    for index, info in (state["storage_data"] or {}).items():
        at, where = _state(index, "MetadataIndex"), info.state
        if info.name != "torch.distributed.checkpoint.filesystem._StorageInfo":
            raise ValueError(f"a place of data is a {info.name}")
        if where.get("transform_descriptors"):
            raise ValueError("its data is compressed or encrypted; save it without extensions")
        begin, length = _whole(where["offset"]), _whole(where["length"])
        offsets = () if at.get("offset") is None else _size(at["offset"])
        chunk = Chunk(
            name=_text(where["relative_path"]), begin=begin, length=length, offsets=offsets,
            sizes=(),
        )  # fmt: skip
        chunks.setdefault(_text(at["fqn"]), {})[offsets] = chunk
    tensors, entries = {}, {}
    for key, stored in state["state_dict_metadata"].items():
        if stored.name == _META + "BytesStorageMetadata":
            (entries[_text(key)],) = chunks[key].values()
            continue
        of = _state(stored, "TensorStorageMetadata")
        boxes = []
        for box in of["chunks"]:
            bounds = _state(box, "ChunkStorageMetadata")
            at_chunk = chunks[key][_size(bounds["offsets"])]
            boxes.append(
                Chunk(
                    name=at_chunk.name, begin=at_chunk.begin, length=at_chunk.length,
                    offsets=at_chunk.offsets, sizes=_size(bounds["sizes"]),
                )
            )  # fmt: skip
        dtype = _DTYPES[of["properties"].state[0].path]
        tensors[_text(key)] = StoredTensor(
            dtype=dtype, shape=_size(of["size"]), chunks=tuple(boxes)
        )
    paths = plain(state.get("planner_data") or {})
    for path in paths.values():
        if not isinstance(path, tuple) or not path:
            raise ValueError("the place of an entry is no path")
        if not all(isinstance(step, str | int) for step in path):
            raise ValueError("the place of an entry is no path")
    return DcpCheckpoint(folder=folder, tensors=tensors, entries=entries, paths=paths)


def _state(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Call) or value.name != _META + name:
        raise ValueError(f"a {name} is missing")
    if not isinstance(value.state, dict):
        raise ValueError(f"a {name} is empty")
    return value.state


def _size(value: Any) -> tuple[int, ...]:
    if not isinstance(value, Call) or value.name != "torch.Size":
        raise ValueError("a shape is missing")
    (sizes,) = value.args
    return tuple(_whole(size) for size in sizes)


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{str(value)[:40]} is no size")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a name is no text")
    return value


def _check_files(checkpoint: DcpCheckpoint) -> None:
    """Check that each entry lies within its file, and that no two share bytes."""
    spans: dict[str, list[tuple[int, int]]] = {}
    chunks = [c for stored in checkpoint.tensors.values() for c in stored.chunks]
    for chunk in (*chunks, *checkpoint.entries.values()):
        spans.setdefault(chunk.name, []).append((chunk.begin, chunk.begin + chunk.length))
    for name, held in spans.items():
        held.sort()
        with opened(checkpoint.folder, name) as file:
            size = os.fstat(file).st_size
        place = os.path.join(checkpoint.folder, name)
        if size < held[-1][1]:
            raise damaged(place, f"has {size} bytes instead of {held[-1][1]}")
        if any(after[0] < before[1] for before, after in itertools.pairwise(held)):
            raise damaged(place, "holds one entry within another")


def _entry(folder: str, chunk: Chunk, limit_bytes: int) -> Any:
    """Read a tensor or plain data that ``torch.save`` wrote; its checksums are verified."""
    place = os.path.join(folder, chunk.name)
    if chunk.length > limit_bytes:
        raise damaged(place, f"has an entry of {chunk.length} bytes, more than {limit_bytes}")
    with opened(folder, chunk.name) as file:
        data = read_exactly(file, chunk.begin, chunk.length, place)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _unpacked(archive, limit_bytes)
    except Exception as error:  # zipfile raises many kinds of errors for files that are no archives
        raise damaged(
            place, f"has a damaged entry at byte {chunk.begin} ({error!r})"[:400]
        ) from error


def _unpacked(archive: zipfile.ZipFile, limit_bytes: int) -> Any:
    infos = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    if len(infos) != len(archive.infolist()):
        raise ValueError("it has a member twice")
    for info in infos.values():
        if info.compress_type != zipfile.ZIP_STORED or info.file_size > limit_bytes:
            raise ValueError("it has a member that is compressed")
    if "byteorder" in infos and archive.read(infos["byteorder"]) != b"little":
        raise ValueError("its numbers are big-endian")
    value = read(archive.read(infos["data.pkl"]), _ENTRY_NAMES)
    while isinstance(value, Call) and value.name == _PARAMETER:
        value = value.args[0]
    if isinstance(value, Call) and value.name in _REBUILDS:
        return _tensor(value, archive, infos)
    return plain(value)


def _tensor(call: Call, archive: zipfile.ZipFile, infos: dict[str, zipfile.ZipInfo]) -> Tensor:
    storage, offset, size, stride = call.args[:4]
    if not isinstance(storage, Persistent) or not isinstance(storage.key, tuple):
        raise ValueError("a tensor has no storage")
    kind, of, key = storage.key[:3]
    if kind != "storage" or not isinstance(of, Name):
        raise ValueError("a tensor has no storage")
    dtype = _STORAGES[of.path]
    if call.name.endswith("v3"):
        dtype = _DTYPES[call.args[6].path]
    data = bytearray(archive.read(infos[f"data/{_text(key)}"]))
    shape, strides = tuple(map(_whole, size)), tuple(map(_whole, stride))
    first = _whole(offset)
    if len(shape) != len(strides):
        raise ValueError("a tensor has fewer strides than sizes")
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    last = first + sum((n - 1) * step for n, step in zip(shape, strides))
    if (last + 1) * dtype.itemsize > len(data):
        raise ValueError("a tensor ends behind its storage")
    held = torch.frombuffer(data, dtype=dtype, count=len(data) // dtype.itemsize)
    return held.as_strided(shape, strides, first)
