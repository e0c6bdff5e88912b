"""Generators of calls for indexing, experts, resizing and the rarer layers."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from autopar.ir.routed_layers import Between, Operand
from tests.rules.op_cases import BOOL, SIZES, SMALL, Draw, New, broadcast, case, dim_of, shape_of


# --- indexing -----------------------------------------------------------------------------------
@case("aten.index.Tensor", integers=True)
def index(draw: Draw, new: New):
    shape = shape_of(draw, 1, 3)
    picked = shape_of(draw, 1, 2)
    chosen = [draw(BOOL) for _ in shape]
    chosen[draw(st.integers(0, len(shape) - 1))] = True
    entries = [
        new.index(size, *broadcast(draw, picked)) if use else None
        for size, use in zip(shape, chosen)
    ]
    return new(*shape), entries


@case("aten.index_put.default")
def index_put(draw: Draw, new: New):
    shape, count = shape_of(draw, 1, 3), draw(SMALL)
    dim = draw(st.integers(0, len(shape) - 1))
    # Distinct entries unless they are summed: which of two writes wins is not defined.
    accumulate = draw(BOOL)
    order = new.index(shape[dim], count) if accumulate else torch.randperm(shape[dim])[:count]
    entries = [order if d == dim else None for d in range(dim + 1)]
    values = new(*shape[:dim], len(order), *shape[dim + 1 :]) if draw(BOOL) else new()
    return new(*shape), entries, values, accumulate


@case("aten.gather.default", integers=True)
def gather(draw: Draw, new: New):
    shape = shape_of(draw)
    dim = dim_of(draw, shape)
    index_shape = list(shape)
    index_shape[dim] = draw(SIZES)
    if draw(st.integers(0, 3)) == 0:
        index_shape[0] = draw(st.integers(1, shape[0]))
    return new(*shape), dim, new.index(shape[dim], *index_shape)


@case("aten.scatter_add.default")
def scatter_add(draw: Draw, new: New):
    shape = shape_of(draw)
    dim = dim_of(draw, shape)
    picked = list(shape)
    picked[dim] = draw(SMALL)
    return new(*shape), dim, new.index(shape[dim], *picked), new(*picked)


@case("aten.scatter.src", "aten.scatter.value", "aten.scatter.reduce", "aten.scatter_reduce.two")
def scatter(draw: Draw, new: New, target: str = ""):
    shape = shape_of(draw)
    dim = dim_of(draw, shape)
    order = torch.argsort(torch.rand(shape, generator=new.generator), dim)
    order = order.narrow(dim, 0, draw(st.integers(1, shape[dim])))
    source = 2.0 if target.endswith("value") else new(*order.shape)
    if target.endswith("two"):
        return new(*shape), dim, order, source, "sum"
    further = ({"reduce": "add"},) if target.endswith("reduce") else ()
    x = new(*shape).requires_grad_() if target.endswith("reduce") else new(*shape)
    return (x, dim, order, source, *further)


@case("aten.index_add.default", "aten.index_copy.default")
def index_add(draw: Draw, new: New):
    shape = shape_of(draw)
    dim = dim_of(draw, shape)
    count = draw(st.integers(1, shape[dim]))
    source = list(shape)
    source[dim] = count
    return new(*shape), dim, torch.randperm(shape[dim])[:count], new(*source)


@case("aten.slice_scatter.default")
def slice_scatter(draw: Draw, new: New):
    shape = list(shape_of(draw))
    dim = dim_of(draw, tuple(shape))
    stop = draw(st.integers(1, shape[dim]))
    return (
        new(*shape),
        new(*(stop if d == dim % len(shape) else s for d, s in enumerate(shape))),
        dim,
        0,
        stop,
    )


@case("aten.select_scatter.default")
def select_scatter(draw: Draw, new: New):
    shape = shape_of(draw)
    dim = draw(st.integers(0, len(shape) - 1))
    return (
        new(*shape),
        new(*shape[:dim], *shape[dim + 1 :]),
        dim,
        draw(st.integers(0, shape[dim] - 1)),
    )


@case("aten.embedding_bag.default", "aten.embedding_bag.padding_idx")
def embedding_bag(draw: Draw, new: New, target: str = ""):
    v, h, bags = draw(SIZES), draw(SIZES), draw(SMALL)
    mode = draw(st.integers(0, 1))
    lengths = new.index(4, bags)
    lengths[0] += 1
    ends = lengths.cumsum(0)
    count = int(ends[-1])
    weights = new.positive(count) if mode == 0 and draw(BOOL) else None
    args = new(v, h), new.index(v, count), ends - lengths, False, mode, False, weights, False
    padding = (draw(st.integers(-1, v - 1)),) if target.endswith("padding_idx") else ()
    return (*args, *padding)


# --- experts, transposed convolution, normalisation, losses -------------------------------------
@case("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
def grouped_mm(draw: Draw, new: New):
    s, e = draw(st.sampled_from([6, 8, 12])), draw(st.sampled_from([2, 3, 4, 6]))
    k, n = draw(st.sampled_from([16, 32, 48])), draw(st.sampled_from([16, 32, 48]))
    ends = new.index(s + 1, e).sort()[0]
    ends[-1] = s
    return new(s, k), new(e, k, n), ends.to(torch.int32)


@case("autopar.routed_product.default")
def routed_product(draw: Draw, new: New):
    t, e, r = draw(SIZES), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    k, n = draw(SIZES), draw(SIZES)
    return new(t, k), new(e, k, n), new.index(e, t * r)


@case("autopar.routed_layers.default")
def routed_layers(draw: Draw, new: New):
    t, e, r = draw(SIZES), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    k, m, n = draw(SIZES), draw(SIZES), draw(SIZES)
    gated = Between(
        (
            ("part", (Operand(0), 2, 0), {}),
            ("part", (Operand(0), 2, 1), {}),
            ("aten.gelu.default", (Operand(1),), {"approximate": "tanh"}),
            ("aten.mul.Tensor", (Operand(3), Operand(2)), {}),
        ),
        4 * m,
    )
    two = Between(
        (
            ("aten.cos.default", (Operand(0),), {}),  # not zero at zero
            ("aten.mul.Tensor", (Operand(2), Operand(1)), {}),
            ("aten.add.Tensor", (Operand(3), 0.5), {}),
        ),
        5 * m,
    )
    between, widths = draw(st.sampled_from([(gated, (2 * m,)), (two, (m, m))]))
    first = [new(e, k, width) for width in widths]
    return new(t, k), first, new(e, m, n), new.index(e, t * r), between.to_text()


@case("aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input")
def conv_transpose(draw: Draw, new: New, target: str = ""):
    spatial = int(target.split("transpose")[1][0])
    groups, n = draw(st.sampled_from([1, 1, 2, 3])), draw(SIZES)
    i, o = draw(SMALL), draw(st.sampled_from([1, 2, 3]))
    bias = new(groups * o) if draw(BOOL) else None
    x, weight = new(n, groups * i, *([3] * spatial)), new(groups * i, o, *([2] * spatial))
    stride = draw(st.integers(1, 2))
    return x, weight, bias, [stride] * spatial, [0] * spatial, [stride - 1] * spatial, groups


@case("aten.instance_norm.default")
def instance_norm(draw: Draw, new: New):
    n, c = draw(SIZES), draw(SIZES)
    weights = (new(c), new(c)) if draw(BOOL) else (None, None)
    return (new(n, c, 4), *weights, None, None, True, 0.1, 1e-5, False)


@case("aten._native_batch_norm_legit_no_training.default")
def batch_norm_inference(draw: Draw, new: New):
    n, c = draw(SIZES), draw(SIZES)
    rest = draw(st.sampled_from([(), (4,), (4, 2)]))
    weights = [new(c).requires_grad_() if draw(BOOL) else None for _ in range(2)]
    x = new(n, c, *rest).requires_grad_()
    return x, *weights, new(c), new.positive(c), 0.1, 1e-5


@case("aten.nll_loss_nd.default")
def nll_loss(draw: Draw, new: New):
    n, c, rest = draw(SIZES), draw(SIZES), shape_of(draw, 0, 2)
    target = new.index(c, n, *rest)
    target.flatten()[1:2].fill_(-100)
    weight = new.positive(c) if draw(BOOL) else None
    x = new(n, c, *rest).log_softmax(1).requires_grad_()
    return x, target, weight, draw(st.integers(0, 2))


# --- element-wise, products, reductions ---------------------------------------------------------
@case("aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def where_scalar(draw: Draw, new: New, target: str = ""):
    shape = shape_of(draw)
    left = 1.0 if target.endswith(("Self", "Scalar")) else new(*broadcast(draw, shape))
    right = 2.0 if target.endswith(("Other", "Scalar")) else new(*broadcast(draw, shape))
    return new(*shape) > 0, left, right


@case("aten.floor_divide.default")
def floor_divide(draw: Draw, new: New):
    shape = shape_of(draw)
    return new.index(9, *shape), new.index(3, *broadcast(draw, shape)) + 1


@case("aten.copy.default")
def copy(draw: Draw, new: New):
    shape = shape_of(draw)
    return new(*shape), new(*broadcast(draw, shape))


@case("aten.fill.Tensor", "aten.fill.Scalar")
def fill(draw: Draw, new: New, target: str = ""):
    return new(*shape_of(draw)), new() if target.endswith("Tensor") else 3.0


@case("aten.mv.default")
def mv(draw: Draw, new: New):
    m, k = draw(SIZES), draw(SIZES)
    return new(m, k), new(k)


@case("aten.dot.default")
def dot(draw: Draw, new: New):
    k = draw(SIZES)
    return new(k), new(k)


@case("aten.norm.ScalarOpt_dim")
def norm(draw: Draw, new: New):
    shape = shape_of(draw)
    return new(*shape), 2.0, [dim_of(draw, shape)], draw(BOOL)


@case("aten.cumprod.default")
def cumprod(draw: Draw, new: New):
    shape = shape_of(draw)
    return new(*shape), dim_of(draw, shape)


@case("aten.glu.default")
def glu(draw: Draw, new: New):
    shape = list(shape_of(draw))
    dim = dim_of(draw, tuple(shape))
    shape[dim] *= 2
    return new(*shape), dim


# --- resizing -----------------------------------------------------------------------------------
@case("aten.repeat.default", integers=True)
def repeat(draw: Draw, new: New):
    shape = shape_of(draw)
    return new(*shape), [draw(SMALL) for _ in range(len(shape) + draw(st.integers(0, 1)))]


@case("aten.repeat_interleave.self_int")
def repeat_interleave(draw: Draw, new: New):
    shape = shape_of(draw)
    return new(*shape), draw(SMALL), dim_of(draw, shape)


@case(
    "aten.upsample_nearest1d.vec", "aten.upsample_nearest2d.vec", "aten.upsample_nearest3d.vec",
    "aten.upsample_linear1d.vec", "aten.upsample_bilinear2d.vec", "aten.upsample_bicubic2d.vec",
    "aten.upsample_trilinear3d.vec", "aten.upsample_nearest2d.default",
    "aten.upsample_bilinear2d.default",
)  # fmt: skip
def upsample(draw: Draw, new: New, target: str = ""):
    spatial = int(target.split("d.")[0][-1])
    align = () if "nearest" in target else (draw(BOOL),)
    x, size = new(draw(SIZES), draw(SIZES), *([2] * spatial)), [draw(st.integers(2, 4))] * spatial
    return (x, size, *align, None) if target.endswith("vec") else (x, size, *align)


@case(
    "aten.reflection_pad1d.default", "aten.reflection_pad2d.default",
    "aten.replication_pad1d.default", "aten.replication_pad2d.default",
)  # fmt: skip
def edge_pad(draw: Draw, new: New, target: str = ""):
    spatial = int(target.split("d.")[0][-1])
    return new(draw(SIZES), draw(SIZES), *([3] * spatial)), [1, 2] * spatial


@case("aten.pixel_shuffle.default")
def pixel_shuffle(draw: Draw, new: New):
    return new(draw(SMALL), draw(SMALL) * 4, draw(SMALL), draw(SMALL)), 2


@case("aten.im2col.default")
def im2col(draw: Draw, new: New):
    return (
        new(draw(SIZES), draw(SIZES), 4, 4),
        [2, 2],
        [1, 1],
        [0, 0],
        [draw(st.integers(1, 2))] * 2,
    )


@case("aten.unfold.default")
def unfold(draw: Draw, new: New):
    shape = shape_of(draw)
    dim = dim_of(draw, shape)
    return new(*shape), dim, draw(st.integers(1, shape[dim])), draw(st.integers(1, 2))


@case("aten.tril.default", "aten.triu.default")
def triangle(draw: Draw, new: New):
    return new(*shape_of(draw, 2, 3)), draw(st.integers(-1, 1))
