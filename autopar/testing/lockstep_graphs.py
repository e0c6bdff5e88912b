"""The graphs that `autopar.testing.lockstep` runs, each read once.

In: a graph of a lowered program. Out: its calls, whose operands are places in a list of columns. A
column has one value for each rank; what all ranks have in common is a column without end.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import fx

from autopar.comm.ops import RAW_OPS
from autopar.runtime.machine.direct_calls import DIRECT
from autopar.runtime.machine.randomness import Draw, random_nodes, split_axes

Column = Iterable[Any]
_RANKS = 0
"""The place of the column of the ranks' numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call: ``function`` takes the columns at ``operands``, rank by rank; ``result`` is a place.

    A raw op has one operand, a ``label`` of mesh axes and further arguments, ``static``. A call
    that draws random numbers has a ``draw``, and the mesh axes that split it.
    """

    function: Callable[..., Any]
    operands: tuple[int, ...]
    result: int
    label: str | None = None
    static: tuple[Any, ...] = ()
    draw: Draw | None = None
    split: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """A graph. ``columns`` has its literals in their places; the arguments follow the ranks."""

    columns: tuple[Column, ...]
    constants: tuple[tuple[int, Any], ...]
    calls: tuple[Call, ...]
    outputs: tuple[int, ...]

    def start(self, num_ranks: int, arguments: Iterable[Column]) -> list[Column]:
        """The columns before the first call."""
        columns = list(self.columns)
        columns[_RANKS] = range(num_ranks)
        for place, argument in enumerate(arguments, start=_RANKS + 1):
            columns[place] = argument
        for place, constant in self.constants:
            columns[place] = [constant] * num_ranks
        return columns


_READ: WeakKeyDictionary[fx.GraphModule, Calls] = WeakKeyDictionary()


def calls_of(module: fx.GraphModule) -> Calls:
    """The calls of a graph, which must not change after they are asked for."""
    calls = _READ.get(module)
    if calls is None:
        calls = _READ[module] = _read(module)
    return calls


def _read(module: fx.GraphModule) -> Calls:
    graph, random, reader = module.graph, random_nodes(module), _Reader()
    for node in graph.find_nodes(op="placeholder"):
        reader.places[node] = reader.new_place()
    for node in graph.nodes:
        if node.op == "get_attr":
            reader.places[node] = reader.new_place()
        elif node.op == "call_function":
            reader.read(node, random.get(node))
    (output,) = graph.find_nodes(op="output")
    return Calls(
        columns=tuple(reader.columns),
        constants=tuple(
            (reader.places[node], getattr(module, str(node.target)))
            for node in graph.find_nodes(op="get_attr")
        ),
        calls=tuple(reader.calls),
        outputs=tuple(reader.places[node] for node in output.args[0]),
    )


class _Reader:
    def __init__(self) -> None:
        self.places: dict[fx.Node, int] = {}
        self.columns: list[Column] = [()]
        self.calls: list[Call] = []

    def new_place(self, column: Column = ()) -> int:
        self.columns.append(column)
        return len(self.columns) - 1

    def read(self, node: fx.Node, draw: Draw | None) -> None:
        target: Any = node.target
        if target in RAW_OPS:
            source, label, *static = node.args
            self._add(node, target, [source], label=str(label), static=tuple(static))
            return
        function, args = DIRECT.get(target, target), list(node.args)
        named = {name: arg for name, arg in node.kwargs.items() if _has_nodes(arg)}
        fixed = {name: arg for name, arg in node.kwargs.items() if name not in named}
        if fixed:
            function = functools.partial(function, **fixed)
        if named:
            function, args = _by_place(function, tuple(named)), [*args, *named.values()]
        if not _has_nodes(args):
            function, args = _of_rank(functools.partial(function, *args)), []
        self._add(node, function, args, draw=draw, split=split_axes(node))

    def _add(
        self, node: fx.Node, function: Callable[..., Any], args: Sequence[Any], **further: Any
    ) -> None:
        operands = tuple(self._operand(arg) for arg in args) or (_RANKS,)
        result = self.places[node] = self.new_place()
        self.calls.append(Call(function=function, operands=operands, result=result, **further))

    def _operand(self, argument: Any) -> int:
        if isinstance(argument, fx.Node):
            return self.places[argument]
        if not _has_nodes(argument):
            return self.new_place(itertools.repeat(argument))
        operands = tuple(self._operand(item) for item in argument)
        result = self.new_place()
        self.calls.append(Call(function=_listed, operands=operands, result=result))
        return result


def _has_nodes(argument: Any) -> bool:
    found: list[fx.Node] = []
    fx.map_arg(argument, found.append)
    return bool(found)


def _listed(*items: Any) -> list[Any]:
    return list(items)


def _of_rank(function: Callable[[], Any]) -> Callable[[int], Any]:
    """A function that is the same on every rank."""
    return lambda rank: function()


def _by_place(function: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """A function that takes arguments of these ``names`` by place, after all others."""
    num = len(names)
    return lambda *args: function(*args[:-num], **dict(zip(names, args[-num:])))
