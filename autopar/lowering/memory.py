"""Peak memory of a rank program, counted by playing one training step over its graphs.

Nothing is guessed: the actions of the schedule are played in their order. Every value lives from
the block that makes it to the last one that reads it, forward or backward; saved values live until
their block's backward pass, and what W needs until that; gradients accumulate; and inside each
graph the peak is found by liveness.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autopar.collectives import ALONE_BYTES, MAX_SCATTERS
from autopar.cost_models.memory import CPU_ALLOCATOR, CUDA_ALLOCATOR, Category, graph_memory
from autopar.lowering.differentiate import Kernel
from autopar.lowering.program import ParameterProgram, RankProgram
from autopar.lowering.route import Route, routes_of
from autopar.placement import Placements, local_shape
from autopar.schedules.action import Kind

aten = torch.ops.aten
Key = tuple[int, int]
"""A micro-batch and a value; of parameters, `PARAMETER` and the value."""
PARAMETER = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramMemory:
    """Bytes on one device at the peak of a step, by category, and where the peak is."""

    by_category: dict[str, int]
    peak_at: str

    @property
    def peak_bytes(self) -> int:
        return sum(self.by_category.values())


def program_memory(
    program: RankProgram, *, num_optimizer_states: int, num_threads: int = 1
) -> ProgramMemory:
    """Memory of one training step on the device of the pipeline that needs most.

    ``num_threads`` are those of a process that computes on a CPU.
    """
    copies = None
    if program.device_type == "cpu":
        copies = functools.partial(_convolution_bytes, num_threads=num_threads)
    kernels = [_measure(kernel, _rounding(program), copies) for kernel in program.kernels]
    sizes = {p.value: _ParameterBytes.of(p, program) for p in program.parameters}
    plays = (
        _Play(program, route, kernels, sizes, num_optimizer_states).run()
        for route in routes_of(program)
    )
    return max(plays, key=lambda memory: memory.peak_bytes)


def _rounding(program: RankProgram) -> Callable[[int], int]:
    return (CPU_ALLOCATOR if program.device_type == "cpu" else CUDA_ALLOCATOR).rounded


@dataclass(frozen=True, slots=True)
class _ParameterBytes:
    """Of one parameter on a device: as it is stored, and as blocks use it."""

    stored: int
    used: int

    @staticmethod
    def of(parameter: ParameterProgram, program: RankProgram) -> _ParameterBytes:
        stored, used = (
            _part_bytes(program, parameter.shape, placements, parameter.dtype.itemsize)
            for placements in (parameter.stored, parameter.used)
        )
        return _ParameterBytes(stored, used)


def _part_bytes(
    program: RankProgram, shape: tuple[int, ...], placements: Placements, itemsize: int
) -> int:
    elements = math.prod(local_shape(shape, placements, program.mesh))
    return _rounding(program)(elements * itemsize)


@dataclass(slots=True)
class _KernelMemory:
    """Working bytes of each graph of a kernel beyond its inputs, what it saves, what of that and of
    I's results W still needs once I is done, and the gradients that I makes."""

    workspace: dict[str, int] = field(default_factory=dict)
    saved: int = 0
    late: int = 0
    input_grads: tuple[int, ...] = ()


def _convolution_bytes(node: fx.Node, num_threads: int) -> int:
    """Copies that oneDNN makes for a convolution, in a layout of its own.

    Of all that it reads, or of what it writes, whichever is more (measured by torch's profiler);
    both of what is read for a weight's gradient. Products stand in for kernels of size 1 where a
    single thread has less than 16 samples, as torch chooses (``use_mkldnn``).
    """
    is_forward = node.target is aten.convolution.default
    if not is_forward and node.target is not aten.convolution_backward.default:
        return 0
    args: Any = node.args
    x, weight = (n.meta["val"] for n in (args[:2] if is_forward else args[1:3]))
    stride, dilation, groups = (args[i if is_forward else i + 1] for i in (3, 5, 8))
    is_plain = all(size == 1 for size in (*weight.shape[2:], *stride, *dilation)) and groups == 1
    if x.dtype is not torch.float32 or (is_plain and num_threads == 1 and x.shape[0] < 16):
        return 0
    x_bytes, weight_bytes = _bytes(x), _bytes(weight)
    if is_forward:
        return max(x_bytes + weight_bytes, _size(node))
    gradient_bytes = _size(args[0])
    needs_input, needs_weight, _ = args[10]
    found = 0
    if needs_input:
        found = max(gradient_bytes + weight_bytes, x_bytes)
    if needs_weight:
        found = max(found, x_bytes + gradient_bytes + weight_bytes)
    return found


