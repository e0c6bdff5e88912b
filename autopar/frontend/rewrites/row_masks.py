"""Boolean masks that select rows, and tensors that are the same for every row.

``x[mask]`` replaces the mask's dimensions by one of rows, as many as the mask selects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.frontend.rewrites.edit import Ops, meta_of, value_of


@dataclass(frozen=True, slots=True)
class RowMask:
    """A boolean mask of fixed shape, the first dimension that it selects from, and how many of the
    tensor that it selects from are behind its own."""

    node: fx.Node
    first: int
    num_behind: int

    @property
    def num_dims(self) -> int:
        return value_of(self.node).dim()

    def wide(self, ops: Ops, mask: fx.Node | None = None) -> fx.Node:
        """The mask, or one of its shape, such that it broadcasts to what it selects from."""
        node = self.node if mask is None else mask
        return ops.reshaped(node, [*value_of(node).shape, *[1] * self.num_behind])

    def repeated(self, ops: Ops, value: fx.Node) -> fx.Node | None:
        """A value that broadcasts to rows, with the mask's dimensions in place of theirs; None if
        it has a number for each row."""
        shape = list(value_of(value).shape)
        if len(shape) <= self.num_behind:
            return value
        place = len(shape) - self.num_behind - 1
        if shape[place] != 1:
            return None
        return ops.reshaped(value, [*shape[:place], *[1] * self.num_dims, *shape[place + 1 :]])


def mask_of(source: Any, indices: Any) -> RowMask | None:
    """The mask that is the only index of a tensor, both of fixed shapes."""
    given = [(place, index) for place, index in enumerate(indices) if index is not None]
    if len(given) != 1 or not is_fixed(source):
        return None
    ((first, node),) = given
    if not is_fixed(node) or value_of(node).dtype is not torch.bool or value_of(node).dim() == 0:
        return None
    return RowMask(node, first, value_of(source).dim() - first - value_of(node).dim())


def is_fixed(node: Any) -> bool:
    """Whether it is a tensor whose sizes do not depend on data."""
    value = meta_of(node) if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and all(type(size) is int for size in value.shape)


def erase_unused(graph: fx.Graph, *nodes: Any) -> None:
    """Erase calls that nobody reads, and what they alone read."""
    waiting = [node for node in nodes if isinstance(node, fx.Node)]
    erased: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node.op == "call_function" and not node.users and node not in erased:
            erased.add(node)
            waiting += node.all_input_nodes
            graph.erase_node(node)
