"""Messages between processes of one host, for which a sender does not wait for the receiver.

gloo's threads move a message when the scheduler lets them, beside threads that compute on all
cores. Here the sender's own thread copies it into memory that both processes share and tells the
receiver so over a socket; the receiver's own thread copies it out when it is needed and tells the
sender that the memory is free. There is up to twice as much of it as messages of each size were
under way at once, of which only what was used takes pages.

A socket holds hundreds of such words; only a sender who is so far ahead waits.

In: the process group that would do it otherwise. Out: a `DirectMessages`, or None where its ranks
are not all on one host. From one rank to another, messages are received in the order in which they
were sent.
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
from typing import Any

import torch
from torch import Tensor

from autopar.comm.transports.sockets import (
    LIMIT_S,
    PeerGone,
    Peers,
    byte_tensor,
    close_in_children,
    connected,
)


def direct_messages(process_group: Any) -> DirectMessages | None:
    """Between the ranks of a gloo group; None for all where not all can have them.

    Collective over the group.
    """
    peers = connected(process_group, able=hasattr(os, "memfd_create"))
    return None if peers is None else DirectMessages(peers)


class DirectMessages:
    """Messages of this rank, on contiguous tensors in the memory of CPUs."""

    def __init__(self, peers: Peers) -> None:
        self._links = {
            rank: _Link(rank, peer) for rank, peer in enumerate(peers) if peer is not None
        }
        close_in_children(self)

    def send(self, rank: int, tensors: Sequence[Tensor]) -> None:
        """One message with all of them, which may be changed at once."""
        self._links[rank].send([byte_tensor(tensor) for tensor in tensors])

    def receive(self, rank: int, into: Sequence[Tensor]) -> Callable[[], float]:
        """The next message of that rank. What is returned waits until it is in these tensors, and
        says when it had come: from then on it was copied (seconds of ``time.perf_counter``)."""
        return self._links[rank].receive([byte_tensor(tensor) for tensor in into])

    def drop_unused(self) -> None:
        """Let go of the shared memory that no message is in: the next ones have other sizes."""
        for link in self._links.values():
            link.drop_unused()

    def close(self) -> None:
        for link in self._links.values():
            link.close()


class _What(IntEnum):
    """Of a record: a slot of the writer's is full, one of the reader's is free, a slot of the
    writer's is no more."""

    FULL = 0
    FREE = 1
    DROPPED = 2


_RECORD = struct.Struct("=IIQ")
"""What, the number of a slot, and its bytes. With the first of new slots comes their memory."""

_ALIGNMENT = 64
_FD = struct.Struct("@i")
_FD_BYTES = socket.CMSG_LEN(_FD.size)


class _Posted:
    """A receive that a message is awaited for."""

    def __init__(self, pieces: list[Tensor]) -> None:
        self.pieces = pieces
        self.came_s: float | None = None


