"""Collectives over sockets in the waiting thread, on real processes, against closed formulas."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.base.errors import WorkerError
from autopar.comm.transports import sockets
from autopar.comm.transports.base import PeerGone, Reduction
from autopar.comm.transports.sockets import WHOLE_BYTES, SocketCollectives
from autopar.comm.transports.unix_sockets import MAX_RANKS
from autopar.runtime.workers.group import WorkerGroup

SIZES = (0, 1, 7, 1000, WHOLE_BYTES // 4, WHOLE_BYTES // 4 + 1, 300_001)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.complex64)


def part(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Small integers, whose sums are exact in every dtype, different on every rank."""
    numbers = (torch.arange(size) * (rank + 3) + rank) % 7
    return (numbers * (1 + 1j)).to(dtype) if dtype.is_complex else numbers.to(dtype)


class Peer:
    """A rank with an exchange over all ranks."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.num = rank, world_size
        found = SocketCollectives.open(dist.group.WORLD)
        assert found is not None
        self.exchange: SocketCollectives = found

    def sums(self, size: int, dtype: torch.dtype) -> Tensor:
        x = part(self.rank, size, dtype)
        self.exchange.all_reduce(x)
        return x

    def largest(self, size: int) -> Tensor:
        x = part(self.rank, size, torch.float32)
        self.exchange.all_reduce(x, Reduction.MAX)
        return x

    def gathered(self, size: int, dtype: torch.dtype) -> Tensor:
        own = part(self.rank, size, dtype)
        whole = own.new_empty(self.num * size)
        self.exchange.all_gather(whole, own)
        return whole

    def exchanged(self, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        sent = torch.cat([part(self.rank + 10 * to, size, dtype) for to in range(self.num)])
        received = torch.empty_like(sent)
        self.exchange.all_to_all(received, sent)
        return received, self.exchange.reduce_scatter(sent)()

    def single(self) -> list[Tensor]:
        """A 0-dimensional tensor, and one element with a stride other than 1: both are
        contiguous."""
        found = [torch.tensor(float(self.rank)), torch.full((8,), float(self.rank))[::8]]
        for x in found:
            self.exchange.all_reduce(x)
        whole = found[1].new_empty(self.num)
        self.exchange.all_gather(whole, found[1])
        return [*found, whole]

    def rounding(self) -> Tensor:
        x = torch.randn(100_000, generator=torch.Generator().manual_seed(self.rank))
        self.exchange.all_reduce(x)
        return x

    def sum_unless(self, rank: int) -> None:
        """One rank dies instead of taking part."""
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            self.exchange.all_reduce(torch.ones(1 << 20))

    def child_lets_go(self) -> bool:
        """A forked child has no connection, and this process keeps its own."""
        child = os.fork()
        if not child:
            closed = all(peer.fileno() == -1 for _, peer in self.exchange._peers)
            os._exit(0 if closed else 1)
        _, status = os.waitpid(child, 0)
        self.exchange.all_reduce(torch.ones(3))
        return status == 0


@pytest.mark.parametrize("num", [2, 3, 4])
def test_collectives_are_those_of_all_parts(num: int) -> None:
    with WorkerGroup(num, service=Peer, threads_per_worker=1) as group:
        for dtype in DTYPES:
            for size in SIZES:
                parts = [part(rank, size, dtype) for rank in range(num)]
                total = torch.stack(parts).sum(0, dtype=dtype)
                for found in group.call("sums", size, dtype):
                    torch.testing.assert_close(found, total, rtol=0, atol=0)
                for found in group.call("gathered", size, dtype):
                    torch.testing.assert_close(found, torch.cat(parts), rtol=0, atol=0)
                for rank, (received, own) in enumerate(group.call("exchanged", size, dtype)):
                    pieces = [part(other + 10 * rank, size, dtype) for other in range(num)]
                    torch.testing.assert_close(received, torch.cat(pieces), rtol=0, atol=0)
                    total = torch.stack(pieces).sum(0, dtype=dtype)
                    torch.testing.assert_close(own, total, rtol=0, atol=0)
        largest = torch.stack([part(rank, 1000, torch.float32) for rank in range(num)]).amax(0)
        assert all(torch.equal(found, largest) for found in group.call("largest", 1000))
        for found in group.call("single"):
            assert torch.cat([x.view(-1) for x in found]).tolist() == [sum(range(num))] * (num + 2)
        first, *others = group.call("rounding")
        assert all(torch.equal(first, other) for other in others)


def test_a_dead_peer_is_noticed_and_named() -> None:
    with WorkerGroup(3, service=Peer, threads_per_worker=1) as group:
        with pytest.raises(WorkerError, match="worker 2") as caught:
            group.call("sum_unless", 2)
        assert caught.value.rank == 2


@pytest.mark.parametrize("size", [3, 1 << 20])
def test_the_rank_that_is_gone_is_named(size: int) -> None:
    here, there = socket.socketpair()
    exchange = SocketCollectives([here, None], index=1)
    there.close()
    with pytest.raises(PeerGone, match="rank 0 of the group"):
        exchange.all_reduce(torch.ones(size))
    exchange.close()


def test_what_is_broken_off_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank takes the next message for the rest of an interrupted one."""
    here, there = socket.socketpair()
    exchange = SocketCollectives([None, here], index=0)
    other = SocketCollectives([there, None], index=1)

    def interrupted(own: Tensor, _: Tensor) -> None:
        raise KeyboardInterrupt

    there.sendall(bytes(1 << 16))
    with monkeypatch.context() as patch:
        patch.setitem(sockets._REDUCE, Reduction.SUM, interrupted)
        with pytest.raises(KeyboardInterrupt):
            exchange.all_reduce(torch.ones(1 << 16))
    for each in (exchange, other):
        with pytest.raises(PeerGone):
            each.all_reduce(torch.ones(1 << 16))


def test_a_forked_process_is_no_rank() -> None:
    with WorkerGroup(2, service=Peer, threads_per_worker=1) as group:
        assert group.call("child_lets_go") == [True, True]


class Alone:
    """A rank that may have no folder for its socket."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank

    def found(self, without: int | None) -> bool:
        def refuse(**_: Any) -> str:
            raise PermissionError("no folder here")

        usual = tempfile.mkdtemp
        if self.rank == without:
            tempfile.mkdtemp = refuse  # type: ignore[assignment]
        try:
            return SocketCollectives.open(dist.group.WORLD) is not None
        finally:
            tempfile.mkdtemp = usual

    def leftovers(self) -> list[str]:
        return [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("autopar-")]


def test_all_or_none_have_it() -> None:
    with WorkerGroup(3, service=Alone, threads_per_worker=1) as group:
        before = group.call("leftovers")[0]
        assert group.call("found", None) == [True] * 3
        assert group.call("found", 1) == [False] * 3
        assert set(group.call("leftovers")[0]) <= set(before)


def test_too_many_ranks_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group: MAX_RANKS + 1)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    assert SocketCollectives.open(None) is None
