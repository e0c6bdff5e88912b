"""The work of a call: by its formula, or a generic one by its kind."""

from collections.abc import Callable
from functools import lru_cache

import torch

from autopar.cost_models.calls import OpCall, resolve
from autopar.cost_models.contraction_work import CONTRACTION_RULES
from autopar.cost_models.layer_work import LAYER_RULES, pointwise_work, view_work
from autopar.cost_models.matrix_work import MATRIX_RULES
from autopar.cost_models.recurrent_work import RECURRENT_RULES
from autopar.cost_models.shapes import is_creation, is_view, outputs
from autopar.cost_models.update import update_work
from autopar.cost_models.work import NO_WORK, Family, OpWork, Work, arithmetic_dtype, generic

_RULES = {
    **MATRIX_RULES,
    **CONTRACTION_RULES,
    **RECURRENT_RULES,
    **LAYER_RULES,
    "_fused_adamw_": update_work,
}

WorkFn = Callable[[OpCall], OpWork]
_GIVEN: dict[str, WorkFn] = {}
"""Formulas of operators that are not torch's, by full name."""


def set_work(target: str, formula: WorkFn | None) -> None:
    """Give an operator such as ``"mylib.product.default"`` its formula; None takes it away."""
    _GIVEN.pop(target, None)
    if formula is not None:
        _GIVEN[target] = formula
    work.cache_clear()


@lru_cache(maxsize=1 << 16)
def work(call: OpCall) -> OpWork:
    """The work of ``call`` in each direction; raises CostError if its shapes depend on data."""
    rule = _GIVEN.get(call.target) or _RULES.get(call.name)
    if rule is not None:
        return rule(call)
    if is_creation(call):
        size_bytes = sum(out.size_bytes for out in outputs(call))
        forward = Work(size_bytes=size_bytes, num_kernels=1 if size_bytes else 0)
        return OpWork(family=Family.CREATION, dtype=arithmetic_dtype(call), forward=forward)
    if call.name.startswith("_assert"):
        return OpWork(family=Family.VIEW, dtype=arithmetic_dtype(call), forward=NO_WORK)
    if is_view(call):
        return view_work(call)
    if call.name in ("clone", "_to_copy", "contiguous", "reshape", "to", "copy"):
        return generic(call, Family.COPY, per_element=0, saved=False)
    if torch.Tag.pointwise in resolve(call.target).tags:
        return pointwise_work(call)
    return generic(call, Family.OTHER, per_element=1)


def flops(call: OpCall) -> int:
    """Floating-point operations of the forward direction."""
    return work(call).forward.flops


def bytes_moved(call: OpCall) -> int:
    """Bytes that the forward direction reads and writes."""
    return work(call).forward.size_bytes
