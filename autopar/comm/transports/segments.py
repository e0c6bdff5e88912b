"""Anonymous shared memory, which another process receives as a descriptor over a socket.

In: a size, and a connected Unix socket. Out: memory that both ends can map. It has no name that
another user could open, it is not bound by the size of ``/dev/shm`` (small in containers), and the
kernel frees it with its last user, however that ends.
"""

from __future__ import annotations

import array
import os
import socket
import tempfile
from collections.abc import Sequence

_FD_BYTES = array.array("i").itemsize
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # not on macOS


def new_segment(size_bytes: int, *, reserved: bool) -> int:
    """The descriptor of new memory.

    ``reserved``: its pages are allocated now, so that a lack of memory is an OSError and not a
    SIGBUS later; otherwise each one when it is first written.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("autopar")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        if reserved and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size_bytes)
        else:
            os.ftruncate(fd, size_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def send_with_fd(
    peer: socket.socket, parts: Sequence[bytes | memoryview], fd: int | None, flags: int = 0
) -> int:
    """Send bytes, and with the first of them a descriptor; the number of bytes that were sent.

    The standard library's ``socket.send_fds`` ignores its flags before Python 3.14.
    """
    rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    return peer.sendmsg(parts, rights, flags)


def receive_with_fd(
    peer: socket.socket, size_bytes: int, flags: int = 0
) -> tuple[bytes, int | None]:
    """Receive up to so many bytes, and the descriptor that came with them, if any."""
    data, ancillary, *_ = peer.recvmsg(size_bytes, socket.CMSG_LEN(_FD_BYTES), flags | _CLOEXEC)
    fds = [array.array("i", raw[:_FD_BYTES])[0] for _, _, raw in ancillary]
    return data, fds[0] if fds else None
