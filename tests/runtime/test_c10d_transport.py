"""The transport over ``torch.distributed``, with gloo on real processes, against closed
formulas."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.comm.transports.base import Messages, Reduction
from autopar.comm.transports.c10d import (
    C10dMessages,
    GlooCollectives,
    GlooMessages,
)
from autopar.comm.transports.registry import open_collectives
from autopar.runtime.workers.group import WorkerGroup

MESSAGES: dict[str, type[Messages]] = {"one group": GlooMessages, "queues": C10dMessages}


def operand(rank: int, num: int, dtype: torch.dtype) -> Tensor:
    """One shard of 5 small integers for each rank."""
    return ((torch.arange(5 * num) * (rank + 3) + rank) % 7).to(dtype)


class Peer:
    """A rank of a gloo group."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.num = rank, world_size

    def collectives(self, overlapped: bool, dtype: torch.dtype) -> list[Tensor]:
        over = GlooCollectives(dist.group.WORLD)
        total, largest, sent = (operand(self.rank, self.num, dtype) for _ in range(3))
        whole, received = sent.new_empty(self.num * len(sent)), torch.empty_like(sent)
        waits = [
            over.all_reduce(total, overlapped=overlapped),
            over.all_reduce(largest, Reduction.MAX, overlapped=overlapped),
            over.all_gather(whole, sent, overlapped=overlapped),
        ]
        shard = over.reduce_scatter(sent, overlapped=overlapped)
        over.all_to_all(received, sent)
        for wait in waits:
            wait()
        return [total, largest, whole, received, shard()]

    def messages(self, kind: str) -> bool:
        """Around the ring in both directions, receives posted first, then rank 1's to all."""
        opened = MESSAGES[kind].open(dist.group.WORLD)
        assert opened is not None
        following, before = (self.rank + 1) % self.num, (self.rank - 1) % self.num
        right = []
        for dtype in (torch.float32, torch.bool, torch.complex64):
            mine = [torch.full((3,), self.rank).to(dtype), torch.ones(2, dtype=dtype)]
            from_before, from_following = ([torch.empty_like(x) for x in mine] for _ in range(2))
            arrived = [opened.receive(before, from_before)]
            ends = [opened.send(following, mine)]
            arrived.append(opened.receive(following, from_following))
            ends.append(opened.send(before, mine))
            times_s = [wait() for wait in arrived]
            for end in ends:
                end()
            right += [times_s == sorted(times_s)]
            for peer, found in ((before, from_before), (following, from_following)):
                right += [torch.equal(found[0], torch.full((3,), peer).to(dtype))]
                right += [torch.equal(found[1], torch.ones(2, dtype=dtype))]
            opened.broadcast(mine[0], 1)
            right += [torch.equal(mine[0], torch.ones(3, dtype=dtype))]
        opened.drop_unused()
        opened.close()
        return all(right)

    def queues(self) -> bool:
        """Whether each peer and direction of this rank has a process group of its own."""
        opened = C10dMessages.open(dist.group.WORLD)
        others = [rank for rank in range(self.num) if rank != self.rank]
        used = {opened._group(*way) for r in others for way in ((self.rank, r), (r, self.rank))}
        opened.close()
        return len(used) == 2 * len(others) and dist.group.WORLD not in used

    def overlapping(self) -> bool:
        opened = open_collectives(dist.group.WORLD, "cpu", must_overlap=True)
        return opened.traits.overlaps


def test_collectives_and_messages_over_gloo() -> None:
    num = 3
    with WorkerGroup(num, service=Peer, threads_per_worker=1) as group:
        for overlapped in (False, True):
            for dtype in (torch.float32, torch.int64):
                operands = torch.stack([operand(rank, num, dtype) for rank in range(num)])
                shards = operands.view(num, num, -1)
                for rank, found in enumerate(group.call("collectives", overlapped, dtype)):
                    total, largest, whole, received, shard = found
                    assert torch.equal(total, operands.sum(0))
                    assert torch.equal(largest, operands.amax(0))
                    assert torch.equal(whole, operands.flatten())
                    assert torch.equal(received, shards[:, rank].flatten())
                    assert torch.equal(shard, shards[:, rank].sum(0))
        for kind in MESSAGES:
            assert group.call("messages", kind, timeout_s=60) == [True] * num
        assert group.call("queues") == [True] * num
        assert group.call("overlapping") == [True] * num
