"""Ports that gloo listens on, closed to newcomers once its groups are connected.

gloo accepts whoever connects, for as long as a group lives, and keeps the descriptor. Once a group
is made all its connections are there, so that from then on the kernel can drop whatever comes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator

_SO_ATTACH_FILTER = 26  # Linux; not in Python's socket module
_OWN_FILES = "/proc/self/fd"
_DROP = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))  # BPF: return 0 bytes


@contextlib.contextmanager
def sealed() -> Iterator[None]:
    """Seal the ports that this process begins to listen on within; nothing where there is no
    Linux. Only for what makes groups of gloo alone: a `TCPStore` is to be reached later too."""
    before = set(_listening())
    yield
    for fd in _listening():
        if fd not in before:
            _seal(fd)


def _listening() -> Iterator[int]:
    """The descriptors of TCP sockets that listen."""
    if not os.path.isdir(_OWN_FILES):
        return
    for name in os.listdir(_OWN_FILES):
        with contextlib.suppress(OSError), _copy(int(name)) as found:  # no socket, or closed
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                yield int(name)


def _seal(fd: int) -> None:
    program = struct.pack("@HP", 1, ctypes.addressof(_DROP))
    with contextlib.suppress(OSError), _copy(fd) as found:
        found.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _copy(fd: int) -> socket.socket:
    copied = os.dup(fd)
    try:
        return socket.socket(fileno=copied)
    except OSError:
        os.close(copied)
        raise
