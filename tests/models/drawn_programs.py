"""Programs drawn over all differentiable operators of torch's ``op_db``, as modules.

A program is a few steps. Each takes values that were made before (or parameters), and is one of: an
operator of ``op_db`` in one of its forms (function, method, in place) on a sample input of torch's
own, whose tensors are parameters or mixed with earlier values; views of views; a write in place
through views of views. The loss reads every value made, so that each has a gradient. While it is
drawn, every step runs once: steps that fail in eager mode or give numbers that are not finite are
drawn again.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

DTYPE = torch.float64
MAX_SAMPLES = 48
MAX_ELEMENTS = 2_000

OPERATORS = [
    op
    for op in op_db
    if op.supports_autograd
    and op.supports_dtype(DTYPE, "cpu")
    and DTYPE in op.supported_backward_dtypes("cpu")
]
_BY_NAME = {op.formatted_name: op for op in OPERATORS}
_UNDEFINED = {"empty", "empty_like", "new_empty", "new_empty_strided", "empty_permuted"}


@cache
def samples(name: str) -> tuple[Any, ...]:
    """Small sample inputs of one operator."""
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        found = _BY_NAME[name].sample_inputs("cpu", DTYPE, requires_grad=True)
        kept = list(itertools.islice(found, MAX_SAMPLES))
    return tuple(s for s in kept if sum(t.numel() for t in _tensors(s)) <= MAX_ELEMENTS)


def _tensors(sample: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return [x for x in leaves if isinstance(x, Tensor)]


def fit(value: Tensor, shape: Sequence[int], scale: float) -> Tensor:
    """The elements of a value, bounded, in another shape."""
    flat, needed = as_real(value).reshape(-1), math.prod(shape)
    if needed > flat.numel():
        flat = flat.repeat(-(-needed // flat.numel()))
    return torch.tanh(flat[:needed] * scale).reshape(list(shape))


def as_real(value: Tensor) -> Tensor:
    real = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    return real if real.dtype == DTYPE else real.to(DTYPE)


Step = Callable[["Drawn", list[Tensor]], Any]


@dataclass(frozen=True)
class Told:
    """A step and its description."""

    run: Step
    text: str


class Drawn(nn.Module):
    """Steps over a list of values; the loss is a weighted sum of all their results."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Told] = []
        self.register_buffer("scales", None)
        self.register_buffer("weights", None)
        self.start = nn.Parameter(torch.linspace(-1, 1, 24, dtype=DTYPE).reshape(2, 3, 4))

    def hold(self, tensor: Tensor, *, trained: bool) -> str:
        """The name under which a sample's tensor is kept."""
        name = f"held{sum(1 for _ in self.parameters()) + sum(1 for _ in self.buffers())}"
        tensor = tensor.detach().clone()
        if trained:
            setattr(self, name, nn.Parameter(tensor))
        else:
            self.register_buffer(name, tensor)
        return name

    def values(self, x: Tensor) -> list[Tensor]:
        return self.run_on([self.start * x])

    def run_on(self, pool: list[Tensor]) -> list[Tensor]:
        """The given values and those that the steps make."""
        for step in self.steps:
            pool += made_by(step.run(self, pool))
        return pool

    def forward(self, x: Tensor) -> Tensor:
        every = torch.cat([as_real(value).reshape(-1) for value in self.values(x)])
        return (torch.tanh(every * self.scales) * self.weights).sum()

    def scale(self) -> bool:
        """Weigh all elements in the loss, so that none saturates; False if one is not finite."""
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            values = [as_real(value).reshape(-1) for value in self.values(INPUT)]
        self.scales = torch.cat(
            [torch.full_like(v, 1 / (1 + float(v.abs().max()))) for v in values]
        )
        self.weights = torch.cos(torch.arange(self.scales.numel(), dtype=DTYPE))
        return all(bool(v.isfinite().all()) for v in values)

    def __str__(self) -> str:
        return "; ".join(step.text for step in self.steps)


def made_by(result: Any) -> list[Tensor]:
    """The values of a result that a loss can read."""
    leaves = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
    return [
        x
        for x in leaves
        if x.layout is torch.strided and (x.is_floating_point() or x.is_complex()) and x.numel()
    ]


INPUT = torch.linspace(0.5, 1.5, 24, dtype=DTYPE).reshape(2, 3, 4)


