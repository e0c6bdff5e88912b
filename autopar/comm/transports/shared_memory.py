"""The transport of shared memory: messages between processes of one host, sent without waiting.

gloo's threads move a message when the scheduler lets them run, in competition with threads that
compute on all cores. Here the sender's own thread copies it into memory that both processes share
and announces it over a socket; the receiver's own thread copies it out when it is needed and
reports the memory as free. There is up to twice as much shared memory as messages of each size were
in flight at once, of which only what was used takes pages. It is a tensor only while it is copied,
and so never among the tensors that a process counts: how much there is depends on who waits for
whom.

A socket holds hundreds of announcements; a sender waits only when it is that far ahead.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from autopar.comm.transports.base import PeerGone, Wait, done
from autopar.comm.transports.segments import new_segment, receive_with_fd, send_with_fd
from autopar.comm.transports.unix_sockets import (
    LIMIT_S,
    MAX_RANKS,
    Peers,
    byte_tensor,
    close_in_children,
    connected,
)


class SharedMemoryMessages:
    """`Messages` of one group, on tensors in the memory of CPUs."""

    holds_sent: ClassVar[bool] = False

    def __init__(self, peers: Peers) -> None:
        self._links = {
            rank: _Link(rank, peer) for rank, peer in enumerate(peers) if peer is not None
        }
        close_in_children(self)

    @classmethod
    def serves(cls, device_kind: str, num_ranks: int) -> bool:
        return device_kind == "cpu" and num_ranks <= MAX_RANKS

    @classmethod
    def open(cls, process_group: Any) -> Self | None:
        peers = connected(process_group, able=hasattr(os, "memfd_create"))
        return None if peers is None else cls(peers)

    def send(self, rank: int, tensors: Sequence[Tensor]) -> Wait:
        self._links[rank].send([byte_tensor(tensor) for tensor in tensors])
        return done  # they have been copied

    def receive(self, rank: int, into: Sequence[Tensor]) -> Callable[[], float]:
        return self._links[rank].receive([byte_tensor(tensor) for tensor in into])

    def broadcast(self, x: Tensor, root: int) -> None:
        if root in self._links:
            self.receive(root, [x])()
        else:
            for rank in self._links:
                self.send(rank, [x])

    def drop_unused(self) -> None:
        for link in self._links.values():
            link.drop_unused()

    def close(self) -> None:
        for link in self._links.values():
            link.close()


class _What(IntEnum):
    """Kinds of records: a slot of the writer's is full, one of the reader's is free, or one of the
    writer's is no more."""

    FULL = 0
    FREE = 1
    DROPPED = 2


_RECORD = struct.Struct("=IIQ")
"""A `_What`, the number of a slot, and its bytes; the first of new slots brings their memory."""
_ALIGNMENT = 64


class _Posted:
    """A receive whose message has not arrived yet."""

    def __init__(self, pieces: list[Tensor]) -> None:
        self.pieces = pieces
        self.arrived_s: float | None = None


