"""Peak memory of a rank program, counted by playing one training step over its graphs.

The actions of the schedule are played in order. Every value lives from the block that computes it
to the last one that reads it, forward or backward; saved values live until their block's I, or
until W if it needs them; gradients accumulate; the peak within a graph is found by liveness;
updates have the optimizer's workspace; and `autopar.comm` says what collectives hold.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.base.accelerators import generator_bytes
from autopar.comm.transports.registry import traits_of
from autopar.cost_models.allocator import Category, allocator_of, device_bytes
from autopar.cost_models.hardware import DeviceSpec
from autopar.cost_models.update import OptimizerSpec
from autopar.lowering.arrivals import contributions_of_round
from autopar.lowering.route import Route, routes_of
from autopar.lowering.types import RankProgram
from autopar.memory.early import EarlyUpdates
from autopar.memory.holders import Holders
from autopar.memory.kernel import KernelMemory, kernel_memory
from autopar.memory.messages import Messages
from autopar.memory.parameters import ParameterBytes, buffer_bytes, first_sum_bytes, part_bytes
from autopar.memory.reductions import ReductionMemory, ScatteredSums, alone_bytes
from autopar.memory.side_stream import SideStream
from autopar.memory.steady_state import shortened
from autopar.memory.tally import Moment, Tally
from autopar.memory.value_gradients import Buffer, Key, ValueGradients
from autopar.schedules.action import RECV_KINDS, Action, Kind

PARAMETER = -1
"""Stands for the micro-batch in a parameter's `Key`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramMemory:
    """Bytes of tensors on one device at the peak of a step, by category, and where the peak is.

    ``device_bytes`` is what the step takes of the device's memory: with what the allocator loses
    or holds back, and on CPUs libraries. ``gradient_bytes``: the most that gradients take at once.
    ``moments`` are the places of a step, such as ``I`` with the name of a block, in order of the
    ``actions``, numbered from 1, without ``num_left_out`` micro-batches that repeat those before
    them.
    """

    by_category: dict[str, int]
    peak_at: str
    device_bytes: int
    gradient_bytes: int
    moments: tuple[Moment, ...] = ()
    actions: tuple[Action, ...] = ()
    num_left_out: int = 0

    @property
    def peak_bytes(self) -> int:
        return sum(self.by_category.values())


def program_memory(
    program: RankProgram, device: DeviceSpec, *, optimizer: OptimizerSpec
) -> ProgramMemory:
    """The memory of a training step on the pipeline device that needs most, for any ``device``."""
    return fullest(device_memories(program, device, optimizer=optimizer))


def fullest(memories: Sequence[ProgramMemory]) -> ProgramMemory:
    """The memory of the pipeline device that needs most; the limits of all of them."""
    return replace(
        max(memories, key=lambda memory: memory.peak_bytes),
        device_bytes=max(memory.device_bytes for memory in memories),
        gradient_bytes=max(memory.gradient_bytes for memory in memories),
    )


def device_memories(
    program: RankProgram, device: DeviceSpec, *, optimizer: OptimizerSpec
) -> tuple[ProgramMemory, ...]:
    """The memory of one training step on each pipeline device, in order."""
    allocator = allocator_of(device)
    kernels = [kernel_memory(kernel, device) for kernel in program.kernels]
    sizes = {p.value: ParameterBytes.of(p, program, allocator) for p in program.parameters}
    found = []
    for route in routes_of(program):
        short = shortened(route, program)
        played = _Play(program, short, kernels, sizes, optimizer, device).run()
        left_out = route.num_microbatches - short.num_microbatches
        found.append(replace(played, num_left_out=left_out))
    return tuple(found)


def moments_of(
    program: RankProgram, device: DeviceSpec, pipeline_rank: int, *, optimizer: OptimizerSpec
) -> tuple[Moment, ...]:
    """All moments of a training step on one pipeline device, of every micro-batch."""
    allocator = allocator_of(device)
    kernels = [kernel_memory(kernel, device) for kernel in program.kernels]
    sizes = {p.value: ParameterBytes.of(p, program, allocator) for p in program.parameters}
    route = list(routes_of(program))[pipeline_rank]
    return _Play(program, route, kernels, sizes, optimizer, device).run().moments