def _measure(
    kernel: Kernel,
    rounded: Callable[[int], int],
    workspace_bytes: Callable[[fx.Node], int] | None,
) -> _KernelMemory:
    memory = _KernelMemory()
    graphs = {"F": kernel.forward, "I": kernel.backward_input, "W": kernel.backward_weight}
    for phase, module in graphs.items():
        if module is None:
            continue
        inputs = sum(rounded(_size(n)) for n in module.graph.nodes if n.op == "placeholder")
        found = graph_memory(module.graph, workspace_bytes=workspace_bytes)
        memory.workspace[phase] = max(found.peak_bytes - inputs, 0)
    outputs = list(kernel.forward.graph.output_node().args[0])  # type: ignore[arg-type]
    made = set(outputs[: kernel.num_outputs])
    memory.saved = sum(
        rounded(_size(n)) for n in dict.fromkeys(outputs[kernel.num_outputs :]) if n not in made
    )
    if kernel.backward_input is not None:
        made_by_i = list(kernel.backward_input.graph.output_node().args[0])  # type: ignore[arg-type]
        memory.input_grads = tuple(_size(n) for n in made_by_i[: len(kernel.input_grads)])
    if kernel.backward_weight is not None:
        given = [n for n in kernel.backward_weight.graph.nodes if n.op == "placeholder"]
        memory.late = sum(
            rounded(_size(node))
            for node, (kind, _) in zip(given, kernel.weight_sources)
            if kind != "operand"
        )
    return memory


