"""What a captured graph cannot hold is refused by name: Python state, shared memory, seeds."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.base.errors import CaptureError, GradientError, InputError, PlanError
from autopar.frontend.capture import capture
from autopar.frontend.checking.gradients import compare_with_eager
from autopar.passes.prepare import prepare
from autopar.sharding.microbatches import Microbatches


class Model(nn.Module):
    """Two linear layers of one size, and what ``prepare`` adds; ``body`` is the forward pass."""

    def __init__(
        self,
        body: Callable[[Any, Tensor], Tensor],
        add: Callable[[Any], object] = lambda model: None,
    ) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.body = body
        add(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def checked(model: nn.Module) -> None:
    x = torch.randn(8, 4)
    compare_with_eager(capture(model, x), model, x)


def set_to(**values: Any) -> Callable[[Any], None]:
    def add(model: Any) -> None:
        for name, value in values.items():
            setattr(model, name, value)

    return add


def counted(model: Any, x: Tensor) -> Tensor:
    model.num += 1
    return model.first(x).square().mean() * model.num


def iterated(model: Any, x: Tensor) -> Tensor:
    return model.first(x).square().mean() * next(model.steps)


def logged(model: Any, x: Tensor) -> Tensor:
    model.log.append(1)
    return model.first(x).square().mean() * len(model.log)


def initialized(model: Any, x: Tensor) -> Tensor:
    hidden = model.first(x)
    if not model.is_initialized:
        model.mean.copy_(hidden.detach().mean(0))
        model.is_initialized = True
    return (hidden - model.mean).square().mean()


def remembered(model: Any, x: Tensor) -> Tensor:
    hidden = model.first(x)
    loss = hidden.square().mean() if model.previous is None else (hidden * model.previous).mean()
    model.previous = hidden.detach()
    return loss


STATEFUL: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any], None]]] = {
    "a counter": (counted, set_to(num=0)),
    "an iterator": (iterated, set_to(steps=itertools.count(1))),
    "a list": (logged, set_to(log=[])),
    "a flag": (
        initialized,
        lambda m: (m.register_buffer("mean", torch.zeros(4)), set_to(is_initialized=False)(m))[1],
    ),
    "a tensor of the call before": (remembered, set_to(previous=None)),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_state_in_python_that_changes_a_result_is_refused(name: str) -> None:
    with pytest.raises(GradientError, match="keeps state outside of its parameters and buffers"):
        checked(Model(*STATEFUL[name]))


def test_the_attribute_is_named() -> None:
    with pytest.raises(GradientError, match=r"attribute 'num'"):
        checked(Model(counted, set_to(num=0)))


def test_a_counter_that_changes_no_result_yet_is_warned_about() -> None:
    def warming_up(model: Any, x: Tensor) -> Tensor:
        model.num += 1
        return model.first(x).square().mean() * (1.0 if model.num < 100 else 2.0)

    with pytest.warns(UserWarning, match=r"changes a number that it keeps in Python.*'num'"):
        checked(Model(warming_up, set_to(num=0)))


def test_data_assigned_to_a_buffer_in_the_first_call_alone_is_refused() -> None:
    def first_mean(model: Any, x: Tensor) -> Tensor:
        hidden = model.first(x)
        if not model.is_initialized:
            model.mean = hidden.detach().mean(0)
            model.is_initialized = True
        return (hidden - model.mean).square().mean()

    with pytest.raises(GradientError, match=r"keeps state outside.*'is_initialized'"):
        checked(Model(first_mean, STATEFUL["a flag"][1]))


ASSIGNED: dict[str, tuple[Callable[[Any], object], str]] = {
    "another shape": (
        lambda m: setattr(m.part, "all", torch.cat([m.part.all, m.part.all])),
        r"shape \(8,\) and torch.float32 to buffer 'part.all', which is a tensor of shape \(4,\)"
        r"(.|\n)*self.all.copy_\(",
    ),
    "another dtype": (
        lambda m: setattr(m.part, "all", m.part.all.double()),
        r"torch.float64 to buffer 'part.all', which is a tensor of shape \(4,\) and torch.float32",
    ),
    "none": (lambda m: setattr(m.part, "all", None), "None or a parameter to buffer 'part.all'"),
    "a tied buffer": (
        lambda m: setattr(m.part, "all", m.part.all + 1),
        "buffer 'part.all', which shares its tensor with 'tied'",
    ),
    "a parameter": (
        lambda m: setattr(m.first, "weight", nn.Parameter(m.first.weight * 0.9)),
        "parameter 'first.weight', which only the optimizer changes",
    ),
}


@pytest.mark.parametrize("name", ASSIGNED)
def test_an_assignment_that_is_no_write_is_refused(name: str) -> None:
    assign, text = ASSIGNED[name]

    def add(model: Any) -> None:
        model.part = nn.Module()
        model.part.register_buffer("all", torch.zeros(4))
        if name == "a tied buffer":
            model.register_buffer("tied", model.part.all)

    def body(model: Any, x: Tensor) -> Tensor:
        assign(model)
        return model.first(x).square().mean()

    with pytest.raises(CaptureError, match=f"its forward pass assigns .*{text}"):
        capture(Model(body, add), torch.randn(8, 4))


class Keeping:
    """A forward hook that keeps the output."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.kept["output"] = output


NOT_COPIED: dict[str, tuple[Callable[[Any], object], str]] = {
    "a lock": (
        lambda m: setattr(m.second, "lock", threading.Lock()),
        "its attribute 'second.lock' of type lock: TypeError: cannot pickle",
    ),
    "a generator": (
        lambda m: setattr(m, "steps", (i for i in range(3))),
        "its attribute 'steps' of type generator",
    ),
    "a hook with a tensor": (
        lambda m: m.first.register_forward_hook(Keeping()),
        r"a hook in _forward_hooks of its module 'first'(.|\n)*detach\(\)",
    ),
}