class _Play:
    """Plays a step on one pipeline device."""

    def __init__(
        self,
        program: RankProgram,
        route: Route,
        kernels: Sequence[KernelMemory],
        parameter_bytes: Mapping[int, ParameterBytes],
        optimizer: OptimizerSpec,
        device: DeviceSpec,
    ) -> None:
        self.program = program
        self.device = device
        self.optimizer = optimizer
        self.route = route
        self.kernels = kernels
        self.parameter_bytes = parameter_bytes
        self.allocator = allocator_of(device)
        self.tally = Tally()
        self.live = self.tally.live
        self.side = SideStream(program, route, self.tally, device.kind)
        traits = traits_of(device.kind, program.mesh.num_devices)
        self.reductions = ReductionMemory(self.tally, traits)
        holders = Holders(self.live)
        self.sizes, self._hold, self._release = holders.sizes, holders.hold, holders.release
        self.gradients = ValueGradients(self.tally, self.allocator)
        self.messages = Messages(program.pipeline, route, self.live, device)
        self.late: dict[tuple[int, int], list[Buffer]] = {}
        self.of_round = contributions_of_round(program, route)
        self.remaining = self.of_round.copy()
        self.scattered = ScatteredSums(
            program, self.tally, self.reductions, parameter_bytes, device.kind
        )
        self.readings = self.route.readings.copy()
        self.joined: dict[int, int] = {}
        self.updated: set[int] = set()
        self.parameter_of = {p.value: p for p in program.parameters}
        trained = {value for values in route.parameters.values() for value in values}
        for p in program.parameters:
            if route.device in p.devices:
                stored = parameter_bytes[p.value].stored
                self.live[Category.PARAMETERS] += stored
                if p.value in trained:
                    self.live[Category.OPTIMIZER_STATE] += stored * optimizer.num_states
        self.live[Category.BUFFERS] += buffer_bytes(program, self.allocator)
        if device.kind == "cpu" and program.is_random:
            self.live[Category.WORKSPACE] += self.allocator.rounded(generator_bytes())
        for i in program.inputs:
            size = self.allocator.rounded(part_bytes(program, i.shape, i.placements, i.dtype))
            self.live[Category.INPUTS] += size
        late = () if optimizer.is_joint else self.route.late_updates
        self.due = {v for a in late for v in self.route.parameters[a.stage]}
        self.live[Category.GRADIENTS] += sum(self.parameter_bytes[v].stored for v in self.due)
        self.rounds: list[list[int]] = [[]]
        """Gradients that are reduced together: first those that are not communicated."""
        self.early = None
        if program.early is not None:
            self.early = EarlyUpdates(
                program, route, self.tally, self.reductions, optimizer, parameter_bytes, device.kind
            )

    def _update_late(self, stage: int) -> None:
        """Run the last step's updates, which release its gradients."""
        self._update(self.route.parameters[stage])
        for value in self.due.intersection(self.route.parameters[stage]):
            self.live[Category.GRADIENTS] -= self.parameter_bytes[value].stored
            self.due.discard(value)

    def run(self) -> ProgramMemory:
        for action in self.route.actions:
            stage, microbatch = action.stage, action.microbatch
            self.tally.begin_action()
            if self.early is None and action.kind is Kind.U and not self.optimizer.is_joint:
                if action in self.route.late_updates:
                    self._update_late(stage)
                else:
                    self._update(v for v in self.route.parameters[stage] if not self.remaining[v])
            if microbatch is None:
                continue
            self._receive(action)
            recomputed = stage in self.program.pipeline.shape.recomputed
            if action.kind is Kind.F:
                self._enter(stage, microbatch, recomputed)
                self._forward(stage, microbatch, keep=not recomputed)
                self._leave(action)
            elif action.kind is Kind.R:
                self._forward(stage, microbatch, keep=True)
                self._leave_recomputed(stage, microbatch)
            elif action.kind in (Kind.I, Kind.B, Kind.W):
                self.side.begin(action)
                self._backward(stage, microbatch, action.kind)
                self._send_back(action)
        self.messages.finish()
        self.side.join()
        self.tally.begin_action()
        for values in self._last_updates():
            self._update(values)
        apart_bytes = self.side.apart_bytes + (self.early.apart_bytes if self.early else 0)
        self.tally.add_to_peak(apart_bytes)
        by_category = {str(c): v for c, v in sorted(self.tally.peak.items()) if v}
        return ProgramMemory(
            by_category=by_category,
            peak_at=self.tally.peak_at,
            device_bytes=device_bytes(by_category, self.device),
            gradient_bytes=self.tally.gradient_bytes,
            moments=tuple(self.tally.moments),
            actions=self.route.actions,
        )

    # --- updates ---------------------------------------------------------------------------
    def _last_updates(self) -> list[list[int]]:
        """The parameters that are updated together after the last action."""
        stages = self.route.parameters.values()
        if self.early is not None:
            self.early.advance("G", is_last=True)
            return [sorted(self.early.at_end)]
        if self.optimizer.is_joint:
            return [sorted({value for values in stages for value in values})]
        if self.program.pipeline.shape.reduces:
            return [list(values) for values in stages]
        return self.rounds

    def _update(self, values: Iterable[int]) -> None:
        """Update those of these parameters that are on this device and not updated yet."""
        here = [v for v in values if self.route.device in self.parameter_of[v].devices]
        due = [v for v in here if v not in self.updated]
        self.updated.update(due)
        sizes = [self.parameter_bytes[value].stored for value in due]
        self.tally.check("update", self.optimizer.workspace_bytes(sizes))
        if self.early is not None:
            self.tally.check("update", self.early.clipped_bytes(due))

    # --- forward ---------------------------------------------------------------------------
    def _enter(self, stage: int, microbatch: int, recomputed: bool) -> None:
        """Receive the values of the stage before, which a recomputed stage keeps."""
        if stage:
            boundary = self.program.pipeline.boundaries[stage - 1]
            for value, meta in zip(boundary.values, boundary.metas):
                size = self.allocator.rounded(meta.size_bytes)
                self._hold((microbatch, value), "env", size, Category.ACTIVATIONS)
                if recomputed:
                    self._hold((microbatch, value), ("R", stage), 0, Category.ACTIVATIONS)

    def _receive(self, action: Action) -> None:
        """Take the message to a stage, if there is one."""
        stage, microbatch = action.stage, action.microbatch
        assert microbatch is not None
        if action.kind in RECV_KINDS:
            self.messages.post(action)
        elif action.kind is Kind.F:
            self.messages.take(Action(stage, Kind.RECV_F, microbatch, 1, action.replica))
        elif action.kind in (Kind.I, Kind.B):
            message = Action(stage, Kind.RECV_B, microbatch, 1, action.replica)
            if self.messages.take(message):
                boundary = self.program.pipeline.boundaries[stage]
                for value, meta in zip(boundary.gradients, boundary.gradient_metas):
                    self.gradients.receive((microbatch, value), meta.size_bytes)

    def _is_sent(self, stage: int, other: int, microbatch: int) -> bool:
        """Whether messages go from a stage to another, which exists and is on another device."""
        shape = self.program.pipeline.shape
        row = shape.placement[shape.replica(microbatch)]
        return 0 <= other < len(row) and row[other] != row[stage]

    def _leave(self, action: Action) -> None:
        """Release the values that the stage sends when they have arrived, and those that leave."""
        stage, microbatch = action.stage, action.microbatch
        assert microbatch is not None
        if self._is_sent(stage, stage + 1, microbatch):
            message = Action(stage, Kind.SEND_F, microbatch, 1, action.replica)
            keys = [(microbatch, v) for v in self.program.pipeline.boundaries[stage].values]
            for key in keys:
                self._hold(key, message, 0, Category.ACTIVATIONS)
                self._release(key, "env", Category.ACTIVATIONS)
            self.messages.send(message, lambda: self._release_all(keys, message))
        for value in set(self.route.finished[stage]).difference(self.route.crossing[stage]):
            self._release((microbatch, value), "env", Category.ACTIVATIONS)

    def _send_back(self, action: Action) -> None:
        """Send the gradients of what the stage received."""
        stage, microbatch = action.stage, action.microbatch
        assert microbatch is not None
        if action.kind is Kind.W or not self._is_sent(stage, stage - 1, microbatch):
            return
        boundary = self.program.pipeline.boundaries[stage - 1]
        message = Action(stage, Kind.SEND_B, microbatch, 1, action.replica)
        for value in set(boundary.values).difference(boundary.gradients):
            self.gradients.release((microbatch, value))
        sent = [self.gradients.send((microbatch, value)) for value in boundary.gradients]
        self.messages.send(message, lambda: self._drop_all(sent))

    def _release_all(self, keys: Sequence[Key], holder: object) -> None:
        for key in keys:
            self._release(key, holder, Category.ACTIVATIONS)

    def _drop_all(self, buffers: Sequence[Buffer | None]) -> None:
        for buffer in buffers:
            if buffer is not None:
                self.gradients.drop(buffer)

    def _leave_recomputed(self, stage: int, microbatch: int) -> None:
        kept = self.route.crossing[stage].union(self.route.finished[stage])
        for value in kept:
            self._release((microbatch, value), "env", Category.ACTIVATIONS)
        for value in self.program.pipeline.boundaries[stage - 1].values if stage else ():
            self._release((microbatch, value), ("R", stage), Category.ACTIVATIONS)

    def _forward(self, stage: int, microbatch: int, *, keep: bool) -> None:
        positions = self.route.blocks[stage]
        read = {p: self.program.blocks[p].interface.parameters for p in positions}
        for position, following in itertools.zip_longest(positions, positions[1:]):
            self._fetch(position, following, read, "F")
            self._run(position, microbatch, keep)
            for value in self.route.dropped[position]:
                self._release((microbatch, value), "env", Category.ACTIVATIONS)
            self._release_read(read[position], self.route.released[position])

    def _release_read(self, read: Sequence[int], for_now: Collection[int]) -> None:
        """Release the parameters that a block has read for the last time, in the step or, if they
        are released after each pass, in its pass (``for_now``)."""
        for value in dict.fromkeys(read):
            self.readings[value] -= 1
            is_released = self.parameter_of[value].released and value in for_now
            if is_released or not self.readings[value]:
                self._release((PARAMETER, value), "env", Category.COMMUNICATION)

    def _run(self, position: int, microbatch: int, keep: bool) -> None:
        block = self.program.blocks[position]
        kernel, memory = self.program.kernels[block.kernel], self.kernels[block.kernel]
        self.tally.check(f"F {block.name}", memory.workspace["F"])
        for value, meta in zip(block.interface.outputs, kernel.output_metas):
            size = self.allocator.rounded(meta.size_bytes)
            self._hold((microbatch, value), "env", size, Category.ACTIVATIONS)
        if keep:
            self.live[Category.ACTIVATIONS] += memory.saved
            sources = {*kernel.input_sources, *kernel.weight_sources}
            for key, category in self._operands(position, microbatch, sources):
                if key[0] != PARAMETER:
                    self._hold(key, (microbatch, position), 0, category)
            for index in memory.saved_outputs:
                key = (microbatch, block.interface.outputs[index])
                self._hold(key, (microbatch, position), 0, Category.ACTIVATIONS)

    def _operands(
        self, position: int, microbatch: int, sources: Collection[tuple[str, int]]
    ) -> Iterator[tuple[Key, Category]]:
        """The operands among the sources of a backward graph that take memory of their own."""
        interface = self.program.blocks[position].interface
        num_inputs = len(interface.inputs)
        for kind, index in sources:
            if kind != "operand":
                continue
            if index < num_inputs:
                key, category = (microbatch, interface.inputs[index]), Category.ACTIVATIONS
            else:
                value = interface.parameters[index - num_inputs]
                key, category = (PARAMETER, value), Category.COMMUNICATION
            if key in self.sizes:
                yield key, category

    def _fetch(
        self, position: int, following: int | None, read: Mapping[int, Sequence[int]], phase: str
    ) -> None:
        """Gather a block's parameters, and then those of the next one, which overlaps with this
        one."""
        self._gather(position, read[position], phase)
        if position in self.joined:
            name = self.program.blocks[position].name
            self.tally.check(f"{phase} {name}", self.joined.pop(position))
        if following is not None:
            self._gather(following, read[following], phase)

    def _gather(self, position: int, values: Sequence[int], phase: str) -> None:
        """Gather parameters; one that is only a view takes no memory of its own.

        Small ones travel joined: their shards are copied into what is sent, and they are copied out
        when the block begins.
        """
        joined, cast_bytes = list[ParameterBytes](), 0
        for value in values:
            key, kernel = (PARAMETER, value), self.parameter_of[value].kernel
            if kernel is None or key in self.sizes or not self.kernels[kernel].workspace["F"]:
                continue
            size = self.parameter_bytes[value]
            self._hold(key, "env", size.used, Category.COMMUNICATION)
            if "F" in size.alone:
                workspace = self.kernels[kernel].workspace["F"] - size.used
                self.tally.check(f"{phase} {self.program.blocks[position].name}", workspace)
                continue
            if size.is_whole:
                continue
            cast_bytes += size.sent if size.is_cast else 0
            if size.is_joined:
                joined.append(size)
        sent_bytes = cast_bytes
        if len(joined) > 1:
            self.joined[position] = sum(size.used for size in joined)
            sent_bytes += sum(size.sent for size in joined)
        if sent_bytes:
            self.tally.check(f"{phase} {self.program.blocks[position].name}", sent_bytes)

    # --- backward --------------------------------------------------------------------------
    def _backward(self, stage: int, microbatch: int, kind: Kind) -> None:
        positions, read = self.route.blocks[stage][::-1], self.route.read_back
        for position, following in itertools.zip_longest(positions, positions[1:]):
            if kind is not Kind.W:
                self._fetch(position, following, read, "I")
                self._input(position, microbatch)
            if kind is not Kind.I:
                self._weight(position, microbatch)

    def _input(self, position: int, microbatch: int) -> None:
        """Play I; the values that W reads are kept."""
        if self.early is not None:
            self.early.reads.end(position)
        block = self.program.blocks[position]
        kernel, memory = self.program.kernels[block.kernel], self.kernels[block.kernel]
        outputs, metas = block.interface.outputs, kernel.output_metas
        taken = [
            self.gradients.take((microbatch, outputs[i]), metas[i].size_bytes)
            for i in kernel.cotangents
        ]
        self.tally.check(f"I {block.name}", memory.workspace.get("I", 0))
        made: dict[int, Buffer] = {}
        for operand, gradient in zip(kernel.input_grads, memory.input_grads):
            if gradient.cotangent is None:
                buffer = made.setdefault(gradient.number, Buffer(gradient.storage_bytes))
            else:
                buffer = taken[gradient.cotangent]
            key = (microbatch, block.interface.inputs[operand])
            self.gradients.accumulate(key, gradient, buffer, f"I {block.name}")
        has_w = kernel.backward_weight is not None
        for key, category in [*self._operands(position, microbatch, kernel.weight_sources)]:
            if has_w and key[0] == PARAMETER:
                self._hold(key, (microbatch, position), 0, category)
        self._release_read(self.route.read_back[position], self.route.released_back[position])
        kept = set(self._operands(position, microbatch, kernel.weight_sources)) if has_w else set()
        for key, category in [*self._operands(position, microbatch, kernel.input_sources)]:
            if (key, category) not in kept:
                self._release(key, (microbatch, position), category)
        self._release_outputs(position, microbatch, for_weight=False)
        self.live[Category.ACTIVATIONS] += memory.late - memory.saved
        needed = {i for kind, i in kernel.weight_sources if has_w and kind == "cotangent"}
        if needed:
            self.late[microbatch, position] = [taken[index] for index in needed]
        for index, buffer in enumerate(taken):
            if index not in needed:
                self.gradients.drop(buffer)

    def _weight(self, position: int, microbatch: int) -> None:
        block = self.program.blocks[position]
        kernel, memory = self.program.kernels[block.kernel], self.kernels[block.kernel]
        if kernel.backward_weight is None:
            return
        where = f"W {block.name}"
        if self.early is not None and memory.steps:
            self._weight_in_steps(position, microbatch)
            return
        values = self._graded(position, kernel.weight_grads)
        self.tally.check(where, self.side.workspace(memory.workspace["W"]))
        self.live[Category.ACTIVATIONS] -= memory.passed
        self._sum(values, where)
        self.side.keep(memory.passed)
        self.side.keep(sum(self.parameter_bytes[v].used for v in values if self._is_second(v)))
        self.side.release(lambda: self._release_arguments(position, microbatch))
        if kernel.cotangents:
            self._reduce(values, f"G {block.name}")
            if self.early is not None:
                self.early.reads.end(position)
                self.early.advance(f"G {block.name}")

    def _weight_in_steps(self, position: int, microbatch: int) -> None:
        """Play W step by step: each gradient is updated with before the next is computed."""
        assert self.early is not None
        block = self.program.blocks[position]
        kernel, where = self.program.kernels[block.kernel], f"W {block.name}"
        steps, shared = kernel.weight_steps, 0
        self.live[Category.ACTIVATIONS] -= self.kernels[block.kernel].passed
        self.early.reads.begin_steps(position)
        for step, memory in zip(steps, self.kernels[block.kernel].steps):
            values = self._graded(position, step.grads)
            self.tally.check(where, memory.workspace)
            self.early.reads.end_step(position, step)
            shared += memory.made
            self.live[Category.ACTIVATIONS] += memory.made
            if step is steps[-1]:
                self._release_arguments(position, microbatch)
                self.live[Category.ACTIVATIONS] -= shared
            if step.rows is not None:
                self.early.update_rows(values[0], step.rows, where)
                if self.early.is_last(values[0], step.rows):
                    self._end_rows(values[0])
            elif step.grads:
                self._sum(values, where)
                self._reduce(values, f"G {block.name}")
            self.early.advance(f"G {block.name}")

    def _end_rows(self, value: int) -> None:
        """Release what other uses of the parameter contributed to its gradient."""
        if self.remaining[value] < self.of_round[value]:
            size, num_before = self.parameter_bytes[value], self.of_round[value] - 1
            self.live[Category.GRADIENTS] -= size.summed if num_before > 1 else size.used
        self.remaining[value] = 0

    def _graded(self, position: int, operands: Sequence[int]) -> list[int]:
        interface = self.program.blocks[position].interface
        return [interface.parameters[o - len(interface.inputs)] for o in operands]

    def _release_arguments(self, position: int, microbatch: int) -> None:
        """Release what W reads."""
        block = self.program.blocks[position]
        kernel, memory = self.program.kernels[block.kernel], self.kernels[block.kernel]
        for key, category in [*self._operands(position, microbatch, kernel.weight_sources)]:
            self._release(key, (microbatch, position), category)
        self._release_outputs(position, microbatch, for_weight=True)
        self.live[Category.ACTIVATIONS] -= memory.late - memory.passed
        for buffer in self.late.pop((microbatch, position), ()):
            self.gradients.drop(buffer)

    def _reduce(self, values: Sequence[int], where: str) -> None:
        """Add to gradients, and reduce those that are complete."""
        complete = [v for v in values if self._contribute(v)]
        self.tally.note_gradients(0)
        communicated = [v for v in complete if self.parameter_of[v].kernel is not None]
        self.rounds[0] += [v for v in complete if v not in communicated]
        last = [v for v in communicated if self.scattered.is_last(v)]
        self.rounds.append(last)
        summed = {v for v in communicated if self.of_round[v] > 1}
        self.tally.check(where, alone_bytes([self._move(v, v in summed) for v in communicated]))
        joined = [v for v in communicated if "I" not in self.parameter_bytes[v].alone]
        self.reductions.start(
            [self.parameter_bytes[v] for v in joined],
            [self.parameter_bytes[v] for v in joined if v not in summed],
            where,
        )
        self.side.keep_reduced(sum(self.parameter_bytes[v].summed for v in communicated))
        self.scattered.add(communicated, where)
        if self.early is not None:
            kept = [v for v in complete if v in last or v not in communicated]
            self.early.complete(kept, last)

    def _move(self, value: int, is_summed: bool) -> tuple[ParameterBytes, int, int]:
        """A gradient, the bytes of which are reduced, and the workspace of its reduction."""
        size, kernel = self.parameter_bytes[value], self.parameter_of[value].kernel
        assert kernel is not None
        operand = size.summed if is_summed else size.used
        return size, operand, self.kernels[kernel].workspace.get("I", 0)

    def _release_outputs(self, position: int, microbatch: int, *, for_weight: bool) -> None:
        """Release outputs that the block had saved: after I, or after W those that W needs."""
        block = self.program.blocks[position]
        for index, is_for_weight in self.kernels[block.kernel].saved_outputs.items():
            if is_for_weight == for_weight:
                key = (microbatch, block.interface.outputs[index])
                self._release(key, (microbatch, position), Category.ACTIVATIONS)

    def _is_second(self, value: int) -> bool:
        """Whether the next contribution to a gradient is added to the first one in new memory."""
        return self.remaining[value] == self.of_round[value] - 1

    def _sum(self, values: Sequence[int], where: str) -> None:
        """Add gradients that W made to earlier contributions."""
        made = sum(self.parameter_bytes[v].used for v in values)
        totals = self.of_round
        sizes = [(self.parameter_bytes[v], totals[v] - self.remaining[v]) for v in values]
        summed = first_sum_bytes(sizes, copies=self.device.kind == "cpu")
        self.tally.note_gradients(max(made, summed))
        self.tally.check(where, summed)

    def _contribute(self, value: int) -> bool:
        """Count a contribution to a gradient; whether it was the last.

        A gradient has its full size from its first contribution on, and its stored size after the
        last.
        """
        total, size = self.of_round[value], self.parameter_bytes[value]
        if self.remaining[value] == total:
            self.live[Category.GRADIENTS] += size.used if total > 1 else size.stored
        elif self.remaining[value] == total - 1:
            self.live[Category.GRADIENTS] += size.summed - size.used
        self.remaining[value] -= 1
        if self.remaining[value]:
            return False
        if total > 1:
            self.live[Category.GRADIENTS] += size.stored - size.summed
        if not self.scattered.is_last(value):
            self.remaining[value] = total  # of the next micro-batch
        return True
