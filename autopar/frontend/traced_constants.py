"""Values under a trace that depend on constants only, such as positions from ``arange``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from autopar.base.torch_private import is_overload, outside_of_tracing
from autopar.frontend.call_groups import nodes_before
from autopar.frontend.reader import is_random


def node_of(tensor: Tensor) -> fx.Node | None:
    """The node of a tensor in the present trace; None where it is not traced."""
    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def constant_of(tensor: Tensor, known: Mapping[fx.Node, Tensor]) -> Tensor | None:
    """The value of a traced tensor, where those of some inputs are ``known``.

    None if it may depend on another input, a parameter, a buffer or a random number, or if an op
    writes in place to what it was computed from.
    """
    result = node_of(tensor)
    if result is None:
        return None
    before = nodes_before(result)
    sources = [node for node in result.graph.nodes if node in before]
    is_known = all(node in known or _is_fixed(node) for node in sources)
    if not is_known or any(map(_writes, _users(sources))):
        return None
    values: dict[fx.Node, Any] = {}
    with outside_of_tracing():  # not under no_grad(), which would be recorded
        for node in sources:
            if node in known:
                values[node] = known[node]
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    found: Tensor = values[result]
    return found


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
    return is_overload(node.target) and not is_random(node.target)


def _writes(node: fx.Node) -> bool:
    target: Any = node.target
    return not is_overload(target) or target._schema.is_mutable
