"""Groups of calls of an exported program that are decomposed together.

In: the graph of an exported program, in which calls may write in place. Out: groups of calls, each
of which writes to none of the tensors that come from outside. A call is a group by itself unless
the storage of its result is written to later: then the group is everything from there to the last
write that reads the storage, or depends on what does. What is left outside needs the group's
results only after the last write, so a group may take the place of its last call.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor, fx

from autopar.base.torch_private import FakeTensor, pytree, written_arguments

Group = tuple[fx.Node, ...]
"""Calls in the order of the graph."""


def is_call(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem


def operands(calls: Sequence[fx.Node]) -> list[fx.Node]:
    """The tensors that calls take from elsewhere, once for each time that they are given."""
    own = set(calls)
    return [
        node for call in calls for node in nodes_in((call.args, call.kwargs)) if node not in own
    ]


def nodes_in(argument: Any) -> Iterator[fx.Node]:
    """The nodes in an argument of a call, in order."""
    if isinstance(argument, fx.Node):
        yield argument
    elif isinstance(argument, list | tuple):
        for part in argument:
            yield from nodes_in(part)
    elif isinstance(argument, dict):
        yield from nodes_in(tuple(argument.values()))


def nodes_before(results: Any) -> set[fx.Node]:
    """The nodes that results are computed from, and themselves."""
    found: set[fx.Node] = set()
    stack = list(nodes_in(results))
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def kind_of(group: Group) -> Any:
    """Equal for two groups with the same decomposition, whose calls return the same operands."""
    places = {call: place for place, call in enumerate(group)}
    return tuple(
        (call.target, _key(call.args, places), _key(call.kwargs, places)) for call in group
    )


def _key(argument: Any, places: Mapping[fx.Node, int]) -> Any:
    if argument in places:
        return places[argument]
    if isinstance(argument, fx.Node):
        value = argument.meta.get("val")
        if not _is_strided(value):
            return type(value), repr(value)
        needs_grad = argument.op == "placeholder" and value.requires_grad
        return (*layout_of(value), value.device, needs_grad)
    if isinstance(argument, list | tuple):
        return tuple(_key(part, places) for part in argument)
    if isinstance(argument, dict):
        return tuple((name, _key(value, places)) for name, value in argument.items())
    return type(argument), repr(argument)


def layout_of(value: Tensor) -> tuple[Any, ...]:
    """The dtype, shape, strides and offset of a tensor; sizes that depend on data as text."""
    numbers = (tuple(value.shape), value.stride(), (value.storage_offset(),))
    return value.dtype, *(tuple(n if type(n) is int else str(n) for n in ns) for ns in numbers)


def call_groups(graph: fx.Graph) -> list[Group] | None:
    """The groups of a graph; None if an input, a parameter or a constant is written to."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    joined: list[set[fx.Node]] = []
    places = {node: place for place, node in enumerate(nodes)}
    if any(map(_written, nodes)):
        returned, used = _storages(graph)
        last_writes: dict[fx.Node, fx.Node] = {}
        for node in nodes:
            for written in _written(node):
                last_writes |= dict.fromkeys(returned[written], node)
        if not all(map(places.__contains__, last_writes)):
            return None
        joined = _closed(
            [
                {node for node in nodes[places[made] : places[last] + 1] if made in used[node]}
                for made, last in last_writes.items()
            ],
            nodes,
        )
    alone = set(filter(is_call, nodes)).difference(*joined)
    groups = [tuple(sorted(group, key=places.__getitem__)) for group in joined]
    return groups + [(node,) for node in nodes if node in alone]


def _written(node: fx.Node) -> list[fx.Node]:
    if not is_call(node):
        return []
    return list(nodes_in(list(written_arguments(node.target, node.args, node.kwargs))))


def _storages(
    graph: fx.Graph,
) -> tuple[dict[fx.Node, set[fx.Node]], dict[fx.Node, set[fx.Node]]]:
    """For each node the makers of the storages that it returns, and of all that it uses at all."""
    returned: dict[fx.Node, set[fx.Node]] = {}
    used: dict[fx.Node, set[fx.Node]] = {}
    known = ReturnedOperands()
    for node in graph.nodes:
        returned[node] = {node}
        sources = operands([node])
        used[node] = {node}.union(*(returned[source] for source in sources))
        if node.target is operator.getitem:
            returned[node] = returned[sources[0]]
        elif node.op == "call_function":
            returned[node].update(
                *(returned[source] for source, found in zip(sources, known.of(node)) if found)
            )
    return returned, used


Returned = Literal["itself", "a view"] | None


class ReturnedOperands:
    """Which operands a call's results alias, found by running each kind of call once, on tensors
    without data that are like the operands and share no memory."""

    def __init__(self) -> None:
        self._known: dict[Any, list[Returned]] = {}

    def of(self, call: fx.Node) -> list[Returned]:
        """For each of `operands`, whether the result is it, or has a view of it."""
        kind = kind_of((call,))
        if kind not in self._known:
            self._known[kind] = _returned(call)
        return self._known[kind]


def _returned(call: fx.Node) -> list[Returned]:
    values = [operand.meta.get("val") for operand in operands([call])]
    modes = [value.fake_mode for value in values if isinstance(value, FakeTensor)]
    if not modes:
        return [None for _ in values]
    target: Any = call.target
    with modes[0], torch.no_grad():
        given = [
            torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            if _is_strided(value)
            else value
            for value in values
        ]
        rest = iter(given)
        args, kwargs = fx.map_arg((call.args, call.kwargs), lambda _: next(rest))
        result = target(*args, **kwargs)
    made = {_storage(part) for part in pytree.tree_leaves(result) if _is_strided(part)}

    def returned(operand: Any) -> Returned:
        if not _is_strided(operand) or _storage(operand) not in made:
            return None
        return "itself" if result is operand else "a view"

    return [returned(operand) for operand in given]


def _is_strided(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.layout == torch.strided


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _closed(groups: Sequence[set[fx.Node]], nodes: Sequence[fx.Node]) -> list[set[fx.Node]]:
    """Disjoint groups of the given ones, with whatever between their first and their last node
    depends on them."""
    places = {node: place for place, node in enumerate(nodes)}
    found: list[set[fx.Node]] = []
    waiting = list(groups)
    while waiting:
        group = waiting.pop()
        others = [other for other in found if not other.isdisjoint(group)]
        found = [other for other in found if other not in others]
        size = len(group)
        group = group.union(*others)
        first, last = min(map(places.__getitem__, group)), max(map(places.__getitem__, group))
        for node in nodes[first:last]:
            if not group.isdisjoint(node.all_input_nodes):
                group.add(node)
        (waiting if len(group) > size else found).append(group)
    return found
