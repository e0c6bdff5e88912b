"""Price every choice of every op, and every move between placements, on one mesh.

An op costs its forward and backward at its local shapes and the communication inside it, a
parameter its update, an input its copy to the device, and a move its collectives both ways. Ops of
the same kind (operator, arguments, shapes) share one table, and equal moves one matrix, so a model
of identical layers costs what its distinct layers cost.

Of a step in micro-batches everything is priced at the size of one, as often as it runs: ops and
moves in each, also the fetch of a parameter from where it is stored; its gradient is added up and
reduced once.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from autopar.comm.ops import ALONE_BYTES
from autopar.cost_models import (
    Cluster,
    CommunicationModel,
    ComputeModel,
    CostError,
    OpEstimate,
    Source,
)
from autopar.cost_models.estimate import Estimate, weakest
from autopar.cost_models.update import FUSED_ADAMW, OptimizerSpec, adamw, update_call
from autopar.ir.graph import Graph, Op, Value, ValueKind
from autopar.ir.mesh import Mesh
from autopar.ir.placement import (
    Placements,
    R,
    State,
    Step,
    StepKind,
    V,
    local_shape,
    redistribute,
)
from autopar.pricing.local_calls import LocalCall, local_calls, split_placements
from autopar.rules import Choice, Space, enumerate_choices, rule_of
from autopar.rules.base import Layout, padded_dims
from autopar.rules.kernels import Phase
from autopar.sharding.microbatches import Microbatches
from autopar.sharding.strategy import Analysis

Array = np.ndarray[Any, np.dtype[np.float64]]

_COMPARED_BYTES = 1 << 20
"""Of a reduction by which groups are compared."""


@dataclass(frozen=True, eq=False, slots=True)
class PlacementTable:
    """The distinct placements of one operand over a node's choices, and which choice has which."""

    distinct: tuple[Placements, ...]
    index: np.ndarray[Any, np.dtype[np.intp]]

    @staticmethod
    def of(placements: Sequence[Placements]) -> PlacementTable:
        distinct = tuple(dict.fromkeys(placements))
        number = {p: i for i, p in enumerate(distinct)}
        return PlacementTable(distinct, np.array([number[p] for p in placements], dtype=np.intp))


@dataclass(frozen=True, eq=False, slots=True)
class OpTable:
    """All choices of one kind of op with what they need, supply and cost."""

    choices: tuple[Choice, ...]
    needs: tuple[PlacementTable, ...]
    supplies: tuple[PlacementTable, ...]
    estimates: tuple[OpEstimate, ...]
    internal_s: Array
    cost_s: Array


@dataclass(frozen=True, eq=False, slots=True)
class ValueTable:
    """All placements of one stored or relayed value, with their own cost."""

    placements: PlacementTable
    cost_s: Array
    memory_bytes: Array


