"""Decomposition of exported programs, in which calls that are alike are decomposed once.

In: a program of ``torch.export``. Out: the program that ``run_decompositions({})`` makes of it:
functional, and without composite operators that return views. That method runs the whole program
twice. Each call, though, decomposes by itself or with the others of its group
(`autopar.frontend.call_groups`), which write in place to what the group itself makes. The
decomposition follows from the operators, their arguments and the layout of the operands. Layers
repeat most groups of a model, so one of each kind is traced here, and its decomposition is inlined
for all others. Calls without results, such as assertions on metadata, are left out.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.traceback import annotate, preserve_node_meta

from autopar.base.torch_private import (
    FakeTensor,
    is_overload,
    lazy_graph_module,
    pytree,
)
from autopar.base.torch_registrations import decomposed_trace, without_repeated_registrations
from autopar.frontend.call_groups import (
    Group,
    call_groups,
    is_call,
    kind_of,
    layout_of,
    nodes_before,
    operands,
)


class Decomposed(NamedTuple):
    """The parts of a decomposed program that its reader needs."""

    graph_module: fx.GraphModule
    graph_signature: Any
    constants: dict[str, Any]


def decomposed(program: Any) -> Decomposed:
    """The decomposition of an exported program, as ``run_decompositions({})`` makes it."""
    with without_repeated_registrations():
        graph = _by_kinds(program.graph_module.graph)
        if graph is None:
            program = program.run_decompositions({})
            graph = program.graph_module.graph
    module = lazy_graph_module(program.graph_module, graph)
    return Decomposed(module, program.graph_signature, program.constants)


@dataclass(frozen=True, slots=True)
class _Body:
    """The decomposition of a group: placeholders for its operands, nodes, and its calls' results.

    ``places``: for each node the place in the group of the call that it is part of.
    """

    operands: Sequence[fx.Node]
    nodes: Sequence[fx.Node]
    places: Sequence[int]
    results: Sequence[Any]

    def inlined(self, group: Group, given: Sequence[Any], graph: fx.Graph) -> Sequence[Any]:
        """The results of this body at the end of ``graph``, in place of ``group``."""
        new: dict[fx.Node, Any] = dict(zip(self.operands, given, strict=True))
        metas = [{k: v for k, v in call.meta.items() if k != "tensor_meta"} for call in group]
        for node, place in zip(self.nodes, self.places, strict=True):
            args, kwargs = fx.map_arg((node.args, node.kwargs), new.__getitem__)
            made = graph.create_node(
                node.op, node.target, args, kwargs, name=re.sub(r"_\d+$", "", node.name)
            )
            made.meta = {**metas[place], "val": node.meta["val"]}
            new[node] = made
        return fx.map_arg(self.results, new.__getitem__)


def _by_kinds(graph: fx.Graph) -> fx.Graph | None:
    """The decomposed graph; None where calls may not be decomposed group by group."""
    if not all(map(_is_plain, graph.nodes)):
        return None
    groups = call_groups(graph)
    if groups is None:
        return None
    kinds = {group: kind_of(group) for group in groups}
    firsts = {kind: group for group, kind in reversed(kinds.items())}
    bodies = _bodies(list(firsts.values()))
    if bodies is None:
        return None
    body_of = dict(zip(firsts, bodies, strict=True))
    group_of = {call: group for group in groups for call in group}
    made, new = fx.Graph(), dict[fx.Node, Any]()
    for node in graph.nodes:
        group = group_of.get(node, ())
        if group and node is group[-1]:
            given = [new[operand] for operand in operands(group)]
            new |= zip(group, body_of[kinds[group]].inlined(group, given, made), strict=True)
            if not all(_alike(call.meta["val"], _value(new[call])) for call in _read(group)):
                return None
        elif not group and node.target is operator.getitem:
            new[node] = new[node.args[0]][node.args[1]]
        elif not group:
            new[node] = made.node_copy(node, new.__getitem__)
            new[node].name = node.name
    made.eliminate_dead_code()
    return made


def _read(group: Group) -> list[fx.Node]:
    """The calls of a group whose results are read outside, or the only one."""
    return [call for call in group if len(group) == 1 or not call.users.keys() <= set(group)]


def _value(results: Any) -> Any:
    return fx.map_arg(results, lambda node: node.meta["val"])


def _is_plain(node: fx.Node) -> bool:
    """Whether a node is no call, or one of an operator that declares no write, on plain tensors."""
    if node.op == "output":
        return True
    if not all(map(_is_plain_value, pytree.tree_leaves(node.meta.get("val")))):
        return False
    if not is_call(node):
        return node.op == "placeholder" or node.target is operator.getitem
    if not is_overload(node.target):
        return False
    return all(isinstance(operand.meta.get("val"), Tensor) for operand in operands([node]))


def _is_plain_value(value: Any) -> bool:
    """Whether a value is no tensor, or a dense one of known size, none of whose bits are lazy."""
    if not isinstance(value, Tensor):
        return not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
    if type(value) is not FakeTensor or value.layout != torch.strided:
        return False
    return all(type(n) is int for n in value.shape) and not (value.is_conj() or value.is_neg())


def _bodies(groups: Sequence[Group]) -> list[_Body] | None:
    """The decomposition of each group; None if one of them writes to its operands."""
    sources = [operand for group in groups for operand in operands(group)]
    if not sources:
        return None
    specs: list[Any] = []

    def run(given: Sequence[Tensor]) -> list[Any]:
        rest, leaves = iter(given), []
        for group in groups:
            results = _run(group, rest)
            own, spec = pytree.tree_flatten([results[call] for call in _read(group)])
            leaves += own
            specs.append(spec)
        return leaves

    values = [_again(node) for node in sources]
    with preserve_node_meta():
        traced = decomposed_trace(run, values, sources[0].meta["val"].fake_mode)
    if traced is None:
        return None
    order = {node: position for position, node in enumerate(traced.nodes)}
    placeholders = iter([node for node in traced.nodes if node.op == "placeholder"])
    output = next(node for node in reversed(traced.nodes) if node.op == "output")
    leaves, bodies = iter(output.args[0]), []
    for group, spec in zip(groups, specs, strict=True):
        own = [next(placeholders) for _ in operands(group)]
        read = pytree.tree_unflatten([next(leaves) for _ in range(spec.num_leaves)], spec)
        nodes = [node for node in nodes_before(read) if node.op != "placeholder"]
        nodes.sort(key=order.__getitem__)
        # What a view of a written tensor becomes where it is returned is part of the last call.
        places = [node.meta.get("custom", {}).get(_PLACE, len(group) - 1) for node in nodes]
        results = dict.fromkeys(group) | dict(zip(_read(group), read, strict=True))
        bodies.append(_Body(own, nodes, places, list(results.values())))
    return bodies


_PLACE = "place_in_group"


def _run(group: Group, given: Iterator[Any]) -> dict[fx.Node, Any]:
    """The results of the calls of a group, whose nodes say which call they are part of."""
    results: dict[fx.Node, Any] = {}

    def value(node: fx.Node) -> Any:
        return results[node] if node in results else next(given)

    for place, call in enumerate(group):
        target: Any = call.target
        args, kwargs = fx.map_arg((call.args, call.kwargs), value)
        with annotate({_PLACE: place}):
            results[call] = target(*args, **kwargs)
    return results


def _again(operand: fx.Node) -> Tensor:
    """Another tensor laid out like an operand; it needs a gradient if that is a parameter."""
    value = operand.meta["val"]
    return value.detach().requires_grad_(operand.op == "placeholder" and value.requires_grad)


def _alike(one: Any, other: Any) -> bool:
    """Whether two results are laid out alike, tensor by tensor."""
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(
        not isinstance(a, Tensor) or (isinstance(b, Tensor) and layout_of(a) == layout_of(b))
        for a, b in pairs
    )
