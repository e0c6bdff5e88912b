"""The other processes of a job on this host, as the host shows them without their help.

In: the progress page of each process, in a file without a name. Out: what a process reported last,
even when it is dead, and whether it is stopped; and a way to kill it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from autopar.runtime.faults import progress
from autopar.runtime.faults.liveness import is_gone, is_runnable, is_stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A process and its progress page; those with equal ``host`` see each other's files and ids."""

    host: tuple[str, ...]
    pid: int
    page_path: str

    @property
    def name(self) -> str:
        return f"process {self.pid} on {self.host[0]}"


@contextlib.contextmanager
def published_location() -> Iterator[Location]:
    """This process's location; it publishes its progress to a new page from now on.

    Others can open the page within the block. Without ``/proc`` they cannot: heartbeats must do.
    """
    with progress.new_page() as page:
        progress.publish_to(page.fileno())  # the mapping stays
        path = f"/proc/{os.getpid()}/fd/{page.fileno()}"
        yield Location(host=_host(), pid=os.getpid(), page_path=path)


def _host() -> tuple[str, ...]:
    """Host name, boot and process-id namespace, the last two on Linux only."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return tuple(parts)


class HostPeers:
    """The other processes on this host, by rank."""

    def __init__(self, own: Location) -> None:
        self._own = own
        self._pids: dict[int, int] = {}
        self._pages: dict[int, int] = {}

    def add(self, rank: int, location: Location) -> None:
        """Another rank's location, as soon as it is known; one on another host does not count."""
        if location.host == self._own.host:
            self._pids[rank] = location.pid
            with contextlib.suppress(OSError):  # another user's: its heartbeats must do
                self._pages[rank] = os.open(location.page_path, os.O_RDONLY)

    def doing(self) -> Mapping[int, str]:
        """The last report of each one; empty outside of a call."""
        return {rank: progress.read(fd) for rank, fd in self._pages.items()}

    @property
    def pids(self) -> frozenset[int]:
        """The process ids of those that are known, and of this process."""
        return frozenset((self._own.pid, *self._pids.values()))

    def stopped(self) -> list[int]:
        """The ranks that are stopped, as by SIGSTOP."""
        return [rank for rank, pid in self._pids.items() if is_stopped(pid)]

    def runnable(self) -> list[int]:
        """The ranks that run, or would if they had a processor."""
        return [rank for rank, pid in self._pids.items() if is_runnable(pid)]

    def fault(self) -> tuple[int, str] | None:
        """A rank that is stopped or gone, and which of the two."""
        for rank, pid in list(self._pids.items()):  # another thread may `add` meanwhile
            if is_stopped(pid):
                return rank, "is stopped"
            if is_gone(pid):
                return rank, "died"
        return None

    def kill(self, rank: int) -> None:
        """Kill a process that cannot end itself; one on another host is left alone."""
        if rank in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGKILL)

    def close(self) -> None:
        while self._pages:
            os.close(self._pages.popitem()[1])
