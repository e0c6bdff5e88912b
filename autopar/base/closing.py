"""The base of objects that hold processes or connections until they are closed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from autopar.base.errors import WorkerError


def closed_error(why: str) -> WorkerError:
    """The error of a call after something was closed; ``why``: such as "close() was called"."""
    return WorkerError(
        f"the compiled model is closed because {why}. It is not opened again: call "
        "autopar.compile(...), and compiled.load(path) the last checkpoint"
    )


class Closing(ABC):
    """A context manager of itself: the end of a ``with`` block calls `close`."""

    @abstractmethod
    def close(self) -> None:
        """Free what the object holds; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
