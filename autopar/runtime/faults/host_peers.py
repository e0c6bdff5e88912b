"""The other processes of a job on this host, as the host shows them without their help.

In: the progress page of each process, in a file that is unlinked once all have opened it. Out: what
a process reported last, even when it is dead, and whether it is stopped; and a way to kill it.
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

from autopar.runtime.faults import progress
from autopar.runtime.faults.liveness import is_stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where a process runs; processes with equal ``host`` see each other's files and ids."""

    host: tuple[str, ...]
    pid: int
    page_path: str

    @property
    def name(self) -> str:
        return f"process {self.pid} on {self.host[0]}"


def new_location() -> Location:
    """This process's location; it publishes its progress to a new page from now on."""
    fd, path = tempfile.mkstemp(prefix="autopar-page-")
    os.truncate(fd, progress.SIZE_BYTES)
    progress.publish_to(fd)
    os.close(fd)  # the mapping stays
    return Location(host=_host(), pid=os.getpid(), page_path=path)


def _host() -> tuple[str, ...]:
    """Host name, boot and process-id namespace, the last two on Linux only."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return tuple(parts)


class HostPeers:
    """The other processes on this host, by rank."""

    def __init__(self, locations: Sequence[Location], rank: int) -> None:
        self._pids: dict[int, int] = {}
        self._pages: dict[int, int] = {}
        for other, location in enumerate(locations):
            if other == rank or location.host != locations[rank].host:
                continue
            self._pids[other] = location.pid
            with contextlib.suppress(OSError):  # another container's file: its heartbeats must do
                self._pages[other] = os.open(location.page_path, os.O_RDONLY)

    def doing(self) -> Mapping[int, str]:
        """What each one reported last; empty outside of a call."""
        return {rank: progress.read(fd) for rank, fd in self._pages.items()}

    def stopped(self) -> list[int]:
        """The ranks that are stopped, as by SIGSTOP."""
        return [rank for rank, pid in self._pids.items() if is_stopped(pid)]

    def kill(self, rank: int) -> None:
        """Kill a process that cannot end itself; one on another host is left alone."""
        if rank in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGKILL)

    def close(self) -> None:
        while self._pages:
            os.close(self._pages.popitem()[1])