def draw(seed: int) -> Drawn:
    """Program number ``seed``; consecutive numbers begin with consecutive operators."""
    generator = random.Random(seed)
    first = OPERATORS[(seed * 7) % len(OPERATORS)].formatted_name
    for attempt in itertools.count():
        model = _attempt(generator, first if attempt < 5 else None)
        if model is not None:
            return model
    raise AssertionError


def _attempt(generator: random.Random, first: str | None) -> Drawn | None:
    model = Drawn()
    if first is not None and not extend(model, lambda: _operator(model, generator, first)):
        return None
    for _ in range(generator.randint(1, 3)):
        kind = generator.choice([_operator, _operator, view_step, write_step, write_operator_step])
        extend(model, functools.partial(kind, model, generator))
    if not model.scale():
        return None
    try:
        loss = model(INPUT)
        loss.backward()
    except RuntimeError:  # a value that was needed was written to, or overlaps itself
        return None
    grads = [p.grad.to_dense() for p in model.parameters() if p.grad is not None]
    is_finite = all(bool(g.isfinite().all()) for g in grads)
    model.zero_grad(set_to_none=True)
    return model if is_finite and bool(loss.isfinite()) else None


def extend(model: Drawn, make: Callable[[], Told | None]) -> bool:
    """Add a step that works in eager mode, out of a few drawn ones."""
    for _ in range(4):
        try:
            step = make()
            if step is None:
                continue
            model.steps.append(step)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if all(v.isfinite().all() for v in model.values(INPUT)):
                    return True
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
            pass
        if step is not None and model.steps and model.steps[-1] is step:
            model.steps.pop()
    return False


# --- operators -----------------------------------------------------------------------------
def _operator(model: Drawn, generator: random.Random, name: str | None = None) -> Told | None:
    op = _BY_NAME[name or generator.choice(OPERATORS).formatted_name]
    forms = ["function"] * 2 + ["method"] * bool(op.get_method() and not op.is_factory_function)
    forms += ["in place"] * 2 * bool(op.get_inplace() and op.supports_inplace_autograd)
    form = generator.choice(forms)
    sample = _sample(op, generator, in_place=form == "in place")
    if sample is None:
        return None
    take = _arguments(model, generator, sample)

    def run(model: Drawn, pool: list[Tensor]) -> Any:
        first, args, kwargs = take(model, pool)
        if form == "in place":
            return op.get_inplace()(first * 1, *args, **kwargs)
        if form == "method":
            return op.get_method()(first, *args, **kwargs)
        return op.get_op()(first, *args, **kwargs)

    return Told(run, f"{op.formatted_name} ({form})")


def _sample(op: Any, generator: random.Random, *, in_place: bool) -> Any:
    if op.formatted_name in _UNDEFINED:
        return None
    found = [s for s in samples(op.formatted_name) if not (in_place and s.broadcasts_input)]
    return generator.choice(found) if found else None


def _arguments(model: Drawn, generator: random.Random, sample: Any) -> Callable[..., Any]:
    """The sample's arguments, their tensors held by the model or mixed with earlier values."""
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    plans: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            plans.append((leaf,))
            continue
        name = model.hold(leaf, trained=leaf.requires_grad)
        mixed = leaf.requires_grad and leaf.numel() > 0 and generator.random() < 0.6
        plans.append((name, generator.random() if mixed else None))

    def take(model: Drawn, pool: list[Tensor]) -> Any:
        taken: list[Any] = []
        for plan in plans:
            if len(plan) == 1:
                taken.append(plan[0])
                continue
            name, place = plan
            tensor = getattr(model, name)
            if place is not None:
                value = pool[int(place * len(pool))]
                more = fit(value, tensor.shape, 0.5) * 0.05
                tensor = tensor + more.to(tensor.dtype)
            taken.append(tensor)
        return pytree.tree_unflatten(taken, spec)

    return take


# --- views ---------------------------------------------------------------------------------
View = Callable[[Tensor], Tensor]