@pytest.mark.parametrize("name", NOT_COPIED)
def test_what_cannot_be_copied_is_named(name: str) -> None:
    add, text = NOT_COPIED[name]
    model = Model(two, add)
    model(torch.randn(8, 4))
    with pytest.raises(CaptureError, match=rf"deepcopy\(\) of Model fails at {text}"):
        capture(model, torch.randn(8, 4))


def test_containers_may_keep_what_an_earlier_call_computed() -> None:
    def keeping(model: Any, x: Tensor) -> Tensor:
        hidden = model.first(x)
        model.cache, model.named["hidden"] = [hidden], hidden
        return hidden.square().mean()

    model = Model(keeping, lambda m: set_to(cache=[], named={})(m))
    model(torch.randn(8, 4))
    checked(model)


def two(model: Any, x: Tensor) -> Tensor:
    return model.second(model.first(x)).square().mean()


def shown(model: Any, x: Tensor) -> Tensor:
    return (model.first(x) @ model.shown).square().mean()


def viewed(model: Any, x: Tensor) -> Tensor:
    hidden = model.first(x)
    model.all.add_(hidden.detach().mean(0))
    return (hidden[:, :2] * model.some).mean() + hidden.square().mean()


def with_views(model: Any) -> None:
    model.register_buffer("all", torch.zeros(4))
    model.register_buffer("some", model.all[:2])


SHARING: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any], object], str]] = {
    "tied by .data": (
        two,
        lambda m: setattr(m.second.weight, "data", m.first.weight.data),
        r"'first.weight' and 'second.weight'",
    ),
    "a buffer of a weight": (
        shown,
        lambda m: m.register_buffer("shown", m.first.weight.data),
        r"'first.weight' and 'shown'",
    ),
    "an attribute of a weight": (
        shown,
        lambda m: setattr(m, "shown", m.first.weight.detach()),
        r"'first.weight' and 'shown'",
    ),
    "a parameter in another": (
        shown,
        lambda m: setattr(m, "shown", nn.Parameter(m.first.weight.data[:, :2])),
        r"'shown' and 'first.weight'|'first.weight' and 'shown'",
    ),
    "a buffer in another": (viewed, with_views, r"'all' and 'some'"),
}


@pytest.mark.parametrize("name", SHARING)
def test_memory_shared_with_what_a_step_changes_is_refused(name: str) -> None:
    body, add, names = SHARING[name]
    with pytest.raises(CaptureError, match=f"({names}) share memory"):
        capture(Model(body, add), torch.randn(8, 4))


def test_tied_parameters_and_disjoint_parts_of_one_storage_are_captured() -> None:
    checked(Model(two, lambda m: setattr(m.second, "weight", m.first.weight)))

    def flat(model: Any) -> None:
        storage = torch.randn(32)
        for place, layer in enumerate((model.first, model.second)):
            layer.weight = nn.Parameter(storage[16 * place : 16 * (place + 1)].view(4, 4))

    checked(Model(two, flat))


def restored(model: Any, x: Tensor) -> Tensor:
    hidden, state = model.first(x), torch.get_rng_state()
    one = F.dropout(hidden)
    torch.set_rng_state(state)
    return (one - F.dropout(hidden)).square().mean()


def seeded(model: Any, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return (model.first(x) * torch.rand(4)).square().mean()


def forked(model: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return F.dropout(model.first(x)).square().mean()


@pytest.mark.parametrize("body", [restored, seeded, forked])
def test_control_of_the_generator_is_refused(body: Callable[[Any, Tensor], Tensor]) -> None:
    with pytest.raises(
        CaptureError, match=r"calls torch\.(set_rng_state|manual_seed|fork_rng)\(\)"
    ):
        capture(Model(body), torch.randn(8, 4))
    assert torch.manual_seed.__module__ == "torch.random"  # torch is as it was


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.sign()


class Clipped(Sign):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.01, 0.01)


class Shifted(Sign):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + 0.01


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return w.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (w,) = ctx.saved_tensors
        return torch.where(w.abs() < 1, grad, 0.0)


def in_microbatches(function: Any) -> None:
    model = Model(lambda m, x: (x @ function.apply(m.first.weight)).square().mean())
    Microbatches(prepare(capture(model, torch.randn(8, 4))).analysis, 2)


@pytest.mark.parametrize("function", [Sign, Clipped, Shifted])
def test_a_nonlinear_backward_pass_of_a_weight_needs_the_whole_batch(function: Any) -> None:
    with pytest.raises(PlanError, match="needs the whole batch at once"):
        in_microbatches(function)


def test_a_linear_backward_pass_of_a_weight_runs_on_microbatches() -> None:
    in_microbatches(StraightThrough)


def test_running_statistics_of_an_instance_norm_are_refused() -> None:
    model = Model(
        lambda m, x: m.norm(m.first(x).view(2, 4, 4)).square().mean(),
        lambda m: m.add_module("norm", nn.InstanceNorm1d(4, track_running_stats=True)),
    )
    with pytest.raises(CaptureError, match="updates running statistics"):
        capture(model, torch.randn(8, 4))
    model.norm.eval()
    checked(model)


@pytest.mark.parametrize(
    "odd",
    [
        lambda x: x.to_sparse(),
        lambda x: x.to("meta"),
        lambda x: torch.nested.nested_tensor([x[:4], x[4:]]),
    ],
)
def test_inputs_without_dense_data_are_refused(odd: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(8, 4)
    signature = capture(Model(two), x).signature
    with pytest.raises(InputError, match="pass a dense one with data"):
        signature.flatten((odd(x),), {})
