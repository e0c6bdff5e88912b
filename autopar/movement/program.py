"""Tensor lifetimes of a lowered program: one training step on one pipeline device, by kernel.

The actions of the route are played in order, as in `autopar.memory.program`, which counts bytes;
here every run of an F, I or W graph is an operation, and every storage that crosses its border is a
tensor with the operations that use it. What lives within one graph is that operation's workspace.
Sums of gradients, gathers, reductions and updates of parameters are operations too; early updates
follow the W that completes a gradient, all others the last action. On a mesh what that count has
beyond these tensors, such as buffers of collectives, is workspace too. Programs of single-op blocks
(`autopar.movement.single_ops`) have the lifetimes of single layers. The result also says where the
runtime finds operations and tensors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from autopar.cost_models.allocator import Category, allocator_of
from autopar.cost_models.hardware import DeviceSpec
from autopar.cost_models.update import OptimizerSpec
from autopar.lowering.arrivals import Arrivals, contributions_of_round, scattered
from autopar.lowering.route import Route, routes_of
from autopar.lowering.types import BlockProgram, Kernel, ParameterProgram, RankProgram, Role
from autopar.memory.early import clipped_bytes
from autopar.memory.kernel import KernelMemory, kernel_memory
from autopar.memory.parameters import ParameterBytes, part_bytes
from autopar.memory.program import moments_of
from autopar.movement.counted import raised_to_count
from autopar.movement.coverable import check_coverable
from autopar.movement.drafts import Drafts, step_of_drafts
from autopar.movement.execution import PARAMETER, Gather, ProgramStep, Run, Sum, Update
from autopar.movement.lifetimes import StepLifetimes
from autopar.schedules.action import Kind

Key = tuple[int, int]
"""A micro-batch and a value."""


def lifetimes_of(
    program: RankProgram, device: DeviceSpec, *, optimizer: OptimizerSpec, pipeline_rank: int = 0
) -> StepLifetimes:
    """The lifetimes of one training step on a pipeline rank; raises as `step_of_program`."""
    return step_of_program(program, device, optimizer=optimizer, pipeline_rank=pipeline_rank).step


def step_of_program(
    program: RankProgram, device: DeviceSpec, *, optimizer: OptimizerSpec, pipeline_rank: int = 0
) -> ProgramStep:
    """One training step on a pipeline rank: its lifetimes, and where the runtime finds them.

    Raises MovementError for what no movement plan covers (`autopar.movement.coverable`).
    """
    route = list(routes_of(program))[pipeline_rank]
    check_coverable(program, route)
    walk = _Walk(program, route, device, optimizer)
    step = walk.run()
    if program.mesh.num_devices == program.pipeline.num_devices == 1:
        return step
    moments = moments_of(program, device, pipeline_rank, optimizer=optimizer)
    return raised_to_count(step, walk.at, moments)


@dataclass(frozen=True, slots=True)
class _Kept:
    """The tensors that a block keeps from its F to its W."""

    operands: tuple[int, ...]
    saved: tuple[int | None, ...]


class _Walk(Drafts):
    """Plays a step and notes operations and tensors."""

    def __init__(
        self, program: RankProgram, route: Route, device: DeviceSpec, optimizer: OptimizerSpec
    ) -> None:
        self.program, self.route, self.optimizer = program, route, optimizer
        super().__init__(allocator_of(device))
        self.memory: list[KernelMemory] = [kernel_memory(k, device) for k in program.kernels]
        self.values: dict[Key, int] = {}
        self.stored: dict[int, int] = {}
        """Persistent tensors, by value: parameters, buffers, inputs and fixed values."""
        self.fetched: dict[int, int] = {}
        self.readings = route.readings.copy()
        self.kept: dict[tuple[int, int], _Kept] = {}
        self.cotangents: dict[tuple[int, int], tuple[list[int], list[int | None]]] = {}
        """By micro-batch and block, between I and W: its cotangents, and what I hands over."""
        self.gradients: dict[Key, int] = {}
        self.views: set[int] = set()  # gradients that are not contiguous
        self.sums: dict[int, int] = {}
        self.shards: dict[int, int] = {}
        """Sums of gradients that are scattered in every micro-batch."""
        self.of_round = contributions_of_round(program, route)
        self.remaining = self.of_round.copy()
        self.rounds_left = dict.fromkeys(scattered(program), program.num_microbatches)
        self.complete: set[int] = set()
        self.parameters = {p.value: p for p in program.parameters}
        self.bytes = {
            p.value: ParameterBytes.of(p, program, self.allocator) for p in program.parameters
        }
        self.joined: dict[int, int] = {}
        """By block, the bytes that are copied out of its gathered parameters."""
        self.states: dict[int, list[int]] = {}
        self.sent = {v for boundary in program.pipeline.boundaries for v in boundary.values}
        self.updated: set[int] = set()
        self.arrivals = Arrivals(program, route, device.kind)

    # --- the step -----------------------------------------------------------------------------
    def run(self) -> ProgramStep:
        self._place_persistent()
        for block in self.program.blocks:
            if not block.role.has_stage:
                self._run_alone(block)
        for action in self.route.actions:
            self.action += 1
            self._act(action.stage, action.kind, action.microbatch)
        self._update_early(is_last=True)
        self._update([v for values in self.route.parameters.values() for v in values])
        self.extend_shown()
        early = self.program.early
        return step_of_drafts(
            self.ops, self.places, self.workspace, self.tensors,
            keeps_gradients=early is None or early.keeps_gradients,
        )  # fmt: skip

    def _act(self, stage: int, kind: Kind, microbatch: int | None) -> None:
        if microbatch is None:
            return
        if kind is Kind.F:
            self._receive(stage, microbatch)
            recomputed = stage in self.program.pipeline.shape.recomputed
            self._forward(stage, microbatch, keep=not recomputed)
            self._finish(stage, microbatch)
        elif kind is Kind.R:
            self._forward(stage, microbatch, keep=True)
        elif kind in (Kind.I, Kind.B, Kind.W):
            positions, read = self.route.blocks[stage][::-1], self.route.read_back
            for position, following in zip_longest(positions, positions[1:]):
                if kind is not Kind.W:
                    self._fetch(position, following, read, "I")
                    self._input(position, microbatch)
                if kind is not Kind.I:
                    self._weight(position, microbatch)
            for value in self.program.pipeline.boundaries[stage - 1].values if stage else ():
                self.gradients.pop((microbatch, value), None)  # sent to the stage before

    def _place_persistent(self) -> None:
        program = self.program
        for p in program.parameters:
            if self.route.device in p.devices:
                size = self.bytes[p.value].stored
                self.stored[p.value] = self._tensor(
                    p.name, Category.PARAMETERS, size, persistent=True
                )
                self.tensors[-1].stored = p.value, PARAMETER
                for number in range(self.optimizer.num_states if p.trainable else 0):
                    name = f"{p.name}:state{number}"
                    state = self._tensor(name, Category.OPTIMIZER_STATE, size, persistent=True)
                    self.tensors[state].stored = p.value, number
                    self.states.setdefault(p.value, []).append(state)
        for b in program.buffers:
            size = self.allocator.rounded(math.prod(b.shape) * b.dtype.itemsize)
            self.stored[b.value] = self._tensor(b.name, Category.BUFFERS, size, persistent=True)
        for i in program.inputs:
            size = self.allocator.rounded(part_bytes(program, i.shape, i.placements, i.dtype))
            self.stored[i.value] = self._tensor(i.name, Category.INPUTS, size, persistent=True)

    def _run_alone(self, block: BlockProgram) -> None:
        """A block outside of all stages. Fixed values exist before the step."""
        read = (*block.interface.inputs, *block.interface.parameters)
        operands = [self.stored.get(v) for v in read]
        num_ops = len(self.ops)
        forward = self.program.kernels[block.kernel].forward
        results = self._run(block.name, forward, operands, Category.BUFFERS, 0)
        self.stored.update(
            (v, t) for v, t in zip(block.interface.outputs, results) if t is not None
        )
        if block.role is Role.FIXED:
            for draft in self.tensors:
                if draft.uses and draft.uses[-1] >= num_ops:
                    draft.persistent = True
                    draft.uses, draft.writes = [], []
            del self.ops[num_ops:], self.workspace[num_ops:], self.places[num_ops:]
            del self.at[num_ops:]

    # --- forward ------------------------------------------------------------------------------
    def _receive(self, stage: int, microbatch: int) -> None:
        """The values of the stage before: created by the operation that comes next."""
        if stage:
            boundary = self.program.pipeline.boundaries[stage - 1]
            for value, meta in zip(boundary.values, boundary.metas):
                if (microbatch, value) not in self.values:
                    size = self.allocator.rounded(meta.size_bytes)
                    name = f"received:{value}/{microbatch}"
                    self.values[microbatch, value] = self._created(name, Category.ACTIVATIONS, size)

    def _forward(self, stage: int, microbatch: int, *, keep: bool) -> None:
        positions = self.route.blocks[stage]
        read = {p: self.program.blocks[p].interface.parameters for p in positions}
        for position, following in zip_longest(positions, positions[1:]):
            self._fetch(position, following, read, "F")
            self._run_block(position, microbatch, keep=keep)
            self._release(read[position], self.route.released[position])

    def _run_block(self, position: int, microbatch: int, *, keep: bool) -> None:
        block = self.program.blocks[position]
        kernel = self.program.kernels[block.kernel]
        operands = tuple(self._operand(v, microbatch) for v in block.interface.inputs)
        operands += tuple(self.fetched[v] for v in block.interface.parameters)
        results = self._run(
            self._name("F", block.name, microbatch),
            kernel.forward,
            operands,
            Category.ACTIVATIONS,
            self.memory[block.kernel].workspace["F"],
            Run("F", position, microbatch),
            f"F {block.name}",
        )
        for value, result in zip(block.interface.outputs, results):
            if result is not None:
                self.values[microbatch, value] = result
                self.tensors[result].leaves |= value in self.sent
        if keep:
            self.kept[microbatch, position] = _Kept(operands, tuple(results[kernel.num_outputs :]))

    def _finish(self, stage: int, microbatch: int) -> None:
        """Hand out the values that leave the program, of which some update buffers."""
        finished = [self.values[microbatch, value] for value in self.route.finished[stage]]
        updated = [self.stored[b.value] for b in self.route.updated[stage]]
        if finished:
            self._op(self._name("finish", f"stage {stage}", microbatch), finished, updated)

    def _operand(self, value: int, microbatch: int) -> int:
        found = self.values.get((microbatch, value))
        return self.stored[value] if found is None else found

    def _fetch(
        self, position: int, following: int | None, read: Mapping[int, Sequence[int]], phase: str
    ) -> None:
        """Have the parameters that a block reads, and begin to gather those of the next one.

        Those that travelled joined are copied out in between.
        """
        self._gather(position, read[position], phase)
        if position in self.joined:
            name = self.program.blocks[position].name
            workspace = self.joined.pop(position)
            self._op(f"copy out {name}", [], [], workspace, counted_at=f"{phase} {name}")
        if following is not None:
            self._gather(following, read[following], phase)

    def _gather(self, position: int, values: Sequence[int], phase: str) -> None:
        """Begin to gather or cast parameters for a block, together, where that makes other tensors;
        they are read until the block runs."""
        block, due = self.program.blocks[position], list[int]()
        made, read, joined = list[int](), list[int](), list[ParameterBytes]()
        workspace = 0
        for value in dict.fromkeys(values):
            number = self.parameters[value].kernel
            if value in self.fetched:
                continue
            if number is None:
                self.fetched[value] = self.stored[value]
                continue
            due.append(value)
            name, forward = self.parameters[value].name, self.program.kernels[number].forward
            (found, *_), new, reads = self._made(
                f"gathered {name}", forward, [self.stored[value]], Category.COMMUNICATION
            )
            assert found is not None
            self.fetched[value] = found
            created = sum(self.tensors[index].size_bytes for index in new)
            workspace = max(workspace, self.memory[number].workspace["F"] - created)
            made += new
            read += reads if new else []
            if new and self.bytes[value].is_joined:
                joined.append(self.bytes[value])
        if len(joined) > 1:
            self.joined[position] = sum(size.used for size in joined)
            workspace = max(workspace, sum(size.sent for size in joined))
        if made or workspace:
            self.coming.setdefault(position, []).extend(read)
            place = Gather(position, tuple(due))
            self._op(f"gather {block.name}", read, made, workspace, place, f"{phase} {block.name}")

    def _release(self, read: Sequence[int], for_now: Collection[int]) -> None:
        """Drop the parameters that a block has read for the last time in the step or, if they are
        released after each pass, in its pass (``for_now``)."""
        for value in dict.fromkeys(read):
            self.readings[value] -= 1
            is_released = self.parameters[value].released and value in for_now
            if is_released or not self.readings[value]:
                self.fetched.pop(value, None)

    def _name(self, phase: str, block: str, microbatch: int) -> str:
        batch = f"/{microbatch}" if self.program.num_microbatches > 1 else ""
        return f"{phase} {block}{batch}"

    # --- backward -----------------------------------------------------------------------------
    def _input(self, position: int, microbatch: int) -> None:
        self.arrivals.reads.end(position)
        block = self.program.blocks[position]
        kernel, memory = self.program.kernels[block.kernel], self.memory[block.kernel]
        name = self._name("I", block.name, microbatch)
        taken: list[int] = []
        for index in kernel.cotangents:
            size = self.allocator.rounded(kernel.output_metas[index].size_bytes)
            taken.append(self._take((microbatch, block.interface.outputs[index]), name, size))
        handed: list[int | None] = []
        self._take_parameters(position, microbatch)
        if kernel.backward_input is not None:
            arguments = self._arguments(kernel.input_sources, (microbatch, position), taken, [])
            results = self._run(
                name,
                kernel.backward_input,
                arguments,
                Category.ACTIVATIONS,
                memory.workspace["I"],
                Run("I", position, microbatch),
                f"I {block.name}",
            )
            handed = results[len(kernel.input_grads) :]
            for operand, made, result in zip(kernel.input_grads, memory.input_grads, results):
                if result is not None:
                    key = (microbatch, block.interface.inputs[operand])
                    self._add_gradient(key, result, made.size_bytes, name)
                    if not made.is_contiguous:
                        self.views.add(self.gradients[key])
        self.cotangents[microbatch, position] = taken, handed
        self._release(self.route.read_back[position], self.route.released_back[position])

    def _take_parameters(self, position: int, microbatch: int) -> None:
        """The backward pass of a block reads its parameters as they are gathered for it now."""
        interface, kept = self.program.blocks[position].interface, self.kept[microbatch, position]
        operands = list(kept.operands)
        for place, value in enumerate(interface.parameters, start=len(interface.inputs)):
            if value in self.route.read_back[position]:
                operands[place] = self.fetched[value]
        self.kept[microbatch, position] = _Kept(tuple(operands), kept.saved)

    def _take(self, key: Key, name: str, size_bytes: int) -> int:
        """The gradient of an output: received, zero or copied ones are created by what is next."""
        found = self.gradients.pop(key, None)
        if found is not None and found not in self.views:
            return found
        made = self._created(f"{name}:of_{key[1]}", Category.ACTIVATIONS, size_bytes)
        if found is not None:
            self.tensors[found].uses.append(len(self.ops))
        return made

    def _arguments(
        self,
        sources: Sequence[tuple[str, int]],
        place: tuple[int, int],
        cotangents: Sequence[int],
        handed: Sequence[int | None],
    ) -> list[int | None]:
        kept = self.kept[place]
        found = {
            "operand": kept.operands,
            "saved": kept.saved,
            "cotangent": cotangents,
            "handed": handed,
        }
        return [found[kind][index] for kind, index in sources]

    def _add_gradient(self, key: Key, new: int, size_bytes: int, name: str) -> None:
        """The first contribution is kept as it is, a sum is a new tensor."""
        known = self.gradients.get(key)
        if known is not None:
            total = self._tensor(f"{name}:sum_{key[1]}", Category.ACTIVATIONS, size_bytes)
            self._op(f"{name} sum", [known, new], [total], counted_at=name.split("/")[0])
            new = total
        self.gradients[key] = new

    def _weight(self, position: int, microbatch: int) -> None:
        block = self.program.blocks[position]
        kernel, place = self.program.kernels[block.kernel], (microbatch, position)
        if kernel.backward_weight is not None and kernel.cotangents:
            taken, handed = self.cotangents[place]
            arguments = self._arguments(kernel.weight_sources, place, taken, handed)
            results = self._run(
                self._name("W", block.name, microbatch),
                kernel.backward_weight,
                arguments,
                Category.GRADIENTS,
                self.memory[block.kernel].workspace["W"],
                Run("W", position, microbatch),
                f"W {block.name}",
            )
            parameters = block.interface.parameters
            graded = [parameters[o - len(block.interface.inputs)] for o in kernel.weight_grads]
            made = [(value, new) for value, new in zip(graded, results) if new is not None]
            self._contribute(made, arguments, block.name)
            self.arrivals.reads.end(position)
            self._update_early(graded)
        self.cotangents.pop(place, None)
        self.kept.pop(place, None)

    def _contribute(
        self, made: Sequence[tuple[int, int]], read: Sequence[int | None], block: str
    ) -> None:
        """Add what W of a block made to gradients, and reduce those that are complete.

        All that W made and ``read`` is held until everything has been added.
        """
        num_ops = len(self.ops)
        for value, new in made:
            self._add(value, new, f"W {block}")
        for held in (*read, *(new for _, new in made)):
            if held is not None and len(self.ops) > num_ops:
                self.tensors[held].uses.append(len(self.ops) - 1)
        for value, _ in made:
            if not self.remaining[value]:
                self._complete(self.parameters[value], f"G {block}")

    def _add(self, value: int, new: int, counted_at: str) -> None:
        """Add to a parameter's gradient: a second contribution makes a new tensor, further ones
        are added in place."""
        p, known = self.parameters[value], self.sums.get(value)
        name, place = f"sum {p.name}", Sum(value)
        if known is None:
            self.sums[value] = new
        elif self.remaining[value] == self.of_round[value] - 1:
            total = self._tensor(f"{p.name}:gradient", Category.GRADIENTS, self.bytes[value].summed)
            self.tensors[total].result = 0
            self._op(name, [known, new], [total], place=place, counted_at=counted_at)
            self.sums[value] = total
        else:
            self._op(name, [known, new], [known], place=place, counted_at=counted_at)
        self.remaining[value] -= 1

    def _complete(self, p: ParameterProgram, counted_at: str) -> None:
        """Reduce a gradient that is complete; one that is scattered in every micro-batch is then
        added to the sum of its shards."""
        if p.kernel is not None:
            self._reduce(p, self.program.kernels[p.kernel], counted_at)
        if p.value in self.rounds_left:
            self.rounds_left[p.value] -= 1
            new, known = self.sums.pop(p.value), self.shards.get(p.value)
            if known is None:
                self.shards[p.value] = new
            else:
                self._op(f"sum {p.name}", [known, new], [known], counted_at=counted_at)
            if self.rounds_left[p.value]:
                self.remaining[p.value] = self.of_round[p.value]
                return
            self.sums[p.value] = self.shards.pop(p.value)
        self.complete.add(p.value)

    def _reduce(self, p: ParameterProgram, kernel: Kernel, counted_at: str) -> None:
        if kernel.backward_input is not None:
            given = {"operand": [self.stored[p.value]], "cotangent": [self.sums[p.value]]}
            (found, *_) = self._run(
                f"reduce {p.name}",
                kernel.backward_input,
                [given[kind][index] for kind, index in kernel.input_sources],
                Category.GRADIENTS,
                self.memory[p.kernel or 0].workspace["I"],
                counted_at=counted_at,
            )
            assert found is not None
            self.sums[p.value] = found

    # --- updates ------------------------------------------------------------------------------
    def _update_early(self, values: Sequence[int] = (), *, is_last: bool = False) -> None:
        """Update early what has arrived, now that these gradients are complete, and is read no
        more: one parameter after the other."""
        if self.program.early is not None:
            complete = [v for v in values if v in self.complete]
            communicated = [v for v in complete if self.parameters[v].kernel is not None]
            self.arrivals.complete(complete, communicated)
            self.arrivals.end_rounds(is_last=is_last)
            for value in self.arrivals.free():
                self._update([value])

    def _update(self, values: Sequence[int]) -> None:
        """Update parameters one by one, or together if the optimizer is joint."""
        here = (v for v in dict.fromkeys(values) if v in self.sums and v not in self.updated)
        due = [v for v in here if self.route.device in self.parameters[v].devices]
        self.updated.update(due)
        groups = [due] if self.optimizer.is_joint and due else [[value] for value in due]
        for group in groups:
            written = [t for v in group for t in (self.stored[v], *self.states.get(v, ()))]
            names = "+".join(self.parameters[v].name for v in group[:3])
            workspace = self.optimizer.workspace_bytes([self.bytes[v].stored for v in group])
            workspace += clipped_bytes(self.program.early, (self.bytes[v] for v in group))
            gradients = [self.sums[v] for v in group]
            self._op(f"update {names}", gradients, written, workspace, Update(tuple(group)))
