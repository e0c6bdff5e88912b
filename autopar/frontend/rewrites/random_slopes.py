"""``rrelu`` in training, rewritten as a random slope where its input is negative.

It is decomposed to ``rrelu_with_noise_functional``, whose derivative in torch (2.11 to 2.13) reads
the slopes from a tensor that they were never written to.

Input: an exported, functional program. Output: the same program, which draws slopes for all
elements and multiplies those that are negative.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from autopar.frontend.rewrites.edit import Ops

_ATEN = torch.ops.aten


def draw_slopes(module: fx.GraphModule) -> None:
    """Rewrite every ``rrelu`` of a functional graph that draws slopes."""
    for node in list(module.graph.nodes):
        if node.target is not _ATEN.rrelu_with_noise_functional.default:
            continue
        x, lower, upper, is_training = _arguments(*node.args, **node.kwargs)
        with module.graph.inserting_before(node):
            ops = Ops(module.graph, node)
            if is_training:
                slopes = ops(_ATEN.uniform.default, ops(_ATEN.detach.default, x), lower, upper)
                is_kept = ops(_ATEN.gt.Scalar, x, 0)
                result = ops(_ATEN.where.self, is_kept, x, ops(_ATEN.mul.Tensor, x, slopes))
            else:
                result = ops(_ATEN.leaky_relu.default, x, (lower + upper) / 2)
        for part in list(node.users):
            if part.target is operator.getitem and part.args[1] == 0:
                part.replace_all_uses_with(result)
                module.graph.erase_node(part)
        if not node.users:
            module.graph.erase_node(node)
    module.recompile()


def _arguments(
    x: Any, noise: Any, lower: Any = 1 / 8, upper: Any = 1 / 3, training: Any = False, *_: Any
) -> tuple[Any, Any, Any, Any]:
    return x, lower, upper, training
