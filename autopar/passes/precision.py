"""Parameters in mixed precision: the cast of each becomes a part of how it is stored.

In: a graph whose parameters are read through casts alone, as `autopar.frontend.low_precision` has
it captured. Out: the graph without these casts: its ops read parameters in the low precision, and
each parameter has the dtype that it is stored in and the dtype that its gradients are summed in. So
a device casts its own shard, once a step, and the low precision is gathered, kept and priced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from autopar.frontend.capture import Captured
from autopar.frontend.low_precision import DTYPES
from autopar.ir.blocks import cut_into_blocks
from autopar.ir.graph import Graph, Mixed, Op

_CAST = torch.ops.aten._to_copy.default


def with_stored_precision(captured: Captured) -> Captured:
    """The same capture; with a precision, parameters are stored apart from what ops read."""
    precision = captured.precision
    if precision is None:
        return captured
    graph = captured.graph
    casts = _casts(graph)
    values = list(graph.values)
    for parameter, cast in casts.items():
        made = values[_output(cast)]
        values[parameter] = replace(
            values[parameter],
            dtype=made.dtype,
            mixed=Mixed(stored=values[parameter].dtype, reduced=DTYPES[precision.reduce]),
        )
    return replace(captured, graph=_without(replace(graph, values=tuple(values)), casts))


def _casts(graph: Graph) -> dict[int, Op]:
    """The cast of each parameter that is read through one cast and nothing else, by its index."""
    uses = graph.consumers()
    ends = {graph.loss, *graph.outputs, *(new for _, new in graph.mutations)}
    found = {}
    for value in graph.parameters:
        places = uses.get(value.index, ())
        op = graph.ops[places[0][0]] if len(places) == 1 else None
        if op is None or op.target is not _CAST or dict(op.kwargs).keys() != {"dtype"}:
            continue
        made = graph.values[_output(op)]
        if made.index not in ends and made.differentiable == value.differentiable:
            found[value.index] = op
    return found


def _output(op: Op) -> int:
    (output,) = op.outputs
    assert output is not None
    return output


def _without(graph: Graph, casts: Mapping[int, Op]) -> Graph:
    """The graph with each cast's result read from its parameter, and numbered anew."""
    source = {_output(op): parameter for parameter, op in casts.items()}
    dropped = {op.index for op in casts.values()}
    number: dict[int, int] = {}
    for value in graph.values:
        if value.index not in source:
            number[value.index] = len(number)
    number |= {made: number[parameter] for made, parameter in source.items()}

    values = tuple(replace(v, index=number[v.index]) for v in graph.values if v.index not in source)
    kept = [op for op in graph.ops if op.index not in dropped]
    ops = tuple(op.renumbered(place, number) for place, op in enumerate(kept))
    return replace(
        graph,
        values=values,
        ops=ops,
        blocks=cut_into_blocks(ops, values),
        inputs=tuple(number[i] for i in graph.inputs),
        loss=None if graph.loss is None else number[graph.loss],
        outputs=tuple(number[i] for i in graph.outputs),
        mutations=tuple((number[b], number[n]) for b, n in graph.mutations),
    )
