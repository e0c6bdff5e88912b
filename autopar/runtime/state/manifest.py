"""The manifest of a checkpoint, read and checked against what is expected of it.

In: a folder, and the size of the state that it is to be loaded into. Out: where each tensor lies,
and the plain data. No tensor is read; `check_file` of `checkpoint_format` verifies the files.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from autopar.runtime.state.checkpoint_format import (
    MANIFEST,
    FileRecord,
    Stamp,
    StoredTensor,
    damaged,
    decode_manifest,
    read_bounded,
    stamp_of,
    stored_tensors,
)
from autopar.runtime.state.plain import from_plain

_MOST_COPIES = 16
"""How much larger than the state its files may be: optimizer states, other dtypes."""
_BYTES_OF_OTHER_DATA = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """``place`` is the manifest's own file, for errors."""

    folder: str
    place: str
    files: tuple[FileRecord, ...]
    tensors: dict[str, StoredTensor]
    plain: dict[str, Any]

    def stamps(self) -> dict[str, Stamp]:
        """The stamps of its files, by name, which show changes between verification and reading."""
        return {file.name: stamp_of(self.folder, file.name) for file in self.files}


def manifest_limit(num_tensors: int) -> int:
    """The most bytes that the metadata of a state of so many tensors may have."""
    return (1 << 20) + (num_tensors << 18)


def read_manifest(folder: str, *, num_tensors: int, num_bytes: int) -> Manifest:
    """The manifest of a checkpoint for a state of so many tensors and bytes.

    Raises InputError if it is damaged, or names files that are far larger than the state.
    """
    place = os.path.join(folder, MANIFEST)
    data = read_bounded(folder, MANIFEST, manifest_limit(num_tensors))
    content = decode_manifest(data, place)
    tensors = stored_tensors(content, place)
    total = sum(file.size_bytes for file in content.files)
    most = _MOST_COPIES * num_bytes + _BYTES_OF_OTHER_DATA
    if total > most:
        raise damaged(place, f"names files of {total} bytes; this model's have at most {most}")
    try:
        plain = {key: from_plain(value) for key, value in content.plain.items()}
    except (ValueError, TypeError, RuntimeError) as error:
        raise damaged(place, f"holds what is no plain data ({error})"[:300]) from error
    return Manifest(folder=folder, place=place, files=content.files, tensors=tensors, plain=plain)
