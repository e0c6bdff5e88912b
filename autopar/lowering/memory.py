"""Peak memory of a rank program, counted by playing one training step over its graphs.

Nothing is guessed: every value lives from the block that makes it to the last one that reads it,
forward or backward; saved values live until their block's backward pass; gradients accumulate; and
inside each graph the peak is found by liveness.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor, fx

from autopar.cost_models.memory import CPU_ALLOCATOR, CUDA_ALLOCATOR, Category, graph_memory
from autopar.lowering.differentiate import Kernel, TensorMeta
from autopar.lowering.program import BlockProgram, ParameterProgram, RankProgram
from autopar.placement import Placements, local_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramMemory:
    """Bytes on one device at the peak of a step, by category, and where the peak is."""

    by_category: dict[str, int]
    peak_at: str

    @property
    def peak_bytes(self) -> int:
        return sum(self.by_category.values())


def program_memory(program: RankProgram, *, num_optimizer_states: int) -> ProgramMemory:
    """Memory of one training step in the conventional order."""
    return _Play(program, num_optimizer_states).run()


@dataclass(slots=True)
class _KernelMemory:
    """Working bytes of each graph of a kernel beyond its inputs, and what it saves."""

    workspace: dict[str, int] = field(default_factory=dict)
    saved: int = 0


class _Play:
    def __init__(self, program: RankProgram, num_optimizer_states: int) -> None:
        self.program = program
        allocator = CPU_ALLOCATOR if program.device_type == "cpu" else CUDA_ALLOCATOR
        self.round = allocator.rounded
        self.live: Counter[Category] = Counter()
        self.peak: Counter[Category] = Counter()
        self.peak_at = "start"
        self.kernels = [self._measure(k) for k in program.kernels]
        self.holders: dict[int, set[object]] = {}
        self.sizes: dict[int, int] = {}
        self.parameter_of = {p.value: p for p in program.parameters}
        for p in program.parameters:
            stored = self._bytes(p.shape, p.stored, p.dtype.itemsize)
            self.live[Category.PARAMETERS] += stored
            if p.trainable:
                self.live[Category.OPTIMIZER_STATE] += stored * num_optimizer_states
        for b in program.buffers:
            self.live[Category.BUFFERS] += self.round(math.prod(b.shape) * b.dtype.itemsize)
        for i in program.inputs:
            self.live[Category.INPUTS] += self._bytes(i.shape, i.placements, i.dtype.itemsize)

    def _bytes(self, shape: tuple[int, ...], placements: Placements, itemsize: int) -> int:
        return self.round(math.prod(local_shape(shape, placements, self.program.mesh)) * itemsize)

    def _measure(self, kernel: Kernel) -> _KernelMemory:
        memory = _KernelMemory()
        graphs = {"F": kernel.forward, "I": kernel.backward_input, "W": kernel.backward_weight}
        for phase, module in graphs.items():
            if module is None:
                continue
            inputs = sum(self.round(_size(n)) for n in module.graph.nodes if n.op == "placeholder")
            found = graph_memory(module.graph)
            memory.workspace[phase] = max(found.peak_bytes - inputs, 0)
        outputs = list(kernel.forward.graph.output_node().args[0])  # type: ignore[arg-type]
        made = set(outputs[: kernel.num_outputs])
        memory.saved = sum(
            self.round(_size(n)) for n in dict.fromkeys(outputs[kernel.num_outputs :])
            if n not in made
        )  # fmt: skip
        return memory

    def _at(self, where: str, working: int) -> None:
        now = self.live.copy()
        now[Category.WORKSPACE] += working
        if sum(now.values()) > sum(self.peak.values()):
            self.peak, self.peak_at = now, where

    def _hold(self, value: int, holder: object, size: int, category: Category) -> None:
        holders = self.holders.setdefault(value, set())
        if not holders:
            self.sizes[value] = size
            self.live[category] += size
        holders.add(holder)

    def _release(self, value: int, holder: object, category: Category) -> None:
        holders = self.holders.get(value)
        if holders and holder in holders:
            holders.discard(holder)
            if not holders:
                self.live[category] -= self.sizes.pop(value)

    def run(self) -> ProgramMemory:
        for position, block in enumerate(self.program.blocks):
            self._forward(position, block)
        for position in reversed(range(len(self.program.blocks))):
            self._backward(position, self.program.blocks[position])
        return ProgramMemory(
            by_category={str(c): v for c, v in sorted(self.peak.items()) if v},
            peak_at=self.peak_at,
        )

    def _forward(self, position: int, block: BlockProgram) -> None:
        kernel, memory = self.program.kernels[block.kernel], self.kernels[block.kernel]
        for value in block.interface.parameters:
            self._fetch(self.parameter_of[value])
        self._at(f"F {block.name}", memory.workspace["F"])
        for value, meta in zip(block.interface.outputs, kernel.output_metas):
            self._hold(value, "env", self.round(meta.size_bytes), Category.ACTIVATIONS)
        self.live[Category.ACTIVATIONS] += memory.saved
        sources = (*kernel.input_sources, *kernel.weight_sources)
        kept = {i for kind, i in sources if kind == "operand"}
        for index, value in enumerate(block.interface.inputs):
            if index in kept and value in self.sizes:
                self._hold(value, position, 0, Category.ACTIVATIONS)
        for index, value in enumerate(block.interface.parameters, len(block.interface.inputs)):
            if index in kept and value in self.sizes:
                self._hold(value, position, 0, Category.COMMUNICATION)
        for value in (*block.interface.inputs, *block.interface.outputs):
            if not self._used_after(value, position):
                self._release(value, "env", Category.ACTIVATIONS)
        for value in block.interface.parameters:
            if self.parameter_of[value].last_block == position:
                self._release(value, "env", Category.COMMUNICATION)

    def _fetch(self, parameter: ParameterProgram) -> None:
        if parameter.kernel is not None and parameter.value not in self.sizes:
            size = self._bytes(parameter.shape, parameter.used, parameter.dtype.itemsize)
            self._hold(parameter.value, "env", size, Category.COMMUNICATION)

    def _used_after(self, value: int, position: int) -> bool:
        return any(value in b.interface.inputs for b in self.program.blocks[position + 1 :])

    def _backward(self, position: int, block: BlockProgram) -> None:
        kernel, memory = self.program.kernels[block.kernel], self.kernels[block.kernel]
        working = max((memory.workspace.get(p, 0) for p in ("I", "W")), default=0)
        self._at(f"B {block.name}", working + self._cotangent_bytes(kernel))
        for value in block.interface.parameters:
            parameter = self.parameter_of[value]
            if parameter.first_block == position and parameter.trainable:
                self.live[Category.GRADIENTS] += self._gradient_bytes(parameter)
            self._release(value, position, Category.COMMUNICATION)
        self.live[Category.ACTIVATIONS] -= memory.saved
        for value in block.interface.inputs:
            self._release(value, position, Category.ACTIVATIONS)

    def _gradient_bytes(self, parameter: ParameterProgram) -> int:
        """As it is stored; while micro-batches are accumulated, as it is used."""
        timed = self.program.num_microbatches > 1
        placements = parameter.used if timed else parameter.stored
        return self._bytes(parameter.shape, placements, parameter.dtype.itemsize)

    def _cotangent_bytes(self, kernel: Kernel) -> int:
        metas: list[TensorMeta] = [kernel.output_metas[i] for i in kernel.cotangents]
        return sum(self.round(m.size_bytes) for m in metas)


def _size(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0
