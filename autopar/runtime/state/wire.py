"""Serializes rank programs for other processes.

fx pickles a graph as Python source, which loses its nodes' metadata, and cannot pickle torch's
operators. Here a graph is a list of nodes, an operator is its name, and metadata is only what the
runtime reads (the axes that split a random operator). Fake tensors are left out: a program that was
sent can be run, but not printed or priced.

The other process registers a user's operator (``torch.library.custom_op``) by importing the module
that defines it. An operator that no import defines is sent as a function: one of ``__main__``, and
one that was generated, such as those of ``autopar.frontend.rewrites.data_dependent``.
"""

from __future__ import annotations

import importlib
import inspect
import io
import pickle
import sys
from typing import Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch import fx

from autopar.base.errors import WorkerError
from autopar.base.torch_private import custom_op_function
from autopar.ir.random_ops import is_random

_Overload = type(torch.ops.aten.mm.default)


class _Ref(NamedTuple):
    """A node among the arguments of another, by position."""

    position: int


class _Line(NamedTuple):
    """One node."""

    op: str
    name: str
    target: Any
    args: Any
    kwargs: Any
    custom: dict[str, Any] | None


def pack(value: Any) -> bytes:
    """Serialize a program with the tensors that it holds, or any object with operators."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """The inverse of `pack`. Only for bytes from this run's own parent."""
    return pickle.loads(data)


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, fx.GraphModule):
            return _rebuild, _lines(obj)
        if isinstance(obj, _Overload):
            return _operator, (str(obj), *_origin(obj))
        if isinstance(obj, torch.memory_format | torch.layout):
            return _torch_constant, (str(obj).removeprefix("torch."),)
        return super().reducer_override(obj)


def _torch_constant(name: str) -> Any:
    """A memory format or layout, which pickle alone would search in any module that uses torch."""
    return getattr(torch, name)


def _origin(op: Any) -> tuple[str, tuple[str, str, Any] | None]:
    """The module that defines an operator, or its definition if an import cannot define it."""
    found = custom_op_function(op)
    if found is None:
        return "", None
    schema, function = found
    in_main = sys.modules.get(function.__module__) is sys.modules["__main__"]
    if not in_main and "<locals>" not in function.__qualname__ and not inspect.ismethod(function):
        return function.__module__, None
    return "", (op.name().partition(".")[0], schema, function)


def _operator(path: str, module: str, definition: tuple[str, str, Any] | None) -> Any:
    """The operator of that name; a user's own is registered first."""
    found = _known_operator(path)
    if found is None and module:
        importlib.import_module(module)
        found = _known_operator(path)
    if found is None and definition is not None:
        name, schema, function = definition
        torch.library.custom_op(name, function, mutates_args=(), schema=schema)
        found = _known_operator(path)
    if found is None:
        raise WorkerError(
            f"operator {path} is not known in the worker: define it by torch.library.custom_op, "
            "in a module that a worker can import too, or start one process a device by torchrun"
        )
    return found


def _known_operator(path: str) -> Any:
    found: Any = torch.ops
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _lines(module: fx.GraphModule) -> tuple[list[_Line], dict[str, Any]]:
    position = {node: i for i, node in enumerate(module.graph.nodes)}

    def ref(node: fx.Node) -> Any:
        return _Ref(position[node])

    lines, held = [], {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            held[str(node.target)] = getattr(module, str(node.target))
        lines.append(
            _Line(
                op=node.op,
                name=node.name,
                target=node.target,
                args=_plain(fx.map_arg(node.args, ref)),
                kwargs=_plain(fx.map_arg(node.kwargs, ref)),
                custom=node.meta.get("custom") if is_random(node) else None,
            )
        )
    return lines, held


def _plain(argument: Any) -> Any:
    """fx's immutable containers as ordinary ones."""
    if isinstance(argument, _Ref):
        return argument
    if isinstance(argument, tuple):
        return tuple(_plain(a) for a in argument)
    if isinstance(argument, list):
        return [_plain(a) for a in argument]
    if isinstance(argument, dict):
        return {k: _plain(v) for k, v in argument.items()}
    if isinstance(argument, slice):
        return slice(_plain(argument.start), _plain(argument.stop), _plain(argument.step))
    return argument


def _rebuild(lines: list[_Line], held: dict[str, Any]) -> fx.GraphModule:
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for line in lines:
        args, kwargs = _resolved(line.args, nodes), _resolved(line.kwargs, nodes)
        node = graph.create_node(line.op, line.target, args, kwargs, line.name)
        if line.custom is not None:
            node.meta["custom"] = line.custom
        nodes.append(node)
    return fx.GraphModule(held, graph)


def _resolved(argument: Any, nodes: list[fx.Node]) -> Any:
    if isinstance(argument, _Ref):
        return nodes[argument.position]
    if isinstance(argument, tuple):
        return tuple(_resolved(a, nodes) for a in argument)
    if isinstance(argument, list):
        return [_resolved(a, nodes) for a in argument]
    if isinstance(argument, dict):
        return {k: _resolved(v, nodes) for k, v in argument.items()}
    if isinstance(argument, slice):
        parts = (argument.start, argument.stop, argument.step)
        return slice(*(_resolved(part, nodes) for part in parts))
    return argument
