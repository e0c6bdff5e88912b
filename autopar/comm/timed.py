"""Collectives that note how long their caller waits in them: exposed communication.

In: the collectives of a group. Out: the same, whose calls and waits are noted as pairs of moments
while somebody measures. A moment is of the calling thread, or on a GPU of its stream: what runs
there meanwhile overlaps with the collective, and what a call or its wait takes is exposed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from autopar.comm.transports.base import CollectiveTransport, Reduction, Wait, done

R = TypeVar("R")


class Waits:
    """The waits of one rank in its collectives, in the order of issue.

    ``spans`` are the moments at which each began and ended; none are noted without ``moment``, a
    function that gives the present one.
    """

    def __init__(self) -> None:
        self.moment: Callable[[], Any] | None = None
        self.spans: list[tuple[Any, Any]] = []

    def noting(self, call: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Call a function, and note how long that takes."""
        if self.moment is None:
            return call(*args, **kwargs)
        start = self.moment()
        result = call(*args, **kwargs)
        self.spans.append((start, self.moment()))
        return result


class TimedCollectives:
    """The collectives of a ``transport``, whose waits are noted."""

    def __init__(self, transport: CollectiveTransport, waits: Waits) -> None:
        self.transport = transport
        self._waits = waits

    def all_reduce(
        self, x: Tensor, reduction: Reduction = Reduction.SUM, *, overlapped: bool = False
    ) -> Wait:
        return self._started(self.transport.all_reduce, x, reduction, overlapped=overlapped)

    def all_gather(self, whole: Tensor, own: Tensor, *, overlapped: bool = False) -> Wait:
        return self._started(self.transport.all_gather, whole, own, overlapped=overlapped)

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        self._waits.noting(self.transport.all_to_all, received, sent)

    def reduce_scatter(self, whole: Tensor, *, overlapped: bool = False) -> Callable[[], Tensor]:
        return self._started(self.transport.reduce_scatter, whole, overlapped=overlapped)

    def _started(
        self, start: Callable[..., Callable[[], R]], *args: Any, **kwargs: Any
    ) -> Callable[[], R]:
        """Start a collective; the call that waits for it is noted too, unless it has ended."""
        end = self._waits.noting(start, *args, **kwargs)
        return end if end is done else functools.partial(self._waits.noting, end)
