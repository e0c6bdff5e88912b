"""Saves whose files are written while training goes on.

In: at a step's end, the plan of ``torch.distributed.checkpoint``, as for a plain save, and this
rank's tensors, which are copied to the host's memory at once. Out: the same checkpoint as a plain
save writes. Each rank writes its own file in a thread, which communicates with nobody; a record
beside the file has its checksum, or what went wrong. The first rank's thread waits for the records
of all ranks and writes the manifest, which makes the files a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from autopar.runtime.state.checkpoint_format import UNFINISHED, WRITTEN, read_bounded
from autopar.runtime.state.checkpoint_writer import (
    CheckpointWriter,
    Layout,
    layout_of,
    resolved,
    write_file,
)
from autopar.runtime.state.numbered_checkpoints import remove_old

_POLL_S = 0.02
_MAX_RECORD_BYTES = 1 << 16


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the writing of a file ended: its checksum, or the error."""

    sha256: str = ""
    error: str = ""


class BackgroundWriter(CheckpointWriter):
    """Copies this rank's tensors to the host's memory; `write_own` and `complete` write."""

    def __init__(self, path: str | os.PathLike[str], plain: Mapping[str, Any]) -> None:
        super().__init__(path, plain)
        self._own: tuple[Layout, list[Tensor]] | None = None
        self._of_all: tuple[Metadata, list[list[WriteResult]]] | None = None

    def _written(
        self, name: str, items: list[WriteItem], planner: SavePlanner
    ) -> list[WriteResult]:
        layout = layout_of(name, items)
        self._own = layout, [_copied(resolved(planner, item)) for item in layout.items]
        return layout.results(sha256="")

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank, keep what `complete` needs."""
        self._of_all = metadata, results

    @property
    def rank(self) -> int:
        assert self._place is not None
        return self._place.rank

    def write_own(self) -> None:
        """Write this rank's file, and the record beside it."""
        if self._own is None:
            return
        layout, copies = self._own
        self._own = None  # the copies need not live while the first rank waits for others
        try:
            record = _Record(sha256=write_file(self.folder, layout, copies))
        except Exception as error:
            self._leave(layout.name, _Record(error=_told(self.rank, error)))
            raise
        self._leave(layout.name, record)

    def _leave(self, name: str, record: _Record) -> None:
        path = os.path.join(self.folder, name + WRITTEN)
        with open(path + UNFINISHED, "xb") as file:
            file.write(msgspec.json.encode(record))
        os.replace(path + UNFINISHED, path)

    def complete(self, given_up: threading.Event, limit_s: float) -> None:
        """On the first rank, wait for the files of all ranks, and make them the checkpoint.

        Raises OSError if one was not written, or not within ``limit_s``.
        """
        assert self._of_all is not None
        metadata, results = self._of_all
        names = {r.storage_data.file.name for by_rank in results for r in by_rank}
        checksums: dict[str, str] = {}
        deadline_s = time.monotonic() + limit_s
        while True:
            for name in sorted(names - checksums.keys()):
                if os.path.lexists(os.path.join(self.folder, name + WRITTEN)):
                    checksums[name] = self._checksum(name)
            missing = sorted(names - checksums.keys())
            if not missing:
                break
            if given_up.wait(_POLL_S) or time.monotonic() > deadline_s:
                raise TimeoutError(f"{missing} were not written within {limit_s:g} s")
        super().finish(metadata, [[_with_checksum(r, checksums) for r in rs] for rs in results])

    def _checksum(self, name: str) -> str:
        data = read_bounded(self.folder, name + WRITTEN, _MAX_RECORD_BYTES)
        record = msgspec.json.decode(data, type=_Record)
        if record.error:
            raise _OtherRankError(record.error)
        return record.sha256


class _OtherRankError(OSError):
    """An error that the rank with it has described."""


class BackgroundSave:
    """One rank's part of a save, begun; of its numbered checkpoints ``keep`` are kept."""

    def __init__(self, writer: BackgroundWriter, keep: int, limit_s: float) -> None:
        self._given_up, self._ended = threading.Event(), threading.Event()
        self._failure = ""
        threading.Thread(
            target=self._run, args=(writer, keep, limit_s), name="autopar-checkpoint", daemon=True
        ).start()

    def outcome(self, wait_s: float) -> str | None:
        """Empty if it has succeeded, the reason if it failed, None if it still runs."""
        return self._failure if self._ended.wait(wait_s) else None

    def give_up(self) -> None:
        """Wait for other ranks no more."""
        self._given_up.set()

    def _run(self, writer: BackgroundWriter, keep: int, limit_s: float) -> None:
        try:
            writer.write_own()
            if writer.is_coordinator:
                writer.complete(self._given_up, limit_s)
                with contextlib.suppress(OSError):  # the checkpoint is complete
                    remove_old(writer.folder, keep)
        except Exception as error:
            self._failure = _told(writer.rank, error)
            writer.discard()
        finally:
            self._ended.set()


def _copied(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _with_checksum(result: WriteResult, checksums: Mapping[str, str]) -> WriteResult:
    written = result.storage_data
    file = written.file
    record = msgspec.structs.replace(file, sha256=checksums[file.name])
    return replace(result, storage_data=replace(written, file=record))


def _told(rank: int, error: Exception) -> str:
    if isinstance(error, _OtherRankError):
        return str(error)
    return f"rank {rank}: {type(error).__name__}: {error}"
