"""Dropout that is off, left out of the graph.

Out of training, and with a probability of 0, eager PyTorch returns the input itself;
``run_decompositions`` makes a copy of it, which every step would pay for.

Input: one graph of an exported program, before its decompositions. Output: the same without it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_ATEN = torch.ops.aten
_DROPOUTS = frozenset({
    _ATEN.dropout.default, _ATEN.feature_dropout.default, _ATEN.alpha_dropout.default,
    _ATEN.feature_alpha_dropout.default,
})  # fmt: skip


def leave_out_disabled_dropout(module: fx.GraphModule) -> None:
    """Replace each dropout that is off by its input."""
    for node in list(module.graph.nodes):
        if node.target in _DROPOUTS and _is_off(*node.args, **node.kwargs):
            node.replace_all_uses_with(node.all_input_nodes[0])
            module.graph.erase_node(node)


def _is_off(input: Any, p: float, train: bool) -> bool:
    return p == 0 or not train
