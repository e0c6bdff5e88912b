"""Tensor lifetimes of a lowered program: one training step on one pipeline device, by kernel.

The actions of the route are played in order, as in `autopar.memory.program`, which counts bytes;
here every run of an F, I or W graph is an operation, and every storage that crosses its border is a
tensor with the operations that use it. What lives within one graph is that operation's workspace.
Sums of gradients, gathers, reductions and updates of parameters are operations too; early updates
follow the W that completes a gradient. Programs of single-op blocks (`autopar.movement.single_ops`)
have the lifetimes of single layers. The result also says where the runtime finds operations and
tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from autopar.cost_models.allocator import Category, allocator_of
from autopar.cost_models.hardware import DeviceSpec
from autopar.cost_models.update import OptimizerSpec
from autopar.lowering.arrivals import Arrivals
from autopar.lowering.route import Route, routes_of
from autopar.lowering.types import BlockProgram, Kernel, ParameterProgram, RankProgram, Role
from autopar.memory.early import clipped_bytes
from autopar.memory.kernel import KernelMemory, kernel_memory
from autopar.memory.parameters import ParameterBytes, part_bytes
from autopar.movement.coverable import check_coverable
from autopar.movement.drafts import Draft, step_of_drafts
from autopar.movement.execution import PARAMETER, OpPlace, ProgramStep, Run, Update
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
    return _Walk(program, route, device, optimizer).run()


@dataclass(frozen=True, slots=True)
class _Kept:
    """The tensors that a block keeps from its F to its W."""

    operands: tuple[int, ...]
    saved: tuple[int | None, ...]


class _Walk:
    """Plays a step and notes operations and tensors."""

    def __init__(
        self, program: RankProgram, route: Route, device: DeviceSpec, optimizer: OptimizerSpec
    ) -> None:
        self.program, self.route, self.optimizer = program, route, optimizer
        self.allocator = allocator_of(device)
        self.memory: list[KernelMemory] = [kernel_memory(k, device) for k in program.kernels]
        self.ops: list[str] = []
        self.places: list[OpPlace] = []
        self.workspace: list[int] = []
        self.tensors: list[Draft] = []
        self.values: dict[Key, int] = {}
        self.stored: dict[int, int] = {}
        """Persistent tensors, by value: parameters, buffers, inputs and fixed values."""
        self.fetched: dict[int, int] = {}
        self.holders: dict[int, set[Key]] = {}
        """By fetched parameter, the micro-batches and blocks whose backward reads it."""
        self.kept: dict[tuple[int, int], _Kept] = {}
        self.cotangents: dict[tuple[int, int], tuple[list[int], list[int | None]]] = {}
        """By micro-batch and block, between I and W: its cotangents, and what I hands over."""
        self.gradients: dict[Key, int] = {}
        self.views: set[int] = set()  # gradients that are not contiguous
        self.sums: dict[int, int] = {}
        self.remaining = route.contributions.copy()
        self.parameters = {p.value: p for p in program.parameters}
        self.bytes = {
            p.value: ParameterBytes.of(p, program, self.allocator) for p in program.parameters
        }
        self.states: dict[int, list[int]] = {}
        self.sent = {v for boundary in program.pipeline.boundaries for v in boundary.values}
        self.updated: set[int] = set()
        self.arrivals = Arrivals(program, route, device.kind)

    # --- tensors and operations ---------------------------------------------------------------
    def _tensor(
        self, name: str, category: Category, size_bytes: int, *, persistent: bool = False
    ) -> int:
        self.tensors.append(Draft(name.replace(" ", "_"), category, size_bytes, persistent))
        return len(self.tensors) - 1

    def _op(
        self,
        name: str,
        reads: Iterable[int],
        writes: Iterable[int],
        workspace_bytes: int = 0,
        place: OpPlace = None,
    ) -> None:
        op, written = len(self.ops), set(writes)
        for index in written.union(reads):
            self.tensors[index].uses.append(op)
            if index in written:
                self.tensors[index].writes.append(op)
        self.ops.append(name)
        self.places.append(place)
        self.workspace.append(workspace_bytes)

    def _run(
        self,
        name: str,
        module: fx.GraphModule,
        arguments: Sequence[int | None],
        category: Category,
        workspace_bytes: int,
        place: Run | None = None,
    ) -> list[int | None]:
        """Run a graph on tensors; a result that is a view of another tensor is that tensor."""
        given = [node for node in module.graph.nodes if node.op == "placeholder"]
        owner: dict[int, int] = {}
        for node, argument in zip(given, arguments):
            value = node.meta.get("val")
            if isinstance(value, Tensor) and argument is not None:
                owner.setdefault(id(value.untyped_storage()), argument)
        results: Any = module.graph.output_node().args[0]
        found: list[int | None] = []
        made = []
        for number, node in enumerate(results):
            value = node.meta.get("val") if isinstance(node, fx.Node) else None
            if not isinstance(value, Tensor):
                found.append(None)
                continue
            storage = value.untyped_storage()
            if id(storage) not in owner:
                size = self.allocator.rounded(storage.nbytes())
                owner[id(storage)] = self._tensor(f"{name}:{number}", category, size)
                self.tensors[-1].result = number
                made.append(owner[id(storage)])
            found.append(owner[id(storage)])
        if made or workspace_bytes:
            created = sum(self.tensors[index].size_bytes for index in made)
            reads = [a for node, a in zip(given, arguments) if a is not None and node.users]
            self._op(name, reads, made, max(0, workspace_bytes - created), place)
        return found

    # --- the step -----------------------------------------------------------------------------
    def run(self) -> ProgramStep:
        self._place_persistent()
        for block in self.program.blocks:
            if not block.role.has_stage:
                self._run_alone(block)
        for action in self.route.actions:
            self._act(action.stage, action.kind, action.microbatch)
        self._update_early(is_last=True)
        self._update([v for values in self.route.parameters.values() for v in values])
        early = self.program.early
        return step_of_drafts(
            self.ops, self.places, self.workspace, self.tensors,
            keeps_gradients=early is None or early.keeps_gradients,
        )  # fmt: skip

    def _act(self, stage: int, kind: Kind, microbatch: int | None) -> None:
        if kind is Kind.U and not self.optimizer.is_joint and self.program.early is None:
            self._update([v for v in self.route.parameters[stage] if not self.remaining[v]])
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
            for position in reversed(self.route.blocks[stage]):
                if kind is not Kind.W:
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

    def _created(self, name: str, category: Category, size_bytes: int) -> int:
        """A tensor that the next operation creates."""
        index = self._tensor(name, category, size_bytes)
        self.tensors[index].uses.append(len(self.ops))
        self.tensors[index].writes.append(len(self.ops))
        return index

    def _forward(self, stage: int, microbatch: int, *, keep: bool) -> None:
        for position in self.route.blocks[stage]:
            block = self.program.blocks[position]
            kernel = self.program.kernels[block.kernel]
            operands = tuple(self._operand(v, microbatch) for v in block.interface.inputs)
            operands += tuple(self._fetch(v) for v in block.interface.parameters)
            results = self._run(
                self._name("F", block.name, microbatch),
                kernel.forward,
                operands,
                Category.ACTIVATIONS,
                self.memory[block.kernel].workspace["F"],
                Run("F", position, microbatch),
            )
            for value, result in zip(block.interface.outputs, results):
                if result is not None:
                    self.values[microbatch, value] = result
                    self.tensors[result].leaves |= value in self.sent
            if keep:
                saved = tuple(results[kernel.num_outputs :])
                self.kept[microbatch, position] = _Kept(operands, saved)
                self._hold(position, microbatch, kernel)
            for value in self.route.released[position]:
                if not self.holders.get(value):
                    self.fetched.pop(value, None)

    def _hold(self, position: int, microbatch: int, kernel: Kernel) -> None:
        """Keep the fetched parameters that the block's backward reads."""
        interface = self.program.blocks[position].interface
        sources = {*kernel.input_sources, *kernel.weight_sources}
        for number, value in enumerate(interface.parameters, start=len(interface.inputs)):
            if value in self.fetched and ("operand", number) in sources:
                self.holders.setdefault(value, set()).add((microbatch, position))

    def _finish(self, stage: int, microbatch: int) -> None:
        """Hand out the values that leave the program, of which some update buffers."""
        finished = [self.values[microbatch, value] for value in self.route.finished[stage]]
        updated = [self.stored[b.value] for b in self.route.updated[stage]]
        if finished:
            self._op(self._name("finish", f"stage {stage}", microbatch), finished, updated)

    def _operand(self, value: int, microbatch: int) -> int:
        found = self.values.get((microbatch, value))
        return self.stored[value] if found is None else found

    def _fetch(self, value: int) -> int:
        """A parameter as blocks use it, gathered or cast where that makes another tensor."""
        parameter = self.parameters[value]
        if parameter.kernel is None:
            return self.stored[value]
        if value not in self.fetched:
            kernel = self.program.kernels[parameter.kernel]
            (found,) = self._run(
                f"gather {parameter.name}",
                kernel.forward,
                [self.stored[value]],
                Category.COMMUNICATION,
                self.memory[parameter.kernel].workspace["F"],
            )[:1]
            assert found is not None
            self.fetched[value] = found
        return self.fetched[value]

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
        if kernel.backward_input is not None:
            arguments = self._arguments(kernel.input_sources, (microbatch, position), taken, [])
            results = self._run(
                name,
                kernel.backward_input,
                arguments,
                Category.ACTIVATIONS,
                memory.workspace["I"],
                Run("I", position, microbatch),
            )
            handed = results[len(kernel.input_grads) :]
            for operand, made, result in zip(kernel.input_grads, memory.input_grads, results):
                if result is not None:
                    key = (microbatch, block.interface.inputs[operand])
                    self._add_gradient(key, result, made.size_bytes, name)
                    if not made.is_contiguous:
                        self.views.add(self.gradients[key])
        self.cotangents[microbatch, position] = taken, handed

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
            self._op(f"{name} sum", [known, new], [total])
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
            )
            parameters = block.interface.parameters
            graded = [parameters[o - len(block.interface.inputs)] for o in kernel.weight_grads]
            made = [(value, new) for value, new in zip(graded, results) if new is not None]
            self._contribute(made, arguments)
            self.arrivals.reads.end(position)
            self._update_early(graded)
        self.cotangents.pop(place, None)
        self.kept.pop(place, None)
        for value in block.interface.parameters:
            holders = self.holders.get(value, set())
            if place in holders:
                holders.discard(place)
                if not holders:
                    self.fetched.pop(value, None)

    def _contribute(self, made: Sequence[tuple[int, int]], read: Sequence[int | None]) -> None:
        """Add what W made to gradients, and reduce those that are complete.

        All that W made and ``read`` is held until everything has been added.
        """
        num_ops = len(self.ops)
        for value, new in made:
            self._add(value, new)
        for held in (*read, *(new for _, new in made)):
            if held is not None and len(self.ops) > num_ops:
                self.tensors[held].uses.append(len(self.ops) - 1)
        for value, _ in made:
            if not self.remaining[value] and self.parameters[value].kernel is not None:
                self._reduce(self.parameters[value])

    def _add(self, value: int, new: int) -> None:
        """Add to a parameter's gradient: a second contribution makes a new tensor, further ones
        are added in place."""
        p, known = self.parameters[value], self.sums.get(value)
        if known is None:
            self.sums[value] = new
        elif self.remaining[value] == self.route.contributions[value] - 1:
            name = f"{p.name}:gradient"
            total = self._tensor(name, Category.GRADIENTS, self.bytes[value].summed)
            self._op(f"sum {p.name}", [known, new], [total])
            self.sums[value] = total
        else:
            self._op(f"sum {p.name}", [known, new], [known])
        self.remaining[value] -= 1

    def _reduce(self, p: ParameterProgram) -> None:
        assert p.kernel is not None
        kernel = self.program.kernels[p.kernel]
        if kernel.backward_input is not None:
            given = {"operand": [self.stored[p.value]], "cotangent": [self.sums[p.value]]}
            arguments = [given[kind][index] for kind, index in kernel.input_sources]
            (found,) = self._run(
                f"reduce {p.name}",
                kernel.backward_input,
                arguments,
                Category.GRADIENTS,
                self.memory[p.kernel].workspace["I"],
            )[:1]
            assert found is not None
            self.sums[p.value] = found

    # --- updates ------------------------------------------------------------------------------
    def _update_early(self, values: Sequence[int] = (), *, is_last: bool = False) -> None:
        """Update early what has arrived, now that these gradients are complete, and is read no
        more: one parameter after the other."""
        if self.program.early is not None:
            complete = [v for v in values if not self.remaining[v]]
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
