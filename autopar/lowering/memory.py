"""Peak memory of a rank program, counted by playing one training step over its graphs.

Nothing is guessed: the actions of the schedule are played in their order. Every value lives from
the block that makes it to the last one that reads it, forward or backward; saved values live until
their block's backward pass, and what W needs until that; gradients accumulate; and inside each
graph the peak is found by liveness.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autopar.collectives import (
    ALL_GATHER,
    ALL_TO_ALL,
    ALONE_BYTES,
    MAX_SCATTERS,
    REDUCE_SCATTER,
)
from autopar.cost_models.cluster import DeviceSpec
from autopar.cost_models.memory import CPU_ALLOCATOR, CUDA_ALLOCATOR, Category, graph_memory
from autopar.lowering.differentiate import Kernel
from autopar.lowering.program import ParameterProgram, RankProgram, Role
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
    program: RankProgram, device: DeviceSpec, *, num_optimizer_states: int
) -> ProgramMemory:
    """Memory of one training step on the device of the pipeline that needs most.

    Of ``device``, which need not be one that the program was lowered for.
    """
    is_cpu = device.kind == "cpu"
    rounded = (CPU_ALLOCATOR if is_cpu else CUDA_ALLOCATOR).rounded

    def working(node: fx.Node) -> int:
        copies = _convolution_bytes(node, device.num_threads) if is_cpu else 0
        return copies or _collective_bytes(node, is_cpu=is_cpu)

    kernels = [_measure(kernel, rounded, working) for kernel in program.kernels]
    sizes = {p.value: _ParameterBytes.of(p, program, rounded) for p in program.parameters}
    plays = (
        _Play(program, route, kernels, sizes, num_optimizer_states, device).run()
        for route in routes_of(program)
    )
    return max(plays, key=lambda memory: memory.peak_bytes)


@dataclass(frozen=True, slots=True)
class _ParameterBytes:
    """Of one parameter on a device: as it is stored, and as blocks use it."""

    stored: int
    used: int

    @staticmethod
    def of(
        parameter: ParameterProgram, program: RankProgram, rounded: Callable[[int], int]
    ) -> _ParameterBytes:
        stored, used = (
            rounded(_part_bytes(program, parameter.shape, placements, parameter.dtype.itemsize))
            for placements in (parameter.stored, parameter.used)
        )
        return _ParameterBytes(stored, used)


def _part_bytes(
    program: RankProgram, shape: tuple[int, ...], placements: Placements, itemsize: int
) -> int:
    return math.prod(local_shape(shape, placements, program.mesh)) * itemsize


@dataclass(frozen=True, slots=True)
class _InputGradient:
    """A result of I: its size, ``number`` of its storage among those of the graph's results, how
    large that is, and which of the cotangents it is a part of, if of one."""

    size_bytes: int
    number: int
    storage_bytes: int
    cotangent: int | None
    is_contiguous: bool


@dataclass(slots=True)
class _KernelMemory:
    """Working bytes of each graph of a kernel beyond its inputs, what it saves, what of that and of
    I's results W still needs once I is done, and the gradients that I makes.

    Outputs that it saves too are counted as values; ``saved_outputs`` says of each whether W needs
    it."""

    workspace: dict[str, int] = field(default_factory=dict)
    saved: int = 0
    late: int = 0
    saved_outputs: dict[int, bool] = field(default_factory=dict)
    input_grads: tuple[_InputGradient, ...] = ()


@dataclass(slots=True)
class _Buffer:
    """Memory that gradients lie in: each keeps all of it."""

    size_bytes: int
    num_holders: int = 0


@dataclass(frozen=True, slots=True)
class _Gradient:
    """The gradient of a value so far, all of a buffer or a part of it."""

    buffer: _Buffer
    is_contiguous: bool = True


_LANES = 16
"""oneDNN's layouts on x86 have the channels in groups of so many, the last one padded."""


