"""All-reduces that may work in place: on memory that the graph has made, and nothing else reads.

In: a node of a lowered graph. Out: whether its result may take the memory of its operand, as the
runtime binds it and as memory is counted; `autopar.comm.ops.is_overwritable` says so of the value.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.base.torch_private import returns_views
from autopar.comm.ops import ALL_REDUCE, MASK, RAW_OPS, SHARD


def may_work_in_place(node: fx.Node) -> bool:
    """Whether ``node`` is an all-reduce of memory made in this graph with no other reader."""
    if node.target is not ALL_REDUCE:
        return False
    value = node.args[0]
    while isinstance(value, fx.Node) and value.op == "call_function" and len(value.users) == 1:
        if not _may_alias(value):
            return True
        value = value.args[0]
    return False


def _may_alias(node: fx.Node) -> bool:
    if node.target in RAW_OPS:
        return node.target in (SHARD, MASK)
    if not hasattr(node.target, "_schema"):  # getitem
        return True
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:  # dropout with p = 0 is its input
        return True
    return returns_views(node.target)
