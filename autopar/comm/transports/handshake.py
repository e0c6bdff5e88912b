"""Connections between processes that know a common key; whoever does not know it is turned away.

In: a listening socket, or a way to connect to one, and a key. Out: connected sockets, each to the
rank that proved to be there. Both sides prove to know the key (HMAC over numbers that both drew),
which never travels. All messages have fixed sizes, so there is nothing to parse; those that connect
are served side by side, each within a limit, so that noise and silence hold up nobody else.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Collection

_DRAWN_BYTES = 32
_HELLO = struct.Struct("=i32s32s")  # rank, what the client drew, its proof
_GUEST_S = 5.0  # how long one that connects may take to prove who it is
_MAX_GUESTS = 64
_AGAIN_S = 0.05


def new_key() -> bytes:
    return os.urandom(_DRAWN_BYTES)


class _Guest:
    """One that has connected, and has not proved anything yet."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.deadline_s = time.monotonic() + _GUEST_S
        self.received = b""
        self.drawn = os.urandom(_DRAWN_BYTES)
        connected.send(self.drawn)  # into an empty buffer

    def rank(self, key: bytes) -> int | None:
        """Who it is, None until all has come; raises OSError for a stranger."""
        data = self.socket.recv(_HELLO.size - len(self.received))
        self.received += data
        if not data:
            raise ConnectionResetError("it has gone")
        if len(self.received) < _HELLO.size:
            return None
        rank, drawn, proof = _HELLO.unpack(self.received)
        if not hmac.compare_digest(proof, _proof(key, b"client", rank, self.drawn, drawn)):
            raise PermissionError("it does not know the key")
        return int(rank)

    def welcome(self, key: bytes) -> None:
        rank, drawn, _ = _HELLO.unpack(self.received)
        self.socket.send(_proof(key, b"server", rank, self.drawn, drawn))


class _Door:
    """Serves those that connect to ``listener`` until each of ``ranks`` is there."""

    def __init__(self, listener: socket.socket, key: bytes, ranks: Collection[int]) -> None:
        listener.setblocking(False)
        self.listener, self.key, self.awaited = listener, key, set(ranks)
        self.found: dict[int, socket.socket] = {}
        self.guests: dict[socket.socket, _Guest] = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ)

    def serve(self, limit_s: float) -> None:
        """Whoever is ready, and turn away those that took too long."""
        for ready, _ in self.selector.select(limit_s):
            if ready.fileobj is self.listener:
                self._let_in()
            else:
                self._hear(self.guests[ready.fileobj])  # type: ignore[index]
        now_s = time.monotonic()
        for guest in [g for g in self.guests.values() if g.deadline_s < now_s]:
            self._turn_away(guest)

    def close(self) -> None:
        for guest in [*self.guests.values()]:
            self._turn_away(guest)
        self.selector.close()

    def _let_in(self) -> None:
        with contextlib.suppress(OSError):  # it has gone again, or there are no descriptors left
            connected, _ = self.listener.accept()
            try:
                guest = _Guest(connected)
            except OSError:
                connected.close()
                return
            self.guests[connected] = guest
            self.selector.register(connected, selectors.EVENT_READ)
        if len(self.guests) > _MAX_GUESTS:
            self._turn_away(next(iter(self.guests.values())))

    def _hear(self, guest: _Guest) -> None:
        try:
            rank = guest.rank(self.key)
            if rank is None:
                return
            if rank in self.awaited:
                guest.welcome(self.key)
                self.awaited.remove(rank)
                self.found[rank] = guest.socket
                self._forget(guest)
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._turn_away(guest)

    def _forget(self, guest: _Guest) -> None:
        self.selector.unregister(guest.socket)
        del self.guests[guest.socket]

    def _turn_away(self, guest: _Guest) -> None:
        self._forget(guest)
        guest.socket.close()


def accept(
    listener: socket.socket, key: bytes, ranks: Collection[int], limit_s: float
) -> dict[int, socket.socket]:
    """Connections from these ranks, each of which knows the key; fewer after ``limit_s``."""
    door = _Door(listener, key, ranks)
    deadline_s = time.monotonic() + limit_s
    try:
        while door.awaited and (left_s := deadline_s - time.monotonic()) > 0:
            door.serve(min(left_s, _GUEST_S))
    finally:
        door.close()
    for connected in door.found.values():
        connected.setblocking(True)
    return door.found


def connect(
    make: Callable[[float], socket.socket], key: bytes, rank: int, limit_s: float
) -> socket.socket:
    """A connection that ``make``, given a limit in seconds, makes to who knows the key.

    Tried again while there is time: a crowd of strangers may be turned away with this rank among
    them. Raises OSError.
    """
    deadline_s = time.monotonic() + limit_s
    while True:
        left_s = max(deadline_s - time.monotonic(), 0.001)
        try:
            connected = make(left_s)
            try:
                connected.settimeout(left_s)
                _introduce(connected, key, rank)
                connected.settimeout(None)
            except BaseException:
                connected.close()
                raise
            return connected
        except PermissionError:
            raise
        except OSError:
            if time.monotonic() + _AGAIN_S >= deadline_s:
                raise
            time.sleep(_AGAIN_S)


def _introduce(connected: socket.socket, key: bytes, rank: int) -> None:
    theirs, own = _received(connected, _DRAWN_BYTES), os.urandom(_DRAWN_BYTES)
    connected.sendall(_HELLO.pack(rank, own, _proof(key, b"client", rank, theirs, own)))
    proof = _received(connected, len(_proof(key, b"server", rank, theirs, own)))
    if not hmac.compare_digest(proof, _proof(key, b"server", rank, theirs, own)):
        raise PermissionError("who listens there does not know this job's key")


def _received(connected: socket.socket, size_bytes: int) -> bytes:
    received = b""
    while len(received) < size_bytes:
        data = connected.recv(size_bytes - len(received))
        if not data:
            raise ConnectionResetError("turned away")
        received += data
    return received


def _proof(key: bytes, role: bytes, rank: int, server: bytes, client: bytes) -> bytes:
    return hmac.digest(key, role + struct.pack("=i", rank) + server + client, "sha256")