def _view(generator: random.Random, shape: Sequence[int], *, written: bool) -> tuple[View, str]:
    """One view of a value of ``shape``; one that may be written to has no element twice."""
    dims = len(shape)
    if not dims:
        return lambda x: x.unsqueeze(0), "unsqueeze"
    dim = generator.randrange(dims)
    size = shape[dim]
    low, step = generator.randrange(max(size, 1)), generator.randint(2, 3)
    options: list[tuple[View, str]] = [
        (lambda x: x.transpose(dim, -1), "transpose"),
        (lambda x: x.unsqueeze(dim), "unsqueeze"),
        (lambda x: x.flatten(), "flatten"),
        (lambda x: x.movedim(dim, 0), "movedim"),
        (lambda x: x.view_as(x), "view_as"),
        (lambda x: x.reshape(-1), "reshape"),
        (lambda x: x.mT if x.dim() > 1 else x.t(), "mT"),
        (lambda x: x.squeeze(), "squeeze"),
    ]
    if not written:
        options += [
            (lambda x: x.detach(), "detach"),
            (lambda x: x[..., None].expand(*x.shape, 2), "expand"),
        ]
    if size > 1:
        options += [
            (lambda x: x.narrow(dim, low, size - low), "narrow"),
            (lambda x: x.select(dim, low), "select"),
            (lambda x: x.unfold(dim, 2, step if written else 1), "unfold"),
            (lambda x: x.chunk(2, dim)[-1], "chunk"),
            (lambda x: x.split(1, dim)[low], "split"),
            (lambda x: x.unbind(dim)[low], "unbind"),
            (lambda x: x.movedim(dim, 0)[::2], "step"),
            (lambda x: x.movedim(dim, 0)[-1:], "slice"),
            (lambda x: x.tensor_split(2, dim)[0], "tensor_split"),
        ]
    if dims > 1:
        options += [
            (lambda x: x.diagonal(0, 0, dims - 1), "diagonal"),
            (lambda x: x.permute(*reversed(range(dims))), "permute"),
            (lambda x: x.flatten(0, 1), "flatten two"),
        ]
    return generator.choice(options)


def chain_of_views(
    generator: random.Random, shape: Sequence[int], length: int, *, written: bool
) -> tuple[View, str]:
    like, chosen, names = torch.empty(shape), [], []
    for _ in range(length):
        view, name = _view(generator, like.shape, written=written)
        like = view(like)
        chosen.append(view)
        names.append(name)

    def chained(x: Tensor) -> Tensor:
        for view in chosen:
            x = view(x)
        return x

    return chained, " of ".join(reversed(names))


def view_step(model: Drawn, generator: random.Random) -> Told:
    place = generator.random()
    pool = model.values(INPUT)
    shape = pool[int(place * len(pool))].shape
    position = int(place * len(pool))
    chained, text = chain_of_views(generator, shape, generator.randint(1, 4), written=False)
    return Told(lambda _, pool: chained(pool[position]), f"{text} of value {position}")


# --- writes in place -----------------------------------------------------------------------
Write = Callable[[Tensor, Tensor], Any]

WRITES: dict[str, Write] = {
    "mul_": lambda v, x: v.mul_(x),
    "add_": lambda v, x: v.add_(x, alpha=0.5),
    "copy_": lambda v, x: v.copy_(x),
    "zero_": lambda v, x: v.zero_(),
    "fill_": lambda v, x: v.fill_(0.3),
    "fill_ tensor": lambda v, x: v.fill_(x.mean()),
    "fill_diagonal_": lambda v, x: v.fill_diagonal_(0.2),
    "wrapped diagonal": lambda v, x: v.fill_diagonal_(0.2, wrap=True),
    "masked_fill_": lambda v, x: v.masked_fill_(x > 0.1, 0.2),
    "masked_fill_ tensor": lambda v, x: v.masked_fill_(x > 0.1, x.sum()),
    "index_fill_": lambda v, x: v.index_fill_(0, torch.tensor([0]), 0.7),
    "index_copy_": lambda v, x: v.index_copy_(0, torch.tensor([0]), x[:1]),
    "index_add_": lambda v, x: v.index_add_(0, torch.tensor([0, 0]), torch.cat([x[:1], x[:1]])),
    "index_put_": lambda v, x: v.index_put_((torch.tensor([0]),), x[0], accumulate=True),
    "setitem": lambda v, x: v.__setitem__(0, x[0]),
    "setitem number": lambda v, x: v.__setitem__((..., 0), 0.4),
    "setitem mask": lambda v, x: v.__setitem__(x > 0, 0.4),
    "scatter_": lambda v, x: v.scatter_(0, torch.zeros_like(v, dtype=torch.int64)[:1], x[:1]),
    "scatter_add_": lambda v, x: v.scatter_add_(0, torch.zeros_like(v, dtype=torch.int64), x),
    "scatter_reduce_": lambda v, x: v.scatter_reduce_(
        0, torch.zeros_like(v, dtype=torch.int64), x, "amax"
    ),
    "put_": lambda v, x: v.put_(torch.tensor([0]), x.reshape(-1)[:1]),
    "masked_scatter_": lambda v, x: v.masked_scatter_(x > 0, x * 2),
    "tril_": lambda v, x: v.tril_(),
    "triu_": lambda v, x: v.triu_(1),
    "transpose_": lambda v, x: v.transpose_(0, -1),
    "t_": lambda v, x: v.t_(),
    "squeeze_": lambda v, x: v.squeeze_(),
    "unsqueeze_": lambda v, x: v.unsqueeze_(0),
    "cumsum_": lambda v, x: v.cumsum_(0),
    "clamp_": lambda v, x: v.clamp_(-0.4, 0.4),
    "lerp_": lambda v, x: v.lerp_(x, 0.3),
    "addcmul_": lambda v, x: v.addcmul_(x, x),
    "sigmoid_": lambda v, x: v.sigmoid_(),
    "relu_": lambda v, x: v.relu_(),
    "dropout_": lambda v, x: nn.functional.dropout(v, 0.0, inplace=True),
    "detach_": lambda v, x: v.mul_(x.detach()),
    "no_grad": lambda v, x: _without_gradient(v, x),
    "hidden": lambda v, x: _hidden(v, x),
    "hidden view": lambda v, x: _hidden(v[..., :1], x[..., :1]),
    "through detach": lambda v, x: v.detach().mul_(1.5),
    "through data": lambda v, x: v.data.mul_(x.detach()),
    "strided": lambda v, x: v.as_strided((2,), (1,), v.storage_offset()).mul_(2),
    "renorm_": lambda v, x: v.renorm_(2, 0, 0.5),
    "slices": lambda v, x: v[..., :1].add_(x[..., :1]),
    "itself": lambda v, x: v.copy_(v.flip(0)),
}


