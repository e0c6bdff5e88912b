"""Seals the ports that gloo listens on, once its groups are connected.

gloo accepts any connection for as long as a group lives, and keeps the descriptor. All connections
of a group exist once it is made, so that the kernel can drop later ones. NCCL connects later too,
at the first message between two ranks: where it is one of the backends, nothing is sealed.
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
def sealed(backends: str) -> Iterator[None]:
    """Seal the ports on which this process starts to listen meanwhile, on Linux.

    For code that makes groups alone, of ``backends`` such as ``"gloo"`` or
    ``"cpu:gloo,cuda:nccl"``: a `TCPStore` must stay reachable.
    """
    if any(part.rpartition(":")[2] != "gloo" for part in backends.split(",")):
        yield
        return
    before = set(_listening())
    yield
    for fd in _listening():
        if fd not in before:
            _seal(fd)


def _listening() -> Iterator[int]:
    """The descriptors of listening TCP sockets."""
    if not os.path.isdir(_OWN_FILES):
        return
    for name in os.listdir(_OWN_FILES):
        with contextlib.suppress(OSError), _copy(int(name)) as found:  # not a socket, or closed
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
