"""The transport of Unix sockets: collectives between processes of one host.

gloo hands every collective to threads of its own. Where all cores compute, each hand-over waits for
the scheduler, for longer than small collectives take. Here the calling thread sends and receives
over a socket to each other process, without a hand-over. That holds for reductions of gradients
too: gloo would overlap them with computation, but on the same cores.

A sum is bit-identical on all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.comm.transports.base import Reduction, Traits, Wait, done
from autopar.comm.transports.unix_sockets import (
    MAX_RANKS,
    Peers,
    byte_tensor,
    close_in_children,
    connected,
    receive,
    send,
)

WHOLE_BYTES = 1 << 17
"""An all-reduce of up to so many bytes is an all-gather of the operands, which every rank sums; a
larger one is a reduce-scatter and an all-gather."""
_CHUNK_BYTES = 1 << 16
"""Bytes sent before as many are received: a rank is at most two chunks ahead of another, which a
socket's buffer holds."""


def _add(x: Tensor, other: Tensor) -> None:
    x.add_(other)


def _maximum(x: Tensor, other: Tensor) -> None:
    torch.maximum(x, other, out=x)


_REDUCE: dict[Reduction, Callable[[Tensor, Tensor], None]] = {
    Reduction.SUM: _add,
    Reduction.MAX: _maximum,
}
"""Each reduces its second tensor into the first."""


class SocketCollectives:
    """`Collectives` of one group, on tensors in the memory of CPUs."""

    traits: ClassVar[Traits] = Traits(
        overlaps=False, receives_whole=False, chunk_bytes=_CHUNK_BYTES, gathered_bytes=WHOLE_BYTES
    )

    def __init__(self, peers: Peers, index: int) -> None:
        self.index, self.num = index, len(peers)
        self._peers = [(rank, peer) for rank, peer in enumerate(peers) if peer is not None]
        close_in_children(self)

    @classmethod
    def serves(cls, device_kind: str, num_ranks: int) -> bool:
        return device_kind == "cpu" and num_ranks <= MAX_RANKS

    @classmethod
    def open(cls, process_group: Any) -> Self | None:
        peers = connected(process_group)
        return None if peers is None else cls(peers, dist.get_rank(process_group))

    def close(self) -> None:
        for _, peer in self._peers:
            peer.close()

    def all_reduce(
        self, x: Tensor, reduction: Reduction = Reduction.SUM, *, overlapped: bool = False
    ) -> Wait:
        flat, reduce = x.view(-1), _REDUCE[reduction]
        if x.nbytes <= self.traits.gathered_bytes:
            whole = flat.new_empty((self.num, flat.numel()))
            self.all_gather(whole, flat)
            first, *others = whole.unbind()
            for other in others:
                reduce(first, other)
            flat.copy_(first)
            return done
        shards = list(flat.tensor_split(self.num))
        own = shards[self.index]
        self._reduce_into(own, shards, reduction)
        self._exchange([own] * self.num, shards)
        return done

    def all_gather(self, whole: Tensor, own: Tensor, *, overlapped: bool = False) -> Wait:
        shards = self._shards(whole)
        shards[self.index].copy_(own.view(-1))
        self._exchange([own] * self.num, shards)
        return done

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        into, out = self._shards(received), self._shards(sent)
        into[self.index].copy_(out[self.index])
        self._exchange(out, into)

    def reduce_scatter(self, whole: Tensor, *, overlapped: bool = False) -> Callable[[], Tensor]:
        shards = self._shards(whole)
        own = shards[self.index].clone()
        self._reduce_into(own, shards, Reduction.SUM)
        return lambda: own

    def _shards(self, whole: Tensor) -> Sequence[Tensor]:
        return whole.view(self.num, whole.numel() // self.num).unbind()

    def _reduce_into(self, own: Tensor, shards: Sequence[Tensor], reduction: Reduction) -> None:
        """Send each shard to its rank and reduce those received into ``own``, chunk by chunk."""
        size, reduce = own.element_size(), _REDUCE[reduction]
        step = _CHUNK_BYTES // size
        sent = [(rank, peer, _bytes_of(shards[rank])) for rank, peer in self._peers]
        scratch = own.new_empty(min(step, own.numel()))
        into = _bytes_of(scratch)
        with self._all_or_closed():
            for start in range(0, max(shard.numel() for shard in shards), step):
                for rank, peer, out in sent:
                    send(rank, peer, out[start * size : (start + step) * size])
                target = own[start : start + step]
                for rank, peer, _ in sent:
                    receive(rank, peer, into[: target.nbytes])
                    reduce(target, scratch[: target.numel()])

    def _exchange(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Send a tensor to and receive one from each other rank, chunk by chunk."""
        ends = [
            (rank, peer, _bytes_of(sent[rank]), _bytes_of(received[rank]))
            for rank, peer in self._peers
        ]
        most = max(max(len(out), len(into)) for *_, out, into in ends)
        with self._all_or_closed():
            for start in range(0, most, _CHUNK_BYTES):
                stop = start + _CHUNK_BYTES
                for rank, peer, out, _ in ends:
                    send(rank, peer, out[start:stop])
                for rank, peer, _, into in ends:
                    receive(rank, peer, into[start:stop])

    @contextlib.contextmanager
    def _all_or_closed(self) -> Iterator[None]:
        """Close the connections if an operation is interrupted (by Ctrl-C, say): the next one would
        be taken for the rest of it."""
        try:
            yield
        except BaseException:
            self.close()
            raise


def _bytes_of(x: Tensor) -> memoryview:
    return byte_tensor(x).numpy().data
