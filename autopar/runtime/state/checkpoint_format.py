"""The files of a checkpoint: their names, their contents, and how they are opened.

A checkpoint is a folder. ``autopar.json`` has the plain data, the location of each tensor, and size
and SHA-256 of each file; it carries a SHA-256 of itself. The others are safetensors files, one for
each rank that wrote. Nothing in them is code, and nothing outside of the folder is opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from autopar.base.errors import InputError

MANIFEST = "autopar.json"
VERSION = 1
SUFFIX = ".safetensors"
UNFINISHED = ".part"
"""The suffix of a file until the manifest names it: other readers look for safetensors files."""
WRITTEN = ".written"
"""The suffix of the record beside a file that was written in the background."""
_NAME = re.compile(r"autopar-[0-9a-f]{16}-[0-9]{1,7}\.safetensors")
_OURS = re.compile(
    r"autopar-[0-9a-f]{16}-[0-9]{1,7}\.safetensors(\.part|\.written(\.part)?)?"
    r"|autopar-[0-9a-f]{16}-publishing\.safetensors|autopar\.json\.[0-9a-f]{16}"
)
_BLOCK_BYTES = 1 << 22

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool, "U64": torch.uint64, "U32": torch.uint32,
    "U16": torch.uint16, "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64, "C128": torch.complex128,
}  # fmt: skip
"""Dtype names of safetensors; ``C128`` is stored as pairs of F64."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class FileRecord(_Struct, frozen=True):
    name: str
    size_bytes: int
    sha256: str


