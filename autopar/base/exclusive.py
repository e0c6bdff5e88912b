"""The process-wide lock under which models are traced, planned and compiled.

``torch.export`` and ``make_fx`` keep state in process globals, so do warnings and the garbage
collector, and a measurement that runs during another compilation comes out too slow. So threads
that plan, compile or lower at the same time take turns.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from autopar.base.errors import InputError


class _Turn:
    """The lock that all threads of this process share; a forked child gets a new one."""

    def __init__(self) -> None:
        self.begin()
        os.register_at_fork(after_in_child=self.begin)

    def begin(self) -> None:
        """Start unlocked: the thread that held the lock does not exist in a forked child."""
        self.lock = threading.RLock()


_TURN = _Turn()


@contextmanager
def in_turn(refusal: str | None = None) -> Iterator[None]:
    """Hold the lock; re-entrant, and usable as a decorator.

    With ``refusal``, raises InputError with this text instead of waiting for another thread.
    """
    lock = _TURN.lock
    if not lock.acquire(blocking=refusal is None):
        raise InputError(refusal)
    try:
        yield
    finally:
        lock.release()
