"""Generators of calls, one for each operator that has a rule.

``CASES[target](draw, new)`` returns positional arguments: ``draw`` draws from a hypothesis
strategy and ``new`` makes a random tensor of the dtype under test. Sizes are such that two or three
devices can share them, some only with padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

Draw = Callable[[st.SearchStrategy[Any]], Any]
SIZES = st.sampled_from([1, 2, 3, 4, 5, 6, 6, 7, 8, 11, 12])
SMALL = st.sampled_from([1, 2, 3, 4, 6])
BOOL = st.booleans()


@dataclass(frozen=True, slots=True)
class New:
    """Makes random tensors; equal seeds make equal ones."""

    dtype: torch.dtype
    generator: torch.Generator

    def __call__(self, *shape: int) -> Tensor:
        if not self.dtype.is_floating_point:
            return self.index(5, *shape).to(self.dtype)
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def positive(self, *shape: int) -> Tensor:
        return self(*shape).abs() + 0.5

    def index(self, limit: int, *shape: int) -> Tensor:
        return torch.randint(0, limit, shape, generator=self.generator)

    def distinct(self, *shape: int) -> Tensor:
        """No two elements alike, so that maxima and orders are unique in every dtype."""
        count = torch.Size(shape).numel()
        order = torch.randperm(count, generator=self.generator).reshape(shape)
        return (order - count // 2).to(self.dtype)


Case = Callable[[Draw, New], tuple[Any, ...]]
CASES: dict[str, Case] = {}
INTEGER_TOO: set[str] = set()


def case(*targets: str, integers: bool = False) -> Callable[[Case], Case]:
    def wrap(make: Case) -> Case:
        for target in targets:
            CASES[target] = make
            if integers:
                INTEGER_TOO.add(target)
        return make

    return wrap


def shape_of(draw: Draw, low: int = 1, high: int = 3) -> tuple[int, ...]:
    return tuple(draw(st.lists(SIZES, min_size=low, max_size=high)))


def dim_of(draw: Draw, shape: tuple[int, ...]) -> int:
    return draw(st.integers(-len(shape), len(shape) - 1))


def broadcast(draw: Draw, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to ``shape``."""
    kept = tuple(1 if draw(st.integers(0, 3)) == 0 else size for size in shape)
    return kept[draw(st.integers(0, len(shape))) :]


# --- products -----------------------------------------------------------------------------------
@case("aten.linear.default")
def linear(draw: Draw, new: New):
    rows, k, n = shape_of(draw, 1, 3), draw(SIZES), draw(SIZES)
    bias = (new(n),) if draw(BOOL) else ()
    return (new(*rows, k), new(n, k), *bias)


@case("aten.mm.default")
def mm(draw: Draw, new: New):
    m, k, n = draw(SIZES), draw(SIZES), draw(SIZES)
    return new(m, k), new(k, n)


@case("aten.bmm.default")
def bmm(draw: Draw, new: New):
    b, m, k, n = draw(SMALL), draw(SIZES), draw(SIZES), draw(SIZES)
    return new(b, m, k), new(b, k, n)


@case("aten.addmm.default")
def addmm(draw: Draw, new: New):
    m, k, n = draw(SIZES), draw(SIZES), draw(SIZES)
    return new(*broadcast(draw, (m, n))), new(m, k), new(k, n)


@case("aten.baddbmm.default")
def baddbmm(draw: Draw, new: New):
    b, m, k, n = draw(SMALL), draw(SIZES), draw(SIZES), draw(SIZES)
    return new(*broadcast(draw, (b, m, n))), new(b, m, k), new(b, k, n)


