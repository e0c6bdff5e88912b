"""Processes of this host that are connected to the job's store, as the kernel shows them.

In: a store over TCP. Out: the process ids of those that are stopped. It finds a rank that was
stopped before it could tell the others who it is. Without ``/proc`` none is found.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from autopar.runtime.faults.liveness import is_stopped

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedClient:
    """A stopped process with a connection to the store, or that ``serves`` the store itself."""

    pid: int
    serves: bool


def stopped_clients(store: dist.Store) -> list[StoppedClient]:
    """The stopped processes with connections like this process's own to the server of ``store``.

    Other users' processes are not seen, and the parent, which may be a launcher, does not count.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return []
    ends = _ends()
    servers = {
        remote
        for inode in _sockets(os.getpid())
        if inode in ends and _port(remote := ends[inode][1]) == store.port
    }
    clients = {inode for inode, (_, remote) in ends.items() if remote in servers}
    serving = {inode for inode, (local, _) in ends.items() if local in servers}
    found = []
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        if pid != os.getppid() and is_stopped(pid):
            sockets = _sockets(pid)
            if sockets & (clients | serving):
                found.append(StoppedClient(pid=pid, serves=bool(sockets & serving)))
    return found


def _ends() -> dict[str, tuple[str, str]]:
    """The local and the remote end of every TCP connection, by the inode of its socket."""
    found = {}
    for table in _TABLES:
        with contextlib.suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                fields = line.split()
                found[fields[9]] = fields[1], fields[2]
    return found


def _port(end: str) -> int:
    return int(end.rpartition(":")[2], 16)


def _sockets(pid: int) -> set[str]:
    """The inodes of a process's sockets; none of another user's process."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                kind, _, inode = os.readlink(entry.path).partition(":[")
                if kind == "socket":
                    found.add(inode.removesuffix("]"))
    return found
