"""Indexing by a boolean mask.

``x[mask]`` replaces the mask's dimensions by one dimension of rows: those that the mask selects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.frontend.rewrites.edit import Ops, meta_of, value_of


@dataclass(frozen=True, slots=True)
class RowMask:
    """A boolean mask of fixed shape that indexes a tensor.

    ``first`` is the first dimension that it indexes; ``num_behind`` dimensions follow those of the
    mask.
    """

    node: fx.Node
    first: int
    num_behind: int

    @property
    def num_dims(self) -> int:
        return value_of(self.node).dim()

    def wide(self, ops: Ops) -> fx.Node:
        """The mask, shaped to broadcast to the tensor that it indexes."""
        return ops.reshaped(self.node, [*value_of(self.node).shape, *[1] * self.num_behind])

    def repeated(self, ops: Ops, value: fx.Node) -> fx.Node | None:
        """A value that broadcasts to the selected rows, reshaped to broadcast to the tensor that
        the mask indexes; None if it has one entry per selected row."""
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
