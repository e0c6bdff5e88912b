"""The known strategies, as masks over the choices along one mesh axis.

In: a priced graph, a strategy's name and a mesh axis. Out: for each node that the strategy
restricts, the choices that it allows; the search decides the rest. A strategy that the model, the
batch or the axis rules out is a ConstraintError with the reason.

==================  ===================  ====================  ==================================
strategy            parameters stored    parameters needed     besides
==================  ===================  ====================  ==================================
data_parallel       R                    R or V                inputs and ops split on the batch
zero3               S where possible     R or V                inputs and ops split on the batch
tensor_parallel     as needed            S where possible      inputs R
megatron            as needed            S where possible      inputs R, attention split on its
                                                               heads, norms whole, nothing split
                                                               on the batch or the sequence
megatron_sequence   as needed            S where possible      as megatron, but norms split on
                                                               the sequence
one_weird_trick     R; dense as needed   R or V; dense S       inputs and convolutions split on
                                                               the batch
==================  ===================  ====================  ==================================

Megatron: Shoeybi et al. 2019; with sequence parallelism: Korthikanti et al. 2022. One weird trick:
Krizhevsky 2014. A norm is an op whose parameters are all vectors. The ops between those of this
table (residual sums, activations, views) take the cheapest choice that agrees with them.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import numpy as np

from autopar.base.errors import ConstraintError
from autopar.ir.choice import Split
from autopar.ir.graph import Op, ValueKind
from autopar.ir.placement import Placement, State
from autopar.pricing.moves import PlacementTable
from autopar.pricing.nodes import NodeKind
from autopar.pricing.problem import PricedGraph
from autopar.pricing.tables import OpTable, ValueTable
from autopar.rules import rule_of
from autopar.rules.registry import Layer

Mask = np.ndarray[Any, np.dtype[np.bool_]]
"""The choices of a node that are allowed."""

Masks = dict[int, Mask]
"""Masks by node; a node without one is unrestricted."""


class Parallelism(StrEnum):
    """The known strategies, by their usual names."""

    DATA_PARALLEL = "data_parallel"
    ZERO3 = "zero3"
    TENSOR_PARALLEL = "tensor_parallel"
    MEGATRON = "megatron"
    MEGATRON_SEQUENCE = "megatron_sequence"
    ONE_WEIRD_TRICK = "one_weird_trick"


_ON_THE_BATCH = frozenset(
    {Parallelism.DATA_PARALLEL, Parallelism.ZERO3, Parallelism.ONE_WEIRD_TRICK}
)
_MEGATRON = frozenset({Parallelism.MEGATRON, Parallelism.MEGATRON_SEQUENCE})


def force_masks(priced: PricedGraph, kind: Parallelism, axis: int) -> Masks:
    """The choices of every node that ``kind`` on ``axis`` allows.

    An axis of size 1 fulfils every strategy. Raises ConstraintError if the strategy does not apply
    to this model, batch and axis.
    """
    return Forces(priced).masks(kind, axis)


class Forces:
    """Masks of each kind and axis for one priced graph, computed once per group of equal nodes."""

    def __init__(self, priced: PricedGraph) -> None:
        self.priced = priced
        self.alike: dict[Any, list[int]] = {}
        for node in range(len(priced.nodes)):
            self.alike.setdefault(_node_key(priced, node), []).append(node)

    def masks(self, kind: Parallelism, axis: int) -> Masks:
        """See `force_masks`."""
        if self.priced.pricing.mesh.axis_sizes[axis] == 1:
            return {}
        _check_exists(self.priced, kind, axis)
        masks = {}
        for nodes in self.alike.values():
            mask = _node_mask(self.priced, nodes[0], kind, axis)
            if not mask.all():
                masks.update(dict.fromkeys(nodes, mask))
        return masks


def forbid_masks(priced: PricedGraph, kind: Parallelism, axis: int) -> Masks:
    """Masks without split weights (tensor), sharded parameters (zero3), or a split batch (data)."""
    graph = priced.pricing.graph
    masks = {}
    for node, (decision, table) in enumerate(zip(priced.nodes, priced.tables)):
        if isinstance(table, OpTable):
            if kind is Parallelism.TENSOR_PARALLEL:
                masks[node] = _weights_whole(priced, graph.ops[decision.index], table, axis)
            continue
        value = graph.values[decision.index]
        if decision.kind != NodeKind.STORED:
            continue
        batched = value.kind is ValueKind.INPUT and kind is Parallelism.DATA_PARALLEL
        sharded = value.kind is ValueKind.PARAMETER and kind is Parallelism.ZERO3
        if batched or sharded:
            masks[node] = _on_axis(table.placements, axis, lambda p: not _is_split(p))
    return masks


def _node_key(priced: PricedGraph, node: int) -> Any:
    """A key that is equal for nodes with the same masks under every strategy."""
    decision, table = priced.nodes[node], priced.tables[node]
    analysis = priced.pricing.analysis
    if isinstance(table, OpTable):
        index = decision.index
        return table, analysis.batch_splits[index], analysis.sequence_splits[index]
    value = priced.pricing.graph.values[decision.index]
    return table, decision.kind, value.kind, _is_dense_weight(priced, decision.index)


def _on_axis(table: PlacementTable, axis: int, allowed: Callable[[Placement], bool]) -> Mask:
    distinct = np.array([allowed(p[axis]) for p in table.distinct])
    mask: Mask = distinct[table.index]
    return mask


def _is_split(placement: Placement) -> bool:
    return placement.state is State.SHARD


def _is_whole(placement: Placement) -> bool:
    return placement.state in (State.REPLICATE, State.VARYING)


def _prefer(mask: Mask) -> Mask:
    """The mask, or everything if it allows nothing."""
    return mask if mask.any() else np.ones_like(mask)


def _splits(table: OpTable, axis: int, allowed: Callable[[Split | None], bool]) -> Mask:
    return np.array([allowed(choice.splits[axis]) for choice in table.choices])


def _parameters(priced: PricedGraph, op: Op) -> list[tuple[int, int]]:
    """(position, tensor rank) of each operand of an op that is a parameter."""
    values = priced.pricing.graph.values
    return [
        (position, len(values[index].shape))
        for position, index in enumerate(op.inputs)
        if values[index].kind is ValueKind.PARAMETER
    ]


def _layer(op: Op) -> Layer | None:
    rule = rule_of(op)
    return None if rule is None else rule.layer


def _is_convolution(priced: PricedGraph, op: Op) -> bool:
    ranks = [rank for _, rank in _parameters(priced, op)]
    return _layer(op) is Layer.CONVOLUTION and max(ranks, default=0) > 2


def _is_dense(priced: PricedGraph, op: Op) -> bool:
    is_matrix = any(rank == 2 for _, rank in _parameters(priced, op))
    return _layer(op) is Layer.DENSE and is_matrix


def _is_norm(priced: PricedGraph, op: Op) -> bool:
    ranks = [rank for _, rank in _parameters(priced, op)]
    return bool(ranks) and max(ranks) == 1


def _is_dense_weight(priced: PricedGraph, value: int) -> bool:
    graph = priced.pricing.graph
    uses = priced.pricing.analysis.consumers.get(value, ())
    return any(_is_dense(priced, graph.ops[op]) for op, _ in uses)


def _node_mask(priced: PricedGraph, node: int, kind: Parallelism, axis: int) -> Mask:
    decision, table = priced.nodes[node], priced.tables[node]
    if isinstance(table, OpTable):
        mask = _op_mask(priced, priced.pricing.graph.ops[decision.index], table, kind, axis)
        return _prefer(mask)
    placements = table.placements
    free = np.ones(len(placements.index), dtype=bool)
    value = priced.pricing.graph.values[decision.index]
    if value.kind is ValueKind.INPUT:
        return _input_mask(table, kind, axis)
    if value.kind is not ValueKind.PARAMETER or kind not in _ON_THE_BATCH:
        return free
    if kind is Parallelism.ONE_WEIRD_TRICK and _is_dense_weight(priced, value.index):
        return free
    if decision.kind == NodeKind.RELAY:
        return _on_axis(placements, axis, _is_whole)
    if kind is Parallelism.ZERO3:
        return _prefer(_on_axis(placements, axis, _is_split))
    return _on_axis(placements, axis, lambda p: not _is_split(p))


def _input_mask(table: ValueTable, kind: Parallelism, axis: int) -> Mask:
    if kind in _ON_THE_BATCH:
        return _prefer(_on_axis(table.placements, axis, lambda p: _is_split(p) and p.dim == 0))
    return _on_axis(table.placements, axis, lambda p: not _is_split(p))


def _op_mask(priced: PricedGraph, op: Op, table: OpTable, kind: Parallelism, axis: int) -> Mask:
    if kind in (Parallelism.DATA_PARALLEL, Parallelism.ZERO3):
        return _on_the_batch(priced, op, table, axis)
    if kind is Parallelism.ONE_WEIRD_TRICK:
        if _is_convolution(priced, op):
            return _on_the_batch(priced, op, table, axis)
        if not _is_dense(priced, op):
            return np.ones(len(table.choices), dtype=bool)
    mask = _weights_split(priced, op, table, axis)
    if kind in _MEGATRON:
        mask &= _as_megatron(priced, op, table, kind, axis)
    return mask


def _on_the_batch(priced: PricedGraph, op: Op, table: OpTable, axis: int) -> Mask:
    """Split along the batch; an op without a batch is whole if it has parameters, else free."""
    batch = priced.pricing.analysis.batch_splits[op.index]
    along = _splits(table, axis, lambda split: split is not None and split == batch)
    if along.any():
        return along
    if _parameters(priced, op):
        return _splits(table, axis, lambda split: split is None)
    return np.ones(len(table.choices), dtype=bool)


def _weights_split(priced: PricedGraph, op: Op, table: OpTable, axis: int) -> Mask:
    """Choices that split every matrix that can be split."""
    mask = np.ones(len(table.choices), dtype=bool)
    for position, rank in _parameters(priced, op):
        if rank >= 2:
            mask &= _prefer(_on_axis(table.needs[position], axis, _is_split))
    return mask


def _weights_whole(priced: PricedGraph, op: Op, table: OpTable, axis: int) -> Mask:
    """Choices that use every parameter whole."""
    mask = np.ones(len(table.choices), dtype=bool)
    for position, _ in _parameters(priced, op):
        mask &= _on_axis(table.needs[position], axis, _is_whole)
    return mask


def _as_megatron(priced: PricedGraph, op: Op, table: OpTable, kind: Parallelism, axis: int) -> Mask:
    """Attention split on heads, norms whole or on the sequence, and otherwise neither."""
    analysis = priced.pricing.analysis
    batch, sequence = analysis.batch_splits[op.index], analysis.sequence_splits[op.index]
    if _layer(op) is Layer.ATTENTION:
        return _splits(table, axis, lambda split: _is_on_heads(op, split))
    if _is_norm(priced, op):
        if kind is Parallelism.MEGATRON_SEQUENCE and sequence is not None:
            return _splits(table, axis, lambda split: split == sequence)
        return _splits(table, axis, lambda split: split is None)
    avoided = {split.dim for split in (batch, sequence) if split is not None}
    if kind is Parallelism.MEGATRON_SEQUENCE and sequence is not None:
        avoided.discard(sequence.dim)
    return _splits(table, axis, lambda split: split is None or split.dim not in avoided)


def _is_on_heads(op: Op, split: Split | None) -> bool:
    rule = rule_of(op)
    return split is not None and rule is not None and split.dim in rule.heads


def _check_exists(priced: PricedGraph, kind: Parallelism, axis: int) -> None:
    """Raise ConstraintError, with what is missing, if the strategy has nothing to split."""
    mesh = priced.pricing.mesh
    size = mesh.axis_sizes[axis]
    where = f"{kind} on axis {mesh.axis_names[axis]!r}"
    if kind in _ON_THE_BATCH:
        _check_batch(priced, where, axis, size)
    parameters = priced.pricing.graph.parameters
    if kind is Parallelism.ZERO3 and any(map(priced.pricing.stores_whole, parameters)):
        raise ConstraintError(
            f"{where}: the optimizer is not known to update each element by itself, so each device "
            "stores whole parameters; use an optimizer such as AdamW without hooks"
        )
    if kind is Parallelism.ONE_WEIRD_TRICK:
        _check_one_weird_trick(priced, where)
    if kind not in _ON_THE_BATCH and not _any_op(
        priced, lambda op, table: _some_split(priced, op, table, axis)
    ):
        raise ConstraintError(f"{where}: no weight of the model can be split in {size}")
    if kind in _MEGATRON:
        _check_megatron(priced, where, axis, size)
    if kind is Parallelism.MEGATRON_SEQUENCE and not _any_op(
        priced,
        lambda op, table: _is_norm(priced, op) and _has_sequence(priced, op, table, axis),
    ):
        raise ConstraintError(f"{where}: no norm has a sequence that can be split in {size}")


def _any_op(priced: PricedGraph, test: Callable[[Op, OpTable], bool]) -> bool:
    ops = priced.pricing.graph.ops
    return any(
        isinstance(table, OpTable) and test(ops[decision.index], table)
        for decision, table in zip(priced.nodes, priced.tables)
    )


def _some_split(priced: PricedGraph, op: Op, table: OpTable, axis: int) -> bool:
    return any(
        rank >= 2 and bool(_on_axis(table.needs[position], axis, _is_split).any())
        for position, rank in _parameters(priced, op)
    )


def _has_sequence(priced: PricedGraph, op: Op, table: OpTable, axis: int) -> bool:
    sequence = priced.pricing.analysis.sequence_splits[op.index]
    return sequence is not None and any(c.splits[axis] == sequence for c in table.choices)


def _check_batch(priced: PricedGraph, where: str, axis: int, size: int) -> None:
    graph = priced.pricing.graph
    tables = [
        table
        for decision, table in zip(priced.nodes, priced.tables)
        if isinstance(table, ValueTable)
        and graph.values[decision.index].kind is ValueKind.INPUT
        and graph.values[decision.index].shape
    ]
    if any(
        _on_axis(t.placements, axis, lambda p: _is_split(p) and p.dim == 0).any() for t in tables
    ):
        return
    shaped = [graph.values[i] for i in graph.inputs if graph.values[i].shape]
    if not shaped:
        raise ConstraintError(f"{where}: the model has no input whose batch can be split")
    batch, num = shaped[0].shape[0], priced.pricing.num_microbatches
    rows, unit = batch // num, size * num
    near = dict.fromkeys((batch // unit * unit or unit, (batch // unit + 1) * unit))
    each = f"each of {num} micro-batches has {rows} rows, which" if num > 1 else str(batch)
    raise ConstraintError(
        f"{where}: the batch cannot be split in {size}: input {shaped[0].name!r} has shape "
        f"{shaped[0].shape}, and {each} is too far from a multiple of {size}. Use a batch of "
        f"{' or '.join(map(str, near))}{' or fewer micro-batches' * (num > 1)}"
    )


def _check_one_weird_trick(priced: PricedGraph, where: str) -> None:
    for what, test in (("convolution", _is_convolution), ("dense layer", _is_dense)):
        if not _any_op(priced, lambda op, table, test=test: test(priced, op)):  # type: ignore[misc]
            raise ConstraintError(f"{where}: the model has no {what}")


def _check_megatron(priced: PricedGraph, where: str, axis: int, size: int) -> None:
    ops = priced.pricing.graph.ops
    heads = [
        any(_is_on_heads(ops[decision.index], choice.splits[axis]) for choice in table.choices)
        for decision, table in zip(priced.nodes, priced.tables)
        if isinstance(table, OpTable) and _layer(ops[decision.index]) is Layer.ATTENTION
    ]
    if not heads:
        raise ConstraintError(f"{where}: the model has no attention")
    if not all(heads):
        raise ConstraintError(f"{where}: the heads of an attention cannot be split in {size}")
