"""The frozen types of a lowered program, from one tensor to everything that a rank runs.

A `RankProgram` has one `Kernel` (F, I and W graphs) per distinct block and per distinct parameter
redistribution, and the blocks, parameters, buffers, inputs and outputs that use them; its
`Pipeline` gives the stage of each block and the order in which the stages run. The other files of
this folder build them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import torch
from torch import Tensor, fx

from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placement, Placements, State, format_placements
from autopar.ir.random_ops import is_random
from autopar.ir.update import Clipping
from autopar.lowering.printing import collective_nodes, format_graph
from autopar.schedules import PipelineShape, Schedule

GraphPhase = Literal["F", "I", "W"]

NO_STAGE = -1
"""The stage of blocks that every device runs by itself: fixed values and totals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    """Shape, strides and dtype of one local tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> TensorMeta:
        return TensorMeta(
            shape=tuple(tensor.shape), stride=tuple(tensor.stride()), dtype=tensor.dtype
        )

    @staticmethod
    def contiguous(shape: Sequence[int], dtype: torch.dtype) -> TensorMeta:
        stride, step = [], 1
        for size in reversed(shape):
            stride.append(step)
            step *= max(size, 1)
        return TensorMeta(shape=tuple(shape), stride=tuple(reversed(stride)), dtype=dtype)

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightStep:
    """A part of W that runs by itself, so that its gradients are released before the next part.

    ``sources``: its arguments among those of W and the results of the first step, if that has no
    ``grads``. ``grads``: the operands whose gradients it computes, all of them or ``rows`` (first,
    end) of one. ``released``: the operands that no later step reads.
    """

    module: fx.GraphModule
    sources: tuple[int, ...]
    grads: tuple[int, ...]
    rows: tuple[int, int] | None = None
    released: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledGraph:
    """A graph of a kernel whose regions are compiled: its phase (F, I or W), and for each region
    the operands of its function (`autopar.lowering.regions`)."""

    phase: GraphPhase
    operands: tuple[tuple[TensorMeta, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """The three graphs of one kind of block, and the values passed between them.

    ``forward(*operands) -> (*outputs, *saved)``. ``backward_input(*saved_i, *cotangents_i) ->
    (*input_grads, *handed)`` and ``backward_weight(*saved_w, *cotangents_w, *handed) ->
    weight_grads``, where each ``*_sources`` lists where an argument comes from: ``("operand", i)``,
    ``("saved", i)``, ``("cotangent", i)`` or ``("handed", i)``. Gradients are listed for the
    operands named in ``input_grads`` and ``weight_grads``. ``weight_steps`` compute the results of
    ``backward_weight`` one after the other; none if it runs as a whole. ``compiled``: the graphs
    that a device compiles; the others, and all steps of W, run op by op.
    """

    forward: fx.GraphModule
    backward_input: fx.GraphModule | None
    backward_weight: fx.GraphModule | None
    num_outputs: int
    output_metas: tuple[TensorMeta, ...]
    cotangents: tuple[int, ...]
    input_sources: tuple[tuple[str, int], ...]
    weight_sources: tuple[tuple[str, int], ...]
    input_grads: tuple[int, ...]
    weight_grads: tuple[int, ...]
    weight_steps: tuple[WeightStep, ...] = ()
    compiled: tuple[CompiledGraph, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockInterface:
    """Values that enter and leave a block, in order. ``parameters`` are the last of ``inputs``."""

    inputs: tuple[int, ...]
    parameters: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterProgram:
    """One parameter: its placements in storage and in blocks, and the kernel between the two.

    It is stored in ``dtype``, blocks read it in ``used_dtype``, and their gradients are summed in
    ``reduced_dtype``. What the kernel makes is kept until the step's last use, or with
    ``released`` made again for each pass. Its gradient is accumulated over the micro-batches as
    blocks make it, or ``scattered`` in each and accumulated as it is stored. ``devices``: the
    devices of the pipeline that hold it, each a copy of its own.
    """

    value: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    used_dtype: torch.dtype
    reduced_dtype: torch.dtype
    stored: Placements
    used: Placements
    trainable: bool
    kernel: int | None
    released: bool = False
    scattered: bool = False
    devices: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferProgram:
    """One buffer or constant, replicated; ``following`` is its value after a step.

    ``device`` is the pipeline device that updates it, and so holds its current value; where several
    replicas of a stage do, each with other micro-batches, ``shared`` lists their devices.
    ``factor``: a step multiplies the buffer by it and adds a value that depends on the batch alone;
    None if no such factor is known.
    """

    value: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    following: OutputProgram | None
    device: int = 0
    shared: tuple[int, ...] = ()
    factor: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputProgram:
    """One tensor input and the shard of it that a rank reads.

    ``microbatch`` is the split into micro-batches, ``placements`` that of one micro-batch.
    """

    value: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: Placements
    microbatch: Placement | None = None

    def part(self, num_microbatches: int) -> tuple[int, ...]:
        """Global shape of one micro-batch."""
        shape = list(self.shape)
        if self.microbatch is not None:
            shape[self.microbatch.dim] //= num_microbatches
        return tuple(shape)

    def num_shards(self, dim: int, mesh: Mesh) -> int:
        """Into how many shards the devices of ``mesh`` split a dimension."""
        sizes = zip(self.placements, mesh.axis_sizes)
        return math.prod(n for p, n in sizes if p.state is State.SHARD and p.dim == dim)


class Role(StrEnum):
    """When a block runs: in every micro-batch, once for all steps, or before each step."""

    EVERY = "every"
    FIXED = "fixed"
    TOTALS = "totals"

    @property
    def has_stage(self) -> bool:
        """Whether the block belongs to a stage; the others run on every device by themselves."""
        return self is Role.EVERY


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProgram:
    """One block: its kernel and the values that it reads and produces.

    ``locations``: file and line in the user's code, by op. Equal blocks share a kernel, whose nodes
    carry the position of their op in the block (``op_place``).
    """

    name: str
    kernel: int
    interface: BlockInterface
    role: Role
    locations: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputProgram:
    """One value that leaves the program, and the kernel that replicates it, if it needs one.

    ``devices``: the pipeline devices that can compute it; None if all can.
    """

    value: int
    kernel: int | None
    meta: TensorMeta
    devices: tuple[int, ...] | None = (0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """The messages between a stage and the next one, for one micro-batch on one rank.

    ``values`` are sent in this order; ``gradients`` are those of them whose gradients come back.
    ``metas`` and ``gradient_metas`` are their local shapes; all are sent as contiguous tensors.
    """

    values: tuple[int, ...]
    metas: tuple[TensorMeta, ...]
    gradients: tuple[int, ...]
    gradient_metas: tuple[TensorMeta, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes that one rank sends to the next stage for one micro-batch."""
        return sum(meta.size_bytes for meta in self.metas)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The stages of a program and the schedule that runs them.

    ``stage_of_block`` has a stage for each block of the program, or `NO_STAGE`. ``boundaries`` has
    one entry per stage except the last. The schedule's sends and receives are explicit.
    """

    schedule: Schedule
    stage_of_block: tuple[int, ...]
    boundaries: tuple[Boundary, ...]

    @property
    def shape(self) -> PipelineShape:
        return self.schedule.shape

    @property
    def num_devices(self) -> int:
        return self.shape.num_devices


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyUpdate:
    """Parameters are updated within the backward pass, as soon as their gradients are complete and
    no later action of the step reads them.

    ``at_end``: the trained parameters that are updated after the step nevertheless. Gradients are
    released by their update unless it ``keeps_gradients``, and clipped before it by the norm that
    ``clipping`` says. If it ``overlaps``, a device that has streams updates on a second one, while
    the next gradients are computed; these updates hold at most what one of them uses.
    """

    at_end: frozenset[int]
    overlaps: bool = True
    keeps_gradients: bool = False
    clipping: Clipping | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """One collective: ``phase`` F (forward), I, W, or G (gradient of a parameter)."""

    phase: str
    where: str
    kind: str
    axes: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """Everything a rank runs in one step; see the module's docstring.

    ``mesh`` is the mesh of one pipeline device: ranks are numbered device by device. ``totals`` are
    values summed over the micro-batches before the first one is computed. ``early`` is None if
    parameters are updated after the backward pass.
    """

    mesh: Mesh
    num_microbatches: int
    totals: tuple[OutputProgram, ...]
    kernels: tuple[Kernel, ...]
    blocks: tuple[BlockProgram, ...]
    parameters: tuple[ParameterProgram, ...]
    buffers: tuple[BufferProgram, ...]
    inputs: tuple[InputProgram, ...]
    loss: OutputProgram | None
    outputs: tuple[OutputProgram, ...]
    constants: tuple[tuple[str, Tensor], ...]
    device_type: str
    fingerprint: str
    pipeline: Pipeline
    early: EarlyUpdate | None = None

    @property
    def num_ranks(self) -> int:
        """Ranks of all devices of the pipeline together."""
        return self.pipeline.num_devices * self.mesh.num_devices

    @property
    def is_random(self) -> bool:
        """Whether an operator draws random numbers, so that a step restores the generators."""
        graphs = (kernel.forward.graph for kernel in self.kernels)
        return any(is_random(node) for graph in graphs for node in graph.nodes)

    def place(self, rank: int) -> tuple[int, int]:
        """The pipeline device of ``rank``, and its position on the mesh."""
        return divmod(rank, self.mesh.num_devices)

    def collectives(self) -> tuple[CollectiveCall, ...]:
        """Every collective of one training step, in order of phase and block."""
        return tuple(collectives_of(self))

    def __str__(self) -> str:
        return format_program(self)


def graphs_of(kernel: Kernel) -> Iterator[tuple[GraphPhase, fx.GraphModule]]:
    yield "F", kernel.forward
    if kernel.backward_input is not None:
        yield "I", kernel.backward_input
    if kernel.backward_weight is not None:
        yield "W", kernel.backward_weight


def collectives_of(program: RankProgram) -> Iterator[CollectiveCall]:
    def of(module: fx.GraphModule, phase: str, where: str) -> Iterator[CollectiveCall]:
        for node in collective_nodes(module):
            source: Any = node.args[0]
            largest = max((node.meta["val"], source.meta["val"]), key=Tensor.numel)
            yield CollectiveCall(
                phase=phase,
                where=where,
                kind=str(node.target).split(".")[1],
                axes=str(node.args[1]),
                size_bytes=largest.numel() * largest.element_size(),
            )

    for parameter in program.parameters:
        if parameter.kernel is not None:
            yield from of(program.kernels[parameter.kernel].forward, "F", parameter.name)
    for block in program.blocks:
        yield from of(program.kernels[block.kernel].forward, "F", block.name)
    again = {p.value: p for p in program.parameters if p.released}
    for block in reversed(program.blocks):
        for p in [again.pop(v) for v in read_back(program, block) if v in again]:
            if p.kernel is not None:
                yield from of(program.kernels[p.kernel].forward, "I", p.name)
        for phase, module in graphs_of(program.kernels[block.kernel]):
            if phase != "F":
                yield from of(module, phase, block.name)
    for parameter in reversed(program.parameters):
        if parameter.kernel is not None and parameter.trainable:
            backward = program.kernels[parameter.kernel].backward_input
            if backward is not None:
                yield from of(backward, "G", parameter.name)


def read_back(program: RankProgram, block: BlockProgram) -> tuple[int, ...]:
    """The parameters that a block's backward pass reads."""
    kernel, interface = program.kernels[block.kernel], block.interface
    if not kernel.cotangents:
        return ()
    sources = {*kernel.input_sources, *kernel.weight_sources}
    first = len(interface.inputs)
    read = sorted(i - first for kind, i in sources if kind == "operand" and i >= first)
    return tuple(dict.fromkeys(interface.parameters[i] for i in read))


