"""Messages through shared memory, on real processes."""

from __future__ import annotations

import os
import socket
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.base.errors import WorkerError
from autopar.comm.transports.base import PeerGone
from autopar.comm.transports.shared_memory import SharedMemoryMessages
from autopar.runtime.host.peak_memory import PeakTensors
from autopar.runtime.workers.group import WorkerGroup

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def numbers(seed: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers that differ for every seed."""
    return ((torch.arange(size) * (seed + 3) + seed) % 11).to(dtype)


class Peer:
    """A rank with messages to all ranks."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.num = rank, world_size
        found = SharedMemoryMessages.open(dist.group.WORLD)
        assert found is not None
        self.messages: SharedMemoryMessages = found

    def round_about(self, size: int, dtype: torch.dtype) -> bool:
        """Send two tensors to each other rank, and return those received from each."""
        others = [rank for rank in range(self.num) if rank != self.rank]
        for rank in others:
            sent = numbers(self.rank * self.num + rank, size, dtype)
            self.messages.send(rank, [sent, sent[:1]])
            sent.zero_()  # it has been copied
        right = []
        for rank in others:
            first, second = torch.empty(size, dtype=dtype), torch.empty(min(size, 1), dtype=dtype)
            self.messages.receive(rank, [first, second])()
            expected = numbers(rank * self.num + self.rank, size, dtype)
            right += [torch.equal(first, expected), torch.equal(second, expected[:1])]
        return all(right)

    def many_before_one_is_received(self, count: int, size: int) -> bool:
        """Both ranks send all; then they wait for the receives, posted in order, from the last."""
        peer = 1 - self.rank
        for index in range(count):
            self.messages.send(peer, [numbers(self.rank + index, size)])
        into = [torch.empty(size) for _ in range(count)]
        waits = [self.messages.receive(peer, [tensor]) for tensor in into]
        for wait in reversed(waits):
            wait()
        return all(torch.equal(x, numbers(peer + i, size)) for i, x in enumerate(into))

    def shared_bytes(self) -> int:
        """Bytes of this process in shared memory for messages."""
        maps = psutil.Process().memory_maps(grouped=False)
        return sum(m.size for m in maps if "memfd:autopar" in m.path)

    def steps(self, count: int) -> int:
        """Messages there and back, of alternating sizes; the shared memory afterwards."""
        peer = 1 - self.rank
        for index in range(count):
            size = 1000 * (1 + index % 3)
            mine, theirs = numbers(self.rank + index, size), torch.empty(size)
            self.messages.send(peer, [mine])
            self.messages.receive(peer, [theirs])()
            assert torch.equal(theirs, numbers(peer + index, size))
        return self.shared_bytes()

    def counted_bytes_of_sends(self, count: int) -> int:
        """Bytes counted for tensors while the other rank has read none of ``count`` messages."""
        sent = numbers(self.rank, 100_000)
        peak = PeakTensors(torch.device("cpu"))
        peak.start()
        for _ in range(count):
            self.messages.send(1 - self.rank, [sent])
        return peak.stop() - sent.nbytes

    def drop(self) -> None:
        self.messages.drop_unused()

    def wait_while_the_other_dies(self) -> None:
        if self.rank == 1:
            time.sleep(0.5)
            os._exit(3)
        self.messages.receive(1, [torch.empty(4)])()


@pytest.mark.parametrize("num_workers", [2, 3])
def test_every_rank_gets_what_was_sent(num_workers: int) -> None:
    with WorkerGroup(num_workers, service=Peer, threads_per_worker=1) as group:
        for size in (0, 1, 1000, 300_001):
            for dtype in DTYPES:
                assert group.call("round_about", size, dtype) == [True] * num_workers


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("count", "size"), [(40, 300_000), (3000, 10)])
def test_a_sender_waits_for_nobody(count: int, size: int) -> None:
    """More bytes, and more messages, than a socket holds, in both directions."""
    with WorkerGroup(2, service=Peer, threads_per_worker=1) as group:
        result = group.call("many_before_one_is_received", count, size, timeout_s=60)
        assert result == [True, True]


def test_messages_on_their_way_are_no_tensors_of_the_sender() -> None:
    with WorkerGroup(2, service=Peer, threads_per_worker=1) as group:
        assert max(group.call("counted_bytes_of_sends", 8)) < 100_000
        assert max(group.call("shared_bytes")) > 8 * 400_000


def test_memory_is_used_again_and_let_go() -> None:
    with WorkerGroup(2, service=Peer, threads_per_worker=1) as group:
        group.call("steps", 6)
        after_two, after_fifty = group.call("steps", 6), group.call("steps", 150)
        assert after_fifty == after_two
        assert 0 < max(after_fifty) < 100_000
        group.call("drop")
        assert max(group.call("steps", 1)) < min(after_fifty)


def test_a_dead_peer_is_noticed_and_named() -> None:
    with WorkerGroup(2, service=Peer, threads_per_worker=1) as group:
        with pytest.raises(WorkerError, match="worker 1") as caught:
            group.call("wait_while_the_other_dies", timeout_s=60)
        assert caught.value.rank == 1


def pair() -> tuple[SharedMemoryMessages, SharedMemoryMessages]:
    here, there = socket.socketpair()
    return SharedMemoryMessages([None, here]), SharedMemoryMessages([there, None])


def test_the_rank_that_is_gone_is_named() -> None:
    first, second = pair()
    second.close()
    with pytest.raises(PeerGone, match="rank 1 of the group"):
        first.receive(1, [torch.empty(3)])()
    with pytest.raises(PeerGone, match="rank 1 of the group"):
        first.send(1, [torch.ones(3)])


def test_the_last_message_of_a_rank_that_is_gone_arrives() -> None:
    first, second = pair()
    first.send(1, [torch.ones(3)])
    first.close()
    into = torch.empty(3)
    second.receive(0, [into])()
    assert torch.equal(into, torch.ones(3))


def test_a_message_of_another_size_is_refused() -> None:
    first, second = pair()
    first.send(1, [torch.ones(3)])
    with pytest.raises(RuntimeError, match="sent 12 bytes where 16 are expected"):
        second.receive(0, [torch.empty(4)])()
    with pytest.raises(PeerGone):
        first.receive(1, [torch.empty(3)])()


def test_what_is_broken_off_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = pair()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("autopar.comm.transports.shared_memory._parts", interrupted)
        with pytest.raises(KeyboardInterrupt):
            first.send(1, [torch.ones(3)])
    with pytest.raises(PeerGone):
        second.receive(0, [torch.empty(3)])()
