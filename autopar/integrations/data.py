"""Loaders for compiled models: each rank's part of a global batch, and batches fetched ahead.

Under ``torchrun`` every rank may load the whole batch, of which autopar takes its shard, or load
that shard alone and pass it with ``local=True``. `LocalBatches` tells a ``DataLoader`` which
samples of each global batch are a rank's: which they are depends on the plan, so that the strided
parts of a ``DistributedSampler`` would train on other batches where a plan splits micro-batches or
models too. `ahead` overlaps loading, and the copy to a GPU, with the steps.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.base.accelerators import is_accelerator, module_of, selected
from autopar.base.errors import InputError
from autopar.base.torch_private import pytree
from autopar.comm.ops import assemble
from autopar.ir.placement import State
from autopar.lowering.types import InputProgram, RankProgram
from autopar.runtime.compiled import Compiled
from autopar.runtime.state.shards import is_padded, local_part, microbatch_of

_log = logging.getLogger(__name__)
_PATIENCE_S = 0.1
THREAD = "autopar.ahead"
"""The name of the threads that fetch batches."""


class LocalBatches(torch.utils.data.Sampler[list[int]]):
    """A batch sampler that keeps of each global batch what this rank passes with ``local=True``.

    ``batches`` is a batch sampler (iterates over lists of indices of samples, the same on all
    ranks), such as ``BatchSampler(RandomSampler(data, generator=seeded), 64, drop_last=False)``;
    ``compiled`` the model, under ``torchrun``. A batch of another size, as an epoch's last one may
    be, is left out on all ranks, and logged once, if it does not divide by the ranks, or if the
    model trains on batches of one size, as with offloading; pass ``trains=False`` to evaluate them.

        loader = DataLoader(data, batch_sampler=LocalBatches(batches, compiled))
        for x, y in loader:
            compiled.train_step(x, y, local=True)

    Raises InputError where ranks do not hold samples of the batch alone: no ``torchrun``, a plan
    that splits no input or another dimension than the first (sequences, images), or inputs that are
    split differently.
    """

    def __init__(
        self, batches: Iterable[Sequence[int]], compiled: Compiled, *, trains: bool = True
    ) -> None:
        if not dist.is_initialized():
            raise InputError(
                "LocalBatches is for ranks that load batches by themselves, under torchrun; local "
                "workers are given the whole batch by train_step(batch)"
            )
        self.batches = batches
        self.rows = local_rows(compiled.program, dist.get_rank())
        self.size = _batch_size(compiled.program)
        takes_others = compiled.takes_other_shapes or not trains
        self._others = _Shares(compiled.program) if takes_others else None
        self._has_logged = False

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches:
            rows = self.rows
            if len(batch) != self.size:
                rows = [] if self._others is None else self._others.rows(len(batch))
            if rows:
                yield [batch[row] for row in rows]
            elif not self._has_logged:
                self._has_logged = True
                _log.warning(
                    "a batch of %d samples is left out: %s", len(batch),
                    f"with local=True the model trains on the {self.size} for which it was compiled"
                    if self._others is None else "it does not divide by the ranks",
                )  # fmt: skip

    def __len__(self) -> int:
        """The number of global batches, with those that are left out."""
        return len(self.batches)  # type: ignore[arg-type]


class _Shares:
    """This rank's part of batches of other sizes, which are split as the example's is.

    Which samples are in a micro-batch does not matter, as the step has the mean over all of them.
    """

    def __init__(self, program: RankProgram) -> None:
        self._source = next(source for source in program.inputs if source.shape)
        self._mesh = program.mesh
        self._place = program.place(dist.get_rank())[1]

    def rows(self, size: int) -> list[int]:
        """The samples of a batch by number; none if they do not divide by the ranks."""
        if size % self._source.num_shards(0, self._mesh):
            return []
        placements, whole = self._source.placements, torch.arange(size)
        return [int(row) for row in local_part(whole, placements, self._mesh, self._place)]


def local_rows(program: RankProgram, rank: int) -> list[int]:
    """The samples of a global batch, by number, that a rank passes with ``local=True``, in order.

    Raises InputError where they do not describe its shard of each input; see `LocalBatches`.
    """
    found: dict[str, list[int]] = {}
    for source in program.inputs:
        if source.shape:
            found[source.name] = _rows_of(source, program, rank)
    names = list(found)
    for name in names[1:]:
        if found[name] != found[names[0]]:
            raise InputError(
                f"the plan splits inputs {names[0]!r} and {name!r} differently, so that no samples "
                "are a rank's: pass the global batch to train_step without local=True"
            )
    if not names or len(found[names[0]]) == _batch_size(program):
        raise InputError(
            "the plan splits no input: every rank reads the whole batch. Pass it to train_step "
            "without local=True"
        )
    return found[names[0]]


def _batch_size(program: RankProgram) -> int:
    return next((source.shape[0] for source in program.inputs if source.shape), 0)


def _rows_of(source: InputProgram, program: RankProgram, rank: int) -> list[int]:
    cuts = [source.microbatch] if source.microbatch is not None else []
    cuts += [p for p in source.placements if p.state is State.SHARD]
    other = next((cut.dim for cut in cuts if cut.dim != 0), None)
    if other is not None:
        raise InputError(
            f"the plan splits dimension {other} of input {source.name!r}, so a rank's shard is not "
            "made of whole samples: pass the global batch to train_step without local=True"
        )
    num, place = program.num_microbatches, program.place(rank)[1]
    if is_padded(source, program):
        raise InputError(
            f"the {source.shape[0]} samples of input {source.name!r} do not divide by the ranks, "
            "which pad: pass the global batch to train_step without local=True"
        )
    whole = torch.arange(source.shape[0])
    parts = [
        local_part(microbatch_of(whole, source, num, index), source.placements, program.mesh, place)
        for index in range(1 if source.microbatch is None else num)
    ]
    rows = parts[0]
    if source.microbatch is not None:
        rows = assemble(torch.stack(parts), 0, source.microbatch.outer)
    return [int(row) for row in rows]


def ahead(
    loader: Iterable[Any], device: torch.device | str | None = None, *, depth: int = 1
) -> Iterator[Any]:
    """Iterate over a loader with the next ``depth`` batches fetched while a step runs.

    A thread iterates over the loader. With a CUDA ``device`` it also copies the tensors of each
    batch there, from pinned memory and on a stream of its own; the caller's stream waits for the
    copy. Without one (local workers, CPUs) batches are fetched as they are. An exception of the
    loader is raised here, after the batches before it; if the caller stops early, the thread ends.

        for batch in ahead(loader, "cuda"):
            compiled.train_step(**batch)

    Raises InputError for a ``depth`` below 1.
    """
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise InputError(f"depth is {depth!r}; it must be a whole number of batches, at least 1")
    target = None if device is None else torch.device(device)
    return _fetched(
        loader, target if target is not None and is_accelerator(target) else None, depth
    )


@dataclass(frozen=True, slots=True)
class _Item:
    """A batch with the event of its copy; with ``ends`` the end, perhaps by an error."""

    batch: Any = None
    copied: Any = None
    ends: bool = False
    error: BaseException | None = None


@dataclass(slots=True)
class _Feed:
    """A bounded queue of batches, filled by a thread and emptied by the caller."""

    loader: Iterable[Any]
    device: torch.device | None
    items: queue.Queue[_Item]
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """The thread: fetch and copy batches until the end, or until the caller has stopped."""
        last = _Item(ends=True)
        try:
            with contextlib.nullcontext() if self.device is None else selected(self.device):
                stream = None if self.device is None else module_of(self.device).Stream(self.device)
                for batch in self.loader:
                    if not self._put(self._copied(batch, stream)):
                        return
        except BaseException as error:  # the caller's to handle
            last = _Item(ends=True, error=error)
        self._put(last)

    def _put(self, item: _Item) -> bool:
        while not self.stopped.is_set():
            with contextlib.suppress(queue.Full):
                self.items.put(item, timeout=_PATIENCE_S)
                return True
        return False

    def _copied(self, batch: Any, stream: Any) -> _Item:
        if self.device is None:
            return _Item(batch)
        with module_of(self.device).stream(stream):
            made = pytree.tree_map_only(Tensor, self._sent, batch)
        return _Item(made, stream.record_event())

    def _sent(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)


def _fetched(loader: Iterable[Any], device: torch.device | None, depth: int) -> Iterator[Any]:
    feed = _Feed(loader, device, queue.Queue(maxsize=depth))
    thread = threading.Thread(target=feed.run, name=THREAD, daemon=True)
    thread.start()
    try:
        while True:
            item = _next(feed, thread)
            if item.ends:
                if item.error is not None:
                    raise item.error
                return
            if device is not None:
                stream = module_of(device).current_stream(device)
                stream.wait_event(item.copied)
                for tensor in pytree.tree_leaves(item.batch):
                    if isinstance(tensor, Tensor):
                        tensor.record_stream(stream)
            yield item.batch
    finally:
        feed.stopped.set()


def _next(feed: _Feed, thread: threading.Thread) -> _Item:
    """The next item; a thread that died without one (an interpreter that exits) ends the loop."""
    while True:
        try:
            return feed.items.get(timeout=_PATIENCE_S)
        except queue.Empty:
            if not thread.is_alive() and feed.items.empty():
                return _Item(ends=True)
