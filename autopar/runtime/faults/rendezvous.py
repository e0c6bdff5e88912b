"""The first exchange among the ranks of a job, before there is a watch over them.

In: a store, this rank's location, and collectives to run. Out: the locations of all ranks, and the
results of the collectives; or a `WorkerError` that names a rank on this host that has died or is
stopped.
"""

from __future__ import annotations

import atexit
import faulthandler
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from autopar.base.accelerators import is_accelerator, module_of
from autopar.base.errors import WorkerError
from autopar.runtime.faults.host_peers import HostPeers, Location

T = TypeVar("T")

EXIT_S = 10.0
"""How long the exit of a process may take after a fault."""
_POLL_S = 0.1
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
        self.rank = rank
        self.num_ranks = num_ranks
        self.device = device
        self.timeout_s = timeout_s
        self.peers = HostPeers(own)
        self._found = {rank: own}
        number = next(_NUMBERS)
        self.supervised(lambda: self._publish_and_read(store, f"autopar/join/{number}"))

    @property
    def locations(self) -> list[Location]:
        """Every rank's, by rank."""
        return [self._found[rank] for rank in range(self.num_ranks)]

    def _publish_and_read(self, store: dist.Store, prefix: str) -> None:
        store.set(f"{prefix}/{self.rank}", msgspec.json.encode(self._found[self.rank]).decode())
        for other in range(self.num_ranks):
            if other == self.rank:
                continue
            while not store.check([f"{prefix}/{other}"]):
                time.sleep(_POLL_S / 5)
            text = store.get(f"{prefix}/{other}")
            self._found[other] = location = msgspec.json.decode(text, type=Location)
            self.peers.add(other, location)

    def supervised(self, collective: Callable[[], T]) -> T:
        """What a collective returns. It runs in a thread, because nothing can interrupt it."""
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
        while time.monotonic() < deadline_s:
            done = wait([result], _POLL_S).done
            if done and result.exception() is None:
                return result.result()
            if (fault := self._fault(_SETTLE_S if done else 0.0)) is not None:
                raise self._error(*fault)
            if done:
                return result.result()
        absent = [rank for rank in range(self.num_ranks) if rank not in self._found]
        raise self._error(
            absent[0] if absent else None, f"did not join within {self.timeout_s:g} s"
        )

    def _fault(self, limit_s: float) -> tuple[int, str] | None:
        deadline_s = time.monotonic() + limit_s
        while (found := self.peers.fault()) is None and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        return found

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
