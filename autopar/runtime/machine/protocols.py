"""The protocols that an executor runs on: `Machine` runs graphs, `Links` connect pipeline devices.

There are two implementations of each: for one rank in its process
(`autopar.runtime.machine.process`, `autopar.runtime.machine.links`), and for all ranks in one
process (`autopar.testing.lockstep`, `autopar.testing.lockstep_links`), where a value is a list of
shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, Protocol, TypeVar

import torch
from torch import fx

from autopar.lowering.streams import Issue
from autopar.lowering.types import TensorMeta
from autopar.runtime.machine.moments import Moment

T = TypeVar("T")


class Phase(IntEnum):
    """The graph of a block that runs: F, I or W."""

    FORWARD = 0
    INPUT = 1
    WEIGHT = 2


class Machine(Protocol[T]):
    """Runs graphs on values of type T."""

    def run(self, module: fx.GraphModule, arguments: Sequence[T]) -> Sequence[T]: ...

    def begin(self, microbatch: int, block: int, phase: Phase) -> None:
        """Announce the block that runs next: it sets the micro-batch and the random seeds.

        A block draws the same numbers for a micro-batch whenever it runs in a step.
        """
        ...

    def begin_gather(self, block: int, values: tuple[int, ...]) -> None:
        """Announce the gathers of parameters for a block, with which `start_moves` begins next."""
        ...

    def begin_sum(self, value: int, gradient: T, contribution: T) -> None:
        """Announce that a contribution is added to what there is of a parameter's gradient."""
        ...

    def end_sum(self, gradient: T) -> None:
        """Announce that the contribution has been added, with the sum."""
        ...

    def on(self, issue: Issue) -> AbstractContextManager[None]:
        """Within: what runs belongs to this issue, on its stream and behind what it waits for.

        A machine without streams runs everything in the order of issue.
        """
        ...

    def updating(self, gradients: Sequence[T]) -> AbstractContextManager[None]:
        """Within: parameters are updated with these gradients, on a stream of their own behind all
        that the current stream was given.

        The current stream first waits for the updates before, so that it may release what they
        used. A machine without streams updates at once.
        """
        ...

    def end_updates(self) -> None:
        """The current stream waits for the updates so far."""
        ...

    def moment(self) -> Moment:
        """The moment at which the current stream has run all that it was given so far."""
        ...

    @property
    def waits(self) -> Sequence[tuple[Moment, Moment]]:
        """The moments at which each wait in a collective began and ended, as far as noted."""
        ...

    def add(self, left: T, right: T) -> T: ...

    def add_to(self, left: T, right: T) -> None:
        """Add in place to a value that has no other reader."""
        ...

    def add_in(self, dtype: torch.dtype, left: T, right: T) -> T:
        """The sum, as new memory of a dtype that is at least as wide."""
        ...

    def add_rows(self, rows: T, whole: T, first: int, end: int) -> None:
        """Add the rows from ``first`` to ``end`` of a value in place to others that nobody else
        reads."""
        ...

    def weighted_sum(self, terms: Sequence[tuple[float, T]]) -> T:
        """The sum of weight times value over at least one term; integers stay integers under
        integer weights."""
        ...

    def contiguous(self, value: T) -> T: ...

    def apart(self, values: Sequence[T], others: Iterable[T]) -> list[T]:
        """The values; copies of those that share memory with one of the ``others``."""
        ...

    def filled(self, meta: TensorMeta, fill: float) -> T: ...

    def start_moves(self, moves: list[tuple[fx.GraphModule, T]]) -> Callable[[], Sequence[T]]:
        """Begin to run graphs of one operand and one result each; the returned call finishes.

        The machine may join collectives. It empties the list, so that an operand that nobody else
        holds is released as soon as it has been sent.
        """
        ...

    def start_gradients(self, moves: list[tuple[fx.GraphModule, T]]) -> Callable[[], Sequence[T]]:
        """As `start_moves`, with results in memory of their own. If reductions last into the next
        step, its other collectives do not queue behind them."""
        ...


@dataclass(frozen=True, slots=True)
class Received(Generic[T]):
    """The values of a message, and when it had arrived (``time.perf_counter``)."""

    values: Sequence[T]
    arrived_s: float


class Links(Protocol[T]):
    """Carries values between pipeline devices: each rank to the rank of its mesh position there.

    A link delivers in the order of its sends. Shapes are agreed beforehand; no metadata travels.
    """

    def send(self, device: int, values: Sequence[T]) -> Callable[[], None]:
        """Begin to send; the returned call waits until the values may be released."""
        ...

    def receive(self, device: int, metas: Sequence[TensorMeta]) -> Callable[[], Received[T]]:
        """Begin to receive contiguous values; the returned call waits for them."""
        ...

    def start_sum(self, devices: tuple[int, ...], values: Sequence[T]) -> Callable[[], Sequence[T]]:
        """Begin to sum over ``devices``, which include this one; the returned call gives the sums
        on each of them."""
        ...

    def share(self, devices: tuple[int, ...], value: T | None, meta: TensorMeta) -> T:
        """Copy a value that the first of ``devices`` has to all devices of the pipeline."""
        ...


class NoLinks(Generic[T]):
    """The `Links` of a program with one pipeline device."""

    def send(self, device: int, values: Sequence[T]) -> Callable[[], None]:
        raise AssertionError(f"there is no device {device}")

    def receive(self, device: int, metas: Sequence[TensorMeta]) -> Callable[[], Received[T]]:
        raise AssertionError(f"there is no device {device}")

    def start_sum(self, devices: tuple[int, ...], values: Sequence[T]) -> Callable[[], Sequence[T]]:
        return lambda: values

    def share(self, devices: tuple[int, ...], value: T | None, meta: TensorMeta) -> T:
        assert value is not None
        return value
