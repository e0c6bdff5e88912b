"""Moves between placements as axis-named ops that fx can trace, print and differentiate.

A move is an ``autograd.Function`` whose forward and backward call raw ops of the ``autopar``
library. The raw ops name mesh *axes*, not process groups, so a sharded graph is built without any
process group; at run time each raw op is bound to a communicator
(`autopar.runtime.machine.process`), and in tests the programs of all ranks run side by side in one
process (`autopar.testing.lockstep`).

The raw ops, where ``num`` is the group's size and ``dim`` and ``outer`` give the digit (see
`autopar.ir.placement`):

- ``all_reduce(x, axes, num)``
- ``all_gather(x, axes, num, dim, outer)``      dim grows ``num`` times
- ``reduce_scatter(x, axes, num, dim, outer)``  dim shrinks ``num`` times
- ``all_to_all(x, axes, num, src_dim, src_outer, dst_dim, dst_outer)``  src grows, dst shrinks
- ``shard(x, axes, num, dim, outer)``     this device's slice, no communication
- ``unshard(x, axes, num, dim, outer)``   the inverse with zeros elsewhere, no communication
- ``mask(x, axes, num)``                  x at position 0 of the group, zeros elsewhere
- ``axis_index(like, axes, num)``         this device's position in its group, a 0-d int64 tensor
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Move, MoveKind, Placements, State, redistribute

_UNBOUND = (
    "an axis-named collective was called outside a bound program; run programs through "
    "autopar.runtime (or autopar.testing.lockstep in tests)"
)


_LIBRARY = torch.library.Library("autopar", "FRAGMENT")


def _raw_op(name: str, fake: Callable[..., Tensor]) -> Any:
    """Register ``autopar::name``; its schema is read from the fake's annotations.

    Not by ``torch.library.custom_op``, whose support of autograd costs time at every call: a move
    brings its own derivative.
    """

    def unbound(*args: Any, **kwargs: Any) -> Tensor:
        raise AutoparError(_UNBOUND)

    schema = torch.library.infer_schema(fake, mutates_args=())
    _LIBRARY.define(f"{name}{schema}", tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.impl(name, unbound, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autopar::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.autopar, name).default


def _same(x: Tensor, axes: str, num: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _grown(x: Tensor, axes: str, num: int, dim: int, outer: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] *= num
    return x.new_empty(shape)


def _shrunk(x: Tensor, axes: str, num: int, dim: int, outer: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] //= num
    return x.new_empty(shape)


def _exchanged(
    x: Tensor, axes: str, num: int, src_dim: int, src_outer: int, dst_dim: int, dst_outer: int
) -> Tensor:
    shape = list(x.shape)
    shape[src_dim] *= num
    shape[dst_dim] //= num
    return x.new_empty(shape)


def _index(like: Tensor, axes: str, num: int) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=like.device)


ALL_REDUCE = _raw_op("all_reduce", _same)
ALL_REDUCE_MAX = _raw_op("all_reduce_max", _same)
ALL_GATHER = _raw_op("all_gather", _grown)
REDUCE_SCATTER = _raw_op("reduce_scatter", _shrunk)
ALL_TO_ALL = _raw_op("all_to_all", _exchanged)
SHARD = _raw_op("shard", _shrunk)
UNSHARD = _raw_op("unshard", _grown)
MASK = _raw_op("mask", _same)
AXIS_INDEX = _raw_op("axis_index", _index)

RAW_OPS = frozenset(
    {
        ALL_REDUCE,
        ALL_REDUCE_MAX,
        ALL_GATHER,
        REDUCE_SCATTER,
        ALL_TO_ALL,
        SHARD,
        UNSHARD,
        MASK,
        AXIS_INDEX,
    }
)
COLLECTIVES = frozenset({ALL_REDUCE, ALL_REDUCE_MAX, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL})
REPEATED = frozenset({ALL_TO_ALL})
"""Collectives that may run again in the backward pass: their results are as large as what they
move, and rows of experts would fill the memory."""


class _Move(torch.autograd.Function):
    """A move: ``forward_op`` on the value, ``backward_op`` on its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        forward_op: Callable[[Tensor], Tensor],
        backward_op: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.backward_op = backward_op
        return forward_op(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.backward_op(grads[0]), None, None


def identity(x: Tensor) -> Tensor:
    return x.view_as(x)


Function = Callable[[Tensor], Tensor]


def move_functions(move: Move, bind: Callable[..., Function]) -> tuple[Function, Function]:
    """A move's function of the local shard, and that of its gradient.

    ``bind(op, *digits)`` gives the raw ``op`` along the move's axes as a function of a tensor.
    """
    source, target = (move.source.dim, move.local_outer), (move.target.dim, move.target_local_outer)
    leave, enter = (move.source.dim, move.padding), (move.target.dim, move.target_padding)
    varying = State.VARYING in (move.source.state, move.target.state)
    match move.kind:
        case MoveKind.SLICE:
            undo = UNSHARD if varying else ALL_GATHER
            return _padded(bind(SHARD, *target), *enter), _trimmed(bind(undo, *target), *enter)
        case MoveKind.MASK:
            return bind(MASK), bind(MASK) if varying else identity
        case MoveKind.PAD:
            return _trimmed(bind(UNSHARD, *source), *leave), _padded(bind(SHARD, *source), *leave)
        case MoveKind.VARY:
            return identity, bind(ALL_REDUCE)
        case MoveKind.UNVARY:
            return identity, bind(MASK)
        case MoveKind.ALL_REDUCE:
            return bind(ALL_REDUCE), bind(ALL_REDUCE) if varying else identity
        case MoveKind.ALL_GATHER:
            undo = REDUCE_SCATTER if varying else SHARD
            return _trimmed(bind(ALL_GATHER, *source), *leave), _padded(bind(undo, *source), *leave)
        case MoveKind.REDUCE_SCATTER:
            return (
                _padded(bind(REDUCE_SCATTER, *target), *enter),
                _trimmed(bind(ALL_GATHER, *target), *enter),
            )
        case MoveKind.ALL_TO_ALL:
            there, back = bind(ALL_TO_ALL, *source, *target), bind(ALL_TO_ALL, *target, *source)
            return (
                _trimmed(_padded(there, *enter), *leave),
                _trimmed(_padded(back, *leave), *enter),
            )


def _padded(function: Function, dim: int, padding: int) -> Function:
    """``function`` of a tensor padded with zeros at the end of ``dim``."""
    if not padding:
        return function
    return lambda x: function(pad_end(x, dim, padding))


def _trimmed(function: Function, dim: int, padding: int) -> Function:
    """``function`` with the padding of ``dim`` removed from its result."""
    if not padding:
        return function

    def trimmed(x: Tensor) -> Tensor:
        whole = function(x)
        return whole.narrow(dim, 0, whole.shape[dim] - padding)

    return trimmed


def pad_end(x: Tensor, dim: int, padding: int) -> Tensor:
    """``x`` with ``padding`` zeros appended to ``dim``."""
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, padding]) if padding else x


