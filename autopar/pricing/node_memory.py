"""Memory estimates by node, for searches within a memory budget.

In: the choices of a node. Out: the bytes that each keeps on a device. A search needs memory that is
additive over nodes, so this is an estimate; the plan's memory is counted by liveness over its
lowered program (`autopar.memory.program`), and the planner corrects the estimate by that count.

- A stored parameter counts its gradient and optimizer state, an op the parameters as it uses them
  (and, with several micro-batches, their accumulated gradients).
- An op counts the values that its derivative reads: operands in the placement that the op needs (so
  gathered ones count whole), or its output. A value with a relay is counted once, there.
- Views, sums and copies keep nothing, since their derivatives read no values.
- Partial sums have full size on every device until they are reduced. One block runs at a time, so
  they count by their mean over the blocks; in the block of the loss, where all activations are
  alive, they count in full.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.ir.graph import Graph, Op, Value, ValueKind
from autopar.ir.placement import Placements, State, local_shape
from autopar.pricing.moves import Array, PlacementTable
from autopar.pricing.tables import OpTable, Pricing, ValueTable
from autopar.rules.derivative import Operands
from autopar.rules.registry import keeps_of
from autopar.sharding.strategy import Analysis


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class NodeBytes:
    """Bytes of every choice of a node: held permanently, and per micro-batch.

    ``released``: as ``weights``, if gathered parameters are released after each pass.
    ``accumulated``: by how much either is less if gradients are scattered in every micro-batch.
    """

    weights: Array
    released: Array
    accumulated: Array
    activations: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """The operands and outputs that an op keeps: positions and fractions of their bytes."""

    weights: tuple[tuple[int, float], ...]
    operands: tuple[tuple[int, float], ...]
    outputs: tuple[tuple[int, float], ...]
    is_last: bool


class NodeMemory:
    """Computes the bytes of every choice of a node; equal nodes share one array."""

    def __init__(self, pricing: Pricing) -> None:
        self.pricing = pricing
        self.reads = pricing.analysis.derived(Reads)
        self.values = pricing.graph.values
        self.known: dict[Any, NodeBytes] = {}
        self.num_blocks = max(1, len(pricing.graph.blocks))

    def op(self, op: Op, table: OpTable) -> NodeBytes:
        """Bytes of an op: parameters as used, operands and outputs that its derivative reads."""
        kept = self.reads.kept[op.index]
        key = (table, kept)
        if key not in self.known:
            weights, activations = np.zeros(len(table.choices)), np.zeros(len(table.choices))
            gathered, summed = np.zeros(len(table.choices)), np.zeros(len(table.choices))
            for position, share in kept.weights:
                value = self.values[op.inputs[position]]
                used = share * self._bytes(value, table.needs[position])
                gathered += used
                if value.differentiable and self.pricing.num_microbatches > 1:
                    # Gradients are accumulated in the placement in which they are computed.
                    summed += used * (value.reduced_dtype.itemsize / value.dtype.itemsize)
            weights += gathered + summed
            for position, share in kept.operands:
                value = self.values[op.inputs[position]]
                activations += share * self._bytes(value, table.needs[position])
            for position, share in kept.outputs:
                index = op.outputs[position]
                assert index is not None
                activations += share * self._bytes(self.values[index], table.supplies[position])
            partial = self._partial_bytes(op, table)
            activations += partial * (1 if kept.is_last else 1 / self.num_blocks)
            absent = 1 - self.pricing.analysis.derived(gathered_share)
            self.known[key] = NodeBytes(
                weights=weights,
                released=weights - absent * gathered,
                accumulated=absent * summed,
                activations=activations,
            )
        return self.known[key]

    def relay(self, value: Value, table: ValueTable) -> NodeBytes:
        """Bytes of a relayed value, if only the derivative of its producer reads it."""
        kept = value.index in self.reads.relays
        key = (table, kept, value.dtype, self.pricing.moves.num_parts(value))
        if key not in self.known:
            size = self._bytes(value, table.placements)
            none = np.zeros_like(size)
            self.known[key] = NodeBytes(
                weights=none, released=none, accumulated=none,
                activations=size if kept else none,
            )  # fmt: skip
        return self.known[key]

    def stored(self, table: ValueTable) -> NodeBytes:
        """Bytes of a parameter's gradient and optimizer state, or of an input."""
        key = table
        if key not in self.known:
            none = np.zeros_like(table.memory_bytes)
            self.known[key] = NodeBytes(
                weights=table.memory_bytes,
                released=table.memory_bytes + table.shard_bytes,
                accumulated=-table.gradient_bytes,
                activations=none,
            )
        return self.known[key]

    def size_bytes(self, value: Value, placements: Placements) -> float:
        """Bytes of a value per micro-batch."""
        num_elements = math.prod(local_shape(value.shape, placements, self.pricing.mesh))
        return num_elements * value.dtype.itemsize / self.pricing.moves.num_parts(value)

    def _bytes(self, value: Value, table: PlacementTable) -> Array:
        """Bytes of a value per micro-batch under each choice."""
        sizes = [self.size_bytes(value, placements) for placements in table.distinct]
        found: Array = np.array(sizes, dtype=float)[table.index]
        return found

    def _partial_bytes(self, op: Op, table: OpTable) -> Array:
        total = np.zeros(len(table.choices))
        for index, supplies in zip(op.outputs, table.supplies):
            if index is not None:
                partial = [
                    any(p.state is State.PARTIAL for p in each) for each in supplies.distinct
                ]
                total += (
                    self._bytes(self.values[index], supplies) * np.array(partial)[supplies.index]
                )
        return total


