"""Numbers added to a scalar: ``sum(losses)``, ``1 - score``, ``loss + 0.1``.

A loss is a sum of shares, over devices and micro-batches. A tensor added to it becomes part of one
share; a number that is an argument of the op would be added to each.

Input: an exported program. Output: the program in which such numbers are tensors, and 0, with which
Python's ``sum`` begins, is not added at all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from autopar.frontend.rewrites.edit import Ops, meta_of, value_of

_ATEN = torch.ops.aten
_ADDS, _TAKES_AWAY = (_ATEN.add.Tensor, _ATEN.add.Scalar), (_ATEN.sub.Tensor, _ATEN.sub.Scalar)
_IS_TAKEN_FROM = (_ATEN.rsub.Scalar,)


def offsets_as_tensors(module: fx.GraphModule) -> None:
    """Rewrite all additions of numbers to scalars in a functional graph."""
    for node in list(module.graph.nodes):
        if node.target in (*_ADDS, *_TAKES_AWAY, *_IS_TAKEN_FROM) and _has_offset(node):
            with module.graph.inserting_before(node):
                result = _rewritten(Ops(module.graph, node), node)
            node.replace_all_uses_with(result)
            module.graph.erase_node(node)
    module.recompile()


def _has_offset(node: fx.Node) -> bool:
    if len(node.args) != 2 or node.kwargs:
        return False
    x, offset = node.args
    found = meta_of(x) if isinstance(x, fx.Node) else None
    is_single = isinstance(found, Tensor) and found.dim() == 0 and found.is_floating_point()
    return is_single and type(offset) in (int, float)


def _rewritten(ops: Ops, node: fx.Node) -> fx.Node:
    x, offset = node.args
    assert isinstance(x, fx.Node)
    if node.target in _IS_TAKEN_FROM:
        x = ops(_ATEN.neg.default, x)
    elif node.target in _TAKES_AWAY:
        offset = -offset  # type: ignore[operator]
    return ops(_ATEN.add.Tensor, x, _constant(ops, offset, value_of(x))) if offset else x


def _constant(ops: Ops, number: Any, like: Tensor) -> fx.Node:
    with like.fake_mode:  # type: ignore[attr-defined]
        return ops(_ATEN.full.default, [], number, dtype=like.dtype, device=like.device)
