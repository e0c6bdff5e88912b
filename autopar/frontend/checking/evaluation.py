"""Evaluation of a captured graph on whole tensors on one device, with PyTorch's own autograd.

Input: a `Graph` and tensors for its parameters, buffers, constants and inputs. Output: the loss,
the model's outputs and the next buffers, which autograd can differentiate. The graph itself runs,
op by op: nothing is split, traced or fused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ir.graph import Graph, Op, ValueKind, refs_in
from autopar.ir.tracing import VIEWS

Watch = Callable[[Op, Sequence[Any]], None]


def evaluate(
    graph: Graph,
    named: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    device: torch.device,
    watch: Watch | None = None,
) -> dict[int, Tensor]:
    """The graph's loss, outputs and next buffers, by value index.

    ``named``: parameters and buffers by the names of their values' targets. ``watch`` is called
    with each op and its results.
    """
    held = dict(zip(graph.inputs, inputs))
    constants = dict(graph.constants)
    for value in graph.values:
        if value.kind is ValueKind.CONSTANT:
            held[value.index] = constants[value.name].to(device)
        elif value.target is not None:
            held[value.index] = named[value.target]
    roots = {*graph.outputs, *(new for _, new in graph.mutations)}
    if graph.loss is not None:
        roots.add(graph.loss)
    last = {index: op.index for op in graph.ops for index in refs_in((op.args, op.kwargs))}
    with torch.enable_grad():
        for op in graph.ops:
            results = _run(op, [held[index] for index in op.inputs], device)
            for index, result in zip(op.outputs, results):
                if index is not None:
                    flows = graph.values[index].differentiable
                    held[index] = result if flows else result.detach()
            if watch is not None:
                watch(op, [None if i is None else held[i] for i in op.outputs])
            for index in (*op.inputs, *(o for o in op.outputs if o is not None)):
                if index not in roots and last.get(index, -1) <= op.index:
                    held.pop(index, None)
    return {index: held[index] for index in roots}


def _run(op: Op, operands: list[Tensor], device: torch.device) -> Sequence[Any]:
    args, kwargs = op.bind(operands)
    args, kwargs = _arguments(args, device), {k: _arguments(v, device) for k, v in kwargs.items()}
    # Views become reshapes, as in a lowered program: strides may differ from those at capture.
    found = args[0].reshape(args[1]) if op.target in VIEWS else op.target(*args, **kwargs)
    return found if isinstance(found, list | tuple) else [found]


def _arguments(node: Any, device: torch.device) -> Any:
    """Arguments with lists where operators expect them, and ``device`` where a device is named."""
    if isinstance(node, tuple):
        return [_arguments(n, device) for n in node]
    return device if isinstance(node, torch.device) else node
