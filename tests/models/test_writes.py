"""In-place writes that autograd does not see, or through views: correct, or rejected."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.base.errors import CaptureError
from autopar.frontend.capture import capture
from autopar.frontend.checking.evaluation import evaluate
from autopar.frontend.checking.gradients import compare_with_eager
from autopar.ir.mesh import Mesh
from tests.models.test_odd_captures import Odd
from tests.oracles import assert_splits_equal_eager


def value(model: Odd, x: Tensor) -> Tensor:
    return model.linear(x).clone()


def windows_with_gaps(model: Odd, x: Tensor) -> Tensor:
    y = value(model, x)
    y.unfold(1, 2, 3).mul_(2)
    return y.square().mean()


def windows_of_part_of_a_turned_value(model: Odd, x: Tensor) -> Tensor:
    y = value(model, x).t()[1:]
    y.unfold(0, 1, 2).select(1, 0).add_(y.mean())
    return y.sin().mean()


def windows_without_gaps(model: Odd, x: Tensor) -> Tensor:
    y = value(model, x)
    y.unfold(1, 2, 2).mul_(y.detach().mean())
    return y.square().mean()


def without_grad(model: Odd, x: Tensor) -> Tensor:
    y = value(model, x)
    with torch.no_grad():
        y.mul_(2)
    return y.square().mean()


def views_without_grad(model: Odd, x: Tensor) -> Tensor:
    y = value(model, x)
    rows = y[1:]
    with torch.no_grad():
        y[0].mul_(y[1].sum())
        y[:, 1] = 3
        y.to(y.dtype).real[2].mul_(3)
        y.chunk(2)[1].add_(rows.mean())
        rows.unfold(1, 1, 3).zero_()
    return y.square().mean() + rows.sin().mean()


def gradients_within(model: Odd, x: Tensor) -> Tensor:
    y = value(model, x)
    with torch.no_grad():
        y.mul_(2)
        with torch.enable_grad():
            z = model.linear(y.clone())
        y.add_(1)
        model.seen.mul_(0.9).add_(y.mean(0))
    return (z * model.seen).mean() + (y * y).mean()


def through_detach(model: Odd, x: Tensor) -> Tensor:
    y = value(model, x)
    detached = y.detach().view(-1)[3:]
    detached.mul_(2)
    first = detached.sin()
    y.mul_(3)
    return y.square().mean() + (first[:4] * model.linear(detached[:4])).mean()


def through_data(model: Odd, x: Tensor) -> Tensor:
    y = value(model, x)
    y.data[0].zero_()
    return (y * x).sin().mean() + model.linear.weight.data.sum()


def a_detached_value_of_its_own(model: Odd, x: Tensor) -> Tensor:
    """The old value is not read again: only the sum has a gradient."""
    total = value(model, x).detach()
    total += model.linear(x).sin()
    total.unfold(1, 2, 3).mul_(2)
    return total.square().mean()


def detached_in_place(model: Odd, x: Tensor) -> Tensor:
    """Gradients flow through values read before the call, and through none read after it."""
    y = model.linear(x).sin()
    before = y * 2
    y.detach_()
    return (before + model.linear(y)).square().mean() + y.sum()


def dropout_that_is_off(model: Odd, x: Tensor) -> Tensor:
    """It returns its input itself, so that a write into one is a write into the other."""
    y = model.linear(x)
    F.dropout(y, 0.5, training=False).mul_(3)
    F.dropout1d(y, 0.5, training=False)[0] = 2
    y.sum_to_size(4, 4).add_(1)
    return y.square().mean()


def dropout_that_is_off_without_grad(model: Odd, x: Tensor) -> Tensor:
    """It returns its input, through which the gradient flows."""
    y = value(model, x)
    F.dropout(y, 0.5, training=False).add_(1)
    with torch.no_grad():
        z = F.dropout(y, 0.5, training=False)
    return (y * z).mean()


def reshaped(model: Odd, x: Tensor) -> Tensor:
    """One operator that makes a view or a copy."""
    y = model.linear(x)
    y.reshape(2, 8).mul_(3)
    y.t().reshape(16).mul_(5)
    return y.square().mean()


BODIES = [
    windows_with_gaps, windows_of_part_of_a_turned_value, windows_without_gaps, without_grad,
    views_without_grad, gradients_within, through_detach, through_data,
    a_detached_value_of_its_own, detached_in_place, dropout_that_is_off,
    dropout_that_is_off_without_grad, reshaped,
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_models_that_write_train_as_in_eager(body):
    torch.manual_seed(0)
    model = Odd(body).double()
    batches = [{"x": torch.randn(4, 4, dtype=torch.float64)} for _ in range(2)]
    assert_splits_equal_eager(model, batches, [Mesh(("a",), (2,))] * 3)


def two_gradients_at_once(model: Odd, x: Tensor) -> Tensor:
    y = value(model, x)
    z = y.detach()
    z += model.linear(x)
    return z.square().mean() + y.sum()


def windows_that_overlap(model: Odd, x: Tensor) -> Tensor:
    y = value(model, x)
    y.unfold(1, 3, 1).zero_()
    return (y + model.linear.bias).square().sum()


def views_that_are_not_said_to_be(model: Odd, x: Tensor) -> Tensor:
    y = value(model, x)
    rows, _ = torch.meshgrid(y[0], y[1], indexing="ij")
    y.mul_(2)
    return rows.square().sum() + y.sum()


def a_changed_parameter(model: Odd, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.linear.weight.clamp_(-0.1, 0.1)
    return model.linear(x).sum()


def another_changed_parameter(model: Odd, x: Tensor) -> Tensor:
    model.linear.weight.data.clamp_(-0.1, 0.1)
    return model.linear(x).sum()


def assigned_data(model: Odd, x: Tensor) -> Tensor:
    y = value(model, x)
    y.data = y.data * 2
    return y.square().sum()


def a_hook(model: Odd, x: Tensor) -> Tensor:
    y = value(model, x)
    y.register_hook(lambda gradient: gradient * 2)
    return y.square().sum()


def a_gradient_penalty(model: Odd, x: Tensor) -> Tensor:
    y = model.linear(x).sin().sum()
    (gradient,) = torch.autograd.grad(y, model.linear.weight, create_graph=True)
    return y + gradient.square().sum()


def a_backward_pass(model: Odd, x: Tensor) -> Tensor:
    model.linear(x).sum().backward()
    return model.linear(x).square().sum()


@pytest.mark.parametrize(
    ("body", "operator", "message"),
    [
        (two_gradients_at_once, "aten.add_.Tensor", "through detach() into memory that is read"),
        (windows_that_overlap, "aten.zero_.default", "whose elements share memory"),
        (views_that_are_not_said_to_be, "aten.meshgrid.indexing", "returns views of what is"),
        (a_changed_parameter, "aten.clamp_.default", "changes a parameter in place"),
        (another_changed_parameter, "aten.clamp_.default", "changes a parameter in place"),
    ],
)
def test_writes_that_have_no_right_form_are_refused_by_name(body, operator, message):
    with pytest.raises(CaptureError) as caught:
        capture(Odd(body), (torch.randn(4, 4),))
    assert re.search(rf"{operator} at test_odd_captures.py:\d+", str(caught.value))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (assigned_data, "y.data = ", "assigns to .data"),
        (a_hook, "y.register_hook", "calls register_hook()"),
        (a_gradient_penalty, "autograd.grad", "computes gradients in its forward pass"),
        (a_backward_pass, "backward()", "computes gradients in its forward pass"),
    ],
)
def test_what_no_graph_shows_is_refused_with_its_line(body, code, message):
    lines, first = inspect.getsourcelines(body)
    number = first + next(i for i, line in enumerate(lines) if code in line)
    with pytest.raises(CaptureError) as caught:
        capture(Odd(body), (torch.randn(4, 4),))
    assert f"{__file__}:{number}" in str(caught.value)
    assert message in str(caught.value)


IN_PLACE_DRAWS = {
    "bernoulli_": lambda v: v.detach().bernoulli_(0.3),
    "bernoulli_ tensor": lambda v: v.detach().bernoulli_(torch.full_like(v, 0.4).detach()),
    "uniform_": lambda v: v.detach().uniform_(-1, 1),
    "normal_": lambda v: v.detach().normal_(1, 2),
    "exponential_": lambda v: v.detach().exponential_(),
    "geometric_": lambda v: v.detach().geometric_(0.3),
    "log_normal_": lambda v: v.detach().log_normal_(),
    "cauchy_": lambda v: v.detach().cauchy_(),
    "random_": lambda v: v.detach().random_(5),
    "rrelu_": lambda v: F.rrelu_(v, training=True),
    "rrelu_ off": lambda v: F.rrelu_(v, training=False),
    "rrelu": lambda v: F.rrelu(v, 0.1, 0.9, training=True),
    "dropout_": lambda v: F.dropout(v, 0.4, inplace=True),
    "alpha_dropout_": lambda v: F.alpha_dropout(v, 0.4, True, inplace=True),
    "feature_alpha_dropout_": lambda v: F.feature_alpha_dropout(v[None], 0.4, True, inplace=True),
    "feature_dropout_": lambda v: F.dropout2d(v[None], 0.4, inplace=True),
}


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "part of columns"])
@pytest.mark.parametrize("draw", IN_PLACE_DRAWS.values(), ids=list(IN_PLACE_DRAWS))
def test_random_numbers_written_in_place_are_drawn_alike(draw, turned):
    def body(model: Odd, x: Tensor) -> Tensor:
        y = value(model, x)
        drawn = draw(y.t()[1:] if turned else y)
        weights = torch.arange(drawn.numel(), dtype=drawn.dtype).reshape(drawn.shape).cos()
        return y.sin().sum() + (drawn * weights).sum()

    torch.manual_seed(0)
    model, x = Odd(body).double(), torch.randn(4, 4, dtype=torch.float64)
    compare_with_eager(capture(model, (x,)), model, (x,))


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout2d, nn.AlphaDropout])
@pytest.mark.parametrize(("p", "training"), [(0.3, False), (0.0, True), (0.3, True)])
def test_dropout_that_is_off_leaves_no_copy(kind, p, training):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), kind(p)).train(training)
    graph = capture(model, torch.randn(2, 3, 5, 5), loss_fn=lambda out: out.sum()).graph
    is_off = [op.target_name for op in graph.ops] == ["aten.conv2d.default", "aten.sum.default"]
    assert is_off == (p == 0 or not training)


def test_slopes_are_drawn_evenly_from_their_range():
    x = -torch.ones(100, 100)
    graph = capture(nn.RReLU(0.2, 0.6), (x,), differentiable=False).graph
    slopes = -evaluate(graph, {}, [x], torch.device("cpu"))[graph.outputs[0]]
    assert 0.2 <= float(slopes.min()) < 0.21
    assert 0.59 < float(slopes.max()) <= 0.6
    assert float(slopes.std()) == pytest.approx(0.4 / 12**0.5, rel=0.05)