@case("aten.matmul.default")
def matmul(draw: Draw, new: New):
    m, k, n = draw(SIZES), draw(SIZES), draw(SIZES)
    batch = shape_of(draw, 0, 2)
    left, right = broadcast(draw, batch), batch
    form = draw(st.sampled_from(["mm", "vm", "mv", "vv"]))
    if form == "vv":
        return new(k), new(k)
    if form == "vm":
        return new(k), new(*right, k, n)
    if form == "mv":
        return new(*right, m, k), new(k)
    return (new(*left, m, k), new(*right, k, n)) if draw(BOOL) else (
        new(*right, m, k), new(*left, k, n)
    )  # fmt: skip


@case("aten.einsum.default")
def einsum(draw: Draw, new: New):
    size = {letter: draw(SMALL) for letter in "abcde"}
    equation = draw(
        st.sampled_from(["ab,bc->ac", "abc,bd->acd", "ab,ab->", "abc,abd->dca", "ab,c->cab",
                         "abc->b", "abc,bd,de->ae"])
    )  # fmt: skip
    terms = equation.split("->")[0].split(",")
    return equation, [new(*(size[letter] for letter in term)) for term in terms]


# --- fills --------------------------------------------------------------------------------------
@case("aten.new_zeros.default", "aten.new_ones.default", integers=True)
def new_zeros(draw: Draw, new: New):
    return new(*shape_of(draw)), shape_of(draw)


@case("aten.new_full.default", integers=True)
def new_full(draw: Draw, new: New):
    return new(*shape_of(draw)), shape_of(draw), 3


@case("aten.__and__.Tensor", "aten.__or__.Tensor")
def logic(draw: Draw, new: New):
    shape = shape_of(draw)
    return new(*shape) > 0, new(*broadcast(draw, shape)) > 0


@case("aten.multiply.Tensor", integers=True)
def multiply(draw: Draw, new: New):
    shape = shape_of(draw)
    return new(*shape), new(*broadcast(draw, shape))


@case("aten.broadcast_tensors.default", integers=True)
def broadcast_tensors(draw: Draw, new: New):
    shape = shape_of(draw)
    return ([new(*shape), new(*broadcast(draw, shape))],)


# --- attention and recurrence -------------------------------------------------------------------
@case("aten.scaled_dot_product_attention.default")
def attention(draw: Draw, new: New):
    b, h, d = draw(SMALL), draw(SMALL), 4
    s, t = draw(SIZES), draw(SIZES)
    repeat = draw(st.sampled_from([1, 1, 2, 3]))
    causal = draw(BOOL)
    if causal:
        t = s
    mask = None
    if not causal and draw(BOOL):
        leading = broadcast(draw, (b, h if repeat == 1 else 1, s))[-3:]
        mask = new(*(leading or (1,)), t)  # of two dimensions at least
        if draw(BOOL):
            mask = mask > -1.0
            mask[..., 0] = True
    width = draw(st.sampled_from([4, 4, 2, 6]))  # of the values, which may differ from the keys'
    operands = new(b, h * repeat, s, d), new(b, h, t, d), new(b, h, t, width)
    return (*operands, mask, 0.0, causal, None, repeat != 1)


@case("aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input")
def recurrent(draw: Draw, new: New, target: str = ""):
    gates, states = {"lstm": (4, 2), "gru": (3, 1)}.get(target.split(".")[1], (1, 1))
    b, s, i, h = draw(SIZES), 2, 3, 2
    layers, both, batch_first = draw(st.integers(1, 2)), draw(BOOL), draw(BOOL)
    directions = 2 if both else 1
    weights = []
    for layer in range(layers):
        width = i if layer == 0 else h * directions
        for _ in range(directions):
            weights += [new(gates * h, width), new(gates * h, h), new(gates * h), new(gates * h)]
    start = [new(layers * directions, b, h) for _ in range(states)]
    x = new(b, s, i) if batch_first else new(s, b, i)
    hx = start if states == 2 else start[0]
    return x, hx, weights, True, layers, 0.0, True, both, batch_first


