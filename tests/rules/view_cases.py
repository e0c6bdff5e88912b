"""Generators of calls for views and rearrangements."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from tests.rules.op_cases import BOOL, SIZES, SMALL, Draw, New, case, dim_of, shape_of


@case("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", integers=True)
def view(draw: Draw, new: New):
    source = shape_of(draw, 1, 3)
    numel = torch.Size(source).numel()
    target, left = [], numel
    for _ in range(draw(st.integers(0, 2))):
        size = draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0]))
        target.append(size)
        left //= size
    return new(*source), [*target, left]


@case("aten.flatten.using_ints", integers=True)
def flatten(draw: Draw, new: New):
    shape = shape_of(draw)
    first = draw(st.integers(0, len(shape) - 1))
    return new(*shape), first, draw(st.integers(first, len(shape) - 1))


@case("aten.unflatten.int")
def unflatten(draw: Draw, new: New):
    outer, inner, shape = draw(SMALL), draw(SMALL), shape_of(draw, 0, 2)
    dim = draw(st.integers(0, len(shape)))
    return new(*shape[:dim], outer * inner, *shape[dim:]), dim, [outer, inner]


@case("aten.unsqueeze.default", integers=True)
def unsqueeze(draw: Draw, new: New):
    shape = shape_of(draw)
    return new(*shape), draw(st.integers(-len(shape) - 1, len(shape)))


@case("aten.squeeze.default")
def squeeze(draw: Draw, new: New):
    return (new(*shape_of(draw)),)


@case("aten.squeeze.dim")
def squeeze_dim(draw: Draw, new: New):
    shape = shape_of(draw)
    return new(*shape), dim_of(draw, shape)


@case("aten.squeeze.dims")
def squeeze_dims(draw: Draw, new: New):
    shape = shape_of(draw)
    return new(*shape), [dim_of(draw, shape)]


@case("aten.transpose.int", integers=True)
def transpose(draw: Draw, new: New):
    shape = shape_of(draw)
    return new(*shape), dim_of(draw, shape), dim_of(draw, shape)


@case("aten.t.default")
def t(draw: Draw, new: New):
    return (new(*shape_of(draw, 0, 2)),)


@case("aten.permute.default", integers=True)
def permute(draw: Draw, new: New):
    shape = shape_of(draw)
    return new(*shape), list(draw(st.permutations(range(len(shape)))))


@case("aten.movedim.int")
def movedim(draw: Draw, new: New):
    shape = shape_of(draw)
    return new(*shape), dim_of(draw, shape), dim_of(draw, shape)


@case("aten.movedim.intlist")
def movedim_list(draw: Draw, new: New):
    shape = shape_of(draw, 2, 3)
    sources, targets = (list(draw(st.permutations(range(len(shape)))))[:2] for _ in range(2))
    return new(*shape), sources, targets


@case("aten.expand.default", integers=True)
def expand(draw: Draw, new: New):
    shape = shape_of(draw)
    target = [-1 if draw(st.integers(0, 3)) == 0 else size for size in shape]
    source = tuple(1 if draw(BOOL) and size != -1 else own for own, size in zip(shape, target))
    return new(*source), [*([2] if draw(BOOL) else []), *target]


@case("aten.slice.Tensor", integers=True)
def slice_(draw: Draw, new: New):
    shape = shape_of(draw)
    dim = dim_of(draw, shape)
    start = draw(st.integers(0, shape[dim] - 1))
    return (
        new(*shape),
        dim,
        start,
        draw(st.integers(start + 1, shape[dim])),
        draw(st.integers(1, 2)),
    )


@case("aten.diff.default")
def diff(draw: Draw, new: New):
    shape, order = list(shape_of(draw)), draw(st.integers(1, 2))
    dim = dim_of(draw, tuple(shape)) % len(shape)
    shape[dim] += order
    others = []
    for size in (draw(st.sampled_from([None, 1, 3])) for _ in range(2)):
        others.append(None if size is None else new(*shape[:dim], size, *shape[dim + 1 :]))
    return new(*shape), order, dim, *others


@case("aten.narrow.default")
def narrow(draw: Draw, new: New):
    shape = shape_of(draw)
    dim = dim_of(draw, shape)
    start = draw(st.integers(0, shape[dim] - 1))
    return new(*shape), dim, start, shape[dim] - start


@case("aten.cumsum.default")
def cumsum(draw: Draw, new: New):
    shape = shape_of(draw)
    return new(*shape), dim_of(draw, shape)


@case("aten.sort.default", integers=True)
def sort(draw: Draw, new: New):
    shape = shape_of(draw)
    return new.distinct(*shape), dim_of(draw, shape), draw(BOOL)


@case("aten.topk.default", integers=True)
def topk(draw: Draw, new: New):
    shape = shape_of(draw)
    dim = dim_of(draw, shape)
    return new.distinct(*shape), draw(st.integers(1, shape[dim])), dim


@case("aten.index_select.default")
def index_select(draw: Draw, new: New):
    shape = shape_of(draw)
    dim = dim_of(draw, shape)
    return new(*shape), dim, new.index(shape[dim], draw(SIZES))


@case("aten.select.int", integers=True)
def select(draw: Draw, new: New):
    shape = shape_of(draw)
    dim = dim_of(draw, shape)
    return new(*shape), dim, draw(st.integers(-shape[dim], shape[dim] - 1))


@case("aten.unbind.int")
def unbind(draw: Draw, new: New):
    shape = shape_of(draw)
    return new(*shape), dim_of(draw, shape)


@case("aten.cat.default", "aten.concat.default", "aten.concatenate.default", integers=True)
def cat(draw: Draw, new: New):
    shape = list(shape_of(draw))
    dim = dim_of(draw, tuple(shape))
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        shape[dim] = draw(SMALL)
        parts.append(new(*shape))
    if draw(BOOL):
        parts.insert(draw(st.integers(0, len(parts))), new(0))  # which torch skips
    return parts, dim


@case("aten.stack.default")
def stack(draw: Draw, new: New):
    shape = shape_of(draw)
    dim = draw(st.integers(-len(shape) - 1, len(shape)))
    return [new(*shape) for _ in range(draw(st.integers(1, 3)))], dim


@case("aten.flip.default")
def flip(draw: Draw, new: New):
    shape = shape_of(draw)
    return new(*shape), [dim_of(draw, shape)]


@case("aten.roll.default")
def roll(draw: Draw, new: New):
    shape = shape_of(draw)
    return (new(*shape), [1], [dim_of(draw, shape)]) if draw(BOOL) else (new(*shape), [2])


@case("aten.pad.default")
def pad(draw: Draw, new: New):
    shape = shape_of(draw, 2, 3)
    return new(*shape), [draw(st.integers(0, 2)), draw(st.integers(0, 2))]


@case("aten.constant_pad_nd.default")
def constant_pad(draw: Draw, new: New):
    shape = shape_of(draw, 2, 3)
    return new(*shape), [draw(st.integers(-1, 2)), 1, draw(st.integers(0, 2)), 0], 1.0


@case("aten.split.Tensor")
def split(draw: Draw, new: New):
    shape = shape_of(draw)
    dim = dim_of(draw, shape)
    return new(*shape), draw(st.integers(1, shape[dim])), dim


@case("aten.chunk.default")
def chunk(draw: Draw, new: New):
    shape = shape_of(draw)
    return new(*shape), draw(st.integers(1, 4)), dim_of(draw, shape)


@case("aten.split_with_sizes.default", "aten.split.sizes")
def split_with_sizes(draw: Draw, new: New):
    shape = shape_of(draw)
    dim = dim_of(draw, shape)
    first = draw(st.integers(0, shape[dim]))
    return new(*shape), [first, shape[dim] - first], dim
