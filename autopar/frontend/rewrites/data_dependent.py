"""Computation on tensors whose shapes depend on values, as operators with fixed shapes.

A boolean mask that selects rows, ``nonzero`` or ``.item()`` have shapes that are unknown before the
step runs, so nothing there can be split or priced. What depends on such values usually has fixed
shapes again: a loss over the selected rows, an output that they are written back to.

Input: an exported program. Output: the program with each such region as a single call of an
operator, which computes it eagerly on every device, and its gradient by running it once more.

Regions that draw random numbers (the second run would draw others), contain subgraphs, or return
such a value, are left as they are, and refused when the program is read.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.base.torch_private import autograd_again, is_composite, pytree
from autopar.frontend.rewrites.edit import value_of, writes

_NAMESPACE = "autopar_regions"
_WEIGHTED = frozenset({
    torch.ops.aten.cross_entropy_loss.default, torch.ops.aten.nll_loss_nd.default,
    torch.ops.aten.nll_loss_forward.default, torch.ops.aten.binary_cross_entropy.default,
    torch.ops.aten.binary_cross_entropy_with_logits.default,
})  # fmt: skip
"""Losses whose ``weight`` and ``pos_weight`` torch does not differentiate."""
_known: dict[Any, Region] = {}


def isolate_composites(module: fx.GraphModule) -> None:
    """Turn operators that cannot be decomposed on dynamic shapes into regions beforehand.

    ``cross_entropy`` of selected rows is exported but not decomposed, which would need its shapes.
    """
    for node in list(module.graph.nodes):
        is_call = node.op == "call_function" and is_composite(node.target)
        if is_call and not _is_dynamic(node) and any(map(_is_dynamic, node.all_input_nodes)):
            _replace(module, [node], operands_are_dynamic=True)
            module.recompile()


def isolate_regions(module: fx.GraphModule) -> None:
    """Replace each region of a functional graph by one call."""
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    for region in _regions(module.graph):
        _replace(module, sorted(region, key=order.__getitem__))
        module.recompile()


def _is_dynamic(node: fx.Node) -> bool:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return any(
        isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool)
        or (isinstance(x, Tensor) and not all(type(size) is int for size in x.shape))
        for x in leaves
    )


def _regions(graph: fx.Graph) -> list[set[fx.Node]]:
    """Dynamic nodes with all their readers, joined where they touch, and convex."""
    regions = [
        {node, *(reader for user in node.users for reader in _with_parts(user))}
        for node in graph.nodes
        if node.op == "call_function" and _is_dynamic(node)
    ]
    while True:
        regions = _joined(_convex(graph, region) for region in _joined(regions))
        if all(_convex(graph, region) == region for region in regions):
            return regions


def _with_parts(node: fx.Node) -> list[fx.Node]:
    """A call together with the nodes that unpack its results."""
    if node.op == "output":
        return []
    several = isinstance(node.meta.get("val"), list | tuple)
    return [node, *(node.users if several else ())]


def _joined(regions: Iterable[set[fx.Node]]) -> list[set[fx.Node]]:
    result: list[set[fx.Node]] = []
    for region in regions:
        touching = [other for other in result if other & region]
        result = [other for other in result if not other & region]
        result.append(region.union(*touching))
    return result


def _convex(graph: fx.Graph, region: set[fx.Node]) -> set[fx.Node]:
    """A region with all nodes on paths between two of its nodes."""
    after, before = set(region), set(region)
    for node in graph.nodes:
        if any(source in after for source in node.all_input_nodes):
            after.add(node)
    for node in reversed(graph.nodes):
        if any(user in before for user in node.users):
            before.add(node)
    return after & before


def _replace(
    module: fx.GraphModule, nodes: Sequence[fx.Node], *, operands_are_dynamic: bool = False
) -> None:
    """Replace ``nodes`` by one call, where possible."""
    inside = set(nodes)
    outputs = [n for n in nodes if any(user not in inside for user in n.users)]
    operands = list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside))
    tensors = [*operands, *outputs]
    if not all(map(may_be_inside, nodes)) or not all(map(_is_tensor, tensors)):
        return
    if any(map(_is_dynamic, outputs if operands_are_dynamic else tensors)):
        return
    graph = module.graph
    if not outputs:  # assertions on values
        for node in reversed(nodes):
            graph.erase_node(node)
        return
    forward = _operator_of(module, nodes, operands, outputs)
    with graph.inserting_after(nodes[-1]):
        call = graph.call_function(forward, (operands,))
    call.meta = {k: v for k, v in nodes[0].meta.items() if k in ("nn_module_stack", "stack_trace")}
    call.meta["val"] = [n.meta["val"] for n in outputs]
    with graph.inserting_after(call):
        for position, node in reversed(list(enumerate(outputs))):
            part = graph.call_function(operator.getitem, (call, position))
            part.meta = {**call.meta, "val": node.meta["val"]}
            node.replace_all_uses_with(part, delete_user_cb=lambda user: user not in inside)
    for node in reversed(nodes):
        graph.erase_node(node)
    _sort(graph)


def may_be_inside(node: fx.Node) -> bool:
    """Whether a node may be part of a region: a call that neither draws random numbers nor writes
    to its arguments."""
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return node.op == "call_function" and not is_random and not writes(node)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _sort(graph: fx.Graph) -> None:
    """Move each node's inputs before it, otherwise keeping the order."""
    order: dict[fx.Node, None] = {}
    stack = list(reversed(graph.nodes))
    while stack:
        missing = [source for source in stack[-1].all_input_nodes if source not in order]
        if missing:
            stack += missing
        else:
            order[stack.pop()] = None
    for before, node in itertools.pairwise(order):
        before.append(node)


