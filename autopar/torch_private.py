"""All use of private torch API, each with the versions it was seen in.

Nothing else in the project imports a name with a leading underscore from torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# --- capture -------------------------------------------------------------------------------
# torch._subclasses.FakeTensorMode: tensors without data (2.11 to 2.13).
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
)

# torch.utils._pytree: flattening of nested arguments, as torch.export does it (2.11 to 2.13).
from torch.utils import _pytree as pytree

__all__ = [
    "DataDependentOutputException",
    "FakeTensor",
    "FakeTensorMode",
    "inlined_higher_order_body",
    "keyed_leaves",
    "pytree",
]


def keyed_leaves(tree: tuple[tuple[Any, ...], dict[str, Any]]) -> list[str]:
    """A readable name for each leaf of ``(args, kwargs)``: ``input_ids``, ``0``, ``batch.x``."""
    pairs, _ = pytree.tree_flatten_with_path(tree)
    return [".".join(str(k).strip(".[]'") for k in path[1:]) for path, _ in pairs]


def inlined_higher_order_body(
    module: nn.Module, node: torch.fx.Node
) -> tuple[Any, tuple[Any, ...], bool] | None:
    """Body, operands and gradient mode of a higher-order op that only sets a mode, else None.

    ``wrap_with_set_grad_enabled(enabled, body, *operands)`` and
    ``wrap_with_autocast(device, dtype, enabled, cache, body, *operands)`` (2.11 to 2.13).
    """
    name = str(node.target)
    if name == "wrap_with_set_grad_enabled":
        enabled, body, *operands = node.args
    elif name == "wrap_with_autocast":
        enabled, (_, _, _, _, body, *operands) = True, node.args
    else:
        return None
    assert isinstance(body, torch.fx.Node)
    return getattr(module, str(body.target)), tuple(operands), bool(enabled)
