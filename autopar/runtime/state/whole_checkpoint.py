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
    Stamp,
    check_file,
    damaged,
    is_covered,
    read_rows,
)
from autopar.runtime.state.checkpoint_paths import Path, check_exists, check_writable
from autopar.runtime.state.checkpoint_writer import CheckpointWriter, write_tensors
from autopar.runtime.state.manifest import Manifest, read_manifest
from autopar.runtime.state.plain import to_plain


def write(path: Path, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
    """Write a checkpoint; raises InputError if that is impossible, also for what is not plain."""
    check_writable(path)
    content = {key: to_plain(value, key) for key, value in plain.items()}
    write_tensors(CheckpointWriter(path, content), path, tensors, is_alone=True)


def read(
    path: Path, *, num_tensors: int, num_bytes: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the plain data of a checkpoint for a state of so many tensors and bytes.

    Raises InputError if it is damaged.
    """
    check_exists(path)
    found = read_manifest(os.fspath(path), num_tensors=num_tensors, num_bytes=num_bytes)
    stamps = found.stamps()
    for file in found.files:
        check_file(found.folder, file)
    return {key: _read(found, key, stamps) for key in found.tensors}, found.plain


def _read(manifest: Manifest, key: str, stamps: Mapping[str, Stamp]) -> Tensor:
    stored = manifest.tensors[key]
    if not is_covered(stored):
        raise damaged(manifest.place, f"does not have every element of {key!r} once")
    found = torch.empty(stored.shape, dtype=stored.dtype)
    for chunk in stored.chunks:
        if math.prod(chunk.sizes):
            num = chunk.sizes[0] if chunk.sizes else 1
            box = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes))
            stamp = stamps[chunk.name]
            found[box] = read_rows(manifest.folder, chunk, stored.dtype, 0, num, stamp)
    return found