def gathered_share(analysis: Analysis) -> float:
    """The largest fraction of the parameters that are gathered at once if they are released after
    each pass: those of a block and the next one, and those that earlier and later blocks share."""
    graph = analysis.graph
    block_of = {
        op.index: b for b, block in enumerate(graph.blocks) for op in graph.block_ops(block)
    }
    at_once = [0] * (len(graph.blocks) + 1)
    for value in graph.parameters:
        blocks = [block_of[op] for op, _ in analysis.consumers.get(value.index, ())]
        for block in range(max(min(blocks) - 1, 0), max(blocks) + 1) if blocks else ():
            at_once[block] += math.prod(value.shape)
    total = sum(math.prod(value.shape) for value in graph.parameters)
    return min(1.0, max(at_once) / max(total, 1))


def kept_bytes(analysis: Analysis) -> float:
    """Bytes of all activations that derivatives read, for the whole batch, unsplit."""
    values, reads = analysis.graph.values, analysis.derived(Reads)
    total = float(sum(values[i].size_bytes for i in reads.relays))
    for op in analysis.graph.ops:
        kept = reads.kept[op.index]
        total += sum(share * values[op.inputs[p]].size_bytes for p, share in kept.operands)
        for position, share in kept.outputs:
            index = op.outputs[position]
            assert index is not None
            total += share * values[index].size_bytes
    return total


def late_share(analysis: Analysis) -> float:
    """The fraction of the kept bytes that W still needs after I.

    W reads the operands of ops with weights, which are kept, and the gradients of their results.
    """
    values, operands, results_bytes = analysis.graph.values, set[int](), 0
    for op in analysis.graph.ops:
        weights = [i for i in op.inputs if _is_weight(values[i])]
        if weights:
            operands.update(i for i in op.inputs if values[i].kind is ValueKind.ACTIVATION)
            results_bytes += sum(values[o].size_bytes for o in op.outputs if o is not None)
    late_bytes = results_bytes + sum(values[i].size_bytes for i in operands)
    return late_bytes / max(kept_bytes(analysis), 1.0)


def _is_weight(value: Value) -> bool:
    """Whether W computes a value's gradient; those of norms and biases are computed with I."""
    is_parameter = value.kind is ValueKind.PARAMETER
    return is_parameter and value.differentiable and len(value.shape) >= 2


class Reads:
    """The values that derivatives read, by op, and the relayed ones: a property of the graph."""

    def __init__(self, analysis: Analysis) -> None:
        self.analysis = analysis
        self.ops, self.values = analysis.graph.ops, analysis.graph.values
        self.keeps = tuple(keeps_of(op) for op in self.ops)
        last = _block_of_loss(analysis.graph)
        self.kept = tuple(self._kept(op, is_last=op.index in last) for op in self.ops)
        self.relays = frozenset(i for i in analysis.relayed if self._keeps_relay(i))

    def _kept(self, op: Op, *, is_last: bool) -> _Kept:
        is_parameter = [self.values[i].kind is ValueKind.PARAMETER for i in op.inputs]
        return _Kept(
            weights=tuple(
                (position, self._share(op, index))
                for position, index in enumerate(op.inputs)
                if is_parameter[position]
            ),
            operands=tuple(
                (position, self._share(op, index))
                for position, index in enumerate(op.inputs)
                if not is_parameter[position] and self._keeps_operand(op, position)
            ),
            outputs=tuple(
                (position, share)
                for position, share in self._kept_outputs(op)
                if op.outputs[position] not in self.analysis.relayed
            ),
            is_last=is_last,
        )

    def _keeps_relay(self, value: int) -> bool:
        if value not in self.analysis.producers or self._num_readers(value):
            return False
        op, position = self.analysis.producers[value]
        return any(position == each for each, _ in self._kept_outputs(self.ops[op]))

    def _share(self, op: Op, value: int) -> float:
        """The fraction of a value that each reader counts, as it is kept once for all of them."""
        return self.keeps[op.index].copies / max(1, self._num_readers(value))

    def _num_readers(self, value: int) -> int:
        uses = self.analysis.consumers.get(value, ())
        return sum(self._counts_operand(self.ops[op], position) for op, position in uses)

    def _counts_operand(self, op: Op, position: int) -> bool:
        is_parameter = self.values[op.inputs[position]].kind is ValueKind.PARAMETER
        return is_parameter or self._keeps_operand(op, position)

    def _keeps_operand(self, op: Op, position: int) -> bool:
        """Whether the operand is an activation that the derivative of ``op`` reads."""
        value = self.values[op.inputs[position]]
        if value.kind is not ValueKind.ACTIVATION or value.fixed:
            return False
        flows, read = self.analysis.differentiable(op), self.keeps[op.index].operands
        if not any(flows) or read is Operands.NONE:
            return False
        if read is Operands.FACTORS:
            return any(flow for other, flow in enumerate(flows) if other != position)
        return value.dtype.is_floating_point

    def _kept_outputs(self, op: Op) -> tuple[tuple[int, float], ...]:
        """(output, fraction of its bytes) that the derivative of ``op`` reads and only it keeps."""
        if not op.outputs or op.outputs[0] is None or not any(self.analysis.differentiable(op)):
            return ()
        keeps, value = self.keeps[op.index], self.values[op.outputs[0]]
        share = 0.0 if keeps.further is None else keeps.further(op, value)
        read_once = value.index not in self.analysis.relayed and self._num_readers(value.index)
        if keeps.output and not read_once:
            share += 1
        return ((0, share),) if share else ()


def _block_of_loss(graph: Graph) -> range:
    """The ops of the block that computes the loss."""
    made = {output: op.index for op in graph.ops for output in op.outputs}
    loss = made.get(graph.loss, -1)
    found = [range(b.start, b.stop) for b in graph.blocks if b.start <= loss < b.stop]
    return found[0] if found else range(0)
