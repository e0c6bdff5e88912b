"""Reductions of gradients: over a device's own mesh, then over the devices that hold a parameter.

In: gradients in the placement in which blocks use their parameters, once they are complete. Out:
gradients in stored placement, equal on all devices that hold a parameter: tied parameters of
several stages and the replicas of a stage have one sum. Those that are scattered in every
micro-batch are added up as they arrive. Reductions overlap with the computation that follows, and
whoever needs a gradient waits for its round, perhaps in the next training step.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from autopar.ir.placement import local_shape
from autopar.lowering.arrivals import Reads
from autopar.lowering.types import ParameterProgram, TensorMeta
from autopar.runtime.machine.protocols import Links, Machine
from autopar.runtime.step.computation import Rows
from autopar.runtime.step.tables import StepTables

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Round(Generic[T]):
    """Gradients that are reduced together; ``wait`` gives them."""

    values: tuple[int, ...]
    wait: Callable[[], Sequence[T]]
    is_of_mesh: bool = True


@dataclass(frozen=True, slots=True)
class Arrived(Generic[T]):
    """Gradients that an early update may use now, by parameter or as rows of one."""

    gradients: dict[int, T]
    rows: list[Rows[T]]

    def __bool__(self) -> bool:
        return bool(self.gradients or self.rows)

    @property
    def values(self) -> list[T]:
        """The tensors of all of them."""
        return [*self.gradients.values(), *(found.gradient for found in self.rows)]


class Gradients(Protocol[T]):
    """Gradients of a step, perhaps still in flight."""

    def take(self, values: Sequence[int]) -> dict[int, T]:
        """Wait for those of these gradients that are complete, and hand them over."""
        ...

    def arrivals(self) -> Iterator[dict[int, T]]:
        """The gradients that were not taken, as they arrive."""
        ...


class Reductions(Generic[T]):
    """The reductions of one step on one device.

    ``partial`` are the gradients that accumulate; ``inspect`` is called with those that are
    complete on this device, and the dtypes of their reductions. If the schedule has reduction
    actions (G), a stage's reductions start there, otherwise as soon as they can. All devices start
    them in one order, which the schedule's verification guarantees; the sums of parameters that
    several stages share come last.
    """

    def __init__(
        self,
        tables: StepTables,
        machine: Machine[T],
        links: Links[T],
        partial: dict[int, T],
        *,
        inspect: Callable[[Sequence[T], Sequence[torch.dtype]], None] | None = None,
    ) -> None:
        program = tables.program
        self.tables = tables
        self.program = program
        self.route = tables.route
        self.machine = machine
        self.links = links
        self.partial = partial
        self._inspect = inspect
        self._scheduled = program.pipeline.shape.reduces
        self._waiting: set[int] = set()
        self._rounds: list[_Round[T]] = []
        self._to_sum: list[int] = []
        self._ready: dict[int, T] = {}
        self._shared = tables.shared
        self._rows: deque[tuple[tuple[int, int, int], Callable[[], Sequence[T]]]] = deque()
        self._rounds_left = dict.fromkeys(tables.scattered, program.num_microbatches)
        self._sums: dict[int, T] = {}
        self._folded: list[tuple[int, ...]] = []
        self._num_in_flight = tables.num_in_flight

    def complete(self, values: Sequence[int]) -> None:
        """Note that these gradients are complete on this device."""
        if self._scheduled:
            self._waiting.update(values)
        else:
            self._move(values)

    def start_stage(self, stage: int) -> None:
        """G: start the reductions of a stage's complete gradients.

        The sum over its replicas starts after the one over the device's own mesh has ended: at the
        next G, or when somebody waits for it.
        """
        self._sum_replicas()
        is_moving = self._move(sorted(self._waiting.intersection(self.route.parameters[stage])))
        if stage in self.route.replicated:
            self._to_sum.append(stage)
            if not is_moving:
                self._sum_replicas()

    def begin_rest(self) -> None:
        """Start all reductions that have not started, after the last action."""
        self._sum_replicas()
        self._move(sorted(self._waiting))
        for devices, parameters in self.route.summed.items():
            if self.route.device in devices:
                self._sum(devices, parameters)
        self._shared = frozenset()

    def take(self, values: Sequence[int]) -> dict[int, T]:
        """Wait for those of these gradients that are complete, and hand them over.

        A gradient that several stages share is complete only after `begin_rest`.
        """
        wanted = {v for v in values if v not in self._shared}
        replicated = (p.value for stage in self._to_sum for p in self.route.replicated[stage][1])
        if not wanted.isdisjoint(replicated):
            self._sum_replicas()
        self._wait(wanted)
        return {v: self._ready.pop(v) for v in values if v in wanted and v in self._ready}

    def reduce_rows(self, rows: list[Rows[T]]) -> None:
        """Reduce complete rows of gradients, which are taken from the list."""
        while rows:
            found = rows.pop(0)
            place, gradient = (found.value, found.first, found.end), found.gradient
            del found
            parameter = self.tables.parameter_of[place[0]]
            if parameter.kernel is None:
                self._rows.append((place, functools.partial(_held, gradient)))
                continue
            backward = self.program.kernels[parameter.kernel].backward_input
            assert backward is not None
            moves = [(backward, self.machine.contiguous(gradient))]
            del gradient
            self._rows.append((place, self.machine.start_gradients(moves)))

    def arrived(self, reads: Reads, *, is_last: bool = False) -> Arrived[T]:
        """The gradients for an early update: complete, reduced, and of weights that no graph of
        this step will read. The last rounds stay in flight, unless this ``is_last``."""
        num = 0 if is_last else self._num_in_flight
        rows = []
        while len(self._rows) > num:
            place, wait = self._rows.popleft()
            rows.append(Rows(*place, wait()[0]))
            del wait
        of_mesh = [r for r in self._rounds if r.is_of_mesh]
        for finished in of_mesh[: max(len(of_mesh) - num, 0)]:
            self._wait(set(finished.values))
        free = reads.free(self._ready)
        return Arrived(gradients={v: self._ready.pop(v) for v in free}, rows=rows)

    def arrivals(self) -> Iterator[dict[int, T]]:
        """The gradients that were not taken, as they arrive; call `begin_rest` before."""
        for values in self._folded:
            yield self.take(values)
        while self._rounds:
            yield self.take(self._rounds[0].values)
        yield self.take(tuple(self._ready))

    def _move(self, values: Sequence[int]) -> bool:
        """Start to bring gradients to the stored placement; whether any is communicated."""
        self._waiting.difference_update(values)
        moved, moves = [], []
        gradients = [self.machine.contiguous(self.partial.pop(value)) for value in values]
        if self._inspect is not None and gradients:
            self._inspect(gradients, [self.tables.parameter_of[v].reduced_dtype for v in values])
        for value in values:
            parameter, gradient = self.tables.parameter_of[value], gradients.pop(0)
            if parameter.kernel is None:
                self._ready[value] = gradient
                continue
            backward = self.program.kernels[parameter.kernel].backward_input
            assert backward is not None
            moved.append(value)
            moves.append((backward, gradient))
            del gradient
        if moved:
            self._rounds.append(_Round(tuple(moved), self.machine.start_gradients(moves)))
            del moves
            self._fold()
        return bool(moved)

    def _fold(self) -> None:
        """Add up what is scattered in every micro-batch, but for the last rounds in flight."""
        for found in self._rounds[: max(len(self._rounds) - self._num_in_flight, 0)]:
            if not self._rounds_left.keys().isdisjoint(found.values):
                self._folded.append(found.values)
                self._wait(set(found.values))

    def _sum_replicas(self) -> None:
        for stage in self._to_sum:
            self._sum(*self.route.replicated[stage])
        self._to_sum.clear()

    def _sum(self, devices: tuple[int, ...], parameters: Sequence[ParameterProgram]) -> None:
        """Start to sum gradients over devices, each of which contributes its own."""
        own = [self._own(parameter) for parameter in parameters]
        wait = self.links.start_sum(devices, own)
        self._rounds.append(_Round(tuple(p.value for p in parameters), wait, is_of_mesh=False))

    def _own(self, parameter: ParameterProgram) -> T:
        """This device's contribution to a gradient; zeros if it has none."""
        self._wait({parameter.value})
        if parameter.value in self._ready:
            return self._ready.pop(parameter.value)
        shape = local_shape(parameter.shape, parameter.stored, self.program.mesh)
        return self.machine.filled(TensorMeta.contiguous(shape, parameter.dtype), 0.0)

    def _wait(self, values: set[int]) -> None:
        for found in [r for r in self._rounds if not values.isdisjoint(r.values)]:
            for value, gradient in zip(found.values, found.wait()):
                self._arrive(value, gradient)
            self._rounds.remove(found)

    def _arrive(self, value: int, gradient: T) -> None:
        if value in self._rounds_left:
            self._rounds_left[value] -= 1
            if value in self._sums:
                self.machine.add_to(self._sums[value], gradient)
            else:
                self._sums[value] = gradient
            if self._rounds_left[value]:
                return
            gradient = self._sums.pop(value)
        self._ready[value] = gradient


