"""Any operator with a batching rule of ``torch.vmap``: the ATen calls that the rule makes."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from autopar.base.torch_private import without_vmap_loops
from autopar.fusion.builder import replay
from autopar.fusion.forms.base import Call, Results, aten
from autopar.fusion.lanes import Operand
from autopar.ir.graph import Ref
from autopar.ir.tracing import VIEWS
from autopar.rules.local import call_op


def vmap_form(call: Call) -> Results | None:
    """The operator under ``torch.vmap`` over the models; raises where it has no batching rule."""

    def one(*operands: Tensor) -> Any:
        args, kwargs = call.op.bind(list(operands))
        if call.op.target in VIEWS:  # stacked values have other strides
            return aten.reshape.default(*args)
        return call_op(call.op, args, kwargs)

    operands = [o.ref for o in call.operands]
    dims = tuple(o.dim for o in call.operands)
    batched = torch.vmap(one, in_dims=dims, out_dims=0)
    with warnings.catch_warnings(), without_vmap_loops():
        warnings.simplefilter("ignore")
        result = replay(call.builder, batched, *operands)
    if result is None:
        return None
    if isinstance(result, Ref):
        return (Operand(result, 0),)
    return tuple(Operand(r, 0) if isinstance(r, Ref) else None for r in result)