# --- convolution and pooling --------------------------------------------------------------------
def conv_operands(draw: Draw, new: New, spatial: int):
    groups = draw(st.sampled_from([1, 1, 2, 3, 4]))
    n, i, o = draw(SIZES), draw(SMALL), draw(st.sampled_from([1, 2, 3]))
    window = draw(st.sampled_from([1, 2, 3]))
    x = new(n, groups * i, *([4] * spatial))
    weight = new(groups * o, i, *([window] * spatial))
    return x, weight, new(groups * o) if draw(BOOL) else None, groups


@case("aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default")
def conv(draw: Draw, new: New, target: str = ""):
    spatial = int(target.split("conv")[1][0])
    x, weight, bias, groups = conv_operands(draw, new, spatial)
    stride, padding = draw(st.integers(1, 2)), draw(st.integers(0, 1))
    return x, weight, bias, [stride] * spatial, [padding] * spatial, [1] * spatial, groups


@case("aten.conv1d.padding", "aten.conv2d.padding", "aten.conv3d.padding")
def conv_padding(draw: Draw, new: New, target: str = ""):
    spatial = int(target.split("conv")[1][0])
    x, weight, bias, groups = conv_operands(draw, new, spatial)
    return x, weight, bias, [1] * spatial, draw(st.sampled_from(["same", "valid"])), [1], groups


@case("aten.convolution.default")
def convolution(draw: Draw, new: New):
    x, weight, bias, groups = conv_operands(draw, new, 2)
    return x, weight, bias, [1, 1], [1, 1], [1, 1], False, [0, 0], groups


@case(
    "aten.max_pool1d.default", "aten.max_pool2d.default", "aten.max_pool3d.default",
    "aten.avg_pool1d.default", "aten.avg_pool2d.default", "aten.avg_pool3d.default",
    "aten.max_pool2d_with_indices.default",
)  # fmt: skip
def pool(draw: Draw, new: New, target: str = ""):
    spatial = int(target.split("pool")[1][0])
    free = (draw(SIZES), draw(SIZES)) if draw(BOOL) else (draw(SIZES),)
    return new.distinct(*free, *([4] * spatial)), [2] * spatial, [draw(st.integers(1, 2))] * spatial


@case(
    "aten.adaptive_avg_pool1d.default", "aten.adaptive_avg_pool2d.default",
    "aten.adaptive_avg_pool3d.default", "aten.adaptive_max_pool2d.default",
)  # fmt: skip
def adaptive_pool(draw: Draw, new: New, target: str = ""):
    spatial = int(target.split("pool")[1][0])
    free = (draw(SIZES), draw(SIZES)) if draw(BOOL) else (draw(SIZES),)
    return new.distinct(*free, *([4] * spatial)), [draw(st.integers(1, 3))] * spatial


# --- element-wise -------------------------------------------------------------------------------
@case(
    "aten.clone.default", "aten.contiguous.default", "aten.detach.default", "aten.detach_.default",
    "aten.rand_like.default", "aten.randn_like.default", "aten.zeros_like.default",
    "aten.ones_like.default", "aten.gelu.default",
)  # fmt: skip
def unary(draw: Draw, new: New):
    return (new(*shape_of(draw)),)


@case("aten._to_copy.default")
def to_copy(draw: Draw, new: New):
    return (new(*shape_of(draw)), {"dtype": torch.float32})


@case("aten.to.dtype")
def to_dtype(draw: Draw, new: New):
    return new(*shape_of(draw)), draw(st.sampled_from([torch.float32, torch.int64, torch.bool]))


@case("aten.to.dtype_layout")
def to_dtype_layout(draw: Draw, new: New):
    return (new(*shape_of(draw)), {"dtype": torch.float32})


@case("aten.to.device")
def to_device(draw: Draw, new: New):
    return new(*shape_of(draw)), torch.device("cpu"), torch.float32


@case("aten.native_dropout.default")
def native_dropout(draw: Draw, new: New):
    return new(*shape_of(draw)), 0.5, True