def _convolution_bytes(node: fx.Node, num_threads: int) -> int:
    """Copies that oneDNN makes for a convolution, in layouts of its own, besides the results.

    Of all that it reads and of what it writes, and then of what it writes alone, to be copied out.
    Few channels are read as they lie unless the kernel has size 1; the gradient of a strided
    convolution's input is laid out channels last, and copied once more. Held against torch's
    profiler for hundreds of shapes: exact for most, within a third for fewer than 16 channels.
    Products stand in for kernels of size 1 where a single thread has less than 16 samples, as torch
    chooses (``use_mkldnn``).
    """
    is_forward = node.target is aten.convolution.default
    if not is_forward and node.target is not aten.convolution_backward.default:
        return 0
    args: Any = node.args
    x, weight = (n.meta["val"] for n in (args[:2] if is_forward else args[1:3]))
    stride, dilation, groups = (args[i if is_forward else i + 1] for i in (3, 5, 8))
    is_point = all(size == 1 for size in weight.shape[2:])
    is_strided = any(size > 1 for size in stride)
    is_product = is_point and not is_strided and max(dilation) == 1 and groups == 1
    if x.dtype is not torch.float32 or (is_product and num_threads == 1 and x.shape[0] < 16):
        return 0
    y = (node if is_forward else args[0]).meta["val"]
    is_by_channel = groups == x.shape[1] > 1
    is_read_in_place = x.shape[1] < _LANES and not is_point and not is_by_channel
    x_bytes, y_bytes = _in_lanes(x, x.shape[1]), _in_lanes(y, y.shape[1])
    weight_bytes = _in_lanes(weight, groups) if is_by_channel else _in_lanes(weight, *weight.shape)
    read_bytes = 0 if is_read_in_place else x_bytes
    if is_forward:
        return max(read_bytes + weight_bytes + y_bytes - _bytes(y), y_bytes)
    needs_input, needs_weight, _ = args[10]
    found = 0
    if needs_input:
        is_last = is_strided and not is_by_channel
        made_bytes, copy_bytes = (_bytes(x), _bytes(x)) if is_last else (x_bytes, 0)
        found = max(y_bytes + weight_bytes + made_bytes - _bytes(x), made_bytes + copy_bytes)
    if needs_weight:
        found = max(found, read_bytes + y_bytes + weight_bytes)
    return found