def _traced(op: Any, *args: Any) -> Function:
    return lambda x: op(x, *args)


def apply_move(x: Tensor, move: Move, mesh: Mesh) -> Tensor:
    """Apply one move of `redistribute` to the local shard ``x``."""
    axes, num = mesh.axes_label(move.axes), mesh.size(move.axes)
    if num == 1:
        return x
    forward, backward = move_functions(move, lambda op, *digits: _traced(op, axes, num, *digits))
    if not (x.is_floating_point() or x.is_complex()):
        return forward(x)
    return with_gradient(x, forward, backward)


def with_gradient(x: Tensor, forward: Function, backward: Function) -> Tensor:
    """``forward(x)`` with ``backward`` applied to its gradient."""
    result: Tensor = _Move.apply(x, forward, backward)
    return result


class _Stands(torch.autograd.Function):
    """A value in place of another, whose gradient goes to the other in the other's dtype."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, other: Tensor) -> Tensor:
        ctx.dtype = other.dtype
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, grads[0].to(ctx.dtype)


def with_gradient_of(value: Tensor, other: Tensor) -> Tensor:
    """``value``, whose gradient comes back through ``other``, which is equal but for its dtype."""
    result: Tensor = _Stands.apply(value, other)
    return result


def move(
    x: Tensor, source: Placements, target: Placements, shape: tuple[int, ...], mesh: Mesh
) -> Tensor:
    """Redistribute the local shard of a value of global ``shape`` from ``source`` to ``target``."""
    for each in redistribute(source, target, shape, mesh):
        x = apply_move(x, each, mesh)
    return x


def is_overwritable(x: Tensor) -> bool:
    """Whether an all-reduce may leave its result in ``x``: it is contiguous, and all of its memory.

    Booleans are reduced as bytes, in a copy.
    """
    is_all = x.untyped_storage().nbytes() == x.numel() * x.element_size()
    return is_all and x.is_contiguous() and x.dtype is not torch.bool


def assemble(parts: Tensor, dim: int, outer: int) -> Tensor:
    """Shards ``[num, *local]`` to the whole tensor, split on ``dim`` inside ``outer``.

    The result is contiguous, as the surrounding graph was traced, even where it could be a view.
    """
    num, local = parts.shape[0], list(parts.shape[1:])
    split = [*local[:dim], outer, local[dim] // outer, *local[dim + 1 :]]
    whole = parts.reshape(num, *split).movedim(0, dim + 1)
    local[dim] *= num
    return whole.reshape(local).contiguous()


def disassemble(whole: Tensor, num: int, dim: int, outer: int) -> Tensor:
    """The inverse of `assemble`: ``[num, *local]``, contiguous."""
    shape = list(whole.shape)
    split = [*shape[:dim], outer, num, shape[dim] // (outer * num), *shape[dim + 1 :]]
    shape[dim] //= num
    return whole.reshape(split).movedim(dim + 1, 0).reshape(num, *shape).contiguous()


def digit_slice(whole: Tensor, num: int, index: int, dim: int, outer: int) -> Tensor:
    """Shard ``index`` of ``whole``, split on ``dim`` inside ``outer``; a view if ``outer`` is 1."""
    if outer == 1:
        size = whole.shape[dim] // num
        return whole.narrow(dim, index * size, size)
    shape = whole.shape
    split = (*shape[:dim], outer, num, shape[dim] // (outer * num), *shape[dim + 1 :])
    kept = (*shape[:dim], shape[dim] // num, *shape[dim + 1 :])
    return whole.reshape(split).select(dim + 1, index).reshape(kept)
