"""Decomposition of exported programs, in which calls that are alike are decomposed once.

In: a program of ``torch.export``. Out: the program that ``run_decompositions({})`` makes of it:
functional, and without composite operators that return views. That method runs the whole program
twice. Where nothing is written in place, though, each call decomposes by itself, and its
decomposition follows from its operator, its arguments and the layout of its operands. Layers repeat
most calls of a model, so one call of each kind is traced here, and its decomposition is inlined for
all others. Calls without results, such as assertions on metadata, are left out.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from autopar.base.torch_private import (
    FakeTensor,
    is_overload,
    lazy_graph_module,
    pytree,
    written_arguments,
)
from autopar.base.torch_registrations import decomposed_trace, without_repeated_registrations


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
    """The decomposition of a call: placeholders for its operands, nodes, and results."""

    operands: Sequence[fx.Node]
    nodes: Sequence[fx.Node]
    results: Any

    def inlined(self, call: fx.Node, operands: Sequence[Any], graph: fx.Graph) -> Any:
        """The results of this body at the end of ``graph``, in place of ``call``."""
        new: dict[fx.Node, Any] = dict(zip(self.operands, operands, strict=True))
        meta = {k: v for k, v in call.meta.items() if k != "tensor_meta"}
        for node in self.nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), new.__getitem__)
            made = graph.create_node(
                node.op, node.target, args, kwargs, name=re.sub(r"_\d+$", "", node.name)
            )
            made.meta = {**meta, "val": node.meta["val"]}
            new[node] = made
        return fx.map_arg(self.results, new.__getitem__)


def _by_kinds(graph: fx.Graph) -> fx.Graph | None:
    """The decomposed graph; None where a call may not be decomposed by itself."""
    if not all(map(_is_plain, graph.nodes)):
        return None
    kinds = {node: _kind(node) for node in graph.nodes if _is_call(node)}
    firsts = {kind: node for node, kind in reversed(kinds.items())}
    bodies = _bodies(list(firsts.values()))
    if bodies is None:
        return None
    body_of = dict(zip(firsts, bodies, strict=True))
    made, new = fx.Graph(), dict[fx.Node, Any]()
    for node in graph.nodes:
        if node in kinds:
            operands = [new[operand] for operand in _operands(node)]
            new[node] = body_of[kinds[node]].inlined(node, operands, made)
            if not _alike(node.meta["val"], fx.map_arg(new[node], lambda n: n.meta["val"])):
                return None
        elif node.target is operator.getitem:
            new[node] = new[node.args[0]][node.args[1]]
        else:
            new[node] = made.node_copy(node, new.__getitem__)
            new[node].name = node.name
    made.eliminate_dead_code()
    return made


def _is_call(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem


def _is_plain(node: fx.Node) -> bool:
    """Whether a node is no call, or one of an operator that declares no write, on plain tensors."""
    if node.op == "output":
        return True
    if not all(map(_is_plain_value, pytree.tree_leaves(node.meta.get("val")))):
        return False
    if not _is_call(node):
        return node.op == "placeholder" or node.target is operator.getitem
    if not is_overload(node.target) or any(written_arguments(node.target, node.args, node.kwargs)):
        return False
    return all(isinstance(operand.meta.get("val"), Tensor) for operand in _operands(node))


def _is_plain_value(value: Any) -> bool:
    """Whether a value is no tensor, or a dense one of known size, none of whose bits are lazy."""
    if not isinstance(value, Tensor):
        return not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
    if type(value) is not FakeTensor or value.layout != torch.strided:
        return False
    return all(type(n) is int for n in value.shape) and not (value.is_conj() or value.is_neg())


def _operands(call: fx.Node) -> list[fx.Node]:
    """The tensors among the arguments of a call, once for each time that they are given."""
    return list(_nodes((call.args, call.kwargs)))


def _nodes(argument: Any) -> Iterator[fx.Node]:
    if isinstance(argument, fx.Node):
        yield argument
    elif isinstance(argument, list | tuple):
        for part in argument:
            yield from _nodes(part)
    elif isinstance(argument, dict):
        yield from _nodes(tuple(argument.values()))


def _kind(call: fx.Node) -> Any:
    """Equal for two calls with the same decomposition."""
    return call.target, _key(call.args), _key(call.kwargs)


def _key(argument: Any) -> Any:
    if isinstance(argument, fx.Node):
        value = argument.meta["val"]
        needs_grad = argument.op == "placeholder" and value.requires_grad
        return (*_layout(value), value.device, needs_grad)
    if isinstance(argument, list | tuple):
        return tuple(map(_key, argument))
    if isinstance(argument, dict):
        return tuple((name, _key(value)) for name, value in argument.items())
    return type(argument), repr(argument)


def _layout(value: Tensor) -> tuple[Any, ...]:
    return value.dtype, tuple(value.shape), value.stride(), value.storage_offset()


def _bodies(calls: Sequence[fx.Node]) -> list[_Body] | None:
    """The decomposition of each call; None if one of them writes to its operands."""
    operands = [operand for call in calls for operand in _operands(call)]
    if not operands:
        return None
    values = [_again(node) for node in operands]

    specs: list[Any] = []

    def run(given: Sequence[Tensor]) -> list[Any]:
        rest, results = iter(given), []
        for call in calls:
            target: Any = call.target
            args, kwargs = fx.map_arg((call.args, call.kwargs), lambda _: next(rest))
            leaves, spec = pytree.tree_flatten(target(*args, **kwargs))
            results += leaves
            specs.append(spec)
        return results

    traced = decomposed_trace(run, values, operands[0].meta["val"].fake_mode)
    if traced is None:
        return None
    order = {node: position for position, node in enumerate(traced.nodes)}
    placeholders = iter([node for node in traced.nodes if node.op == "placeholder"])
    output = next(node for node in reversed(traced.nodes) if node.op == "output")
    leaves, bodies = iter(output.args[0]), []
    for call, spec in zip(calls, specs, strict=True):
        own = [next(placeholders) for _ in _operands(call)]
        results = [next(leaves) for _ in range(spec.num_leaves)]
        nodes = {node for node in _before(results) if node.op != "placeholder"}
        bodies.append(
            _Body(own, sorted(nodes, key=order.__getitem__), pytree.tree_unflatten(results, spec))
        )
    return bodies


def _again(operand: fx.Node) -> Tensor:
    """Another tensor laid out like an operand; it needs a gradient if that is a parameter."""
    value = operand.meta["val"]
    return value.detach().requires_grad_(operand.op == "placeholder" and value.requires_grad)


def _before(results: Any) -> set[fx.Node]:
    """The nodes that results are computed from, and themselves."""
    found: set[fx.Node] = set()
    stack = list(_nodes(results))
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def _alike(one: Any, other: Any) -> bool:
    """Whether two results are laid out alike, tensor by tensor."""
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(
        not isinstance(a, Tensor) or (isinstance(b, Tensor) and _layout(a) == _layout(b))
        for a, b in pairs
    )