@case("autopar.model_dropout.default")
def model_dropout(draw: Draw, new: New):
    x = new(*shape_of(draw))
    draws = torch.arange(x.shape[0] * 3).view(-1, 3)
    return x, draws, 0.5, ""


@case("aten.exponential.default")
def exponential(draw: Draw, new: New):
    return (new(*shape_of(draw)),)


@case("aten.bernoulli.p")
def bernoulli(draw: Draw, new: New):
    return new(*shape_of(draw)), 0.5


@case("aten.bernoulli.default")
def bernoulli_of(draw: Draw, new: New):
    return (new(*shape_of(draw)).sigmoid(),)


@case("aten.rsub.Tensor")
def rsub(draw: Draw, new: New):
    shape = shape_of(draw)
    return new(*broadcast(draw, shape)), new(*shape)


@case("aten.full_like.default")
def full_like(draw: Draw, new: New):
    return new(*shape_of(draw)), 3.0


@case("aten.masked_fill.Scalar")
def masked_fill_scalar(draw: Draw, new: New):
    shape = shape_of(draw)
    return new(*shape), new(*broadcast(draw, shape)) > 0, 2.0


@case("aten.masked_fill.Tensor")
def masked_fill_tensor(draw: Draw, new: New):
    shape = shape_of(draw)
    return new(*shape), new(*broadcast(draw, shape)) > 0, new()


@case("aten.where.self", integers=True)
def where(draw: Draw, new: New):
    shape = shape_of(draw)
    return new(*shape) > 0, new(*broadcast(draw, shape)), new(*broadcast(draw, shape))


# --- embedding and losses -----------------------------------------------------------------------
@case("aten.embedding.default")
def embedding(draw: Draw, new: New):
    v, h = draw(SIZES), draw(SIZES)
    padding = draw(st.integers(-1, v - 1))
    return new(v, h), new.index(v, *shape_of(draw, 0, 2)), padding


@case("aten.cross_entropy_loss.default")
def cross_entropy(draw: Draw, new: New):
    n, c = draw(SIZES), draw(SIZES)
    rest = shape_of(draw, 0, 1) if draw(BOOL) else ()
    reduction = draw(st.integers(0, 2))
    if draw(st.integers(0, 3)) == 0:
        target = new(n, c, *rest).softmax(1)
    else:
        target = new.index(c, n, *rest)
        target.flatten()[1:2].fill_(-100)
    weight = new.positive(c) if draw(BOOL) else None
    smoothing = draw(st.sampled_from([0.0, 0.0, 0.1]))
    return new(n, c, *rest).requires_grad_(), target, weight, reduction, -100, smoothing


@case("aten.soft_margin_loss.default")
def soft_margin_loss(draw: Draw, new: New):
    shape = shape_of(draw)
    return new(*shape).requires_grad_(), new(*shape), draw(st.integers(0, 2))


@case("aten.mse_loss.default", "aten.l1_loss.default")
def plain_loss(draw: Draw, new: New):
    shape = shape_of(draw)
    return new(*shape), new(*shape), draw(st.integers(0, 2))


@case("aten.smooth_l1_loss.default", "aten.huber_loss.default")
def huber_loss(draw: Draw, new: New):
    shape = shape_of(draw)
    return new(*shape), new(*shape), draw(st.integers(0, 2)), 0.5


@case("aten.kl_div.default")
def kl_div(draw: Draw, new: New):
    shape = shape_of(draw)
    return new(*shape), new(*shape), draw(st.integers(0, 2)), {"log_target": draw(BOOL)}


@case("aten.binary_cross_entropy.default")
def binary_cross_entropy(draw: Draw, new: New):
    shape = shape_of(draw)
    weight = new.positive(*broadcast(draw, shape)) if draw(BOOL) else None
    prediction = new(*shape).sigmoid().requires_grad_()
    return prediction, new(*shape).sigmoid(), weight, draw(st.integers(0, 2))


