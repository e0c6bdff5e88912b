"""The links of `autopar.testing.lockstep`: pipeline ranks as threads that take turns.

Each pipeline rank runs its list of actions in a thread of its own. Only the thread that holds the
turn runs, and it yields the turn when it waits for a message. So the values of a run are
deterministic, no other thread uses the global random generator while an op draws from it, and a
deadlocked schedule is reported at once instead of hanging.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from torch import Tensor

from autopar.lowering.types import TensorMeta
from autopar.runtime.machine.protocols import Received
from autopar.runtime.state.shards import reduced

Shards = list[Tensor]
R = TypeVar("R")


class Deadlock(RuntimeError):
    """All running pipeline ranks wait for messages that were not sent."""


class Turns:
    """A turn that one thread at a time holds."""

    def __init__(self, num_ranks: int) -> None:
        self._gates = [threading.Semaphore(0) for _ in range(num_ranks)]
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self._failed: BaseException | None = None

    def run(self, functions: Sequence[Callable[[], R]]) -> list[R]:
        """Run one function per rank, each in a thread of its own, and return their results.

        Re-raises the first error; the other threads stop at their next wait.
        """
        results: dict[int, R] = {}

        def play(rank: int, function: Callable[[], R]) -> None:
            self._gates[rank].acquire()
            try:
                results[rank] = function()
            except BaseException as error:
                if self._failed is None:
                    self._failed = error
            self._pass_on()

        self._waiting = {rank: (lambda: True, "its start") for rank in range(len(functions))}
        threads = [
            threading.Thread(target=play, args=pair, daemon=True) for pair in enumerate(functions)
        ]
        for thread in threads:
            thread.start()
        self._pass_on()
        for thread in threads:
            thread.join()
        if self._failed is not None:
            raise self._failed
        return [results[rank] for rank in range(len(functions))]

    def wait_until(self, is_there: Callable[[], bool], rank: int, what: str) -> None:
        """Yield the turn until ``is_there()``."""
        if is_there():
            return
        self._waiting[rank] = is_there, what
        self._pass_on()
        self._gates[rank].acquire()
        if self._failed is not None:
            raise RuntimeError("another pipeline rank has failed") from self._failed

    def _pass_on(self) -> None:
        """Give the turn to the rank that has waited longest of those that can go on; after a
        failure every rank can."""
        if not self._waiting:
            return
        able = (r for r, (is_there, _) in self._waiting.items() if self._failed or is_there())
        try:
            rank = next(able, None)
        except Exception as error:
            self._failed = error
            rank = next(iter(self._waiting))
        if rank is None:
            lines = [f"rank {r} waits for {what}" for r, (_, what) in sorted(self._waiting.items())]
            self._failed = Deadlock("; ".join(lines))
            rank = next(iter(self._waiting))
        del self._waiting[rank]
        self._gates[rank].release()


class Mail:
    """The messages between all pipeline ranks of one program."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.sent: dict[tuple[int, int], list[list[Shards]]] = defaultdict(list)
        self.sums: dict[tuple[tuple[int, ...], int], dict[int, list[Shards]]] = defaultdict(dict)
        self.shared: list[Shards] = []


class LockstepLinks:
    """`autopar.runtime.machine.protocols.Links` of one pipeline rank."""

    def __init__(self, mail: Mail, rank: int, num_ranks: int) -> None:
        self.mail = mail
        self.rank = rank
        self.num_ranks = num_ranks
        self._num_received: Counter[int] = Counter()
        self._num_sums: Counter[tuple[int, ...]] = Counter()
        self._num_shared = 0

    def send(self, device: int, values: Sequence[Shards]) -> Callable[[], None]:
        assert device != self.rank, f"pipeline rank {device} sends to itself"
        self.mail.sent[self.rank, device].append(_copies(values))
        return lambda: None

    def receive(self, device: int, metas: Sequence[TensorMeta]) -> Callable[[], Received[Shards]]:
        place = self._num_received[device]
        self._num_received[device] += 1
        box = self.mail.sent[device, self.rank]

        def wait() -> Received[Shards]:
            what = f"message {place} from rank {device}"
            self.mail.turns.wait_until(lambda: len(box) > place, self.rank, what)
            values, box[place] = box[place], []
            _check(values, metas, what)
            return Received(values, time.perf_counter())

        return wait

    def start_sum(
        self, devices: tuple[int, ...], values: Sequence[Shards]
    ) -> Callable[[], Sequence[Shards]]:
        if len(devices) == 1:
            return lambda: values
        assert self.rank in devices, f"pipeline rank {self.rank} is not one of {devices}"
        place = self._num_sums[devices]
        self._num_sums[devices] += 1
        given = self.mail.sums[devices, place]
        given[self.rank] = _copies(values)

        def wait() -> Sequence[Shards]:
            what = f"sum {place} over ranks {devices}"
            self.mail.turns.wait_until(lambda: len(given) == len(devices), self.rank, what)
            terms = [given[device] for device in devices]
            return [[reduced(parts) for parts in zip(*each)] for each in zip(*terms, strict=True)]

        return wait

    def share(self, devices: tuple[int, ...], value: Shards | None, meta: TensorMeta) -> Shards:
        place, what = self._num_shared, f"value {self._num_shared} that rank {devices[0]} shares"
        self._num_shared += 1
        shared = self.mail.shared
        if self.rank == devices[0]:
            assert value is not None
            assert len(shared) == place, "pipeline ranks share values in different orders"
            shared.append(_copies([value])[0])
        self.mail.turns.wait_until(lambda: len(shared) > place, self.rank, what)
        _check([shared[place]], [meta], what)
        return [x.clone() for x in shared[place]]


def _copies(values: Iterable[Shards]) -> list[Shards]:
    """Contiguous copies: a message owns its memory, as on every transport."""
    return [[x.clone().contiguous() for x in value] for value in values]


def _check(values: Sequence[Shards], metas: Sequence[TensorMeta], what: str) -> None:
    """Check that a message has the shapes and dtypes for which the receiver made room."""
    found = [(tuple(x.shape), x.dtype) for value in values for x in value[:1]]
    wanted = [(m.shape, m.dtype) for m in metas]
    assert found == wanted, f"{what} holds {found}, where {wanted} was agreed"
