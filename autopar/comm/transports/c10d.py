"""The transport of ``torch.distributed``: any backend, any number of hosts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.comm.transports.base import Reduction, Traits, Wait, done

# torch 2.13 renamed both and warns about the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_OPS = {Reduction.SUM: dist.ReduceOp.SUM, Reduction.MAX: dist.ReduceOp.MAX}


class C10dCollectives:
    """`Collectives` of a backend that has all of them, as NCCL does."""

    traits: ClassVar[Traits] = Traits(overlaps=True, receives_whole=False)

    def __init__(self, process_group: Any) -> None:
        self.process_group = process_group
        self.num = dist.get_world_size(process_group)

    @classmethod
    def serves(cls, device_kind: str, num_ranks: int) -> bool:
        return device_kind != "cpu"

    @classmethod
    def open(cls, process_group: Any) -> Self | None:
        return cls(process_group)

    def all_reduce(
        self, x: Tensor, reduction: Reduction = Reduction.SUM, *, overlapped: bool = False
    ) -> Wait:
        group = self.process_group
        return _end_of(dist.all_reduce(x, _OPS[reduction], group=group, async_op=overlapped))

    def all_gather(self, whole: Tensor, own: Tensor, *, overlapped: bool = False) -> Wait:
        group = self.process_group
        return _end_of(_all_gather_single(whole, own, group=group, async_op=overlapped))

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        dist.all_to_all_single(received, sent, group=self.process_group)

    def reduce_scatter(self, whole: Tensor, *, overlapped: bool = False) -> Callable[[], Tensor]:
        shard = whole.new_empty(whole.numel() // self.num)
        group = self.process_group
        end = _end_of(_reduce_scatter_single(shard, whole, group=group, async_op=overlapped))

        def reduced() -> Tensor:
            end()
            return shard

        return reduced

    def close(self) -> None:
        """The process group belongs to whoever made it."""


class GlooCollectives(C10dCollectives):
    """`Collectives` over gloo, which has no reduce-scatter.

    ``torch.distributed`` would copy the tensor, all-reduce the copy and keep a shard. Here each
    rank sends every other one its shard and sums what it received: half the bytes.
    """

    traits: ClassVar[Traits] = Traits(overlaps=True, receives_whole=True)

    @classmethod
    def serves(cls, device_kind: str, num_ranks: int) -> bool:
        return device_kind == "cpu"

    def reduce_scatter(self, whole: Tensor, *, overlapped: bool = False) -> Callable[[], Tensor]:
        received = torch.empty_like(whole)
        group = self.process_group
        end = _end_of(dist.all_to_all_single(received, whole, group=group, async_op=True))

        def reduced() -> Tensor:
            end()
            return received.view(self.num, -1).sum(0, dtype=whole.dtype)

        return reduced


class C10dMessages:
    """`Messages` as point-to-point operations of a backend.

    NCCL queues all messages of a process group on a rank, so that a receive that waits would block
    a send, and another receive. So no two peers of a rank share a process group, nor do the two
    directions between two ranks: ``queues`` are these groups, by the sum of the two ranks modulo
    their number and by whether the message goes to the higher one. Messages without a queue travel
    in ``process_group``. All ranks of the job open theirs at the same time.
    """

    holds_sent: ClassVar[bool] = True

    def __init__(
        self, process_group: Any, queues: Mapping[tuple[int, bool], Any] | None = None
    ) -> None:
        self._rank = dist.get_rank(process_group)
        self._num = dist.get_world_size(process_group)
        self._process_group, self._queues = process_group, queues or {}

    @classmethod
    def serves(cls, device_kind: str, num_ranks: int) -> bool:
        return device_kind != "cpu"

    @classmethod
    def open(cls, process_group: Any) -> Self | None:
        own = tuple(dist.get_process_group_ranks(process_group))
        found: list[Any] = [own] * dist.get_world_size()
        dist.all_gather_object(found, own)
        queues = {}
        # All ranks make all groups: torch names a group that its members alone make by a count of
        # groups that may differ among them, and NCCL splits its world on all ranks at once.
        for ranks in sorted(set(found)):
            for place in sorted({sum(pair) % len(ranks) for pair in _pairs(len(ranks))}):
                for is_upward in (True, False):
                    made = dist.new_group(list(ranks))
                    if ranks == own:
                        queues[place, is_upward] = made
        opened = cls(process_group, queues)
        opened._connect()
        return opened

    def _connect(self) -> None:
        """Exchange a first message between any two ranks.

        NCCL connects two ranks at their first message, and both wait for that, also in a receive
        that is posted early. So it happens here, in one order of all pairs, which is free of
        circles.
        """
        x = torch.zeros(1, device=_device_type_of(self._process_group))
        for pair in _pairs(self._num):
            for source, target in (pair, pair[::-1]):
                if self._rank == source:
                    self.send(target, [x])()
                elif self._rank == target:
                    self.receive(source, [x])()

    def _group(self, source: int, target: int) -> Any:
        place = (source + target) % self._num
        return self._queues.get((place, target > source), self._process_group)

    def send(self, rank: int, tensors: Sequence[Tensor]) -> Wait:
        sent, group = [_on_wire(tensor) for tensor in tensors], self._group(self._rank, rank)
        works = [dist.isend(tensor, group=group, group_dst=rank) for tensor in sent]

        def wait() -> None:
            for work in works:
                _end_of(work)()
            sent.clear()

        return wait

    def receive(self, rank: int, into: Sequence[Tensor]) -> Callable[[], float]:
        group = self._group(rank, self._rank)
        works = [dist.irecv(_on_wire(tensor), group=group, group_src=rank) for tensor in into]

        def wait() -> float:
            for work in works:
                _end_of(work)()
            return time.perf_counter()

        return wait

    def broadcast(self, x: Tensor, root: int) -> None:
        dist.broadcast(_on_wire(x), group=self._process_group, group_src=root)

    def drop_unused(self) -> None:
        """The backend keeps no buffers of ours."""

    def close(self) -> None:
        for group in self._queues.values():
            dist.destroy_process_group(group)


class GlooMessages(C10dMessages):
    """`Messages` over gloo, where sends and receives of one group never block each other."""

    @classmethod
    def serves(cls, device_kind: str, num_ranks: int) -> bool:
        return device_kind == "cpu"

    @classmethod
    def open(cls, process_group: Any) -> Self | None:
        return cls(process_group)

    def close(self) -> None:
        """The process group belongs to whoever made it."""


def _pairs(num: int) -> list[tuple[int, int]]:
    return list(itertools.combinations(range(num), 2))


def backends(process_group: Any = None) -> dict[str, str]:
    """The backend of each kind of device: ``cpu:gloo,cuda:nccl``; by default of the world."""
    parts = dist.get_backend_config(process_group).split(",")
    return dict(part.split(":") for part in parts)


def _device_type_of(process_group: Any) -> str:
    """The kind of device that has a backend besides gloo, if any."""
    of_kinds = backends(process_group).items()
    return next((kind for kind, backend in of_kinds if backend != "gloo"), "cpu")


def _end_of(work: Any) -> Wait:
    """The wait for a ``torch.distributed`` work; None is one that has ended."""
    if work is None:
        return done

    def wait() -> None:  # a frame of this file: whoever is in it waits for other ranks
        work.wait()

    return wait


def _on_wire(tensor: Tensor) -> Tensor:
    """Booleans and complex numbers as what every backend moves; the same memory."""
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8)
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
