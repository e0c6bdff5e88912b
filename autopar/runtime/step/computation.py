"""The computation of a step on one device: the graphs of its stages, micro-batch by micro-batch.

In: the tables of a device's program, and this step's parameters, buffers and batches. Out:
accumulated gradients, this device's terms of the loss, next buffers. It knows blocks and values;
the order of actions, communication between devices and reductions belong to the executor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from autopar.ir.placement import local_shape
from autopar.lowering.arrivals import Reads
from autopar.lowering.types import NO_STAGE, BufferProgram, OutputProgram
from autopar.runtime.machine.protocols import Machine, Phase
from autopar.runtime.machine.shared_buffers import Made
from autopar.runtime.step.tables import BlockTable, StepTables

T = TypeVar("T")


@dataclass(slots=True)
class _Record(Generic[T]):
    """The values that the forward pass of a block saves for its backward pass; of its operands
    those that are no parameters."""

    operands: dict[int, T]
    saved: Sequence[T]


@dataclass(slots=True)
class Flight(Generic[T]):
    """The values of one micro-batch on this device.

    ``given`` are inputs and totals; ``values`` are what stages computed or received; ``cotangents``
    are the gradients accumulated so far. By block, ``records`` are kept for I, and ``late`` for W.
    By stage, ``entered`` are the inputs of a recomputed stage.
    """

    given: Mapping[int, T]
    values: dict[int, T] = field(default_factory=dict)
    cotangents: dict[int, T] = field(default_factory=dict)
    records: dict[int, _Record[T]] = field(default_factory=dict)
    late: dict[int, list[T]] = field(default_factory=dict)
    entered: dict[int, dict[int, T]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Moving(Generic[T]):
    """Buffers computed by a micro-batch, on their way to all ranks."""

    microbatch: int
    buffers: tuple[BufferProgram, ...]
    wait: Callable[[], Sequence[T]]


@dataclass(frozen=True, slots=True)
class Rows(Generic[T]):
    """The complete gradient of the rows from ``first`` to ``end`` of a parameter on this device."""

    value: int
    first: int
    end: int
    gradient: T


class Computation(Generic[T]):
    """One step on one device; ``fixed`` are the values that depend on nothing but constants.

    Communication of the loss, of next buffers and of the next block's parameters, forward and
    backward, overlaps with the computation that follows. With ``keeps_loss`` summing the loss over
    ranks is left to the caller. Gradients are those of the loss times ``loss_scale``. With
    ``in_steps`` W runs in its steps.
    """

    def __init__(
        self,
        tables: StepTables,
        machine: Machine[T],
        *,
        parameters: Mapping[int, T],
        buffers: Mapping[int, T],
        fixed: Mapping[int, T],
        given: Sequence[Mapping[int, T]],
        keeps_loss: bool = False,
        loss_scale: float = 1.0,
        in_steps: bool = False,
    ) -> None:
        program, route = tables.program, tables.route
        self.tables = tables
        self.program = program
        self.keeps_loss = keeps_loss
        self.loss_scale = loss_scale
        self.in_steps = in_steps
        self.route = route
        self.machine = machine
        self.stored = parameters
        self.buffers = dict(buffers)
        self._copied: dict[int, T] = {}
        self.fixed = fixed
        self.flights: list[Flight[T]] = [Flight(given=values) for values in given]
        self.used: dict[int, T] = {}
        self._read: Mapping[int, T] = parameters if tables.is_plain else self.used
        self._coming: dict[int, tuple[tuple[int, ...], Callable[[], Sequence[T]]]] = {}
        self._readings = route.readings.copy()
        self.partial: dict[int, T] = {}
        self._own_sums: set[int] = set()
        self.remaining = tables.contributions.copy()
        self.reads = None if program.early is None else Reads(program, route)
        self.rows: list[Rows[T]] = []
        self.following: dict[int, T] = {}
        self.made: list[Made[T]] = []
        self.loss: T | None = None
        self._whole_loss: Callable[[], Sequence[T]] | None = None
        self._num_losses = 0
        self._moving: dict[int, _Moving[T]] = {}

    def value(self, microbatch: int, index: int) -> T:
        """A value as blocks read it."""
        flight = self.flights[microbatch]
        for known in (flight.values, flight.given, self.fixed, self.buffers):
            if index in known:
                return known[index]
        return self.stored[index]

    # --- forward ----------------------------------------------------------------------------

    def forward(self, stage: int, microbatch: int, *, keep: bool) -> None:
        """F of a stage; with ``keep`` it saves what the backward pass needs."""
        recomputed = stage in self.program.pipeline.shape.recomputed
        flight = self.flights[microbatch]
        if recomputed and keep and stage:
            entering = self.program.pipeline.boundaries[stage - 1].values
            flight.entered[stage] = {v: flight.values[v] for v in entering}
        self._run_blocks(stage, microbatch, keep=keep and not recomputed)

    def recompute(self, stage: int, microbatch: int) -> None:
        """R of a stage: run its forward pass again, only to save what the backward pass needs."""
        flight = self.flights[microbatch]
        outer = flight.values
        flight.values = flight.entered.pop(stage, {})
        self._run_blocks(stage, microbatch, keep=True)
        flight.values = outer

    def _run_blocks(self, stage: int, microbatch: int, *, keep: bool) -> None:
        values = self.flights[microbatch].values
        self._arrive(stage)
        positions, blocks = self.route.blocks[stage], self.tables.blocks
        for position, following in itertools.zip_longest(positions, positions[1:]):
            if not self.tables.is_plain:
                self._fetch(position, blocks[position].interface.parameters)
                if following is not None:
                    self._start_fetching(following, blocks[following].interface.parameters)
            self._run_block(position, microbatch, keep)
            for value in self.route.dropped[position]:
                values.pop(value, None)
            if not self.tables.is_plain:
                self._release(blocks[position].interface.parameters, self.route.released[position])

    def _run_block(self, position: int, microbatch: int, keep: bool) -> None:
        table, flight = self.tables.blocks[position], self.flights[microbatch]
        operands = [self.value(microbatch, i) for i in table.interface.inputs]
        operands += [self._read[i] for i in table.interface.parameters]
        self.machine.begin(microbatch, position, Phase.FORWARD)
        results = self.machine.run(table.kernel.forward, operands)
        num_outputs = table.kernel.num_outputs
        flight.values.update(zip(table.interface.outputs, results[:num_outputs]))
        if keep:
            flight.records[position] = _Record(
                operands={i: operands[i] for i in table.kept}, saved=results[num_outputs:]
            )

    def _release(self, read: Sequence[int], for_now: Collection[int]) -> None:
        """Drop the parameters that a block has read for the last time in this step; of those that
        are released after each pass, the ones that its pass reads no more (``for_now``)."""
        for value in dict.fromkeys(read):
            self._readings[value] -= 1
            is_released = self.tables.parameter_of[value].released and value in for_now
            if is_released or not self._readings[value]:
                self.used.pop(value, None)

    def _start_fetching(self, position: int, read: Sequence[int]) -> None:
        """Begin to bring parameters to the placement in which a block reads them.

        All micro-batches share one copy.
        """
        values, moves = [], []
        for value in dict.fromkeys(read):
            parameter = self.tables.parameter_of[value]
            if value in self.used:
                continue
            if parameter.kernel is None:
                self.used[value] = self.stored[value]
            else:
                values.append(value)
                moves.append((self.program.kernels[parameter.kernel].forward, self.stored[value]))
        if moves:
            self.machine.begin_gather(position, tuple(values))
            self._coming[position] = tuple(values), self.machine.start_moves(moves)

    def _fetch(self, position: int, read: Sequence[int]) -> None:
        """Wait for the parameters that a block reads."""
        if position not in self._coming:
            self._start_fetching(position, read)
        if position in self._coming:
            values, wait = self._coming.pop(position)
            self.used.update(zip(values, wait()))

    def finish_forward(self, stage: int, microbatch: int) -> None:
        """Take the loss and the next buffers from the results of a stage's F."""
        values, crossing = self.flights[microbatch].values, self.route.crossing[stage]
        self._follow(stage, microbatch, self.route.updated[stage], values)
        if stage == self.route.loss_stage:
            self._add_loss(values)
        for value in self.route.finished[stage]:
            if value not in crossing:
                del values[value]

    def _add_loss(self, values: Mapping[int, T]) -> None:
        """Add a micro-batch's loss; after the last one begin to sum it over the ranks."""
        output = self.program.loss
        assert output is not None
        part = values[output.value]
        self.loss = part if self.loss is None else self.machine.add(self.loss, part)
        self._num_losses += 1
        is_last = self._num_losses == self.route.num_losses
        if is_last and output.kernel is not None and not self.keeps_loss:
            forward = self.program.kernels[output.kernel].forward
            self._whole_loss = self.machine.start_moves([(forward, self.loss)])

    def whole_loss(self) -> T | None:
        """The loss summed over this device's ranks; None if the loss is not made here."""
        return self._whole_loss()[0] if self._whole_loss is not None else self.loss

    def read_copied(self) -> None:
        """Read what buffers copy that no stage computes, before the step changes anything: inputs,
        constants, parameters and other buffers."""
        if not self.route.copied:
            return
        last = len(self.flights) - 1
        copies = [b.following.value for b in self.route.copied if b.following is not None]
        read = self.machine.apart([self.value(last, v) for v in copies], self._changing())
        self._copied.update(zip(copies, read))

    def _changing(self) -> list[T]:
        """Tensors whose memory is changed in place, by updates or by the user."""
        given = (value for flight in self.flights for value in flight.given.values())
        return [*self.stored.values(), *given]

    def finish(self) -> None:
        """Wait for the next buffers, and add those that no stage computes."""
        self._follow(NO_STAGE, len(self.flights) - 1, self.route.copied, self._copied)
        for stage in tuple(self._moving):
            self._arrive(stage)

    def _follow(
        self,
        stage: int,
        microbatch: int,
        updated: Sequence[BufferProgram],
        values: Mapping[int, T],
    ) -> None:
        """Take a stage's next buffers; communication of them ends by its next F."""
        if not updated:
            return
        moved, moves = [], []
        found = [values[b.following.value] for b in updated if b.following is not None]
        for buffer, value in zip(updated, self.machine.apart(found, self._changing())):
            assert buffer.following is not None
            kernel = buffer.following.kernel
            if kernel is None:
                self._set_buffer(buffer, microbatch, value)
                continue
            moved.append(buffer)
            moves.append((self.program.kernels[kernel].forward, value))
        if moves:
            wait = self.machine.start_moves(moves)
            self._moving[stage] = _Moving(microbatch, tuple(moved), wait)

    def _arrive(self, stage: int) -> None:
        moving = self._moving.pop(stage, None)
        if moving is not None:
            for buffer, value in zip(moving.buffers, moving.wait()):
                self._set_buffer(buffer, moving.microbatch, value)

    def _set_buffer(self, buffer: BufferProgram, microbatch: int, value: T) -> None:
        if buffer.shared:  # shared with other replicas, which run other micro-batches
            self.made.append(Made(buffer.value, microbatch, value))
        else:
            self.following[buffer.value] = self.buffers[buffer.value] = value

    def whole(self, output: OutputProgram, value: T) -> T:
        """A value that leaves the program, as a whole tensor."""
        if output.kernel is None:
            return value
        return self.machine.run(self.program.kernels[output.kernel].forward, [value])[0]

    # --- backward ---------------------------------------------------------------------------

    def backward(self, stage: int, microbatch: int, *, weights: bool) -> Iterator[list[int]]:
        """I of a stage, block by block, or with ``weights`` B: each block's W after its I.

        Yields, after each step of a block's W, the parameters whose gradients are now complete.
        Complete rows of gradients are in ``rows``; ``reads`` counts the graphs to come that read
        each parameter.
        """
        flight, read = self.flights[microbatch], self.route.read_back
        positions = self.route.blocks[stage][::-1]
        for position, following in itertools.zip_longest(positions, positions[1:]):
            table = self.tables.blocks[position]
            if self.reads is not None:
                self.reads.end(position)
            record = flight.records.pop(position, None)
            if record is None:
                continue
            if not self.tables.is_plain:
                self._fetch(position, read[position])
                if following is not None:
                    self._start_fetching(following, read[following])
            if not table.kernel.cotangents:
                continue
            cotangents = self._take(flight, table)
            arguments = self._run_input(position, microbatch, record, cotangents)
            if not self.tables.is_plain:
                self._release(read[position], self.route.released_back[position])
            del record, cotangents  # the arguments of W refer to those that it needs
            if table.kernel.backward_weight is None:
                continue
            if weights:
                yield from self._run_weight(position, microbatch, arguments)
            else:
                flight.late[position] = arguments
            del arguments

    def weights(self, stage: int, microbatch: int) -> Iterator[list[int]]:
        """W of a stage, as `backward`."""
        for position in reversed(self.route.blocks[stage]):
            arguments = self.flights[microbatch].late.pop(position, None)
            if arguments is not None:
                yield from self._run_weight(position, microbatch, arguments)
                del arguments

    def _take(self, flight: Flight[T], table: BlockTable) -> list[T]:
        """Cotangents of the block's outputs; zeros for those without one."""
        loss = None if self.program.loss is None else self.program.loss.value
        kernel, taken = table.kernel, []
        for index in kernel.cotangents:
            value = table.interface.outputs[index]
            cotangent = flight.cotangents.pop(value, None)
            if value == loss:
                cotangent = self.machine.filled(kernel.output_metas[index], self.loss_scale)
            if cotangent is None:
                cotangent = self.machine.filled(kernel.output_metas[index], 0.0)
            taken.append(self.machine.contiguous(cotangent))
        return taken

    def _run_input(
        self, position: int, microbatch: int, record: _Record[T], cotangents: list[T]
    ) -> list[T]:
        """Run I and pass the gradients on; returns the arguments of W."""
        table, handed = self.tables.blocks[position], list[T]()
        known = record.operands, self._read, record.saved, cotangents, handed
        graph = table.kernel.backward_input
        if graph is not None:
            arguments = [known[origin][i] for origin, i in table.input_arguments]
            self.machine.begin(microbatch, position, Phase.INPUT)
            results = self.machine.run(graph, arguments)
            into = self.flights[microbatch].cotangents
            for value, gradient in zip(table.differentiated, results):
                self.accumulate(into, value, gradient)
            handed.extend(results[len(table.differentiated) :])
        return [known[origin][i] for origin, i in table.weight_arguments]

    def _run_weight(
        self, position: int, microbatch: int, arguments: list[T]
    ) -> Iterator[list[int]]:
        """Run W, as a whole or step by step. It empties ``arguments`` when it no longer needs
        them."""
        table = self.tables.blocks[position]
        kernel = table.kernel
        assert kernel.backward_weight is not None
        self.machine.begin(microbatch, position, Phase.WEIGHT)
        if self.reads is None or not (self.in_steps and kernel.weight_steps):
            run = self.machine.run
            complete = self._contribute(table.graded, run(kernel.backward_weight, arguments))
            arguments.clear()
            if self.reads is not None:
                self.reads.end(position)
            yield complete
            return
        self.reads.begin_steps(position)
        for step in kernel.weight_steps:
            results = self.machine.run(step.module, [arguments[i] for i in step.sources])
            self.reads.end_step(position, step)
            if not step.grads:
                arguments.extend(results)
                continue
            if step is kernel.weight_steps[-1]:
                arguments.clear()
            graded = [
                table.interface.parameters[i - len(table.interface.inputs)] for i in step.grads
            ]
            if step.rows is None:
                complete = self._contribute(graded, results)
            else:
                complete = []
                self._add_rows(Rows(graded[0], *step.rows, results[0]))
            del results
            yield complete

    def _add_rows(self, rows: Rows[T]) -> None:
        """Complete rows of a gradient, with what other uses of the parameter contributed."""
        value = rows.value
        if value in self.partial:
            self.machine.add_rows(rows.gradient, self.partial[value], rows.first, rows.end)
            parameter = self.tables.parameter_of[value]
            shape = local_shape(parameter.shape, parameter.used, self.program.mesh)
            if rows.end == shape[0]:
                del self.partial[value]
        self.rows.append(rows)

    def _contribute(self, values: Sequence[int], gradients: Sequence[T]) -> list[int]:
        """Add to gradients; the parameters whose gradients are now complete."""
        complete = []
        for value, gradient in zip(values, gradients):
            self._add_gradient(value, gradient)
            self.remaining[value] -= 1
            if not self.remaining[value]:
                self.remaining[value] = self.tables.contributions[value]  # of the next micro-batch
                self._own_sums.discard(value)
                complete.append(value)
        return complete

    def _add_gradient(self, value: int, gradient: T) -> None:
        """Add to a gradient. The first sum is new memory, as one tensor may be the gradient of two
        parameters, in the dtype of reductions; later contributions are added in place."""
        known = self.partial.get(value)
        if known is None:
            self.partial[value] = gradient
            return
        self.machine.begin_sum(value, known, gradient)
        if value in self._own_sums:
            self.machine.add_to(known, gradient)
        else:
            self._own_sums.add(value)
            dtype = self.tables.parameter_of[value].reduced_dtype
            self.partial[value] = self.machine.add_in(dtype, known, gradient)
        self.machine.end_sum(self.partial[value])

    def accumulate(self, into: dict[int, T], value: int, gradient: T) -> None:
        into[value] = self.machine.add(into[value], gradient) if value in into else gradient