class _Play:
    """One device of the program's pipeline."""

    def __init__(
        self,
        program: RankProgram,
        route: Route,
        kernels: Sequence[_KernelMemory],
        parameter_bytes: Mapping[int, _ParameterBytes],
        num_optimizer_states: int,
    ) -> None:
        self.program = program
        self.route = route
        self.kernels = kernels
        self.parameter_bytes = parameter_bytes
        self.round = _rounding(program)
        self.live: Counter[Category] = Counter()
        self.peak: Counter[Category] = Counter()
        self.peak_at = "start"
        self.holders: dict[Key, set[object]] = {}
        self.sizes: dict[Key, int] = {}
        self.gradients: dict[Key, int] = {}
        self.remaining = self.route.contributions.copy()
        self.scattering: deque[int] = deque()
        self.parameter_of = {p.value: p for p in program.parameters}
        for p in program.parameters:
            if route.device in p.devices:
                stored = parameter_bytes[p.value].stored
                self.live[Category.PARAMETERS] += stored
                if p.trainable:
                    self.live[Category.OPTIMIZER_STATE] += stored * num_optimizer_states
        for b in program.buffers:
            self.live[Category.BUFFERS] += self.round(math.prod(b.shape) * b.dtype.itemsize)
        for i in program.inputs:
            size = _part_bytes(program, i.shape, i.placements, i.dtype.itemsize)
            self.live[Category.INPUTS] += size
        self.due = {v for a in self.route.late_updates for v in self.route.parameters[a.stage]}
        self.live[Category.GRADIENTS] += sum(self.parameter_bytes[v].stored for v in self.due)

    def _at(self, where: str, working: int) -> None:
        now = self.live.copy()
        now[Category.WORKSPACE] += working
        if sum(now.values()) > sum(self.peak.values()):
            self.peak, self.peak_at = now, where

    def _hold(self, key: Key, holder: object, size: int, category: Category) -> None:
        holders = self.holders.setdefault(key, set())
        if not holders:
            self.sizes[key] = size
            self.live[category] += size
        holders.add(holder)

    def _release(self, key: Key, holder: object, category: Category) -> None:
        holders = self.holders.get(key)
        if holders and holder in holders:
            holders.discard(holder)
            if not holders:
                self.live[category] -= self.sizes.pop(key)

    def _update_late(self, stage: int) -> None:
        """The gradients of the last step are let go of."""
        for value in self.due.intersection(self.route.parameters[stage]):
            self.live[Category.GRADIENTS] -= self.parameter_bytes[value].stored
            self.due.discard(value)

    def run(self) -> ProgramMemory:
        for action in self.route.actions:
            stage, microbatch = action.stage, action.microbatch
            if action in self.route.late_updates:
                self._update_late(stage)
            if microbatch is None:
                continue
            recomputed = stage in self.program.pipeline.shape.recomputed
            if action.kind is Kind.F:
                self._enter(stage, microbatch, recomputed)
                self._forward(stage, microbatch, keep=not recomputed)
                self._leave(stage, microbatch)
            elif action.kind is Kind.R:
                self._forward(stage, microbatch, keep=True)
                self._leave_recomputed(stage, microbatch)
            elif action.kind in (Kind.I, Kind.B, Kind.W):
                for position in reversed(self.route.blocks[stage]):
                    if action.kind is not Kind.W:
                        self._input(position, microbatch)
                    if action.kind is not Kind.I:
                        self._weight(position, microbatch)
                for value in self.program.pipeline.boundaries[stage - 1].values if stage else ():
                    self._release_gradient((microbatch, value))  # to the stage before
        return ProgramMemory(
            by_category={str(c): v for c, v in sorted(self.peak.items()) if v},
            peak_at=self.peak_at,
        )

    # --- forward ---------------------------------------------------------------------------
    def _enter(self, stage: int, microbatch: int, recomputed: bool) -> None:
        """What comes from the stage before, which a recomputed stage keeps."""
        if stage:
            boundary = self.program.pipeline.boundaries[stage - 1]
            for value, meta in zip(boundary.values, boundary.metas):
                size = self.round(meta.size_bytes)
                self._hold((microbatch, value), "env", size, Category.ACTIVATIONS)
                if recomputed:
                    self._hold((microbatch, value), ("R", stage), 0, Category.ACTIVATIONS)

    def _leave(self, stage: int, microbatch: int) -> None:
        """What the stage sends on is let go, unless the next stage is on this device."""
        row = self.program.pipeline.shape.placement[self.program.pipeline.shape.replica(microbatch)]
        if stage + 1 < len(row) and row[stage + 1] != row[stage]:
            for value in self.program.pipeline.boundaries[stage].values:
                self._release((microbatch, value), "env", Category.ACTIVATIONS)
        for value in self.route.finished[stage]:
            if value not in self.route.crossing[stage]:
                self._release((microbatch, value), "env", Category.ACTIVATIONS)

    def _leave_recomputed(self, stage: int, microbatch: int) -> None:
        kept = self.route.crossing[stage].union(self.route.finished[stage])
        for value in kept:
            self._release((microbatch, value), "env", Category.ACTIVATIONS)
        for value in self.program.pipeline.boundaries[stage - 1].values if stage else ():
            self._release((microbatch, value), ("R", stage), Category.ACTIVATIONS)

    def _forward(self, stage: int, microbatch: int, *, keep: bool) -> None:
        positions = self.route.blocks[stage]
        for position, following in itertools.zip_longest(positions, positions[1:]):
            self._fetch(position)
            if following is not None:
                self._fetch(following)  # beside the computation of this block
            self._run(position, microbatch, keep)
            for value in self.route.dropped[position]:
                self._release((microbatch, value), "env", Category.ACTIVATIONS)
            for value in self.route.released[position]:
                self._release((PARAMETER, value), "env", Category.COMMUNICATION)

    def _run(self, position: int, microbatch: int, keep: bool) -> None:
        block = self.program.blocks[position]
        kernel, memory = self.program.kernels[block.kernel], self.kernels[block.kernel]
        self._at(f"F {block.name}", memory.workspace["F"])
        for value, meta in zip(block.interface.outputs, kernel.output_metas):
            size = self.round(meta.size_bytes)
            self._hold((microbatch, value), "env", size, Category.ACTIVATIONS)
        if keep:
            self.live[Category.ACTIVATIONS] += memory.saved
            sources = {*kernel.input_sources, *kernel.weight_sources}
            for key, category in self._operands(position, microbatch, sources):
                self._hold(key, (microbatch, position), 0, category)

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

    def _fetch(self, position: int) -> None:
        """Parameters that are gathered; one that a kernel only views takes no memory of its own."""
        for value in self.program.blocks[position].interface.parameters:
            key, kernel = (PARAMETER, value), self.parameter_of[value].kernel
            if kernel is None or key in self.sizes or not self.kernels[kernel].workspace["F"]:
                continue
            self._hold(key, "env", self.parameter_bytes[value].used, Category.COMMUNICATION)

    # --- backward --------------------------------------------------------------------------
    def _input(self, position: int, microbatch: int) -> None:
        """I; what W reads stays behind."""
        block = self.program.blocks[position]
        kernel, memory = self.program.kernels[block.kernel], self.kernels[block.kernel]
        for index in kernel.cotangents:  # those from another device come now
            size_bytes = kernel.output_metas[index].size_bytes
            self._hold_gradient((microbatch, block.interface.outputs[index]), size_bytes)
        self._at(f"I {block.name}", memory.workspace.get("I", 0))
        for index in kernel.cotangents:
            self._release_gradient((microbatch, block.interface.outputs[index]))
        for operand, size_bytes in zip(kernel.input_grads, memory.input_grads):
            self._hold_gradient((microbatch, block.interface.inputs[operand]), size_bytes)
        has_w = kernel.backward_weight is not None
        kept = set(self._operands(position, microbatch, kernel.weight_sources)) if has_w else set()
        for key, category in [*self._operands(position, microbatch, kernel.input_sources)]:
            if (key, category) not in kept:
                self._release(key, (microbatch, position), category)
        self.live[Category.ACTIVATIONS] += memory.late - memory.saved

    def _weight(self, position: int, microbatch: int) -> None:
        block = self.program.blocks[position]
        kernel, memory = self.program.kernels[block.kernel], self.kernels[block.kernel]
        if kernel.backward_weight is None:
            return
        self._at(f"W {block.name}", memory.workspace["W"])
        if kernel.cotangents:
            num_inputs = len(block.interface.inputs)
            values = [block.interface.parameters[o - num_inputs] for o in kernel.weight_grads]
            self._reduce([v for v in values if self._contribute(v)], block.name)
        for key, category in [*self._operands(position, microbatch, kernel.weight_sources)]:
            self._release(key, (microbatch, position), category)
        self.live[Category.ACTIVATIONS] -= memory.late

    def _contribute(self, value: int) -> bool:
        """A gradient has its full size from its first contribution on; at the end as stored.

        Whether this contribution was the last.
        """
        total, size = self.route.contributions[value], self.parameter_bytes[value]
        stored, used = size.stored, size.used
        if self.remaining[value] == total:
            self.live[Category.GRADIENTS] += used if total > 1 else stored
        self.remaining[value] -= 1
        if self.remaining[value]:
            return False
        if total > 1:
            self.live[Category.GRADIENTS] += stored - used
        return True

    def _reduce(self, values: Sequence[int], name: str) -> None:
        """Reductions send copies, or whole gradients for the parts that are stored; of the latter
        a few are on their way at a time, each with as much that is received."""
        found = [self.parameter_bytes[v] for v in values if self.parameter_of[v].kernel is not None]
        whole = [size.used for size in found if size.used > size.stored]
        self._at(f"G {name}", sum(size.used for size in found) + sum(whole))
        joined = sum(size for size in whole if size <= ALONE_BYTES)
        alone = [size for size in whole if size > ALONE_BYTES]
        for size in [joined, *alone] if joined else alone:
            self.scattering.append(2 * size)
            self.live[Category.COMMUNICATION] += 2 * size
        while len(self.scattering) > MAX_SCATTERS:
            self.live[Category.COMMUNICATION] -= self.scattering.popleft()

    def _hold_gradient(self, key: Key, size_bytes: int) -> None:
        """From the first block that has a part of it; the parts are added up."""
        more = max(self.round(size_bytes) - self.gradients.get(key, 0), 0)
        self.gradients[key] = self.gradients.get(key, 0) + more
        self.live[Category.ACTIVATIONS] += more

    def _release_gradient(self, key: Key) -> None:
        self.live[Category.ACTIVATIONS] -= self.gradients.pop(key, 0)


def _size(node: fx.Node) -> int:
    value = node.meta.get("val")
    return _bytes(value) if isinstance(value, Tensor) else 0


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