class _Link:
    """Both directions between this rank and another one."""

    def __init__(self, rank: int, peer: socket.socket) -> None:
        self._rank, self._peer = rank, peer
        self._ready = select.poll()
        self._ready.register(peer, select.POLLIN | select.POLLOUT)
        self._own: list[memoryview | None] = []
        self._unused: dict[int, list[int]] = {}
        self._theirs: dict[int, memoryview] = {}
        self._full: deque[int] = deque()
        self._posted: deque[_Posted] = deque()
        self._notes: deque[bytes] = deque()

    def send(self, pieces: Sequence[Tensor]) -> None:
        size = sum(map(len, pieces))
        with self._whole_or_closed():
            self._read_all()
            numbers = self._unused.get(size)
            number, fd = (numbers.pop(), None) if numbers else self._new(size)
            try:
                slot = self._own[number]
                assert slot is not None
                for part, piece in zip(_parts(slot, pieces), pieces):
                    part.copy_(piece)
                self._write(number, size, fd)
            finally:
                if fd is not None:
                    os.close(fd)

    def receive(self, pieces: list[Tensor]) -> Callable[[], float]:
        posted = _Posted(pieces)
        self._posted.append(posted)

        def wait() -> float:
            called_s = time.perf_counter()
            with self._whole_or_closed():
                while posted.arrived_s is None:
                    self._fill_next()
            return max(called_s, posted.arrived_s)

        return wait

    def drop_unused(self) -> None:
        with self._whole_or_closed():
            self._read_all()
            for size, numbers in self._unused.items():
                for number in numbers:
                    self._own[number] = None
                    self._note(_What.DROPPED, number, size)
            self._unused.clear()

    def close(self) -> None:
        self._peer.close()

    def _new(self, size: int) -> tuple[int, int]:
        """Double the slots of a size, or make the first, in one segment; the number of the first
        new one, and the segment's descriptor."""
        num = max(1, sum(slot is not None and len(slot) == size for slot in self._own))
        fd = new_segment(num * _stride(size), reserved=False)
        try:
            slots = _slots(fd, size)
        except BaseException:
            os.close(fd)
            raise
        first = len(self._own)
        self._own += slots
        self._unused.setdefault(size, []).extend(range(first + 1, first + num))
        return first, fd

    def _fill_next(self) -> None:
        """Copy the oldest message into the oldest receive."""
        while not self._full:
            self._read(0)
        arrived_s = time.perf_counter()
        number, posted = self._full.popleft(), self._posted.popleft()
        slot, room = self._theirs[number], sum(map(len, posted.pieces))
        if len(slot) != room:
            raise RuntimeError(
                f"rank {self._rank} of the group sent {len(slot)} bytes where {room} are "
                "expected: both must run the same program"
            )
        for piece, part in zip(posted.pieces, _parts(slot, posted.pieces)):
            piece.copy_(part)
        posted.arrived_s = arrived_s
        self._note(_What.FREE, number, room)

    def _read_all(self) -> None:
        """Read the records that have arrived, without waiting."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._read(socket.MSG_DONTWAIT)

    def _read(self, flags: int) -> None:
        try:
            record, fd = receive_with_fd(self._peer, _RECORD.size, flags)
        except BlockingIOError:
            if flags:
                raise
            raise PeerGone.because(self._rank, f"nothing arrived for {LIMIT_S} s") from None
        except OSError as error:
            raise PeerGone.because(self._rank, error) from error
        if not record:
            raise PeerGone.because(self._rank, "connection closed by peer")
        what, number, size = _RECORD.unpack(record)
        if fd is not None:
            try:
                self._theirs.update(enumerate(_slots(fd, size), number))
            finally:
                os.close(fd)
        if what == _What.FULL:
            self._full.append(number)
        elif what == _What.FREE:
            self._unused.setdefault(size, []).append(number)
        else:
            del self._theirs[number]

    def _write(self, number: int, size: int, fd: int | None) -> None:
        """Announce a full slot. While the socket has no room, incoming records are read: the other
        rank may be waiting for room too."""
        self._write_notes()
        record = _RECORD.pack(_What.FULL, number, size)
        while not self._wrote(record, fd):
            if not self._ready.poll(LIMIT_S * 1000):
                raise PeerGone.because(self._rank, f"took nothing for {LIMIT_S} s")
            self._read_all()

    def _note(self, what: _What, number: int, size: int) -> None:
        """Announce what the other rank need not learn soon, and may no longer be there to read."""
        self._notes.append(_RECORD.pack(what, number, size))
        self._write_notes()

    def _write_notes(self) -> None:
        try:
            while self._notes and self._wrote(self._notes[0]):
                self._notes.popleft()
        except PeerGone:  # it may have finished; a rank that still needs it will notice
            self._notes.clear()

    def _wrote(self, record: bytes, fd: int | None = None) -> bool:
        """Write a record if the socket has room for it, and say whether it had."""
        try:
            send_with_fd(self._peer, [record], fd, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            raise PeerGone.because(self._rank, error) from error
        return True

    @contextlib.contextmanager
    def _whole_or_closed(self) -> Iterator[None]:
        """Close the connection if an operation is interrupted (by Ctrl-C, say), at an unknown
        point."""
        try:
            yield
        except BaseException:
            self.close()
            raise


def _slots(fd: int, size: int) -> Sequence[memoryview]:
    """Map a segment and cut it into slots of ``size`` bytes."""
    memory, stride = memoryview(mmap.mmap(fd, 0)), _stride(size)
    return [memory[start : start + size] for start in range(0, len(memory), stride)]


def _stride(size: int) -> int:
    """Bytes from one slot to the next; an empty slot has an address too."""
    return max(1, -(-size // _ALIGNMENT)) * _ALIGNMENT


def _parts(slot: memoryview, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
    """The places of the pieces of a message in its slot."""
    memory = (
        torch.frombuffer(slot, dtype=torch.uint8) if slot else torch.empty(0, dtype=torch.uint8)
    )
    return memory.split([len(piece) for piece in pieces])
