"""What this process is doing in a training step, readable by others even when it is dead.

In: a short text, before each action of the schedule. Out: the same text in a page of memory that is
shared with the parent of a local worker, or with the other processes of this host. Writing takes
well under a microsecond, so that it is always on.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Any

SIZE_BYTES = 96


class _Board:
    """The page of this process, if its parent gave it one."""

    def __init__(self) -> None:
        self.page: mmap.mmap | None = None


_BOARD = _Board()


def join(fd: int) -> None:
    """Write to this file from now on; it has `SIZE_BYTES`."""
    _BOARD.page = mmap.mmap(fd, SIZE_BYTES)


def padded(text: str) -> bytes:
    """A text as `say` takes it."""
    return text.encode(errors="replace")[:SIZE_BYTES].ljust(SIZE_BYTES, b"\0")


def say(text: bytes) -> None:
    """Note what begins now; ``text`` is `padded`."""
    if _BOARD.page is not None:
        _BOARD.page[:] = text


def current() -> str:
    """What this process said last; empty for nothing."""
    return "" if _BOARD.page is None else _text(_BOARD.page[:])


def new_board() -> Any:
    """An empty file to hand to a worker."""
    file = tempfile.TemporaryFile()  # noqa: SIM115  closed by whoever reads it
    file.truncate(SIZE_BYTES)
    return file


def read(fd: int) -> str:
    """What was last said there; empty for nothing."""
    return _text(os.pread(fd, SIZE_BYTES, 0))


def _text(page: bytes) -> str:
    return page.rstrip(b"\0").decode(errors="replace")


START, AFTER = "the start of ", "after "
"""What a rank says at the start of a call, and after one, is one of these with its number."""
NOTHING = padded("")
"""Said when a call is over."""
IN_CALL = "no action"
"""Said by a worker that has taken up a call, and is in no action of it."""