COPIES: list[View] = [
    lambda x: x.clone(),
    lambda x: x * 1,
    lambda x: x.mT.clone().mT if x.dim() > 1 else x.sin(),
]


def _without_gradient(v: Tensor, x: Tensor) -> None:
    with torch.no_grad():
        scale = x.abs().amax()
    v.div_(scale + 1)


def _hidden(v: Tensor, x: Tensor) -> None:
    with torch.no_grad():
        v.mul_(x).add_(0.1)


def write_step(model: Drawn, generator: random.Random) -> Told | None:
    """A copy of a value, written to through views of views."""
    pool = model.values(INPUT)
    position = generator.randrange(len(pool))
    value = pool[position]
    if value.dtype != DTYPE:
        return None
    chained, text = chain_of_views(generator, value.shape, generator.randint(0, 3), written=True)
    after, after_text = chain_of_views(
        generator, value.shape, generator.randint(0, 2), written=True
    )
    name = generator.choice(list(WRITES))
    source = generator.randrange(len(pool))
    twice = generator.random() < 0.3
    copied = generator.choice(COPIES)

    def run(_: Drawn, pool: list[Tensor]) -> list[Tensor]:
        base = copied(pool[position])
        other = after(base)
        view = chained(base)
        for _time in range(2 if twice else 1):
            WRITES[name](view, fit(pool[source], view.shape, 0.5))
        return [base, other, view] if name not in OF_FORM else [base]

    return Told(run, f"{name} through {text or 'nothing'} of value {position} ({after_text})")


OF_FORM = {"transpose_", "t_", "squeeze_", "unsqueeze_"}


def write_operator_step(model: Drawn, generator: random.Random) -> Told | None:
    """An operator's in-place form on a view of a larger value."""
    op = generator.choice(_IN_PLACE)
    sample = _sample(op, generator, in_place=True)
    if sample is None or not isinstance(sample.input, Tensor) or sample.input.dtype != DTYPE:
        return None
    take = _arguments(model, generator, sample)
    turned = generator.random() < 0.5

    def run(model: Drawn, pool: list[Tensor]) -> list[Tensor]:
        first, args, kwargs = take(model, pool)
        if turned and first.dim() > 1:
            base = torch.stack([first.mT, first.mT * 0.5])
            view = base[0].mT
        else:
            base = torch.stack([first, first * 0.5], -1)
            view = base[..., 0]
        op.get_inplace()(view, *args, **kwargs)
        return [base]

    return Told(run, f"{op.formatted_name} (in place, {'turned' if turned else 'strided'} view)")


_IN_PLACE = [op for op in OPERATORS if op.get_inplace() and op.supports_inplace_autograd]
