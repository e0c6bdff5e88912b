"""Unix sockets between the processes of one host.

In: a process group. Out: a connected socket to each other rank, or None where its ranks are not all
on one host. The listening sockets are closed once all ranks are connected, and accept only those
that know the key, which travels in the group (`autopar.comm.transports.handshake`). A wait ends in
`PeerGone` when the other rank is gone.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import struct
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.comm.transports import handshake
from autopar.comm.transports.base import PeerGone

MAX_RANKS = 16
"""Largest group that is connected: there is one socket for each pair of ranks."""
LIMIT_S = 24 * 3600
"""Time limit of a single wait, as long as that of gloo's collectives in local workers: the watch
over the job ends a hang far sooner."""
_CONNECT_S = 60.0

Peers = Sequence[socket.socket | None]
"""The sockets by rank of the group; None at this rank's own position."""


def connected(process_group: Any, *, able: bool = True) -> Peers | None:
    """Connect the ranks of a group; None on all of them if any rank cannot connect, or is not
    ``able`` to use the sockets. Collective."""
    num, index = dist.get_world_size(process_group), dist.get_rank(process_group)
    if not 1 < num <= MAX_RANKS:
        return None
    with contextlib.ExitStack() as stack:
        listener, offer = None, None
        with contextlib.suppress(OSError):
            if not able:
                raise OSError("this rank cannot use sockets")
            host = Path("/proc/sys/kernel/random/boot_id").read_text()
            folder = tempfile.mkdtemp(prefix="autopar-")  # no other user may enter it
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(f"{folder}/{index}")
            listener.listen(num)
            key = handshake.new_key()
            offer = host, f"{folder}/{index}", key
        offers: list[Any] = [None] * num
        dist.all_gather_object(offers, offer, group=process_group)
        if None in offers or len({host for host, *_ in offers}) > 1:
            return None
        assert listener is not None
        peers = _connected(listener, [offer[1:] for offer in offers], index)
        answers: list[Any] = [None] * num
        dist.all_gather_object(answers, peers is not None, group=process_group)
        if peers is not None and not all(answers):
            _close(peers)
        return peers if all(answers) else None


def _connected(
    listener: socket.socket, offers: Sequence[tuple[str, bytes]], index: int
) -> Peers | None:
    """Connect to the lower ranks and accept the higher ones; each listener has a key of its own."""
    peers: list[socket.socket | None] = [None] * len(offers)
    try:
        for other, (path, key) in enumerate(offers[:index]):
            make = functools.partial(_unix_connection, path)
            peers[other] = handshake.connect(make, key, index, _CONNECT_S)
        higher = range(index + 1, len(offers))
        accepted = handshake.accept(listener, offers[index][1], higher, _CONNECT_S)
        for other, made in accepted.items():
            peers[other] = made
        if len(accepted) < len(higher):
            raise TimeoutError("not all ranks have connected")
        limit = struct.pack("@ll", LIMIT_S, 0)  # by the kernel: Python would poll each time
        for peer in peers:
            if peer is not None:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    except OSError:
        _close(peers)
        return None
    return peers


def _unix_connection(path: str, limit_s: float) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    try:
        made.settimeout(limit_s)
        made.connect(path)
    except BaseException:
        made.close()
        raise
    return made


def _close(peers: Peers) -> None:
    for peer in peers:
        if peer is not None:
            peer.close()


def send(rank: int, peer: socket.socket, out: memoryview) -> None:
    """Send all of it; waits while the other rank does not receive."""
    try:
        peer.sendall(out)
    except OSError as error:
        raise PeerGone.because(rank, error) from error


def receive(rank: int, peer: socket.socket, into: memoryview) -> None:
    """Fill ``into``."""
    while len(into):
        try:
            num = peer.recv_into(into)
        except OSError as error:
            raise PeerGone.because(rank, error) from error
        if not num:
            raise PeerGone.because(rank, "connection closed by peer")
        into = into[num:]


def byte_tensor(x: Tensor) -> Tensor:
    """A contiguous tensor's bytes. A tensor of one element counts as contiguous with any stride."""
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.detach().as_strided((x.numel(),), (1,)).view(torch.uint8)


class _Closable(Protocol):
    def close(self) -> None: ...


_OPEN: weakref.WeakSet[_Closable] = weakref.WeakSet()


def close_in_children(user: _Closable) -> None:
    """Close ``user`` in forked processes: they are no ranks, and their copies of its connections
    would stay open when this process dies."""
    _OPEN.add(user)


def _close_all() -> None:
    for user in _OPEN:
        user.close()


os.register_at_fork(after_in_child=_close_all)
