"""A graph with other ops: whatever a pass has made of them, numbered and cut into blocks anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.ir.blocks import cut_into_blocks
from autopar.ir.graph import Graph, Op, Value, ValueKind


def rebuilt(
    graph: Graph, ops: Sequence[Op], values: Sequence[Value], read_from: Mapping[int, int]
) -> Graph:
    """``graph`` with ``ops`` and ``values``, whose indices ops refer to.

    ``read_from``: the values to read instead of others. Ops and values that nothing reads then
    disappear.
    """
    source = list(range(len(values)))
    for index in read_from:
        while source[index] in read_from:
            source[index] = read_from[source[index]]
    kept_ops = _read(graph, ops, source)
    computed = {o for op in kept_ops for o in op.outputs if o is not None}
    kept = [v for v in values if v.kind is not ValueKind.ACTIVATION or v.index in computed]
    number = {value.index: place for place, value in enumerate(kept)}
    number |= {i: number[s] for i, s in enumerate(source) if i != s and s in number}
    new_values = tuple(replace(v, index=number[v.index]) for v in kept)
    new_ops = tuple(op.renumbered(place, number) for place, op in enumerate(kept_ops))
    return replace(
        graph,
        values=new_values,
        ops=new_ops,
        blocks=cut_into_blocks(new_ops, new_values),
        inputs=tuple(number[i] for i in graph.inputs),
        loss=None if graph.loss is None else number[graph.loss],
        outputs=tuple(number[i] for i in graph.outputs),
        mutations=tuple((number[b], number[n]) for b, n in graph.mutations),
    )


def _read(graph: Graph, ops: Sequence[Op], source: Sequence[int]) -> list[Op]:
    """The ops with a result that another op or the end of the graph reads, each from its source."""
    ends = [*graph.outputs, *(new for _, new in graph.mutations)]
    read = {source[i] for i in ends} | (set() if graph.loss is None else {source[graph.loss]})
    kept: list[Op] = []
    for op in reversed(ops):
        if any(o in read for o in op.outputs if o is not None):
            kept.append(op)
            read.update(source[i] for i in op.inputs)
    return kept[::-1]
