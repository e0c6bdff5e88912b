"""Insertion of ops in place of one op of an exported graph, with the metadata that export sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

_ATEN = torch.ops.aten


class Ops:
    """Adds calls to a graph as if the op that they replace had been written that way."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph = graph
        self.meta = {k: v for k, v in node.meta.items() if k in ("nn_module_stack", "stack_trace")}

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = self.graph.call_function(target, args, kwargs)
        made.meta = {**self.meta, "val": target(*fx.map_arg(args, meta_of), **kwargs)}
        return made

    def wide(self, index: fx.Node, num_dims: int) -> fx.Node:
        """The index with ``num_dims`` dimensions, new ones of size 1 in front."""
        for _ in range(num_dims - value_of(index).dim()):
            index = self(_ATEN.unsqueeze.default, index, 0)
        return index

    def permuted(self, node: fx.Node, order: Sequence[int]) -> fx.Node:
        if list(order) == sorted(order):
            return node
        return self(_ATEN.permute.default, node, list(order))

    def reshaped(self, node: fx.Node, shape: Sequence[int]) -> fx.Node:
        if not value_of(node).is_contiguous():
            node = self(_ATEN.clone.default, node, memory_format=torch.contiguous_format)
        return self(_ATEN.view.default, node, list(shape))


def writes(node: fx.Node) -> bool:
    """Whether a call writes to its arguments."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def meta_of(node: fx.Node) -> Any:
    return node.meta.get("val")


def value_of(node: fx.Node) -> Tensor:
    found = meta_of(node)
    assert isinstance(found, Tensor), node
    return found
