"""A page of shared memory in which a process publishes what it is doing in a training step.

In: a short text, before each action of the schedule. Out: the same text, for the parent of a local
worker or the other processes of the host, also after this process has died. Writing takes well
under a microsecond, so that it is always on.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Any

SIZE_BYTES = 96
START, AFTER = "the start of ", "after "
"""At the start of a call, and after one, a rank reports one of these with the call's number."""
IN_CALL = "no action"
"""Reported by a worker that has received a call and is in no action of it."""


class _Page:
    """The page of this process, if it has one."""

    def __init__(self) -> None:
        self.memory: mmap.mmap | None = None


_PAGE = _Page()


def publish_to(fd: int) -> None:
    """Write to this file, of `SIZE_BYTES`, from now on."""
    _PAGE.memory = mmap.mmap(fd, SIZE_BYTES)


def publish_here() -> None:
    """Write to memory of this process, if it has no page that others see, for its own errors."""
    if _PAGE.memory is None:
        _PAGE.memory = mmap.mmap(-1, SIZE_BYTES)


def encoded(text: str) -> bytes:
    """A text as `report` takes it."""
    return text.encode(errors="replace")[:SIZE_BYTES].ljust(SIZE_BYTES, b"\0")


NOTHING = encoded("")
"""Reported when a call is over."""


def report(text: bytes) -> None:
    """Publish what begins now; ``text`` is `encoded`."""
    if _PAGE.memory is not None:
        _PAGE.memory[:] = text


def current() -> str:
    """The last report of this process; empty if there is none."""
    return "" if _PAGE.memory is None else _text(_PAGE.memory[:])


def new_page() -> Any:
    """An empty file to hand to a worker."""
    file = tempfile.TemporaryFile()  # noqa: SIM115  closed by whoever reads it
    file.truncate(SIZE_BYTES)
    return file


def read(fd: int) -> str:
    """The last report in this file; empty if there is none."""
    return _text(os.pread(fd, SIZE_BYTES, 0))


def _text(page: bytes) -> str:
    return page.rstrip(b"\0").decode(errors="replace")
