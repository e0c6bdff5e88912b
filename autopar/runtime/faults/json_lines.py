"""Small messages between the processes of a job: JSON objects over TCP, one per line.

In: a socket that `autopar.comm.transports.handshake` has connected. Out: the objects that the other
end sent. Nothing but plain data travels; a peer that sends anything else counts as gone.
"""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

_MAX_LINE_BYTES = 1 << 20
_SEND_WAIT_S = 1.0


class JsonLines:
    """One end of a connection; ``ended`` once the other is gone or breaks the protocol."""

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
        """Send a message, or note that the connection has ended."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.ended = True

    def receive(self) -> list[dict[str, Any]]:
        """The complete messages that have arrived; call it when the socket is readable."""
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
        messages: list[dict[str, Any]] = []
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
                self.ended = True
                break
            messages.append(message)
        return messages

    def close(self) -> None:
        self._socket.close()


def listen(*, everywhere: bool) -> socket.socket:
    """A listening socket, for this host alone or for all."""
    if not everywhere:
        return socket.create_server(("127.0.0.1", 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))