@case("aten.binary_cross_entropy_with_logits.default")
def binary_cross_entropy_with_logits(draw: Draw, new: New):
    shape = shape_of(draw)
    weight = new.positive(*broadcast(draw, shape)) if draw(BOOL) else None
    scale = new.positive(shape[-1]) if draw(BOOL) else None
    return (
        new(*shape).requires_grad_(),
        new(*shape).sigmoid(),
        weight,
        scale,
        draw(st.integers(0, 2)),
    )


# --- normalisation ------------------------------------------------------------------------------
@case("aten.layer_norm.default")
def layer_norm(draw: Draw, new: New):
    free, normalized = (
        shape_of(draw, 1, 2),
        (draw(st.sampled_from([3, 4])), 2)[: draw(SMALL) % 2 + 1],
    )
    weights = (new(*normalized), new(*normalized)) if draw(BOOL) else ()
    return (new(*free, *normalized), list(normalized), *weights)


@case("aten.rms_norm.default")
def rms_norm(draw: Draw, new: New):
    free = shape_of(draw, 1, 2)
    weight = (new(4),) if draw(BOOL) else ()
    return (new(*free, 4), [4], *weight)


@case("aten.group_norm.default")
def group_norm(draw: Draw, new: New):
    n, groups, c = draw(SIZES), draw(SMALL), draw(st.sampled_from([1, 2, 3]))
    weights = (new(groups * c), new(groups * c)) if draw(BOOL) else ()
    return (new(n, groups * c, 3, 2), groups, *weights)


@case("aten._native_batch_norm_legit_functional.default")
def batch_norm(draw: Draw, new: New):
    n, c = draw(st.sampled_from([2, 4, 6, 12])), draw(SMALL)
    rest = draw(st.sampled_from([(), (4,), (4, 2)]))
    weights = [new(c).requires_grad_() if draw(BOOL) else None for _ in range(2)]
    x = new(n, c, *rest).requires_grad_()
    return x, *weights, new(c), new.positive(c), draw(BOOL), 0.1, 1e-5


# --- reductions ---------------------------------------------------------------------------------
@case("aten.sum.default", "aten.mean.default")
def full_reduction(draw: Draw, new: New):
    return (new(*shape_of(draw)),)


@case(
    "aten.sum.dim_IntList", "aten.mean.dim", "aten.amax.default", "aten.amin.default",
    "aten.logsumexp.default",
)  # fmt: skip
def reduction(draw: Draw, new: New, target: str = ""):
    shape = shape_of(draw)
    dims = sorted({dim_of(draw, shape) % len(shape) for _ in range(draw(st.integers(1, 2)))})
    keep = draw(BOOL)
    x = new.distinct(*shape) if target.startswith(("aten.am", "aten.log")) else new(*shape)
    return x, dims, keep


@case("aten.any.dim", "aten.all.dim")
def truth(draw: Draw, new: New):
    shape = shape_of(draw)
    return new(*shape) > 0, dim_of(draw, shape), draw(BOOL)


@case(
    "aten.argmax.default", "aten.argmin.default", "aten.max.dim", "aten.min.dim",
    "aten.prod.dim_int", integers=True,
)  # fmt: skip
def one_dim_reduction(draw: Draw, new: New):
    shape = shape_of(draw)
    return new.distinct(*shape), dim_of(draw, shape), draw(BOOL)


@case("aten.linalg_vector_norm.default")
def vector_norm(draw: Draw, new: New):
    shape = shape_of(draw)
    return new(*shape), 2.0, [dim_of(draw, shape)], draw(BOOL)


@case(
    "aten.softmax.int", "aten._softmax.default", "aten.log_softmax.int",
    "aten._log_softmax.default", "aten._safe_softmax.default",
)  # fmt: skip
def softmax(draw: Draw, new: New, target: str = ""):
    shape = shape_of(draw)
    last = (False,) if "._" in target and "safe" not in target else ()
    return (new(*shape), dim_of(draw, shape), *last)
