"""Price tables of all choices of all ops and stored values on one mesh.

An op costs its forward and backward at local shapes and the communication inside it, a parameter
its update, an input its copy to the device, and a redistribution its collectives both ways. Ops of
the same kind (operator, arguments, shapes) share one table, and equal redistributions one matrix,
so pricing takes time only for the distinct layers of a model.

With micro-batches everything is priced at the size of one, times the number of runs: ops,
redistributions run in each; a parameter is gathered once, or where it is released after each pass
in all of them; its gradient is accumulated and reduced once, or where it is scattered in every
micro-batch in all of them.

Prices are of one pass over a step. Where it is computed several times (a second pass for clipping),
what it does once, updates and copies of inputs, is shared among the passes.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from autopar.cost_models import (
    Cluster,
    CommunicationModel,
    ComputeModel,
    CostError,
    OpEstimate,
    Source,
)
from autopar.cost_models.estimate import Estimate, weakest
from autopar.cost_models.update import (
    FUSED_ADAMW,
    OptimizerSpec,
    UpdateScope,
    adamw,
    update_call,
)
from autopar.ir.choice import Choice
from autopar.ir.graph import Op, Value, ValueKind
from autopar.ir.mesh import Mesh
from autopar.ir.placement import MoveKind, Placements, R, State, V, local_shape, redistribute
from autopar.pricing.local_calls import LocalCall, local_calls, split_placements
from autopar.pricing.moves import Array, Moves, PlacementTable, Routes, added
from autopar.rules import Space, enumerate_choices, rule_of
from autopar.rules.choice import padded_dims
from autopar.rules.derivative import Operands
from autopar.rules.kernels import Phase
from autopar.rules.registry import keeps_of
from autopar.rules.space import Layout
from autopar.sharding.microbatches import Microbatches
from autopar.sharding.strategy import Analysis


@dataclass(frozen=True, eq=False, slots=True)
class OpTable:
    """All choices of a kind of op: the placements that they need and supply, and their costs.

    ``collectives`` is the communication inside a choice, or None; ``repeated_s`` are the seconds
    for which the backward pass of a micro-batch may repeat that of the forward pass, None where it
    cannot; ``unpriced`` is empty, or the reason why no cost model covers it (it is then priced by
    its memory traffic).
    """

    choices: tuple[Choice, ...]
    needs: tuple[PlacementTable, ...]
    supplies: tuple[PlacementTable, ...]
    estimates: tuple[OpEstimate, ...]
    collectives: tuple[Estimate | None, ...]
    repeated_s: tuple[float | None, ...]
    cost_s: Array
    unpriced: tuple[str, ...]


@dataclass(frozen=True, eq=False, slots=True)
class ValueTable:
    """All placements of a stored or relayed value, with their costs.

    ``shard_bytes``: what a parameter takes as it is stored, and ``gradient_bytes`` its gradient,
    where ``memory_bytes`` leaves them to the ops that use it.
    """

    placements: PlacementTable
    cost_s: Array
    memory_bytes: Array
    shard_bytes: Array
    gradient_bytes: Array


def reads_back(analysis: Analysis, parameter: int) -> bool:
    """Whether a backward pass reads a parameter: as a factor, for the gradient of an activation."""
    values = analysis.graph.values
    for index, position in analysis.consumers.get(parameter, ()):
        op = analysis.graph.ops[index]
        flows, read = analysis.differentiable(op), keeps_of(op).operands
        to_activations = any(
            flow and values[i].kind is ValueKind.ACTIVATION for i, flow in zip(op.inputs, flows)
        )
        is_factor = to_activations and len(values[op.inputs[position]].shape) > 1
        if (read is Operands.FACTORS and is_factor) or (read is Operands.FLOATING and any(flows)):
            return True
    return False


class Pricing:
    """The price tables of a graph on a mesh of a cluster.

    ``held`` fixes the placements of some stored values. ``optimizer`` is AdamW by default. A step
    is computed in ``num_passes``. ``buffer_bytes`` are those of the graph.
    ``routes`` may be a caching `redistribute` shared by several instances.
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
        num_passes: int = 1,
        routes: Routes = redistribute,
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
        self.num_passes = num_passes
        self.buffer_bytes = analysis.graph.buffer_bytes
        self.moves = Moves(
            analysis.graph, mesh, cluster, communication, microbatches, routes=routes
        )
        self._op_tables: dict[Any, OpTable] = {}
        self._value_tables: dict[Any, ValueTable] = {}

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
        priced = [self._estimate(op, choice) for choice in timed]
        estimates, unpriced = tuple(e for e, _ in priced), tuple(why for _, why in priced)
        inside = [self._collectives(op, space, choice) for choice in timed]
        collectives, repeated_s = (tuple(each) for each in zip(*inside)) if inside else ((), ())
        internal_s = np.array([0.0 if each is None else each.time_s for each in collectives])
        return OpTable(
            choices=choices,
            needs=tuple(PlacementTable.of([n[i] for n in needs]) for i in range(len(op.inputs))),
            supplies=tuple(
                PlacementTable.of([s[i] for s in supplies]) for i in range(len(op.outputs))
            ),
            estimates=estimates,
            collectives=collectives,
            repeated_s=repeated_s,
            cost_s=np.array([e.total_s for e in estimates]) + internal_s,
            unpriced=unpriced,
        )

    def _timed(self, op: Op, choice: Choice) -> Choice:
        """The choice with the micro-batch axis in front."""
        cut = self.microbatches
        return choice if cut is None else Choice((cut.splits[op.index], *choice.splits))

    def calls(self, op: Op, choice: Choice) -> tuple[LocalCall, ...]:
        """The calls that a device makes for an op under a choice, for one micro-batch."""
        timed = self._timed(op, choice)
        needs = self.analysis.needs(op, timed, self.timed)
        supplies = self.analysis.supplies(op, timed, self.timed)
        return local_calls(self.analysis, op, timed, needs, supplies, self.timed)

    def _estimate(self, op: Op, choice: Choice) -> tuple[OpEstimate, str]:
        """The time of all micro-batches, and the reason if no cost model covers the op.

        ``choice`` includes the micro-batch axis.
        """
        needs = self.analysis.needs(op, choice, self.timed)
        supplies = self.analysis.supplies(op, choice, self.timed)
        reason = ""
        try:
            estimate = self._of_calls(
                local_calls(self.analysis, op, choice, needs, supplies, self.timed)
            )
        except CostError as error:
            reason = str(error)
            estimate = self._by_traffic(op, needs, supplies)
        estimate = self._with_clearing(estimate, op, choice, needs, supplies)
        return self._with_sums(estimate.times(self.num_microbatches), op, needs), reason

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
        """Add the accumulation of the parameters' gradients over micro-batches."""
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
        """Add the clearing of padded dimensions: see `autopar.rules.local.run_local`."""
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
        """The estimate for an op without a cost model: its memory traffic, once per direction."""
        values = self.graph.values
        pairs = [*zip(op.inputs, needs)]
        pairs += [(o, s) for o, s in zip(op.outputs, supplies) if o is not None]
        moved = sum(self._timed_bytes(values[i], p) for i, p in pairs)
        device = self.cluster.device
        time_s = device.kernel_launch_s + moved / device.memory_bandwidth_bytes_per_s
        backward_s = time_s if any(self.analysis.differentiable(op)) else 0.0
        return OpEstimate(time_s, backward_s, 0.0, Source.ANALYTICAL)

    def _collectives(
        self, op: Op, space: Space | None, choice: Choice
    ) -> tuple[Estimate | None, float | None]:
        """The communication inside an op, None if there is none; and ``OpTable.repeated_s``.

        All-to-alls can be repeated, once for each of the backward pass. What is only agreed upon
        beside them is kept.
        """
        rule = rule_of(op)
        if space is None or rule is None or rule.collectives is None:
            return None, 0.0
        inputs = [self.graph.values[i] for i in op.inputs]
        calls = rule.collectives(op, space, choice, self.timed, inputs)
        first = self.timed.num_axes - self.mesh.num_axes
        total, exchanged_s = None, 0.0
        for call in calls:
            axes = tuple(axis - first for axis in call.axes)
            price = self.moves.collective(call.kind, call.size_bytes, axes)
            total = added(total, price)
            if call.kind == MoveKind.ALL_TO_ALL and price is not None:
                exchanged_s += price.time_s
        if total is None:
            return None, 0.0
        total = replace(total, time_s=self.num_microbatches * total.time_s)
        return total, exchanged_s / 2 if exchanged_s else None

    def _clearing_s(
        self, dims: Sequence[str], values: Sequence[tuple[int | None, Placements, Layout]]
    ) -> float:
        """Seconds of zeroing the padding of ``values`` along ``dims``."""
        device = self.cluster.device
        return sum(
            device.kernel_launch_s
            + 2 * self._timed_bytes(self.graph.values[i], p) / device.memory_bandwidth_bytes_per_s
            for dim in dims
            for i, p, layout in values
            if i is not None and any(dim in factors for factors in layout)
        )

    def num_gathers(self, value: Value, *, released: bool) -> int:
        """How often per step a parameter is brought from its store to its blocks."""
        reads = 2 if reads_back(self.analysis, value.index) else 1
        return self.num_microbatches * reads if released else 1

    def local_bytes(self, value: Value, placements: Placements) -> int:
        """Bytes of one device's part of a value in its stored dtype."""
        shape = local_shape(value.shape, placements, self.mesh)
        return int(np.prod(shape, dtype=np.int64)) * value.stored_dtype.itemsize

    def _timed_bytes(self, value: Value, placements: Placements) -> int:
        """Local bytes of one micro-batch."""
        shape = local_shape(value.shape, placements, self.timed)
        return int(np.prod(shape, dtype=np.int64)) * value.dtype.itemsize

    def stored_table(self, value: Value) -> ValueTable:
        """The table of the placements in which a parameter or input may be stored."""
        digits, held = self._digits(value), self.held.get(value.index)
        first = None if self.microbatches is None else self.microbatches.states[value.index]
        dtypes = value.dtype, value.mixed
        key = (value.kind, value.shape, dtypes, self._is_trained(value), digits, first, held)
        if key not in self._value_tables:
            options = [held] if held else split_placements(value, self.mesh, (R,), digits)
            if self.stores_whole(value) and not held:
                options = [(R,) * self.mesh.num_axes]
            if (cut := self.microbatches) is not None:
                options = [p for p in options if cut.allows_stored(value.index, p, self.mesh)]
            sizes = np.array([self.local_bytes(value, p) for p in options], dtype=float)
            self._value_tables[key] = ValueTable(
                placements=PlacementTable.of(options),
                cost_s=self._holding_s(value, sizes) / self.num_passes,
                memory_bytes=self._holding_bytes(value, sizes),
                shard_bytes=sizes * (value.kind is ValueKind.PARAMETER and value.mixed is None),
                gradient_bytes=sizes * (value.kind is ValueKind.PARAMETER and self._sums(value)),
            )
        return self._value_tables[key]

    def stores_whole(self, value: Value) -> bool:
        """Whether the optimizer updates a parameter as a whole only."""
        return self._is_trained(value) and self.optimizer.scope is not UpdateScope.ELEMENT

    def _holding_s(self, value: Value, sizes: Array) -> Array:
        """Seconds per step of a stored value: a parameter's update, an input's copy."""
        if value.kind is not ValueKind.PARAMETER:
            return sizes * 2 / self.cluster.device.memory_bandwidth_bytes_per_s
        if not self._is_trained(value):
            return np.zeros_like(sizes)
        times = {size: self.update(int(size), value.stored_dtype).time_s for size in set(sizes)}
        products = self.update_products(value)
        products_s = sum(num_times * estimate.forward_s for num_times, estimate in products)
        return np.array([times[size] for size in sizes]) + products_s

    def update_products(self, value: Value) -> list[tuple[int, OpEstimate]]:
        """The prices of the matrix products in the update of a parameter, which is stored whole,
        and how often each is made."""
        if len(value.shape) != 2:
            return []
        return [
            (product.num_times, self.compute.estimate(product.call(value.shape)))
            for product in self.optimizer.products
        ]

    def update(self, size_bytes: int, dtype: torch.dtype) -> Estimate:
        """The price of updating a shard of a parameter.

        Without a measurement it is bound by memory, since the launches of many parameters are
        fused. Measurements are of AdamW; others are scaled by their passes over memory.
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

    def _is_trained(self, value: Value) -> bool:
        """Whether a value has a gradient; a parameter that no op reads has none, and no state."""
        return value.differentiable and value.index in self.analysis.consumers

    def _sums(self, value: Value) -> bool:
        """Whether the gradient of a parameter is a sum over micro-batches."""
        return value.differentiable and self.num_microbatches > 1

    def _holding_bytes(self, value: Value, sizes: Array) -> Array:
        """Bytes of a parameter's gradient and optimizer state, or of an input.

        The op that uses a parameter counts it, and its accumulated gradient with several
        micro-batches; a parameter that ops read in another dtype is stored besides.
        """
        if value.kind is ValueKind.PARAMETER:
            own = 0 if value.mixed is None else 1
            gradients = 1 if self.num_microbatches == 1 else 0
            num_held = gradients + self.optimizer.num_states
            return sizes * (own + (num_held if self._is_trained(value) else 0))
        return sizes

    def _digits(self, value: Value) -> tuple[tuple[int, int], ...]:
        """Non-contiguous splits (dim, outer) in which consumers may need a value."""
        found: set[tuple[int, int]] = set()
        for op, position in self.analysis.consumers.get(value.index, ()):
            table = self.op_table(self.graph.ops[op]).needs[position]
            for placements in table.distinct:
                found.update(
                    (p.dim, p.outer) for p in placements if p.state is State.SHARD and p.outer > 1
                )
        return tuple(sorted(found))

    def relay_table(self, value: Value) -> ValueTable:
        """The table of a shared value's relay placements: those that its users may need."""
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
            self._value_tables[key] = ValueTable(
                PlacementTable.of(list(options)), zeros, zeros, zeros, zeros
            )
        return self._value_tables[key]
