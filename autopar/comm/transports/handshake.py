"""Authenticated connections between processes that share a key; others are rejected.

In: a listening socket, or a way to connect to one, and a key. Out: connected sockets, each to an
authenticated rank. Both sides prove that they know the key (HMAC over nonces that both drew), which
is never sent. All messages have fixed sizes, so there is nothing to parse. Clients are served
concurrently, each within a time limit, so that no noisy or silent one delays the others.
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

_NONCE_BYTES = 32
_HELLO = struct.Struct("=i32s32s")  # rank, the client's nonce, its proof
_CLIENT_S = 5.0  # how long a client may take to authenticate
_MAX_CLIENTS = 64
_AGAIN_S = 0.05


def new_key() -> bytes:
    return os.urandom(_NONCE_BYTES)


class _Client:
    """A client that has connected and is not authenticated yet."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.deadline_s = time.monotonic() + _CLIENT_S
        self.received = b""
        self.nonce = os.urandom(_NONCE_BYTES)
        connected.send(self.nonce)  # into an empty buffer

    def rank(self, key: bytes) -> int | None:
        """The client's rank, None until its message is complete; OSError for a wrong proof."""
        data = self.socket.recv(_HELLO.size - len(self.received))
        self.received += data
        if not data:
            raise ConnectionResetError("the client is gone")
        if len(self.received) < _HELLO.size:
            return None
        rank, drawn, proof = _HELLO.unpack(self.received)
        if not hmac.compare_digest(proof, _proof(key, b"client", rank, self.nonce, drawn)):
            raise PermissionError("the client does not know the key")
        return int(rank)

    def welcome(self, key: bytes) -> None:
        rank, drawn, _ = _HELLO.unpack(self.received)
        self.socket.send(_proof(key, b"server", rank, self.nonce, drawn))


class _Acceptor:
    """Serves the clients of ``listener`` until each of ``ranks`` is connected."""

    def __init__(self, listener: socket.socket, key: bytes, ranks: Collection[int]) -> None:
        listener.setblocking(False)
        self.listener, self.key, self.awaited = listener, key, set(ranks)
        self.found: dict[int, socket.socket] = {}
        self.clients: dict[socket.socket, _Client] = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ)

    def serve(self, limit_s: float) -> None:
        """Serve the clients that are ready, and reject those that took too long."""
        for ready, _ in self.selector.select(limit_s):
            if ready.fileobj is self.listener:
                self._accept()
            else:
                self._read(self.clients[ready.fileobj])  # type: ignore[index]
        now_s = time.monotonic()
        for client in [g for g in self.clients.values() if g.deadline_s < now_s]:
            self._reject(client)

    def close(self) -> None:
        for client in [*self.clients.values()]:
            self._reject(client)
        self.selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the client is gone, or no descriptors are left
            connected, _ = self.listener.accept()
            try:
                client = _Client(connected)
            except OSError:
                connected.close()
                return
            self.clients[connected] = client
            self.selector.register(connected, selectors.EVENT_READ)
        if len(self.clients) > _MAX_CLIENTS:
            self._reject(next(iter(self.clients.values())))

    def _read(self, client: _Client) -> None:
        try:
            rank = client.rank(self.key)
            if rank is None:
                return
            if rank not in self.awaited:
                raise PermissionError(f"rank {rank} is not awaited")
            client.welcome(self.key)
        except BlockingIOError:
            return
        except OSError:  # it does not know the key, is no awaited rank, or is gone
            self._reject(client)
            return
        self.awaited.remove(rank)
        self.found[rank] = client.socket
        self._forget(client)

    def _forget(self, client: _Client) -> None:
        self.selector.unregister(client.socket)
        del self.clients[client.socket]

    def _reject(self, client: _Client) -> None:
        self._forget(client)
        client.socket.close()


def accept(
    listener: socket.socket, key: bytes, ranks: Collection[int], limit_s: float
) -> dict[int, socket.socket]:
    """Accept authenticated connections from these ranks; fewer after ``limit_s``."""
    acceptor = _Acceptor(listener, key, ranks)
    deadline_s = time.monotonic() + limit_s
    try:
        while acceptor.awaited and (left_s := deadline_s - time.monotonic()) > 0:
            acceptor.serve(min(left_s, _CLIENT_S))
    finally:
        acceptor.close()
    for connected in acceptor.found.values():
        connected.setblocking(True)
    return acceptor.found


def connect(
    make: Callable[[float], socket.socket], key: bytes, rank: int, limit_s: float
) -> socket.socket:
    """Connect with ``make``, which takes a time limit in seconds, to a listener with the key.

    It tries again while there is time: among a crowd of strangers this rank may be rejected too.
    Raises OSError: of the last attempt that did not time out, if there was one.
    """
    deadline_s = time.monotonic() + limit_s
    rejection: OSError | None = None
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
        except OSError as error:
            if not isinstance(error, TimeoutError):
                rejection = error
            if time.monotonic() + _AGAIN_S >= deadline_s:
                raise rejection or error from None
            time.sleep(_AGAIN_S)


def _introduce(connected: socket.socket, key: bytes, rank: int) -> None:
    theirs, own = _received(connected, _NONCE_BYTES), os.urandom(_NONCE_BYTES)
    connected.sendall(_HELLO.pack(rank, own, _proof(key, b"client", rank, theirs, own)))
    proof = _received(connected, len(_proof(key, b"server", rank, theirs, own)))
    if not hmac.compare_digest(proof, _proof(key, b"server", rank, theirs, own)):
        raise PermissionError("the listener does not know this job's key")


def _received(connected: socket.socket, size_bytes: int) -> bytes:
    received = b""
    while len(received) < size_bytes:
        data = connected.recv(size_bytes - len(received))
        if not data:
            raise ConnectionResetError("rejected")
        received += data
    return received


def _proof(key: bytes, role: bytes, rank: int, server: bytes, client: bytes) -> bytes:
    return hmac.digest(key, role + struct.pack("=i", rank) + server + client, "sha256")