def format_program(program: RankProgram) -> str:
    """The program as text: parameters, blocks, then the distinct kernels' graphs."""
    lines = [f"program on mesh {program.mesh} ({program.device_type})", "", "parameters"]
    for p in program.parameters:
        via = "" if p.kernel is None else f"  by kernel {p.kernel}"
        via += ", released after forward" * p.released
        via += ", scattered in every micro-batch" * p.scattered
        lines.append(
            f"  {p.name} {list(p.shape)}: stored {format_placements(p.stored)}, "
            f"used {format_placements(p.used)}{via}"
        )
    stages = program.pipeline.stage_of_block
    lines += ["", "blocks"]
    lines += [
        f"  {i} {b.name}: kernel {b.kernel}" + (f", stage {s}" if s > 0 else "")
        for i, (b, s) in enumerate(zip(program.blocks, stages))
    ]
    if program.pipeline.shape.num_stages > 1:
        lines += ["", *_pipeline_lines(program.pipeline)]
    for number, kernel in enumerate(program.kernels):
        for phase, module in graphs_of(kernel):
            lines += ["", f"kernel {number} {phase}"]
            lines += [f"  {line}" for line in format_graph(module)]
    return "\n".join(lines)


def _pipeline_lines(pipeline: Pipeline) -> list[str]:
    lines = ["pipeline"]
    for stage, boundary in enumerate(pipeline.boundaries):
        sent = ", ".join(f"{str(m.dtype)[6:]}{list(m.shape)}" for m in boundary.metas)
        back = len(boundary.gradients)
        lines.append(f"  stage {stage} to {stage + 1}: {sent or 'nothing'}; {back} gradients back")
    return lines + [f"  {line}" for line in str(pipeline.schedule).splitlines()]
