"""Fuses the products of a layer of experts, and the activation between them, into one op.

In: a graph in which rows are in their own order (`autopar.passes.row_order`). Out: the graph with
`autopar.ir.routed_layers` in place of a product and the products with the same experts that it
reads, if only element-wise ops and equal parts of columns are in between, and nothing else reads
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar.frontend.capture import Captured
from autopar.ir.graph import Graph, Op, Ref, Value, map_refs
from autopar.ir.random_ops import draws
from autopar.ir.rebuild import rebuilt
from autopar.ir.routed_layers import PART, ROUTED_LAYERS, Between, Call, Operand
from autopar.ir.routed_product import ROUTED_PRODUCT

_SPLITS = ("aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default")
_SLICE = "aten.slice.Tensor"


def with_expert_layers(captured: Captured) -> Captured:
    """The same capture with each layer of experts as one op."""
    graph = captured.graph
    uses = _Uses(graph)
    found: dict[int, Op] = {}
    for op in graph.ops:
        if op.target is ROUTED_PRODUCT and (layers := _layers(uses, op)) is not None:
            found[op.index] = layers
    if not found:
        return captured
    ops = [found.get(op.index, op) for op in graph.ops]
    return replace(captured, graph=rebuilt(graph, ops, graph.values, {}))


class _Uses:
    """The ops of a graph that make and read each value, and the values that outlive it."""

    def __init__(self, graph: Graph) -> None:
        self.values, self.ops = graph.values, graph.ops
        self.producers, self.consumers = graph.producers(), graph.consumers()
        self.ends = {graph.loss, *graph.outputs, *(new for _, new in graph.mutations)}

    def are_read_only_by(self, values: Sequence[int], ops: set[int]) -> bool:
        read = {index for value in values for index, _ in self.consumers.get(value, ())}
        return read <= ops and self.ends.isdisjoint(values)


def _layers(uses: _Uses, last: Op) -> Op | None:
    """The layer of experts that ends with a product, as one op."""
    hidden, second, expert = last.inputs
    num_rows, width = uses.values[hidden].shape
    inside = _region(uses, hidden, expert, width)
    if inside is None or uses.values[expert].shape[0] != num_rows:
        return None
    if [o for o in inside[-1].outputs if o is not None] != [hidden]:
        return None
    made = [o for op in inside for o in op.outputs if o is not None]
    first = [op for op in inside if op.target is ROUTED_PRODUCT]
    sources = {op.inputs[0] for op in first}
    if len(sources) != 1 or not uses.are_read_only_by(made, {op.index for op in (*inside, last)}):
        return None
    if len({uses.values[o].differentiable for o in made}) > 1:
        return None
    between = _between(uses.values, first, inside)
    if not between.uses_all_parts():
        return None
    weights = tuple(Ref(op.inputs[1]) for op in first)
    args = (Ref(sources.pop()), weights, Ref(second), Ref(expert), between.to_text())
    return replace(last, target=ROUTED_LAYERS, args=args, kwargs=())


def _region(uses: _Uses, hidden: int, expert: int, width: int) -> list[Op] | None:
    """The ops that make ``hidden``, down to products for the same experts, in order.

    None if another op is among them. All values have a multiple of ``width`` columns.
    """
    found: dict[int, Op] = {}
    waiting = [hidden]
    while waiting:
        value = waiting.pop()
        made = uses.producers.get(value)
        if made is None or uses.values[value].shape[-1] % width:
            return None
        op = uses.ops[made[0]]
        if op.index in found:
            continue
        found[op.index] = op
        if op.target is ROUTED_PRODUCT:
            if op.inputs[2] != expert:
                return None
        elif _is_element_wise(uses.values, op) or _parts(uses.values, op) is not None:
            waiting += op.inputs
        else:
            return None
    return [found[index] for index in sorted(found)]


def _between(values: Sequence[Value], first: Sequence[Op], inside: Sequence[Op]) -> Between:
    """The function from the results of the ``first`` products to the last result ``inside``."""
    numbers: dict[int | None, int] = {op.outputs[0]: i for i, op in enumerate(first)}
    calls: list[Call] = []

    def add(value: int | None, call: Call) -> None:
        numbers[value] = len(first) + len(calls)
        calls.append(call)

    for op in inside:
        parts = _parts(values, op)
        if parts is not None:
            source = Operand(numbers[op.inputs[0]])
            for out, num, index in parts:
                add(out, (PART, (source, num, index), {}))
        elif op.target is not ROUTED_PRODUCT:
            args = map_refs(op.args, lambda ref: Operand(numbers[ref.index]))
            add(op.outputs[0], (op.target_name, args, dict(op.kwargs)))
    stored = [op for op in inside if _parts(values, op) is None]
    num_columns = sum(values[o].shape[1] for op in stored for o in op.outputs if o is not None)
    return Between(tuple(calls), num_columns)


def _is_element_wise(values: Sequence[Value], op: Op) -> bool:
    """Whether an op computes each element of its one result from those of operands of its shape."""
    if torch.Tag.pointwise not in getattr(op.target, "tags", ()) or len(op.outputs) != 1:
        return False
    if draws(op.target, op.args, dict(op.kwargs)) or op.per_shard:
        return False
    (out,) = op.outputs
    if out is None or not values[out].dtype.is_floating_point:
        return False
    alike = all(values[i].shape == values[out].shape for i in op.inputs)
    are_plain = all(isinstance(a, Ref) or _is_plain(a) for a in op.args)
    return alike and are_plain and all(_is_plain(value) for _, value in op.kwargs)


def _is_plain(argument: Any) -> bool:
    return argument is None or type(argument) in (bool, int, float, str)


def _parts(values: Sequence[Value], op: Op) -> list[tuple[int, int, int]] | None:
    """The results of an op that takes equal parts of a matrix's columns: value, their number, and
    which one it is; None for any other op."""
    return list(_parts_of(values, op)) or None


def _parts_of(values: Sequence[Value], op: Op) -> Iterator[tuple[int, int, int]]:
    if op.target_name not in (*_SPLITS, _SLICE) or op.kwargs:
        return
    dims = op.args[1:2] if op.target_name == _SLICE else op.args[2:3]
    shape = values[op.inputs[0]].shape
    widths = {values[o].shape[-1] for o in op.outputs if o is not None}
    if len(shape) != 2 or dims not in ((1,), (-1,)) or len(widths) != 1:
        return
    width = widths.pop()
    num = shape[1] // width
    if op.target_name == _SLICE:
        start, step = (*op.args[2:3], 0)[0] or 0, (*op.args[4:5], 1)[0]
        start += shape[1] if start < 0 else 0
        (out,) = op.outputs
        if out is not None and step == 1 and start % width == 0 and num * width == shape[1]:
            yield out, num, start // width
        return
    is_even = op.args[1] in (width, (width,) * num) or op.target_name == "aten.chunk.default"
    if is_even and num == len(op.outputs) and num * width == shape[1]:
        yield from ((o, num, i) for i, o in enumerate(op.outputs) if o is not None)
