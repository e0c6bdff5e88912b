"""Python bindings of common ops, which are quicker to call than the dispatcher's overloads.

``torch.ops.aten.mm.default`` parses its arguments against the schema, which takes longer than the
parser of ``torch.mm``; a transformer layer makes a hundred such calls in a step. Each function here
has its op's arguments, results and kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

_ATEN = torch.ops.aten

DIRECT: Mapping[Any, Callable[..., Any]] = {
    _ATEN.add.Tensor: torch.add,
    _ATEN.addmm.default: torch.addmm,
    _ATEN.baddbmm.default: torch.baddbmm,
    _ATEN.bmm.default: torch.bmm,
    _ATEN.cat.default: torch.cat,
    _ATEN.div.Tensor: torch.div,
    _ATEN.embedding.default: torch.embedding,
    _ATEN.mm.default: torch.mm,
    _ATEN.mul.Tensor: torch.mul,
    _ATEN.native_layer_norm.default: torch.native_layer_norm,
    _ATEN.permute.default: torch.permute,
    _ATEN.pow.Tensor_Scalar: torch.pow,
    _ATEN.relu.default: torch.relu,
    _ATEN.reshape.default: torch.reshape,
    _ATEN.rsqrt.default: torch.rsqrt,
    _ATEN.select.int: torch.select,
    _ATEN.sub.Tensor: torch.sub,
    _ATEN.sum.dim_IntList: torch.sum,
    _ATEN.t.default: torch.t,
    _ATEN.tanh.default: torch.tanh,
    _ATEN.transpose.int: torch.transpose,
    _ATEN.unsqueeze.default: torch.unsqueeze,
}
