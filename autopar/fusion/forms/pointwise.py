"""Element-wise operators: the same operator on stacked operands that broadcast as before."""

from __future__ import annotations

import torch

from autopar.fusion.forms.base import Call, Results, aten, form
from autopar.fusion.lanes import Operand
from autopar.ir.graph import Ref

_ALSO = frozenset(
    {
        "aten.clone.default",
        "aten.contiguous.default",
        "aten._to_copy.default",
        "aten.to.dtype",
        "aten.detach.default",
        "aten.masked_fill.Scalar",
        "aten.gelu.default",
        "aten.where.self",
        "aten.zeros_like.default",
        "aten.ones_like.default",
        "aten.full_like.default",
        "aten.rsub.Tensor",
    }
)


def is_pointwise(call: Call) -> bool:
    tags = getattr(call.op.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        return False
    return torch.Tag.pointwise in tags or call.op.target_name in _ALSO


def pointwise_form(call: Call) -> Results | None:
    """The same operator, with the model dimension where its largest operand has it."""
    placed = _all_placed(call)
    if placed is None:
        return None
    operands, dim = placed
    args, kwargs = call.op.bind(operands)
    kwargs.pop("memory_format", None)
    return _stacked(call, call.emit(call.op.target, *args, **kwargs), dim)


@form("element by element", "aten.masked_fill.Tensor")
def masked_fill_form(call: Call) -> Results | None:
    """The models' own numbers where the mask is set; the operator itself takes one number only."""
    placed = _all_placed(call)
    if placed is None:
        return None
    (x, mask, value), dim = placed
    dtype = call.builder.value(x).dtype
    if call.builder.value(value).dtype is not dtype:
        value = call.emit(aten._to_copy.default, value, dtype=dtype)
    return _stacked(call, call.emit(aten.where.self, mask, value, x), dim)


def _all_placed(call: Call) -> tuple[list[Ref], int] | None:
    """Operands that broadcast against each other, and their model dimension."""
    rank = call.out_ranks[0]
    full = [o for o, r in zip(call.operands, call.ranks) if o.dim is not None and r == rank]
    dim = full[0].dim if full else 0
    if dim is None or dim > rank or len(call.out_ranks) != 1:
        return None
    return [_placed(call, place, rank, dim) for place in range(len(call.operands))], dim


def _stacked(call: Call, made: Ref | tuple[Ref, ...], dim: int) -> Results | None:
    """The result; None where every operand was shared or had fewer dimensions."""
    (result,) = (made,) if isinstance(made, Ref) else made
    return (Operand(result, dim),) if len(call.shape(result)) == call.out_ranks[0] + 1 else None


def _placed(call: Call, place: int, rank: int, dim: int) -> Ref:
    """An operand that broadcasts against ``rank + 1`` dimensions, with the models along ``dim``."""
    operand, own = call.operands[place], call.ranks[place]
    if operand.dim is None:
        if own <= rank - dim:
            return operand.ref
        return call.emit(aten.unsqueeze.default, operand.ref, dim + own - rank)
    if own == rank:
        return call.moved(operand, dim)
    front = call.moved(operand, 0)
    missing = rank - own
    ones = (1,) * missing
    size = call.shape(front)
    if missing < dim:
        return call.moved(Operand(front, 0), dim - missing)
    return call.reshape(front, (*ones[:dim], size[0], *ones[dim:], *size[1:]))
