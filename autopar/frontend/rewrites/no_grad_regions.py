"""``no_grad`` regions and ``detach_`` calls of an exported program, made plain ``detach`` calls.

``torch.export`` writes regions as calls of ``wrap_with_set_grad_enabled``. ``run_decompositions``
inlines these and thereby forgets that no gradient flows back through them; likewise it drops
``detach_`` as a write that writes nothing.

Input: an exported program, before its decompositions. Output: the same program without such calls,
in which values that leave a region are detached.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from autopar.base.torch_private import inlined_higher_order_body

_DETACH, _DETACH_IN_PLACE = torch.ops.aten.detach.default, torch.ops.aten.detach_.default
_CONSTANT = torch.ops.aten.lift_fresh_copy.default


def inline_no_grad_regions(module: fx.GraphModule) -> frozenset[fx.Node]:
    """Inline the regions of one graph; returns the nodes that ran under ``no_grad``."""
    _find_users(module.graph)
    without: set[fx.Node] = set()
    while True:
        calls = [node for node in module.graph.nodes if _region(module, node) is not None]
        if not calls:
            break
        for call in calls:
            without |= _inlined(module, call)
    return frozenset(without)


def _find_users(graph: fx.Graph) -> None:
    """Enter users that ``torch.export`` (torch 2.13) forgets where it makes regions."""
    for node in graph.nodes:
        for source in node.all_input_nodes:
            source.users.setdefault(node)


def detach_at_once(module: fx.GraphModule) -> None:
    """Detach by calls that return a value, which everything after them reads."""
    passed: set[fx.Node] = set()
    for node in module.graph.nodes:
        passed.add(node)
        if node.target is _DETACH_IN_PLACE and node.args[0].target is not _CONSTANT:
            node.target, source = _DETACH, node.args[0]
            source.replace_all_uses_with(node, lambda user: user not in passed)


def detach_what_leaves(module: fx.GraphModule, without: Collection[fx.Node]) -> None:
    """Detach values of nodes that ran under ``no_grad`` where other nodes read them."""
    for node in list(module.graph.nodes):
        value = node.meta.get("val")
        if node not in without or not isinstance(value, torch.Tensor):
            continue
        leaves = [user for user in node.users if user not in without]
        if not leaves or not (value.is_floating_point() or value.is_complex()):
            continue
        with module.graph.inserting_after(node):
            detached = module.graph.call_function(_DETACH, (node,))
        detached.meta = dict(node.meta)
        for user in leaves:
            user.replace_input_with(node, detached)


def _region(
    module: fx.GraphModule, node: fx.Node
) -> tuple[fx.GraphModule, tuple[fx.Node, ...], bool] | None:
    """The body, operands and gradient mode of a region."""
    if "wrap_with_set_grad_enabled" not in str(node.target):
        return None
    return inlined_higher_order_body(module, node)


def _inlined(module: fx.GraphModule, call: fx.Node) -> set[fx.Node]:
    """Replace the call by a copy of its body; returns the copied nodes if the mode is off."""
    region = _region(module, call)
    assert region is not None
    body, operands, is_enabled = region
    copies: dict[fx.Node, fx.Node] = {}
    given = iter(operands)
    results: Any = ()
    with module.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op == "placeholder":
                copies[node] = next(given)
            elif node.op == "output":
                results = tuple(fx.map_arg(node.args[0], copies.__getitem__))
            else:
                copies[node] = module.graph.node_copy(node, copies.__getitem__)
                if node.op == "get_attr":
                    copies[node].target = _adopted(module, body, str(node.target))
    for part in list(call.users):
        assert part.target is operator.getitem
        part.replace_all_uses_with(results[part.args[1]])
        module.graph.erase_node(part)
    module.graph.erase_node(call)
    made = {copy for node, copy in copies.items() if node.op != "placeholder"}
    return set() if is_enabled else made


def _adopted(module: fx.GraphModule, body: fx.GraphModule, name: str) -> str:
    """The name under which ``module`` holds an attribute of ``body`` after the move."""
    number = 0
    while hasattr(module, f"inlined_{number}"):
        number += 1
    setattr(module, f"inlined_{number}", getattr(body, name))
    return f"inlined_{number}"
