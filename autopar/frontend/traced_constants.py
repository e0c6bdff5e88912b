"""Values under a trace that depend on constants only, such as positions from ``arange``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from autopar.base.torch_private import outside_of_tracing


def constant_of(tensor: Tensor) -> Tensor | None:
    """The value of a traced tensor; None if it may depend on an input, a parameter, a buffer or a
    random number, or if an op writes in place to what it was computed from."""
    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    if slot is None:
        return None
    sources = _sources(slot.proxy.node)
    if not all(map(_is_fixed, sources)) or any(map(_writes, _users(sources))):
        return None
    values: dict[fx.Node, Any] = {}
    with outside_of_tracing():  # not under no_grad(), which would be recorded
        for node in sources:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    found: Tensor = values[slot.proxy.node]
    return found


def _sources(node: fx.Node) -> list[fx.Node]:
    """All nodes that a node is computed from, and itself, in the order of the graph."""
    found, stack = {node}, [node]
    while stack:
        new = set(stack.pop().all_input_nodes) - found
        found |= new
        stack.extend(new)
    return [each for each in node.graph.nodes if each in found]


def _users(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """All nodes that are computed from some nodes."""
    found = set[fx.Node]()
    stack = list(nodes)
    while stack:
        new = set(stack.pop().users) - found
        found |= new
        stack.extend(new)
    return found


def _is_fixed(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags


def _writes(node: fx.Node) -> bool:
    target = node.target
    return not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable
