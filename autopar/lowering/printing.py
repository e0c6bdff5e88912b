"""Traced graphs as text, and the collectives that they contain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from autopar.comm.ops import COLLECTIVES, RAW_OPS


def collective_nodes(module: fx.GraphModule) -> Iterator[fx.Node]:
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target in COLLECTIVES:
            yield node


def format_graph(module: fx.GraphModule) -> list[str]:
    """One line per node: name, operator, arguments and local shape."""
    lines = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            lines.append(f"{node.name}: {_shape(node)}")
        elif node.op == "output":
            lines.append("return " + ", ".join(str(a) for a in node.args[0]))
        else:
            lines.append(f"{node.name}: {_shape(node)} = {operator_name(node)}({_arguments(node)})")
    return lines


def operator_name(node: fx.Node) -> str:
    name = str(node.target)
    if node.target in RAW_OPS:
        return name.removesuffix(".default")
    return {"<built-in function getitem>": "getitem"}.get(name, name.removesuffix(".default"))


def _arguments(node: fx.Node) -> str:
    parts = [_argument(a) for a in node.args]
    parts += [f"{k}={_argument(v)}" for k, v in node.kwargs.items()]
    return ", ".join(parts)


def _argument(argument: Any) -> str:
    return repr(argument) if isinstance(argument, str) else str(argument)


def _shape(node: fx.Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "tuple"
