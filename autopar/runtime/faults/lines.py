"""Small messages between the processes of a job: JSON objects over TCP, one a line.

In: a connected socket. Out: the objects that the other end sent. Nothing but plain data travels, so
that whoever reaches the port can do no more than be refused.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import time
from typing import Any

_MAX_LINE_BYTES = 1 << 20
_SEND_WAIT_S = 1.0
_HELLO_WAIT_S = 5.0


class Lines:
    """One end of a connection; ``ended`` once the other is gone or does not take part."""

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(_SEND_WAIT_S)
        with contextlib.suppress(OSError):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._received = bytearray()
        self.ended = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send, or find that the connection has ended."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.ended = True

    def receive(self) -> list[dict[str, Any]]:
        """What is there, once the socket is readable; whole messages only."""
        try:
            data = self._socket.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            data = b""
        self._received += data
        *lines, rest = bytes(self._received).split(b"\n")
        self._received = bytearray(rest)
        self.ended = self.ended or not data or len(rest) > _MAX_LINE_BYTES
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self._socket.close()


def listen(*, everywhere: bool) -> socket.socket:
    """A listening socket, for this host alone or for all."""
    if not everywhere:
        return socket.create_server(("127.0.0.1", 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def accept_all(listener: socket.socket, token: str, num: int, limit_s: float) -> dict[int, Lines]:
    """Connections from ranks 1 to ``num``, each with the token; fewer after ``limit_s``."""
    found: dict[int, Lines] = {}
    deadline_s = time.monotonic() + limit_s
    while len(found) < num:
        listener.settimeout(max(deadline_s - time.monotonic(), 0.001))
        try:
            connected, _ = listener.accept()
        except TimeoutError:
            break
        lines = Lines(connected)
        rank = _said_hello(lines, token)
        if rank in range(1, num + 1) and rank not in found:
            found[rank] = lines
        else:
            lines.close()
    return found


def _said_hello(lines: Lines, token: str) -> int:
    """The rank at the other end; -1 for a stranger."""
    deadline_s = time.monotonic() + _HELLO_WAIT_S
    while not lines.ended and time.monotonic() < deadline_s:
        try:
            messages = lines.receive()
        except ValueError:
            return -1
        if messages:
            hello = messages[0]
            is_ours = isinstance(hello, dict) and hmac.compare_digest(
                str(hello.get("token")).encode(), token.encode()
            )
            return int(hello["rank"]) if is_ours else -1
    return -1


def connect(host: str, port: int, token: str, rank: int, limit_s: float) -> Lines:
    """A connection to rank 0; raises OSError where there is no way to it."""
    lines = Lines(socket.create_connection((host, port), timeout=limit_s))
    lines.send({"token": token, "rank": rank})
    return lines


def new_token() -> str:
    return os.urandom(16).hex()
