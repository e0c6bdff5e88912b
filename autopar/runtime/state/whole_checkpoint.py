"""A checkpoint of whole tensors that one process holds, in the files of `checkpoint_format`.

In: tensors by name, and plain data. Out: a folder; and both again, verified before anything of them
is returned. An earlier checkpoint in the folder stays until the new one is complete, and reading
runs no code.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.state.checkpoint_format import (
    MANIFEST,
    Stamp,
    StoredTensor,
    check_file,
    damaged,
    decode_manifest,
    is_covered,
    read_bounded,
    read_rows,
    stamp_of,
    stored_tensors,
)
from autopar.runtime.state.checkpoint_paths import Path, check_exists, check_writable
from autopar.runtime.state.checkpoint_writer import CheckpointWriter, write_tensors
from autopar.runtime.state.plain import plain_of, to_plain

_BYTES_OF_A_RECORD = 1 << 18


def write(path: Path, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
    """Write a checkpoint; raises InputError if that is impossible, also for what is not plain."""
    check_writable(path)
    content = {key: to_plain(value, key) for key, value in plain.items()}
    write_tensors(CheckpointWriter(path, content), path, tensors, is_alone=True)


def read(path: Path, most_tensors: int, most_bytes: int) -> tuple[dict[str, Tensor], Any]:
    """The tensors and the plain data of a checkpoint.

    Raises InputError for one that is damaged, or larger than what is expected.
    """
    check_exists(path)
    folder = os.fspath(path)
    place = os.path.join(folder, MANIFEST)
    limit = (1 << 20) + most_tensors * _BYTES_OF_A_RECORD
    content = decode_manifest(read_bounded(folder, MANIFEST, limit), place)
    stored = stored_tensors(content, place)
    total = sum(file.size_bytes for file in content.files)
    if total > most_bytes:
        raise damaged(place, f"names files of {total} bytes; these models' have {most_bytes}")
    plain = plain_of(content.plain, place)
    stamps = {file.name: stamp_of(folder, file.name) for file in content.files}
    for file in content.files:
        check_file(folder, file)
    return {key: _read(folder, place, key, x, stamps) for key, x in stored.items()}, plain


def _read(
    folder: str, place: str, key: str, stored: StoredTensor, stamps: Mapping[str, Stamp]
) -> Tensor:
    if not is_covered(stored):
        raise damaged(place, f"does not have every element of {key!r} once")
    found = torch.empty(stored.shape, dtype=stored.dtype)
    for chunk in stored.chunks:
        if math.prod(chunk.sizes):
            num = chunk.sizes[0] if chunk.sizes else 1
            box = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes))
            found[box] = read_rows(folder, chunk, stored.dtype, 0, num, stamps[chunk.name])
    return found
