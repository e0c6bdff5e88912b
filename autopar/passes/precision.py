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
from autopar.ir.graph import Graph, Mixed, Op
from autopar.ir.rebuild import rebuilt

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
    """The graph with each cast's result read from its parameter."""
    dropped = {op.index for op in casts.values()}
    kept = [op for op in graph.ops if op.index not in dropped]
    return rebuilt(graph, kept, graph.values, {_output(op): p for p, op in casts.items()})
