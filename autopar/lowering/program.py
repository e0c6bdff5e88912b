"""Lower a strategy to the program that every rank runs.

The program is the same on all ranks: collectives name mesh axes, and a rank's own position enters
only when the runtime binds it. It has one kernel (F, I and W graphs) per distinct block and per
distinct parameter redistribution, and lists of the blocks and parameters that use them.
``print(program)`` shows it; ``program.collectives()`` lists its communication.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch

from autopar.base.errors import CaptureError, PlanError, first_line
from autopar.base.spelling import did_you_mean
from autopar.base.torch_private import data_dependent_errors
from autopar.ir.block_names import FIXED, TOTALS
from autopar.ir.graph import Block, Graph, Value, ValueKind
from autopar.ir.placement import Placement, Placements, R, State, local_shape
from autopar.lowering.accumulate import before_sums, spans_microbatches
from autopar.lowering.differentiate import trace_joint
from autopar.lowering.joint import Joint
from autopar.lowering.pipeline import forward_schedule, serial_pipeline, serial_schedule
from autopar.lowering.printing import collective_nodes, operator_name
from autopar.lowering.redistribution import Redistribution, redistribution_kernel
from autopar.lowering.shard import block_function, block_interface, block_signature, last_uses
from autopar.lowering.types import (
    BlockInterface,
    BlockProgram,
    BufferProgram,
    InputProgram,
    Kernel,
    OutputProgram,
    ParameterProgram,
    RankProgram,
    Role,
    TensorMeta,
    graphs_of,
)
from autopar.passes.batch_norm import carried_factor
from autopar.schedules import Schedule
from autopar.sharding.strategy import Strategy

_NOTHING: Mapping[str, Collection[str]] = MappingProxyType({})


def lower(
    strategy: Strategy,
    *,
    device_type: str = "cpu",
    training: bool = True,
    blocks: tuple[Block, ...] | None = None,
    kept: Mapping[str, Collection[str]] = _NOTHING,
    may_join: bool = False,
    traces: Traces | None = None,
) -> RankProgram:
    """Lower ``strategy``; without ``training``, only forward graphs that keep all outputs.

    ``blocks``: contiguous runs of the graph's ops, in place of its own blocks. ``kept``: for each
    block that recomputes, the values that it keeps (`autopar.lowering.joint`). ``may_join``: the
    schedule runs nothing between I and W of a block, so blocks that recompute may join them.
    ``traces``: those of earlier programs of this strategy and these blocks; new ones are added.
    """
    traces = Traces() if traces is None else traces
    return _Lowering(
        strategy, torch.device(device_type), training, blocks, kept, may_join, traces
    ).lower()


@dataclass(slots=True)
class Traces:
    """The joint graphs of one strategy's blocks, to lower it again with other recomputation.

    By signature, and by the block's name. ``over_time``: with several micro-batches, the strategy
    with the axis in time.
    """

    known: dict[str, Joint] = field(default_factory=dict)
    of_block: dict[str, Joint] = field(default_factory=dict)
    over_time: Strategy | None = None


class _Lowering:
    def __init__(
        self,
        strategy: Strategy,
        device: torch.device,
        training: bool,
        blocks: tuple[Block, ...] | None,
        kept: Mapping[str, Collection[str]],
        may_join: bool,
        traces: Traces,
    ) -> None:
        self.strategy = strategy
        self.graph: Graph = strategy.graph
        if blocks is not None:
            self.graph = replace(self.graph, blocks=blocks)
        self.device = device
        self.training = training
        self.kernels: list[Kernel] = []
        self.known: dict[tuple[Joint, tuple[str, ...] | None], int] = {}
        self.moves: dict[Redistribution, int] = {}
        self.strides: dict[int, tuple[int, ...]] = {}
        self.totals: list[OutputProgram] = []
        self.kept = kept
        self.may_join = may_join
        self.traces = traces

    def lower(self) -> RankProgram:
        graph = self.graph
        kept = self._kept()
        interfaces = self._live_interfaces(kept)
        self._check_names([block.name for block, _ in interfaces])
        blocks = []
        for block, interface in interfaces:
            kernel = self._block_kernel(block, interface)
            for value, meta in zip(interface.outputs, self.kernels[kernel].output_metas):
                self.strides[value] = meta.stride
            blocks.append(
                BlockProgram(
                    name=block.name,
                    kernel=kernel,
                    interface=interface,
                    role=self._role(block),
                    locations=tuple(op.location for op in graph.block_ops(block)),
                )
            )
            self._check_microbatches(block.name, self.kernels[kernel])
        parameters = tuple(self._parameter(v, blocks) for v in graph.parameters)
        loss = None if graph.loss is None else self._output(graph.loss)
        outputs = () if self.training else tuple(self._output(i) for i in graph.outputs)
        buffers = self._buffers()
        return RankProgram(
            mesh=self.strategy.mesh.devices,
            num_microbatches=self.strategy.mesh.num_microbatches,
            totals=tuple(self.totals),
            kernels=tuple(self.kernels),
            blocks=tuple(blocks),
            parameters=parameters,
            buffers=buffers,
            inputs=tuple(self._input(graph.values[i]) for i in graph.inputs),
            loss=loss,
            outputs=outputs,
            constants=graph.constants,
            device_type=self.device.type,
            fingerprint=graph.fingerprint,
            pipeline=serial_pipeline([b.role.has_stage for b in blocks], self._schedule()),
        )

    def _schedule(self) -> Schedule:
        if self.training:
            return serial_schedule(self.strategy.mesh.num_microbatches)
        return forward_schedule((0,))

    def _kept(self) -> frozenset[int]:
        """Values that must leave the program."""
        graph = self.graph
        kept = {new for _, new in graph.mutations} if self.training else set()
        if graph.loss is not None:
            kept.add(graph.loss)
        if not self.training:
            kept.update(graph.outputs)
        return frozenset(kept)

    def _live_interfaces(self, kept: frozenset[int]) -> list[tuple[Block, BlockInterface]]:
        """The live blocks with their interfaces, without outputs that nothing reads."""
        graph = self.graph
        wanted, last_use = set(kept), last_uses(graph)
        result = []
        for block in reversed(graph.blocks):
            interface = block_interface(graph, block, kept, last_use)
            outputs = tuple(o for o in interface.outputs if o in wanted)
            if not outputs:
                continue
            interface = BlockInterface(
                inputs=interface.inputs, parameters=interface.parameters, outputs=outputs
            )
            wanted.update(interface.inputs)
            result.append((block, interface))
        return result[::-1]

    def _meta(self, value: Value) -> TensorMeta:
        shape = local_shape(value.shape, self.strategy.interface(value), self.strategy.mesh)
        plain = TensorMeta.contiguous(shape, value.dtype)
        stride = self.strides.get(value.index, plain.stride)
        return TensorMeta(shape=shape, stride=stride, dtype=value.dtype)

    def _block_kernel(self, block: Block, interface: BlockInterface) -> int:
        joint = self._joint(block, interface)
        kept = self.kept.get(block.name)
        key = joint, None if kept is None else tuple(sorted(kept))
        if key not in self.known:
            try:
                kernel = joint.kernel(kept, may_join=self.may_join and kept is not None)
            except PlanError as error:
                raise PlanError(f"block {block.name!r}: {error}") from error
            if self._role(block) is Role.TOTALS:
                kernel = self._before_sums(interface, kernel)
            self.known[key] = self._add(kernel)
        return self.known[key]

    def _joint(self, block: Block, interface: BlockInterface) -> Joint:
        """The joint graph of a block, traced once for all that have its signature."""
        traces = self.traces
        if block.name not in traces.of_block:
            signature = block_signature(self.strategy, block, interface, self.strides)
            if signature not in traces.known:
                traces.known[signature] = self._traced(block, interface)
            traces.of_block[block.name] = traces.known[signature]
        return traces.of_block[block.name]

    def _traced(self, block: Block, interface: BlockInterface) -> Joint:
        values = [self.graph.values[i] for i in (*interface.inputs, *interface.parameters)]
        try:
            return trace_joint(
                block_function(self.strategy, block, interface, self.device),
                [self._meta(v) for v in values],
                [v.differentiable for v in values],
                [v.kind is ValueKind.PARAMETER for v in values],
                self.device,
                training=self.training,
            )
        except data_dependent_errors() as error:
            dtypes = sorted({str(v.dtype) for v in values})
            raise CaptureError(
                f"block {block.name!r} has an operator whose computation on {self.device.type} "
                f"devices in {', '.join(dtypes)} depends on the data, which cannot be traced: "
                f"{first_line(error)}. Compute it in another dtype, such as precision='bf16', or "
                "write it without reading tensors in Python"
            ) from error

    def _check_names(self, blocks: Sequence[str]) -> None:
        """Raise PlanError for a block that keeps values, but does not exist."""
        for name in self.kept:
            if name not in blocks:
                raise PlanError(f"no block is called {name!r}" + did_you_mean(name, blocks))

    def _role(self, block: Block) -> Role:
        if block.name == TOTALS and self.strategy.mesh.num_microbatches > 1:
            return Role.TOTALS
        return Role.FIXED if block.name == FIXED else Role.EVERY

    def _before_sums(self, interface: BlockInterface, kernel: Kernel) -> Kernel:
        """The kernel of the totals without its sums over micro-batches, which go to ``totals``."""
        forward, summed = before_sums(kernel.forward, self.strategy.mesh.num_microbatches)
        for position, module in summed.items():
            meta = kernel.output_metas[position]
            sums = replace(
                kernel, forward=module, num_outputs=1, output_metas=(meta,), cotangents=()
            )
            self.totals.append(
                OutputProgram(value=interface.outputs[position], kernel=self._add(sums), meta=meta)
            )
        return replace(kernel, forward=forward)

    def _check_microbatches(self, name: str, kernel: Kernel) -> None:
        for _, module in graphs_of(kernel):
            for node in collective_nodes(module):
                if spans_microbatches(node):
                    raise PlanError(
                        f"{name!r} needs several micro-batches at once "
                        f"({operator_name(node)}); use num_microbatches=1"
                    )

    def _add(self, kernel: Kernel) -> int:
        self.kernels.append(kernel)
        return len(self.kernels) - 1

    def _move_kernel(
        self, value: Value, source: Placements, target: Placements, *, differentiable: bool
    ) -> int | None:
        """The kernel of one redistribution outside blocks, or None if the placements are equal."""
        if source == target:
            return None
        wanted = Redistribution.of(
            value, source, target, self.strategy.mesh, differentiable=differentiable
        )
        return self._redistribution(wanted, value.name)

    def _fetch_kernel(self, value: Value, source: Placements, target: Placements) -> int | None:
        """The kernel that brings a parameter from its store to the blocks, and its gradient back;
        None if it is used as it is stored."""
        if source == target and value.mixed is None:
            return None
        wanted = Redistribution.of(
            value, source, target, self.strategy.mesh,
            differentiable=value.differentiable, mixed=value.mixed,
        )  # fmt: skip
        return self._redistribution(wanted, value.name)

    def _redistribution(self, wanted: Redistribution, name: str) -> int:
        if wanted not in self.moves:
            kernel = redistribution_kernel(wanted, self.device, training=self.training)
            self._check_microbatches(name, kernel)
            self.moves[wanted] = self._add(kernel)
        return self.moves[wanted]

    def _parameter(self, value: Value, blocks: Sequence[BlockProgram]) -> ParameterProgram:
        stored = self.strategy.supply(value)
        users = [i for i, b in enumerate(blocks) if value.index in b.interface.parameters]
        used = self.strategy.interface(value) if users else stored
        kernel = self._fetch_kernel(value, stored, used)
        assignment = self.strategy.assignment
        is_gathered = kernel is not None and self.training
        is_scattered = (
            is_gathered
            and value.index in assignment.scattered
            and value.differentiable
            and self.strategy.is_reduce_scattered(value)
            and self.strategy.mesh.num_microbatches > 1
        )
        return ParameterProgram(
            value=value.index,
            name=value.target or value.name,
            shape=value.shape,
            dtype=value.stored_dtype,
            used_dtype=value.dtype,
            reduced_dtype=value.reduced_dtype,
            stored=self._on_devices(stored),
            used=self._on_devices(used),
            trainable=value.differentiable,
            kernel=kernel,
            released=is_gathered and value.index in assignment.released,
            scattered=is_scattered,
        )

    def _buffers(self) -> tuple[BufferProgram, ...]:
        following = dict(self.graph.mutations) if self.training else {}
        return tuple(
            BufferProgram(
                value=v.index,
                name=v.target or v.name,
                shape=v.shape,
                dtype=v.dtype,
                following=self._output(following[v.index]) if v.index in following else None,
                factor=carried_factor(self.graph, v.index) if v.index in following else None,
            )
            for v in (*self.graph.buffers, *self.graph.of_kind(ValueKind.CONSTANT))
        )

    def _on_devices(self, placements: Placements) -> Placements:
        """The placements without the micro-batch axis."""
        return placements[-self.strategy.mesh.devices.num_axes :]

    def _input(self, value: Value) -> InputProgram:
        mesh, placements = self.strategy.mesh, self.strategy.supply(value)
        microbatch = placements[0] if mesh.num_microbatches > 1 else R
        placements = self._on_devices(placements)
        if microbatch.state is State.SHARD:
            placements = tuple(_inside(p, microbatch, mesh.num_microbatches) for p in placements)
        return InputProgram(
            value=value.index,
            name=value.name,
            shape=value.shape,
            dtype=value.dtype,
            placements=placements,
            microbatch=microbatch if microbatch.state is State.SHARD else None,
        )

    def _output(self, index: int) -> OutputProgram:
        value = self.graph.values[index]
        strategy = self.strategy
        is_parameter = value.kind is ValueKind.PARAMETER  # handed out as it is stored
        source = strategy.supply(value) if is_parameter else strategy.interface(value)
        kernel = self._move_kernel(value, source, strategy.replicated, differentiable=False)
        meta = TensorMeta.contiguous(value.shape, value.dtype)
        return OutputProgram(value=index, kernel=kernel, meta=meta)


def _inside(placement: Placement, cut: Placement, num: int) -> Placement:
    """A placement of the whole tensor as a placement of one part of ``cut``."""
    if placement.state is not State.SHARD or placement.dim != cut.dim:
        return placement
    behind = placement.outer >= cut.outer * num
    return placement._replace(outer=placement.outer // num) if behind else placement
