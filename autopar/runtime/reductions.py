"""Reductions of gradients: over a device's own mesh while others are computed, then over devices.

In: gradients as blocks use their parameters, when their last contribution is in. Out: gradients in
stored placement, equal on all devices that hold a parameter: tied parameters of several stages and
the replicas of a stage have one sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from autopar.lowering.differentiate import TensorMeta
from autopar.lowering.program import ParameterProgram, RankProgram
from autopar.lowering.route import Route
from autopar.placement import local_shape
from autopar.runtime.machine import Links, Machine

T = TypeVar("T")


class Reductions(Generic[T]):
    """The reductions of one step on one device; ``partial`` are the gradients that add up.

    Where the schedule has reductions of its own (G), a stage's begin there; otherwise as soon as
    they can. Sums over devices come last, in one order on all of them.
    """

    def __init__(
        self,
        program: RankProgram,
        route: Route,
        machine: Machine[T],
        links: Links[T],
        partial: dict[int, T],
    ) -> None:
        self.program = program
        self.route = route
        self.machine = machine
        self.links = links
        self.partial = partial
        self.gradients: dict[int, T] = {}
        self._scheduled = program.pipeline.shape.reduces
        self._waiting: set[int] = set()
        self._started: list[tuple[list[int], Callable[[], Sequence[T]]]] = []
        self._parameter_of = {p.value: p for p in program.parameters}

    def complete(self, values: Sequence[int]) -> None:
        """The last contributions to these gradients are in."""
        if self._scheduled:
            self._waiting.update(values)
        else:
            self._start(values)

    def start_stage(self, stage: int) -> None:
        """G: begin the reductions of what a stage has completed."""
        used = {
            value
            for position in self.route.blocks[stage]
            for value in self.program.blocks[position].interface.parameters
        }
        self._start(sorted(self._waiting & used))

    def finish(self) -> dict[int, T]:
        """Wait for all, and sum over the devices that hold a parameter."""
        self._start(sorted(self._waiting))
        for values, finish in self._started:
            self.gradients.update(zip(values, finish()))
        self._started.clear()
        for devices, parameters in self.route.summed.items():
            if self.route.device in devices:
                own = [self._own(parameter) for parameter in parameters]
                sums = self.links.sum_over(devices, own)
                self.gradients.update(zip((p.value for p in parameters), sums))
        return self.gradients

    def _own(self, parameter: ParameterProgram) -> T:
        """This device's share of a gradient, which may be none."""
        if parameter.value in self.gradients:
            return self.gradients[parameter.value]
        shape = local_shape(parameter.shape, parameter.stored, self.program.mesh)
        return self.machine.filled(TensorMeta.contiguous(shape, parameter.dtype), 0.0)

    def _start(self, values: Sequence[int]) -> None:
        """Bring gradients to the stored placement, beside what is computed next."""
        self._waiting.difference_update(values)
        moved, moves = [], []
        for value in values:
            parameter = self._parameter_of[value]
            gradient = self.machine.contiguous(self.partial.pop(value))
            if parameter.kernel is None:
                self.gradients[value] = gradient
                continue
            backward = self.program.kernels[parameter.kernel].backward_input
            assert backward is not None
            moved.append(value)
            moves.append((backward, gradient))
        if moves:
            self._started.append((moved, self.machine.start_moves(moves)))