def _operator_of(
    module: fx.GraphModule,
    nodes: Sequence[fx.Node],
    operands: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
) -> Any:
    """The operator that computes ``outputs``."""
    given, results = ([value_of(node) for node in side] for side in (operands, outputs))
    return operator_of(_body(module, nodes, operands, outputs), given, results)


def operator_of(
    body: fx.GraphModule,
    operands: Sequence[Tensor],
    outputs: Sequence[Tensor],
    namespace: str = _NAMESPACE,
) -> Any:
    """The operator that runs a graph of tensors like ``operands``; equal graphs share one. Its
    outputs have the shapes of ``outputs``, whatever its operands have."""
    _detach_weights(body)
    kinds, metas = ([(tuple(x.shape), x.dtype) for x in side] for side in (operands, outputs))
    text = f"{body.code}{metas}{kinds}"
    name = "r" + hashlib.sha256(text.encode()).hexdigest()[:24]
    found = getattr(getattr(torch.ops, namespace), name, None)
    return found.default if found is not None else _define(namespace, name, body, metas)


def _detach_weights(body: fx.GraphModule) -> None:
    """Let losses read weights that need no gradient: a region asks for that of all operands."""
    for node in [node for node in body.graph.nodes if node.target in _WEIGHTED]:
        for place, argument in enumerate(node.target._schema.arguments):
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            if argument.name in ("weight", "pos_weight") and given is not None:
                with body.graph.inserting_before(node):
                    held = body.graph.call_function(torch.ops.aten.detach.default, (given,))
                if place < len(node.args):
                    node.update_arg(place, held)
                else:
                    node.update_kwarg(argument.name, held)
    body.recompile()


def _body(
    module: fx.GraphModule,
    nodes: Sequence[fx.Node],
    operands: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
) -> fx.GraphModule:
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {node: graph.placeholder(f"x{i}") for i, node in enumerate(operands)}
    for node in nodes:
        args: Any = node.args
        source = env.get(args[0]) if node.target is operator.getitem else None
        if isinstance(source, tuple):
            env[node] = source[args[1]]
        elif node.target in _known:
            inner = _known[node.target].body.graph
            given = [n for n in inner.nodes if n.op == "placeholder"]
            inlined = {n: env[a] for n, a in zip(given, args[0])}
            env[node] = graph.graph_copy(inner, inlined)
        else:
            env[node] = graph.node_copy(node, env.__getitem__)
            env[node].meta = {}
    graph.output(tuple(env[node] for node in outputs))
    return fx.GraphModule(module, graph)


def _define(
    namespace: str,
    name: str,
    body: fx.GraphModule,
    metas: Sequence[tuple[tuple[int, ...], torch.dtype]],
) -> Any:
    """Register the operator of a region and that of its gradient, which runs the region again."""
    region = Region(body)
    qualified = f"{namespace}::{name}"
    forward = torch.library.custom_op(
        qualified, region.forward, mutates_args=(), schema="(Tensor[] operands) -> Tensor[]"
    )
    backward = torch.library.custom_op(
        f"{qualified}_backward",
        region.backward,
        mutates_args=(),
        schema="(Tensor[] operands, Tensor[] cotangents) -> Tensor[]",
    )

    def fake(operands: Sequence[Tensor]) -> list[Tensor]:
        device = operands[0].device if operands else torch.device("cpu")
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in metas]

    def fake_backward(operands: Sequence[Tensor], _: Sequence[Tensor]) -> list[Tensor]:
        return [torch.empty_like(x) for x in operands if x.is_floating_point()]

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[0])

    def differentiate(ctx: Any, cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        operands = ctx.saved_tensors
        filled = [
            x if x is not None else torch.zeros(shape, dtype=dtype, device=operands[0].device)
            for x, (shape, dtype) in zip(cotangents, metas)
        ]
        found = iter(backward(list(operands), filled))
        return [next(found) if x.is_floating_point() else None for x in operands]

    forward.register_fake(fake)
    backward.register_fake(fake_backward)
    forward.register_autograd(differentiate, setup_context=save)
    target = getattr(getattr(torch.ops, namespace), name).default
    _known[target] = region
    return target


class Region:
    """The computation of a region on real tensors."""

    def __init__(self, body: fx.GraphModule) -> None:
        self.body = body

    def forward(self, operands: Sequence[Tensor]) -> list[Tensor]:
        return [x.clone() for x in self.body(*operands)]

    def backward(self, operands: Sequence[Tensor], cotangents: Sequence[Tensor]) -> list[Tensor]:
        with autograd_again():
            leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in operands]
            sources = [x for x in leaves if x.requires_grad]
            outputs = zip(self.body(*leaves), cotangents)
            results = [(output, given) for output, given in outputs if output.requires_grad]
            if not results:
                return [torch.zeros_like(x) for x in operands if x.is_floating_point()]
            gradients = torch.autograd.grad(
                [output for output, _ in results],
                sources,
                [given for _, given in results],
                allow_unused=True,
            )
        return [torch.zeros_like(x) if g is None else g.clone() for x, g in zip(sources, gradients)]
