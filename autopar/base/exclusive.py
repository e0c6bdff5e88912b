"""What one thread of a process does at a time: tracing and compiling.

``torch.export`` and ``make_fx`` keep what they trace in globals of the process, warnings and the
garbage collector are the process's too, and what is measured beside another compilation would be
slower. So threads that compile, plan or lower at once take turns.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from autopar.base.errors import InputError


class _Turn:
    """The lock that all threads of this process share."""

    def __init__(self) -> None:
        self.begin()
        os.register_at_fork(after_in_child=self.begin)

    def begin(self) -> None:
        """Nobody's turn: a forked child does not have the thread whose turn it was."""
        self.lock = threading.RLock()


_TURN = _Turn()


@contextmanager
def in_turn(refusal: str | None = None) -> Iterator[None]:
    """Wait until no other thread is inside; may be nested, and used as a decorator.

    With ``refusal`` nothing is waited for: InputError with this text.
    """
    lock = _TURN.lock
    if not lock.acquire(blocking=refusal is None):
        raise InputError(refusal)
    try:
        yield
    finally:
        lock.release()