def _held(gradient: T) -> Sequence[T]:
    return (gradient,)


class Updater(Protocol[T]):
    """Updates parameters, given by their values, with gradients as they arrive.

    An updater that ``agrees`` with the other ranks on a step before it updates anything sums the
    loss itself.
    """

    @property
    def agrees(self) -> bool: ...

    @property
    def loss_scale(self) -> float:
        """The factor of the loss before the backward pass; gradients are divided by it."""
        ...

    def inspect(self, gradients: Sequence[T], dtypes: Sequence[torch.dtype]) -> None:
        """Look at gradients that are complete on this device, each to be reduced in its dtype."""
        ...

    def total_loss(self, part: T | None) -> T:
        """Sum the loss over the ranks; ``part`` is this rank's, None if it has none."""
        ...

    def may_update(self, arrived: Arrived[T], loss: T | None) -> bool:
        """Look at gradients that arrived within the backward pass, and say whether to update with
        them; ``loss`` is this rank's term of the loss."""
        ...

    def update_early(self, arrived: Arrived[T]) -> None:
        """Update parameters within the backward pass, perhaps on another stream."""
        ...

    def update(self, values: Sequence[int], gradients: Gradients[T]) -> None:
        """U: update those of these parameters whose gradients are complete."""
        ...

    def update_last(self, values: Sequence[int]) -> None:
        """U of the previous step."""
        ...
