"""Indexing, gathering and scattering: the indexed dimension stays whole, all others are free."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.ir.graph import Op, Ref, Value
from autopar.rules.derivative import KEEPS_NOTHING
from autopar.rules.elementwise import broadcast_layout
from autopar.rules.registry import register
from autopar.rules.space import Layout, Space, SpaceBuilder, layout

Outputs = Sequence[Value | None]


def _indexed_dims(op: Op, inputs: Sequence[Value]) -> list[int] | None:
    """The dimensions with an index tensor; None where a mask makes the size of the result vary."""
    entries = op.args[1]
    num_indices = sum(isinstance(entry, Ref) for entry in entries)
    if any(v.dtype in (torch.bool, torch.uint8) for v in inputs[1 : 1 + num_indices]):
        return None
    return [d for d, entry in enumerate(entries) if isinstance(entry, Ref)]


def _picked_layout(
    free: dict[int, str], rank: int, indexed: Sequence[int], picked: Sequence[str]
) -> tuple[str, ...]:
    """Dimensions of ``x[indices]``: the picked ones in place for adjacent indices, else first."""
    first, last = indexed[0], indexed[-1]
    if last - first + 1 != len(indexed):
        return (*picked, *free.values())
    before = [free[d] for d in range(first)]
    return (*before, *picked, *(free[d] for d in range(last + 1, rank)))


@register("aten.index.Tensor", keeps=KEEPS_NOTHING)
def index_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``x[:, i, j]``: dimensions without an index are free, and so are those of the indices."""
    indexed = _indexed_dims(op, inputs)
    if not indexed:
        return None
    shape, indices = inputs[0].shape, inputs[1:]
    builder = SpaceBuilder()
    free = {d: builder.dim(f"d{d}", s) for d, s in enumerate(shape) if d not in indexed}
    picked_shape = torch.broadcast_shapes(*(v.shape for v in indices))
    picked = builder.dims("i", picked_shape)
    source = [free[d] if d in free else builder.whole(s) for d, s in enumerate(shape)]
    return builder.build(
        [layout(*source), *(broadcast_layout(v.shape, picked, picked_shape) for v in indices)],
        [layout(*_picked_layout(free, len(shape), indexed, picked))],
    )


@register("aten.index_put.default")
def index_put_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """Dimensions without an index are free."""
    indexed = _indexed_dims(op, inputs)
    if not indexed:
        return None
    shape, indices, values = inputs[0].shape, inputs[1:-1], inputs[-1]
    builder = SpaceBuilder()
    free = {d: builder.dim(f"d{d}", s) for d, s in enumerate(shape) if d not in indexed}
    picked = [builder.whole(s) for s in torch.broadcast_shapes(*(v.shape for v in indices))]
    x = layout(*(free[d] if d in free else builder.whole(s) for d, s in enumerate(shape)))
    put = _picked_layout(free, len(shape), indexed, picked)
    sizes = [builder.sizes[d] for d in put]
    whole = [layout(*(builder.whole(s) for s in v.shape)) for v in indices]
    return builder.build([x, *whole, broadcast_layout(values.shape, put, sizes)], [x])


@register("aten.gather.default")
def gather_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``out[i, j] = x[i, index[i, j]]``: free where sizes agree, and along the index itself."""
    source, index = inputs[0].shape, inputs[1].shape
    if not source or len(index) != len(source):
        return None
    dim = op.args[1] % len(source)
    builder = SpaceBuilder()
    left: list[str] = []
    right: list[str] = []
    for d, (size, picked) in enumerate(zip(source, index)):
        if d == dim:
            left.append(builder.whole(size))
            right.append(builder.dim("i", picked))
        elif size == picked:
            left.append(builder.dim(f"d{d}", size))
            right.append(left[-1])
        else:
            left.append(builder.whole(size))
            right.append(builder.whole(picked))
    return builder.build([layout(*left), layout(*right)], [layout(*right)])


@register(
    "aten.scatter.src",
    "aten.scatter.value",
    "aten.scatter.reduce",
    "aten.scatter_add.default",
    "aten.scatter_reduce.two",
)
def scatter_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """The other dimensions are free where all operands agree."""
    shapes = [v.shape for v in inputs]
    rank = len(shapes[0])
    if rank == 0 or any(len(s) != rank for s in shapes):
        return None
    dim = op.args[1] % rank
    builder = SpaceBuilder()
    shared = {
        d: builder.dim(f"d{d}", shapes[0][d])
        for d in range(rank)
        if d != dim and len({s[d] for s in shapes}) == 1
    }

    def of(shape: Sequence[int]) -> Layout:
        return layout(*(shared[d] if d in shared else builder.whole(shape[d]) for d in range(rank)))

    return builder.build([of(s) for s in shapes], [of(shapes[0])])


@register("aten.index_add.default", "aten.index_copy.default")
def index_add_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``x[..., index] += source``: the other dimensions are free."""
    shape, index, source = (v.shape for v in inputs)
    if not shape or len(source) != len(shape):
        return None
    dim = op.args[1] % len(shape)
    builder = SpaceBuilder()
    free = {d: builder.dim(f"d{d}", s) for d, s in enumerate(shape) if d != dim}
    sides = [
        layout(*(free[d] if d != dim else builder.whole(s) for d, s in enumerate(sizes)))
        for sizes in (shape, source)
    ]
    entries = layout(*(builder.whole(s) for s in index))
    return builder.build([sides[0], entries, sides[1]], [sides[0]])


@register("aten.slice_scatter.default", "aten.select_scatter.default", keeps=KEEPS_NOTHING)
def slice_scatter_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """Write a slice into ``x``; the other dimensions are free."""
    shape, source = inputs[0].shape, inputs[1].shape
    given = op.args[2] if len(op.args) > 2 else dict(op.kwargs).get("dim", 0)
    dim = given % len(shape)
    builder = SpaceBuilder()
    free = {d: builder.dim(f"d{d}", s) for d, s in enumerate(shape) if d != dim}
    x = layout(*(free[d] if d != dim else builder.whole(s) for d, s in enumerate(shape)))
    written = list(free.values())
    if len(source) == len(shape):
        written.insert(dim, builder.whole(source[dim]))
    return builder.build([x, layout(*written)], [x])