class _Link:
    """Both directions between this rank and another one."""

    def __init__(self, rank: int, peer: socket.socket) -> None:
        self._rank, self._peer = rank, peer
        self._ready = select.poll()
        self._ready.register(peer, select.POLLIN | select.POLLOUT)
        self._own: list[Tensor | None] = []
        self._unused: dict[int, list[int]] = {}
        self._theirs: dict[int, Tensor] = {}
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
                _copy_into(self._own[number], pieces)
                self._write(number, size, fd)
            finally:
                if fd is not None:
                    os.close(fd)

    def receive(self, pieces: list[Tensor]) -> Callable[[], float]:
        posted = _Posted(pieces)
        self._posted.append(posted)

        def wait() -> float:
            asked_s = time.perf_counter()
            with self._whole_or_closed():
                while posted.came_s is None:
                    self._fill_next()
            return max(asked_s, posted.came_s)

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
        """As many slots of a size as there are, at first one, in one piece of memory: the number of
        the first of them, and the file that the memory is of."""
        num = max(1, sum(slot is not None and len(slot) == size for slot in self._own))
        fd = os.memfd_create("autopar")
        try:
            os.ftruncate(fd, num * _stride(size))
            slots = _slots(fd, size)
        except BaseException:
            os.close(fd)
            raise
        first = len(self._own)
        self._own += slots
        self._unused.setdefault(size, []).extend(range(first + 1, first + num))
        return first, fd

    def _fill_next(self) -> None:
        """The oldest receive from the oldest message."""
        while not self._full:
            self._read(0)
        came_s = time.perf_counter()
        number, posted = self._full.popleft(), self._posted.popleft()
        slot, room = self._theirs[number], sum(map(len, posted.pieces))
        if len(slot) != room:
            raise RuntimeError(
                f"rank {self._rank} of the group sent {len(slot)} bytes where {room} are "
                "expected: both must run the same program"
            )
        for piece, part in zip(posted.pieces, slot.split([len(p) for p in posted.pieces])):
            piece.copy_(part)
        posted.came_s = came_s
        self._note(_What.FREE, number, room)

    def _read_all(self) -> None:
        """What has come, without waiting."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._read(socket.MSG_DONTWAIT)

    def _read(self, flags: int) -> None:
        try:
            record, beside, *_ = self._peer.recvmsg(_RECORD.size, _FD_BYTES, flags)
        except BlockingIOError:
            if flags:
                raise
            raise PeerGone.because(self._rank, f"nothing came for {LIMIT_S} s") from None
        except OSError as error:
            raise PeerGone.because(self._rank, error) from error
        if not record:
            raise PeerGone.because(self._rank, "connection closed by peer")
        what, number, size = _RECORD.unpack(record)
        for _, _, packed in beside:
            (fd,) = _FD.unpack(packed)
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
        """That a slot is full. While there is no room for it, what comes is read: the other rank
        may be waiting for room too."""
        self._write_notes()
        record = _RECORD.pack(_What.FULL, number, size)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        beside = [] if fd is None else [(*rights, _FD.pack(fd))]
        while not self._wrote(record, beside):
            if not self._ready.poll(LIMIT_S * 1000):
                raise PeerGone.because(self._rank, f"took nothing for {LIMIT_S} s")
            self._read_all()

    def _note(self, what: _What, number: int, size: int) -> None:
        """What the other rank need not know soon, and may no longer read."""
        self._notes.append(_RECORD.pack(what, number, size))
        self._write_notes()

    def _write_notes(self) -> None:
        try:
            while self._notes and self._wrote(self._notes[0]):
                self._notes.popleft()
        except PeerGone:  # it may have done all that it had to; who waits for it will learn it
            self._notes.clear()

    def _wrote(self, record: bytes, beside: Sequence[tuple[int, int, bytes]] = ()) -> bool:
        """Whether there was room for a record."""
        try:
            self._peer.sendmsg([record], beside, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            raise PeerGone.because(self._rank, error) from error
        return True

    @contextlib.contextmanager
    def _whole_or_closed(self) -> Iterator[None]:
        """What is broken off (by Ctrl-C, say) is the end: nobody knows how far it came."""
        try:
            yield
        except BaseException:
            self.close()
            raise


def _slots(fd: int, size: int) -> Sequence[Tensor]:
    """The parts of a file's memory, of so many bytes each."""
    memory = torch.frombuffer(mmap.mmap(fd, 0), dtype=torch.uint8)
    return [part[:size] for part in memory.split(_stride(size))]


def _stride(size: int) -> int:
    """From one slot to the next; a slot of nothing has an address too."""
    return max(1, -(-size // _ALIGNMENT)) * _ALIGNMENT


def _copy_into(slot: Tensor | None, pieces: Sequence[Tensor]) -> None:
    assert slot is not None
    for part, piece in zip(slot.split([len(piece) for piece in pieces]), pieces):
        part.copy_(piece)