class Pricing:
    """The tables of one graph on one mesh of one cluster.

    ``held`` says of some stored values where they lie already: they have no other choice.
    ``optimizer`` is by default AdamW.
    """

    def __init__(
        self,
        analysis: Analysis,
        mesh: Mesh,
        cluster: Cluster,
        compute: ComputeModel,
        communication: CommunicationModel,
        microbatches: Microbatches | None = None,
        *,
        held: Mapping[int, Placements] | None = None,
        optimizer: OptimizerSpec | None = None,
    ) -> None:
        self.analysis = analysis
        self.microbatches = microbatches
        self.num_microbatches = 1 if microbatches is None else microbatches.num
        self.timed = mesh if microbatches is None else microbatches.mesh_of(mesh)
        self.graph = analysis.graph
        self.mesh = mesh
        self.cluster = cluster
        self.compute = compute
        self.communication = communication
        self.held = held or {}
        self.optimizer = optimizer or adamw(cluster.device)
        self.unpriced: dict[str, str] = {}
        self.communication_sources: set[Source] = set()
        self.communication_is_noisy = False
        self._op_tables: dict[Any, OpTable] = {}
        self._value_tables: dict[Any, ValueTable] = {}
        self._move_costs: dict[Any, tuple[float, float]] = {}
        self._move_matrices: dict[Any, Array] = {}
        self.num_joined = _num_joined(analysis.graph)
        self._group = slowest_groups(communication, mesh)

    def op_table(self, op: Op) -> OpTable:
        """The table of an op's kind."""
        cut = self.microbatches
        key = (self.analysis.kinds[op.index], None if cut is None else cut.splits[op.index])
        if key not in self._op_tables:
            self._op_tables[key] = self._make_op_table(op)
        return self._op_tables[key]

    def _make_op_table(self, op: Op) -> OpTable:
        space = self.analysis.spaces[op.index]
        choices = enumerate_choices(space, self.mesh, self.analysis.bases[op.index])
        if (cut := self.microbatches) is not None:
            choices = tuple(c for c in choices if cut.allows(op.index, c, self.mesh))
        needs = [self.analysis.needs(op, c, self.mesh) for c in choices]
        supplies = [self.analysis.supplies(op, c, self.mesh) for c in choices]
        timed = [self._timed(op, c) for c in choices]
        estimates = tuple(self._estimate(op, choice) for choice in timed)
        internal = np.array([self._internal(op, space, choice) for choice in timed])
        return OpTable(
            choices=choices,
            needs=tuple(PlacementTable.of([n[i] for n in needs]) for i in range(len(op.inputs))),
            supplies=tuple(
                PlacementTable.of([s[i] for s in supplies]) for i in range(len(op.outputs))
            ),
            estimates=estimates,
            internal_s=internal,
            cost_s=np.array([e.total_s for e in estimates]) + internal,
        )

    def _timed(self, op: Op, choice: Choice) -> Choice:
        """The choice on the mesh with the axis in time: what the op computes of one micro-batch."""
        cut = self.microbatches
        return choice if cut is None else Choice((cut.splits[op.index], *choice.splits))

    def _estimate(self, op: Op, choice: Choice) -> OpEstimate:
        """Of all micro-batches; ``choice`` has the axis in time."""
        needs = self.analysis.needs(op, choice, self.timed)
        supplies = self.analysis.supplies(op, choice, self.timed)
        try:
            estimate = self._of_calls(
                local_calls(self.analysis, op, choice, needs, supplies, self.timed)
            )
        except CostError as error:
            self.unpriced.setdefault(op.target_name, str(error))
            estimate = self._by_traffic(op, needs, supplies)
        estimate = self._with_clearing(estimate, op, choice, needs, supplies)
        return self._with_sums(estimate.times(self.num_microbatches), op, needs)

    def _of_calls(self, calls: Sequence[LocalCall]) -> OpEstimate:
        found = []
        for made in calls:
            estimate = self.compute.estimate(made.call)
            if made.phase is Phase.FORWARD:
                estimate = replace(estimate, input_grad_s=0.0, weight_grad_s=0.0)
            elif made.phase is Phase.BACKWARD:
                once_s = estimate.forward_s
                estimate = replace(estimate, forward_s=0.0, input_grad_s=once_s, weight_grad_s=0.0)
            found.append(estimate)
        return functools.reduce(operator.add, found)

    def _with_sums(self, estimate: OpEstimate, op: Op, needs: tuple[Placements, ...]) -> OpEstimate:
        """And adding each micro-batch's gradients of parameters to those of the ones before."""
        later = self.num_microbatches - 1
        values, flows = self.graph.values, self.analysis.differentiable(op)
        sizes = [
            self._timed_bytes(values[i], need)
            for i, need, flow in zip(op.inputs, needs, flows)
            if flow and values[i].kind is ValueKind.PARAMETER
        ]
        if not later or not sizes:
            return estimate
        device = self.cluster.device
        sums_s = sum(
            device.kernel_launch_s + 3 * size / device.memory_bandwidth_bytes_per_s
            for size in sizes
        )
        return replace(estimate, weight_grad_s=estimate.weight_grad_s + later * sums_s)

    def _with_clearing(
        self,
        estimate: OpEstimate,
        op: Op,
        choice: Choice,
        needs: tuple[Placements, ...],
        supplies: tuple[Placements, ...],
    ) -> OpEstimate:
        """And what padded dimensions cost besides: see `autopar.rules.base.run_local`."""
        space = self.analysis.spaces[op.index]
        if space is None:
            return estimate
        dims = [d for d in padded_dims(space, choice, self.timed) if d not in space.clean]
        if not dims:
            return estimate
        made = list(zip(op.outputs, supplies, space.outputs))
        flows = self.analysis.differentiable(op)
        given = [x for x, flow in zip(zip(op.inputs, needs, space.inputs), flows) if flow]
        return replace(
            estimate,
            forward_s=estimate.forward_s + self._clearing_s(dims, made),
            input_grad_s=estimate.input_grad_s + self._clearing_s(dims, given),
        )

    def _by_traffic(
        self, op: Op, needs: tuple[Placements, ...], supplies: tuple[Placements, ...]
    ) -> OpEstimate:
        """An op that no cost model knows moves its operands through memory once a direction."""
        values = self.graph.values
        pairs = [*zip(op.inputs, needs)]
        pairs += [(o, s) for o, s in zip(op.outputs, supplies) if o is not None]
        moved = sum(self._timed_bytes(values[i], p) for i, p in pairs)
        device = self.cluster.device
        time_s = device.kernel_launch_s + moved / device.memory_bandwidth_bytes_per_s
        backward_s = time_s if any(self.analysis.differentiable(op)) else 0.0
        return OpEstimate(time_s, backward_s, 0.0, Source.ANALYTICAL)

    def _internal(self, op: Op, space: Space | None, choice: Choice) -> float:
        rule = rule_of(op)
        if space is None or rule is None or rule.collectives is None:
            return 0.0
        inputs = [self.graph.values[i] for i in op.inputs]
        calls = rule.collectives(op, space, choice, self.timed, inputs)
        first = self.timed.num_axes - self.mesh.num_axes
        return self.num_microbatches * sum(
            self._collective_s(c.kind, c.size_bytes, tuple(axis - first for axis in c.axes))
            for c in calls
        )

    def _clearing_s(
        self, dims: Sequence[str], values: Sequence[tuple[int | None, Placements, Layout]]
    ) -> float:
        """Seconds of zeroing values behind the end of the padded dimensions they have."""
        device = self.cluster.device
        return sum(
            device.kernel_launch_s
            + 2 * self._timed_bytes(self.graph.values[i], p) / device.memory_bandwidth_bytes_per_s
            for dim in dims
            for i, p, layout in values
            if i is not None and any(dim in factors for factors in layout)
        )

    def _collective_s(
        self, kind: str, size_bytes: int, axes: tuple[int, ...], num_joined: int = 1
    ) -> float:
        if self.mesh.size(axes) == 1:
            return 0.0
        found = self.joined(kind, size_bytes, self._group[axes], num_joined)
        self.communication_sources.add(found.source)
        self.communication_is_noisy |= found.is_noisy
        return found.time_s

    def local_bytes(self, value: Value, placements: Placements) -> int:
        shape = local_shape(value.shape, placements, self.mesh)
        return int(np.prod(shape, dtype=np.int64)) * value.dtype.itemsize

    def _timed_bytes(self, value: Value, placements: Placements) -> int:
        """The same of one micro-batch, on the mesh with the axis in time."""
        shape = local_shape(value.shape, placements, self.timed)
        return int(np.prod(shape, dtype=np.int64)) * value.dtype.itemsize

    def num_parts(self, value: Value) -> int:
        """Into how many micro-batches a value is cut; 1 where each has all of it."""
        cut = self.microbatches
        is_cut = cut is not None and cut.states[value.index].state is State.SHARD
        return self.num_microbatches if is_cut else 1

    def stored_table(self, value: Value) -> ValueTable:
        """Placements a parameter or input may be stored in."""
        digits, held = self._digits(value), self.held.get(value.index)
        first = None if self.microbatches is None else self.microbatches.states[value.index]
        key = (value.kind, value.shape, value.dtype, value.differentiable, digits, first, held)
        if key not in self._value_tables:
            options = [held] if held else split_placements(value, self.mesh, (R,), digits)
            if (cut := self.microbatches) is not None:
                options = [p for p in options if cut.allows_stored(value.index, p, self.mesh)]
            sizes = np.array([self.local_bytes(value, p) for p in options], dtype=float)
            self._value_tables[key] = ValueTable(
                placements=PlacementTable.of(options),
                cost_s=self._holding_s(value, sizes),
                memory_bytes=self._holding_bytes(value, sizes),
            )
        return self._value_tables[key]

    def _holding_s(self, value: Value, sizes: Array) -> Array:
        """A parameter is updated; an input is copied in."""
        if value.kind is not ValueKind.PARAMETER:
            return sizes * 2 / self.cluster.device.memory_bandwidth_bytes_per_s
        if not value.differentiable:
            return np.zeros_like(sizes)
        times = {size: self.update(int(size), value.dtype).time_s for size in set(sizes)}
        return np.array([times[size] for size in sizes])

    def update(self, size_bytes: int, dtype: torch.dtype) -> Estimate:
        """The update of a part of a parameter.

        One that was not measured is bound by memory: the launches of many parameters' updates are
        one. Measured is AdamW's; another's is in proportion to its passes through memory.
        """
        num_passes = self.optimizer.num_passes
        found = self.compute.estimate(update_call(size_bytes // dtype.itemsize, dtype))
        if found.source is Source.ANALYTICAL:
            bandwidth = self.cluster.device.memory_bandwidth_bytes_per_s
            return Estimate(num_passes * size_bytes / bandwidth, Source.ANALYTICAL)
        if self.optimizer.is_fused and num_passes == FUSED_ADAMW.num_passes:
            return Estimate(found.forward_s, found.source)
        return Estimate(
            found.forward_s * num_passes / FUSED_ADAMW.num_passes,
            weakest((found.source, Source.INTERPOLATED)),
        )

    def _holding_bytes(self, value: Value, sizes: Array) -> Array:
        """Gradient and optimizer state of a parameter (its use is counted at the op, where the
        gradients of several micro-batches are added up too)."""
        if value.kind is ValueKind.PARAMETER:
            gradients = 1 if self.num_microbatches == 1 else 0
            num_held = gradients + self.optimizer.num_states
            return sizes * (num_held if value.differentiable else 0)
        return sizes

    def _digits(self, value: Value) -> tuple[tuple[int, int], ...]:
        """Further digits (dim, outer) that consumers may need of a value."""
        found: set[tuple[int, int]] = set()
        for op, position in self.analysis.consumers.get(value.index, ()):
            table = self.op_table(self.graph.ops[op]).needs[position]
            for placements in table.distinct:
                found.update(
                    (p.dim, p.outer) for p in placements if p.state is State.SHARD and p.outer > 1
                )
        return tuple(sorted(found))

    def relay_table(self, value: Value) -> ValueTable:
        """Placements a shared value may be relayed in: whatever its users may need."""
        options: dict[Placements, None] = {}
        for op, position in self.analysis.consumers[value.index]:
            for need in self.op_table(self.graph.ops[op]).needs[position].distinct:
                relayed = tuple(
                    (V if value.differentiable else R) if p.state is State.PARTIAL else p
                    for p in need
                )
                options.setdefault(relayed)
        options.setdefault((R,) * self.mesh.num_axes)
        key = ("relay", tuple(options), value.differentiable)
        if key not in self._value_tables:
            zeros = np.zeros(len(options))
            self._value_tables[key] = ValueTable(PlacementTable.of(list(options)), zeros, zeros)
        return self._value_tables[key]

    def moves(
        self,
        value: Value,
        source: PlacementTable,
        target: PlacementTable,
        *,
        stored: bool = False,
        num_joined: int = 1,
    ) -> Array:
        """Seconds of redistributing ``value``, [choices of source, choices of target]."""
        what = (value.shape, value.dtype, value.differentiable, self.num_parts(value))
        key = (what, stored, num_joined, id(source), id(target))
        if key not in self._move_matrices:
            small = np.array(
                [
                    [
                        self.move_s(value, s, t, stored=stored, num_joined=num_joined)
                        for t in target.distinct
                    ]
                    for s in source.distinct
                ]
            )
            self._move_matrices[key] = small[np.ix_(source.index, target.index)]
        return self._move_matrices[key]

    def move_s(
        self,
        value: Value,
        source: Placements,
        target: Placements,
        *,
        stored: bool = False,
        num_joined: int = 1,
    ) -> float:
        """Seconds of one redistribution in a step, forward and (where a gradient flows) backward.

        ``stored``: of a parameter from its store, whose gradient comes back once a step.
        """
        forward_s, backward_s = self.directions_s(
            value, source, target, stored=stored, num_joined=num_joined
        )
        num = self.num_microbatches
        return num * forward_s + (1 if stored else num) * backward_s

    def directions_s(
        self,
        value: Value,
        source: Placements,
        target: Placements,
        *,
        stored: bool = False,
        num_joined: int = 1,
    ) -> tuple[float, float]:
        """Seconds of one redistribution of one micro-batch's part, forward and backward.

        It travels with ``num_joined`` such values; ``stored`` parameters with those of their block.
        """
        parts = self.num_parts(value)
        num_joined = self.num_joined if stored else num_joined
        key = (value.shape, value.dtype, value.differentiable, parts, source, target, num_joined)
        if key not in self._move_costs:
            forward_s = backward_s = 0.0
            for step in redistribute(source, target, value.shape, self.mesh):
                there_s, back_s = self._step_s(value, step, parts, num_joined)
                forward_s += there_s
                backward_s += back_s
            self._move_costs[key] = forward_s, backward_s
        return self._move_costs[key]

    def _step_s(self, value: Value, step: Step, parts: int, num_joined: int) -> tuple[float, float]:
        local = math.ceil(math.prod(step.shape) * value.dtype.itemsize / parts)
        num = self.mesh.size(step.axes)
        grown = local * num if step.kind in (StepKind.ALL_GATHER, StepKind.PAD) else local
        forward_s, backward_s = self._copy_s(step, grown), 0.0
        copies = _rearranged(step) if num > 1 else 0
        if step.forward is not None:
            forward_s += self._collective_s(step.forward, grown, step.axes, num_joined)
            forward_s += copies * self._pass_s(grown)
        if value.differentiable and step.backward is not None:
            backward_s = self._collective_s(step.backward, grown, step.axes, num_joined)
            backward_s += copies * self._pass_s(grown)
        return forward_s, backward_s

    def joined(
        self, kind: str, size_bytes: int, group: tuple[int, ...], num_joined: int
    ) -> Estimate:
        """A part of a collective that several values travel in (see `autopar.comm.coalesced`): what
        is sent is copied into one buffer, what is gathered out of one. A large value that is not
        summed travels alone."""
        found = self.communication.joined(kind, size_bytes, group, num_joined)
        is_alone = kind != "all_reduce" and size_bytes > ALONE_BYTES
        if num_joined == 1 or is_alone:
            return found
        copied = size_bytes
        if kind == "all_gather":
            copied += size_bytes // len(group)
        copy_s = 2 * copied / self.cluster.device.memory_bandwidth_bytes_per_s
        return Estimate(found.time_s + copy_s, found.source, found.is_noisy)

    def _copy_s(self, step: Step, size_bytes: int) -> float:
        """Slices, masks and pads read and write memory."""
        if step.kind in (StepKind.SLICE, StepKind.MASK, StepKind.PAD):
            return self._pass_s(size_bytes)
        return 0.0

    def _pass_s(self, size_bytes: int) -> float:
        """Seconds of a kernel that reads and writes as much."""
        device = self.cluster.device
        return device.kernel_launch_s + 2 * size_bytes / device.memory_bandwidth_bytes_per_s


def _rearranged(step: Step) -> int:
    """How often a step that communicates, forward or backward, copies the value besides: what is
    split along anything but the outermost dimension is put in order before it is sent, or after it
    has come (`autopar.comm.ops.disassemble`, `assemble`)."""
    digits = (step.source, step.local_outer), (step.target, step.target_local_outer)
    return sum(
        place.state is State.SHARD and outer * math.prod(step.shape[: place.dim]) > 1
        for place, outer in digits
    )


def slowest_groups(
    communication: CommunicationModel, mesh: Mesh
) -> dict[tuple[int, ...], tuple[int, ...]]:
    """For every set of axes the group that a step waits for: where an axis does not fit into a
    node, some of its groups lie across two."""
    return {
        axes: _slowest(communication, mesh.groups(axes))
        for size in range(1, mesh.num_axes + 1)
        for axes in itertools.combinations(range(mesh.num_axes), size)
    }


def _slowest(
    communication: CommunicationModel, groups: Sequence[tuple[int, ...]]
) -> tuple[int, ...]:
    of_shape: dict[Any, tuple[int, ...]] = {}
    for group in groups:
        of_shape.setdefault(communication.group_shape(group), group)
    return max(
        of_shape.values(),
        key=lambda group: communication.estimate("all_reduce", _COMPARED_BYTES, group).time_s,
    )


def _num_joined(graph: Graph) -> int:
    """How many parameters a block has on average, of those that have any."""
    of_block = [
        {i for op in graph.ops[block.start : block.stop] for i in op.inputs}
        for block in graph.blocks
    ]
    counts = [
        sum(graph.values[i].kind is ValueKind.PARAMETER for i in inputs) for inputs in of_block
    ]
    return max(1, round(sum(counts) / max(1, sum(count > 0 for count in counts))))
