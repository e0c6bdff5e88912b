"""The processes of a job on one host: what each is doing can be read there even when it is dead.

In: a page of memory for each process, in a file that is unlinked as soon as all have opened it.
Out: the text that a process wrote last, whether it is stopped, and an end to one that is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.runtime.faults import whereabouts
from autopar.runtime.faults.life import is_stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a process runs; two with equal ``host`` see each other's files and process ids."""

    host: tuple[str, ...]
    pid: int
    page_path: str

    @property
    def name(self) -> str:
        return f"process {self.pid} on {self.host[0]}"


def new_place() -> Place:
    """This process's, which writes its whereabouts to a new page from now on."""
    fd, path = tempfile.mkstemp(prefix="autopar-page-")
    os.truncate(fd, whereabouts.SIZE_BYTES)
    whereabouts.join(fd)
    os.close(fd)  # the mapping stays
    return Place(host=_host(), pid=os.getpid(), page_path=path)


def _host() -> tuple[str, ...]:
    """Host name, boot and process-id namespace; the last two only where Linux tells them."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return tuple(parts)


class Neighbours:
    """The other processes on this host, by rank."""

    def __init__(self, places: Sequence[Place], rank: int) -> None:
        self._pids: dict[int, int] = {}
        self._pages: dict[int, int] = {}
        for other, place in enumerate(places):
            if other == rank or place.host != places[rank].host:
                continue
            self._pids[other] = place.pid
            with contextlib.suppress(OSError):  # another container's file: its beats must do
                self._pages[other] = os.open(place.page_path, os.O_RDONLY)

    def doing(self) -> Mapping[int, str]:
        """What each one wrote last; empty outside of a call."""
        return {rank: whereabouts.read(fd) for rank, fd in self._pages.items()}

    def stopped(self) -> list[int]:
        """Those that are stopped, as by SIGSTOP."""
        return [rank for rank, pid in self._pids.items() if is_stopped(pid)]

    def kill(self, rank: int) -> None:
        """End a process that cannot end itself; nothing if it is on another host."""
        if rank in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGKILL)

    def close(self) -> None:
        while self._pages:
            os.close(self._pages.popitem()[1])
