"""The first exchange among the ranks of a job, before there is a watch over them.

In: a store, this rank's location, and collectives to run. Out: the locations of all ranks, and the
results of the collectives; or a `WorkerError` that names a rank on this host that has died or is
stopped, also one that was stopped before it told the others its process id.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from types import FrameType
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from autopar.base.accelerators import is_accelerator, module_of
from autopar.base.errors import WorkerError
from autopar.runtime.faults.host_peers import HostPeers, Location
from autopar.runtime.faults.store_clients import stopped_clients
from autopar.runtime.faults.termination import end_by_sigterm, handle_termination

T = TypeVar("T")

EXIT_S = 10.0
"""How long the exit of a process may take after a fault."""
_POLL_S = 0.1
_SCAN_S = 1.0  # between two looks at processes that have not said who they are
_NUMBERED_S = 10.0  # by then the others have said who they are, so that only one is left
_STORE_POLL_S = 0.02  # a wait in the store itself could not be ended, and may lock out other users
_SETTLE_S = 3.0  # a connection breaks before the process that held it is seen to be gone
_NUMBERS = itertools.count()  # joining is collective, so equal on all ranks


class Rendezvous:
    """A meeting of all ranks over a store; making it is collective, each step within a limit."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        num_ranks: int,
        own: Location,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self.store = store
        self.rank = rank
        self.num_ranks = num_ranks
        self.device = device
        self.timeout_s = timeout_s
        self.peers = HostPeers(own)
        self._found = {rank: own}
        self._end_at_s: float | None = None
        self._began_s = time.monotonic()
        self._scan_at_s = self._began_s + _SCAN_S
        self._prefix, is_over = f"autopar/join/{next(_NUMBERS)}", threading.Event()
        try:
            self.supervised(lambda: self._publish_and_read(is_over))
        finally:
            is_over.set()  # after an error, nobody needs the other locations

    @property
    def locations(self) -> list[Location]:
        """Every rank's, by rank."""
        return [self._found[rank] for rank in range(self.num_ranks)]

    def _publish_and_read(self, is_over: threading.Event) -> None:
        own = msgspec.json.encode(self._found[self.rank]).decode()
        self.store.set(f"{self._prefix}/{self.rank}", own)
        while (absent := self._absent()) is not None:
            look_at_s = time.monotonic() + _SCAN_S
            while not self._read(absent):
                if is_over.wait(_STORE_POLL_S):
                    return
                if time.monotonic() > look_at_s:
                    self._read_all()
                    look_at_s = time.monotonic() + _SCAN_S

    def _read(self, rank: int) -> bool:
        """Read a rank's location if it has been published, and say whether it has."""
        key = f"{self._prefix}/{rank}"
        if not self.store.check([key]):
            return False
        location = msgspec.json.decode(self.store.get(key), type=Location)
        self.peers.add(rank, location)
        self._found[rank] = location
        return True

    def _read_all(self) -> None:
        """Read what all other ranks have published; raises WorkerError if one found a fault."""
        for rank in range(self.num_ranks):
            if rank not in self._found:
                self._read(rank)
        if self.store.check([self._fault_key]):
            raise self._error(*msgspec.json.decode(self.store.get(self._fault_key)))

    @property
    def _fault_key(self) -> str:
        return f"{self._prefix}/fault"

    def supervised(self, collective: Callable[[], T]) -> T:
        """Run a collective and return its result; in a thread, as nothing can interrupt it."""
        with self._naming_before_termination():
            return self._supervised(collective)

    def _supervised(self, collective: Callable[[], T]) -> T:
        result: Future[T] = Future()

        def run() -> None:
            try:
                if is_accelerator(self.device):  # a thread begins with the first one
                    module_of(self.device).set_device(self.device)
                result.set_result(collective())
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=run, name="autopar-rendezvous", daemon=True).start()
        deadline_s = time.monotonic() + self.timeout_s
        while not wait([result], _POLL_S).done:
            self._check_peers()
            self._end_if_told()
            if time.monotonic() > deadline_s:
                raise self._error(self._absent(), f"did not join within {self.timeout_s:g} s")
        error = result.exception()
        if isinstance(error, WorkerError):
            raise error
        if error is not None:
            settled_s = time.monotonic() + _SETTLE_S
            while time.monotonic() < settled_s:
                self._check_peers()
                time.sleep(_POLL_S)
        if isinstance(error, dist.DistNetworkError) and (absent := self._absent()) is not None:
            # Where no launcher holds the store, rank 0 does, and takes it with it.
            what = f"had not joined when the job's store broke off ({error})"
            raise self._error(absent, what) from error
        self._end_if_told()
        return result.result()

    @contextlib.contextmanager
    def _naming_before_termination(self) -> Iterator[None]:
        """Let SIGTERM, which a launcher sends as soon as one rank has ended, be followed by
        `_end_if_told`."""

        def note(_number: int, _frame: FrameType | None) -> None:
            self._end_at_s = time.monotonic() + _SETTLE_S

        is_handled = handle_termination(note)
        try:
            yield
        finally:
            if is_handled:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _end_if_told(self) -> None:
        """After SIGTERM look for the rank for whose sake it came, and end as SIGTERM does if none
        is found."""
        if self._end_at_s is None:
            return
        while time.monotonic() < self._end_at_s:
            self._check_peers()
            time.sleep(_POLL_S)
        if (absent := self._absent()) is not None:
            raise self._error(absent, "had not joined when SIGTERM ended this process")
        end_by_sigterm()

    def _absent(self) -> int | None:
        """The first rank that has not published its location."""
        return next((rank for rank in range(self.num_ranks) if rank not in self._found), None)

    def _check_peers(self) -> None:
        """Raise WorkerError if a rank on this host is stopped or gone.

        One that is stopped is killed, as no other rank's error reaches it.
        """
        fault = self.peers.fault()
        if fault is None:
            self._check_unknown()
            return
        error = self._error(*fault)
        if fault[0] in self.peers.stopped():
            self.peers.kill(fault[0])
        raise error

    def _check_unknown(self) -> None:
        """Raise WorkerError if a process that has not said which rank it is, is stopped on this
        host; it is killed, too, and the other ranks are told."""
        absent = [rank for rank in range(self.num_ranks) if rank not in self._found]
        if not absent or time.monotonic() < self._scan_at_s:
            return
        self._scan_at_s = time.monotonic() + _SCAN_S
        known = self.peers.pids
        for client in stopped_clients(self.store):
            rank = 0 if client.serves else absent[0] if len(absent) == 1 else None
            is_time = rank is not None or time.monotonic() > self._began_s + _NUMBERED_S
            if client.pid not in known and is_time:
                what = f"is stopped (process {client.pid} on {socket.gethostname()})"
                if not client.serves:  # else the store is stopped, too
                    with contextlib.suppress(dist.DistError):
                        self.store.set(self._fault_key, msgspec.json.encode((rank, what)).decode())
                    time.sleep(2 * _SCAN_S)  # until all others have read it
                with contextlib.suppress(OSError):
                    os.kill(client.pid, signal.SIGKILL)
                raise self._error(rank, what)

    def _error(self, rank: int | None, what: str) -> WorkerError:
        # The thread may stay in its collective, and threads of the process group with it.
        atexit.register(faulthandler.dump_traceback_later, EXIT_S, exit=True)
        who = "a rank" if rank is None else f"rank {rank}"
        where = f" ({self._found[rank].name})" if rank in self._found else ""
        return WorkerError(
            f"{who} of {self.num_ranks}{where} {what} while the ranks joined for autopar.compile; "
            "this job cannot go on: start it again",
            rank=rank,
        )