class ChunkRecord(_Struct, frozen=True):
    """One box of a tensor: the index of its file, and its first byte there."""

    file: int
    begin: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class TensorRecord(_Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[ChunkRecord, ...]


class Content(_Struct, frozen=True):
    files: tuple[FileRecord, ...]
    tensors: dict[str, TensorRecord]
    plain: dict[str, Any]


class _Envelope(_Struct, frozen=True):
    autopar_checkpoint: int
    sha256: str
    content: msgspec.Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A box of a stored tensor: ``length`` bytes from byte ``begin`` of the file ``name``."""

    name: str
    begin: int
    length: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def encode_manifest(content: Content) -> bytes:
    raw = msgspec.json.encode(content)
    digest = hashlib.sha256(raw).hexdigest()
    envelope = _Envelope(autopar_checkpoint=VERSION, sha256=digest, content=msgspec.Raw(raw))
    return msgspec.json.encode(envelope)


def decode_manifest(data: bytes, place: str) -> Content:
    """Parse the manifest; InputError if any byte has changed since it was written."""
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        if envelope.autopar_checkpoint != VERSION:
            raise refusal(
                place,
                f"has format {envelope.autopar_checkpoint}; this autopar reads format {VERSION}",
                "load it with the autopar that wrote it",
            )
        if msgspec.json.encode(envelope) != data:
            raise damaged(place, "is not as it was written")
        if hashlib.sha256(envelope.content).hexdigest() != envelope.sha256:
            raise damaged(place, "does not have its checksum")
        content = msgspec.json.decode(envelope.content, type=Content)
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise damaged(place, f"cannot be read ({type(error).__name__}: {error})"[:300]) from error
    for record in content.files:
        if not _NAME.fullmatch(record.name) or record.size_bytes < 0:
            raise damaged(place, f"names a file {record.name[:100]!r}, as no checkpoint does")
    if len({record.name for record in content.files}) != len(content.files):
        raise damaged(place, "names a file twice")
    return content


def stored_tensors(content: Content, place: str) -> dict[str, StoredTensor]:
    found = {}
    for key, record in content.tensors.items():
        dtype = DTYPES.get(record.dtype)
        if dtype is None:
            raise damaged(place, f"gives {key[:200]!r} the unknown dtype {record.dtype[:40]!r}")
        chunks = []
        for chunk in record.chunks:
            if not 0 <= chunk.file < len(content.files) or min(chunk.sizes, default=0) < 0:
                raise damaged(place, f"places {key[:200]!r} where nothing is")
            length = math.prod(chunk.sizes) * dtype.itemsize
            file = content.files[chunk.file]
            if chunk.begin < 0 or chunk.begin + length > file.size_bytes:
                raise damaged(place, f"places {key[:200]!r} behind the end of {file.name!r}")
            chunks.append(
                Chunk(
                    name=file.name,
                    begin=chunk.begin,
                    length=length,
                    offsets=chunk.offsets,
                    sizes=chunk.sizes,
                )
            )
        found[key] = StoredTensor(dtype=dtype, shape=record.shape, chunks=tuple(chunks))
    return found


_MAX_CELLS = 1 << 22


def is_covered(stored: StoredTensor) -> bool:
    """Whether the chunks cover the tensor, each element once."""
    shape, chunks = stored.shape, stored.chunks
    if any(size < 0 for size in shape):
        return False
    for chunk in chunks:
        if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape):
            return False
        bounds = zip(chunk.offsets, chunk.sizes, shape)
        if any(o < 0 or s < 0 or o + s > size for o, s, size in bounds):
            return False
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        return False
    filled = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    if len(filled) < 2:
        return True
    cuts = [
        sorted({p for c in filled for p in (c.offsets[d], c.offsets[d] + c.sizes[d])})
        for d in range(len(shape))
    ]
    counts = [len(c) - 1 for c in cuts]
    if math.prod(counts) > _MAX_CELLS:
        return False
    places = [{p: i for i, p in enumerate(c)} for c in cuts]
    painted = torch.zeros(counts, dtype=torch.bool)
    for chunk in filled:
        box = painted[
            tuple(slice(at[o], at[o + s]) for at, o, s in zip(places, chunk.offsets, chunk.sizes))
        ]
        if box.any():
            return False
        box.fill_(True)
    return True


def refusal(place: str, what: str, fix: str) -> InputError:
    return InputError(f"the checkpoint file {place!r} {what}; {fix}")


def damaged(place: str, what: str) -> InputError:
    return refusal(place, what, "nothing was loaded: copy it again, or load another checkpoint")


@contextlib.contextmanager
def opened(folder: str, name: str) -> Iterator[int]:
    """Open a regular file of the folder, without following links and without waiting."""
    place = os.path.join(folder, name)
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise damaged(place, "is outside of the folder")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(place, flags)
    except FileNotFoundError as error:
        raise damaged(place, "is missing") from error
    except (OSError, ValueError) as error:
        raise damaged(place, f"cannot be opened ({error})") from error
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise damaged(place, "is no regular file")
        yield file
    finally:
        os.close(file)


def read_bounded(folder: str, name: str, limit_bytes: int) -> bytes:
    with opened(folder, name) as file:
        size = os.fstat(file).st_size
        if size > limit_bytes:
            raise damaged(
                os.path.join(folder, name),
                f"has {size} bytes, more than this model's can have ({limit_bytes})",
            )
        return bytes(read_exactly(file, 0, size, os.path.join(folder, name)))


def read_exactly(file: int, begin: int, length: int, place: str) -> bytearray:
    data = bytearray(length)
    view, done = memoryview(data), 0
    while done < length:
        try:
            count = os.preadv(file, [view[done:]], begin + done)
        except OSError as error:
            raise damaged(place, f"cannot be read ({error})") from error
        if count == 0:
            raise damaged(place, f"ends at {begin + done} bytes, before {begin + length}")
        done += count
    return data


def shard_name(folder: str, name: str) -> str:
    """The path of a file: a save that ended right after completing it leaves it unrenamed."""
    is_there = os.path.lexists(os.path.join(folder, name))
    return name if is_there else name + UNFINISHED


Stamp = tuple[int, int, int, int, int]
"""The identity and version of a file: device, inode, size and times."""


def stamp_of(folder: str, name: str) -> Stamp:
    """The stamp of a file of the folder as it is now."""
    with opened(folder, shard_name(folder, name)) as file:
        return _stamp(file)


def _stamp(file: int) -> Stamp:
    found = os.fstat(file)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def check_file(folder: str, record: FileRecord) -> None:
    """Raise InputError unless size and checksum match the manifest."""
    name = record.name
    place = os.path.join(folder, name)
    with opened(folder, shard_name(folder, name)) as file:
        size = os.fstat(file).st_size
        if size != record.size_bytes:
            raise damaged(place, f"has {size} bytes instead of {record.size_bytes}")
        digest, done = hashlib.sha256(), 0
        while done < size:
            part = read_exactly(file, done, min(_BLOCK_BYTES, size - done), place)
            digest.update(part)
            done += len(part)
        if digest.hexdigest() != record.sha256:
            raise damaged(place, "does not have its checksum")


def read_rows(
    folder: str, chunk: Chunk, dtype: torch.dtype, first: int, num: int, stamp: Stamp
) -> Tensor:
    """Read rows ``first`` to ``first + num`` of a chunk's first dimension, or a whole scalar.

    Raises InputError if the file no longer has the stamp from before its checksum was verified: a
    checksum is of a whole file, and a rank reads the rows that it needs.
    """
    sizes = (num, *chunk.sizes[1:]) if chunk.sizes else ()
    row = math.prod(chunk.sizes[1:]) * dtype.itemsize
    length = math.prod(sizes) * dtype.itemsize
    if not length:
        return torch.empty(sizes, dtype=dtype)
    name = shard_name(folder, chunk.name)
    with opened(folder, name) as file:
        begin = chunk.begin + first * row
        data = read_exactly(file, begin, length, os.path.join(folder, chunk.name))
        if _stamp(file) != stamp:
            raise refusal(
                os.path.join(folder, chunk.name),
                "was changed after its checksum was verified, while it was loaded",
                "part of it may have been taken: load a checkpoint again before training goes on",
            )
    return torch.frombuffer(data, dtype=dtype).reshape(sizes)


def remove_ours(folder: str, kept: Sequence[str]) -> None:
    """Remove files that other saves left in the folder, as far as possible."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if _OURS.fullmatch(name) and name not in kept:
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(folder, name))