def _in_lanes(tensor: Tensor, *dims: int) -> int:
    """Bytes of a tensor whose channels are padded to whole lanes.

    ``dims``: how many of them there are; of a weight all its sizes, channels first.
    """
    padded = math.prod(-(-size // _LANES) * _LANES for size in dims[:2])
    return _bytes(tensor) // math.prod(dims[:2]) * padded


def _collective_bytes(node: fx.Node, *, is_cpu: bool) -> int:
    """What a collective inside a graph needs besides its operand and its result.

    Parts that do not lie one behind the other are brought there, and back; a reduce-scatter on
    gloo receives as much as it sends (see `autopar.reduce_scatter`).
    """
    if node.target not in (ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL):
        return 0
    operand, _, _, *digits = node.args
    assert isinstance(operand, fx.Node)
    sent_bytes, made_bytes = _size(operand), _size(node)
    if node.target is ALL_GATHER:
        return 0 if _is_outermost(digits) else made_bytes
    rearranged_bytes = 0 if _is_outermost(digits[-2:]) else sent_bytes
    if node.target is REDUCE_SCATTER:
        return rearranged_bytes + (sent_bytes if is_cpu else 0)
    return rearranged_bytes + (0 if _is_outermost(digits[:2]) else made_bytes)


def _is_outermost(digit: Sequence[Any]) -> bool:
    dim, outer = digit
    return dim == 0 and outer == 1


def _measure(
    kernel: Kernel,
    rounded: Callable[[int], int],
    workspace_bytes: Callable[[fx.Node], int],
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
    number = {node: i for i, node in enumerate(outputs[: kernel.num_outputs])}
    saved = outputs[kernel.num_outputs :]
    memory.saved = sum(rounded(_size(n)) for n in dict.fromkeys(saved) if n not in number)
    for index, node in enumerate(saved):
        if node in number:
            memory.saved_outputs[number[node]] = ("saved", index) in kernel.weight_sources
    if kernel.backward_input is not None:
        memory.input_grads = _input_gradients(kernel, kernel.backward_input.graph, rounded)
    if kernel.backward_weight is not None:
        given = [n for n in kernel.backward_weight.graph.nodes if n.op == "placeholder"]
        memory.late = sum(
            rounded(_size(node))
            for node, (kind, index) in zip(given, kernel.weight_sources)
            if kind == "handed" or (kind == "saved" and saved[index] not in number)
        )
    return memory


def _input_gradients(
    kernel: Kernel, graph: fx.Graph, rounded: Callable[[int], int]
) -> tuple[_InputGradient, ...]:
    given = [node for node in graph.nodes if node.op == "placeholder"]
    cotangent_of = {
        id(node.meta["val"].untyped_storage()): index
        for node, (kind, index) in zip(given, kernel.input_sources)
        if kind == "cotangent"
    }
    results: Any = graph.output_node().args[0]
    found, numbers = [], dict[int, int]()
    for node in results[: len(kernel.input_grads)]:
        value = node.meta["val"]
        storage = value.untyped_storage()
        found.append(
            _InputGradient(
                size_bytes=rounded(_size(node)),
                number=numbers.setdefault(id(storage), len(numbers)),
                storage_bytes=rounded(storage.nbytes()),
                cotangent=cotangent_of.get(id(storage)),
                is_contiguous=value.is_contiguous(),
            )
        )
    return tuple(found)


class _Play:
    """One device of the program's pipeline."""

    def __init__(
        self,
        program: RankProgram,
        route: Route,
        kernels: Sequence[_KernelMemory],
        parameter_bytes: Mapping[int, _ParameterBytes],
        num_optimizer_states: int,
        device: DeviceSpec,
    ) -> None:
        self.program = program
        self.device = device
        self.route = route
        self.kernels = kernels
        self.parameter_bytes = parameter_bytes
        self.round = (CPU_ALLOCATOR if device.kind == "cpu" else CUDA_ALLOCATOR).rounded
        self.live: Counter[Category] = Counter()
        self.peak: Counter[Category] = Counter()
        self.peak_at = "start"
        self.holders: dict[Key, set[object]] = {}
        self.sizes: dict[Key, int] = {}
        self.gradients: dict[Key, _Gradient] = {}
        self.late: dict[tuple[int, int], list[_Buffer]] = {}
        self.remaining = self.route.contributions.copy()
        self.scattering: deque[tuple[int, int]] = deque()
        self.parameter_of = {p.value: p for p in program.parameters}
        for p in program.parameters:
            if route.device in p.devices:
                stored = parameter_bytes[p.value].stored
                self.live[Category.PARAMETERS] += stored
                if p.trainable:
                    self.live[Category.OPTIMIZER_STATE] += stored * num_optimizer_states
        for b in program.buffers:
            self.live[Category.BUFFERS] += self.round(math.prod(b.shape) * b.dtype.itemsize)
        for block in program.blocks:
            if block.role is Role.FIXED:  # computed once, kept for all steps
                made = _made_bytes(program.kernels[block.kernel].forward.graph, self.round)
                self.live[Category.BUFFERS] += made
        for i in program.inputs:
            size = self.round(_part_bytes(program, i.shape, i.placements, i.dtype.itemsize))
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
                    sent = self.gradients.pop((microbatch, value), None)  # to the stage before
                    if sent is not None:
                        self._drop(sent.buffer)
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
        taken = [
            self._take((microbatch, block.interface.outputs[i]), kernel.output_metas[i].size_bytes)
            for i in kernel.cotangents
        ]
        self._at(f"I {block.name}", memory.workspace.get("I", 0))
        made: dict[int, _Buffer] = {}
        for operand, gradient in zip(kernel.input_grads, memory.input_grads):
            if gradient.cotangent is None:
                buffer = made.setdefault(gradient.number, _Buffer(gradient.storage_bytes))
            else:
                buffer = taken[gradient.cotangent]
            key = (microbatch, block.interface.inputs[operand])
            self._accumulate(key, gradient, buffer, f"I {block.name}")
        has_w = kernel.backward_weight is not None
        kept = set(self._operands(position, microbatch, kernel.weight_sources)) if has_w else set()
        for key, category in [*self._operands(position, microbatch, kernel.input_sources)]:
            if (key, category) not in kept:
                self._release(key, (microbatch, position), category)
        self._release_outputs(position, microbatch, for_weight=False)
        self.live[Category.ACTIVATIONS] += memory.late - memory.saved
        needed = {index for kind, index in kernel.weight_sources if kind == "cotangent"}
        self.late[microbatch, position] = [taken[index] for index in needed if has_w]
        for index, buffer in enumerate(taken):
            if not has_w or index not in needed:
                self._drop(buffer)

    def _weight(self, position: int, microbatch: int) -> None:
        block = self.program.blocks[position]
        kernel, memory = self.program.kernels[block.kernel], self.kernels[block.kernel]
        if kernel.backward_weight is None:
            return
        self._at(f"W {block.name}", memory.workspace["W"])
        for key, category in [*self._operands(position, microbatch, kernel.weight_sources)]:
            self._release(key, (microbatch, position), category)
        self._release_outputs(position, microbatch, for_weight=True)
        self.live[Category.ACTIVATIONS] -= memory.late
        for buffer in self.late.pop((microbatch, position), ()):
            self._drop(buffer)
        if kernel.cotangents:
            num_inputs = len(block.interface.inputs)
            values = [block.interface.parameters[o - num_inputs] for o in kernel.weight_grads]
            self._reduce([v for v in values if self._contribute(v)], block.name)

    def _release_outputs(self, position: int, microbatch: int, *, for_weight: bool) -> None:
        """Outputs that the block had saved, once I is done or, those that W needs, W."""
        block = self.program.blocks[position]
        for index, is_for_weight in self.kernels[block.kernel].saved_outputs.items():
            if is_for_weight == for_weight:
                key = (microbatch, block.interface.outputs[index])
                self._release(key, (microbatch, position), Category.ACTIVATIONS)

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
        a few are on their way at a time. Small ones are joined, which copies them.

        On gloo each has as much that is received, and the part is made in the end; elsewhere the
        part is what is received.
        """
        found = [self.parameter_bytes[v] for v in values if self.parameter_of[v].kernel is not None]
        copied = sum(size.used for size in found if size.used <= size.stored)
        whole = [size for size in found if size.used > size.stored]
        joined = [size for size in whole if size.used <= ALONE_BYTES]
        alone = [[size] for size in whole if size.used > ALONE_BYTES]
        for sizes in [joined, *alone] if joined else alone:
            sent, made = sum(size.used for size in sizes), 0
            if self.device.kind == "cpu":
                sent, made = 2 * sent, sum(size.stored for size in sizes)
            self.scattering.append((sent, made))
            self.live[Category.COMMUNICATION] += sent
            self.live[Category.GRADIENTS] -= made
        beside = sum(size.used for size in joined) if len(joined) > 1 else 0
        self._at(f"G {name}", copied + beside)
        while len(self.scattering) > MAX_SCATTERS:
            sent, made = self.scattering.popleft()
            self.live[Category.GRADIENTS] += made
            self._at(f"G {name}", copied)
            self.live[Category.COMMUNICATION] -= sent

    def _take(self, key: Key, size_bytes: int) -> _Buffer:
        """The gradient of a block's output, as the block's I reads it.

        What came from another device, or zeros, is made now; of a part that does not lie in one
        piece a copy.
        """
        found = self.gradients.pop(key, None)
        if found is not None and found.is_contiguous:
            return found.buffer
        copy = self._keep(_Buffer(self.round(size_bytes)))
        if found is not None:
            self._drop(found.buffer)
        return copy

    def _accumulate(self, key: Key, made: _InputGradient, buffer: _Buffer, where: str) -> None:
        """The first part of a gradient is kept as it is; a sum is new memory."""
        known, new = self.gradients.get(key), _Gradient(self._keep(buffer), made.is_contiguous)
        if known is not None:
            total = _Gradient(self._keep(_Buffer(made.size_bytes)))
            self._at(where, 0)
            self._drop(known.buffer)
            self._drop(new.buffer)
            new = total
        self.gradients[key] = new

    def _keep(self, buffer: _Buffer) -> _Buffer:
        if not buffer.num_holders:
            self.live[Category.ACTIVATIONS] += buffer.size_bytes
        buffer.num_holders += 1
        return buffer

    def _drop(self, buffer: _Buffer) -> None:
        buffer.num_holders -= 1
        if not buffer.num_holders:
            self.live[Category.ACTIVATIONS] -= buffer.size_bytes


def _made_bytes(graph: fx.Graph, rounded: Callable[[int], int]) -> int:
    """Of a graph's results, those that lie in no memory of its operands."""

    def storages(nodes: Iterable[Any]) -> dict[int, int]:
        values = [n.meta["val"] for n in nodes if isinstance(n.meta.get("val"), Tensor)]
        found = [value.untyped_storage() for value in values]
        return {id(storage): rounded(storage.nbytes()) for storage in found}

    results: Any = graph.output_node().args[0]
    given = storages(node for node in graph.nodes if node.op == "placeholder")
    return sum(size for key, size in storages(results).items() if key not in given)


def _size(node: fx.Node) -> int:
    value = node.meta.get("val")
    return _bytes(value) if isinstance(value, Tensor) else 0


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
