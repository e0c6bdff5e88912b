"""The gradient check rejects every difference from eager mode by name, and nothing else."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.base.errors import CaptureError, GradientError, InputError
from autopar.frontend import capture as capturing
from autopar.frontend.capture import capture
from autopar.frontend.checking import gradients
from autopar.frontend.checking.gradients import check_trainable, compare_with_eager
from tests.models import test_odd_captures as odd
from tests.models.zoo import MODELS, MORE_MODELS, UNEVEN_MODELS, build


def check(model: nn.Module, *inputs: Tensor, loss_fn: Callable[..., Tensor] | None = None) -> None:
    compare_with_eager(capture(model, inputs, loss_fn=loss_fn), model, inputs, loss_fn=loss_fn)


def without_rewrite(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    instead = {"functions_as_operators": contextlib.nullcontext}
    monkeypatch.setattr(capturing, name, instead.get(name, lambda *_: None))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", [*MODELS, *MORE_MODELS, *UNEVEN_MODELS])
def test_every_model_of_the_tests_passes(name):
    model, make_batch = build(name)
    batch = make_batch(0)
    compare_with_eager(capture(model, batch), model, batch)


@pytest.mark.parametrize("body", odd.BODIES, ids=lambda body: body.__name__)
def test_odd_models_pass(body):
    torch.manual_seed(0)
    check(odd.Odd(body), torch.randn(4, 4))


@pytest.mark.parametrize(
    ("rewrite", "body", "operator", "line"),
    [
        ("index_strided_access", odd.filled_diagonal, "as_strided_scatter", "fill_diagonal_"),
        ("functions_as_operators", odd.reentrant, "linear", "checkpoint("),
        ("detach_what_leaves", odd.without_gradient, "div", "y / scale"),
    ],
)
def test_a_gradient_that_capture_loses_is_refused_with_operator_and_line(
    monkeypatch, rewrite, body, operator, line
):
    without_rewrite(monkeypatch, rewrite)
    torch.manual_seed(0)
    model, x = odd.Odd(body).double(), torch.randn(4, 4, dtype=torch.float64)
    with pytest.raises(GradientError, match=r"the gradient of 'linear.weight' is off by") as caught:
        check(model, x)
    source, first = inspect.getsourcelines(body)
    number = first + next(i for i, code in enumerate(source) if line in code)
    assert f"aten.{operator}" in str(caught.value)
    assert f"{odd.__file__}:{number}" in str(caught.value)


def test_an_own_gradient_that_capture_loses_is_refused(monkeypatch):
    without_rewrite(monkeypatch, "functions_as_operators")
    with pytest.raises(GradientError, match=r"'linear.weight' is off by"):
        check(odd.Odd(odd.own_gradients).double(), torch.randn(4, 4, dtype=torch.float64))


def test_a_forward_pass_that_capture_changes_is_refused(monkeypatch):
    def doubled(module: torch.fx.GraphModule) -> None:
        for node in list(module.graph.nodes):
            if node.target is torch.ops.aten.sin.default:
                node.target = torch.ops.aten.cos.default

    monkeypatch.setattr(capturing, "offsets_as_tensors", doubled)

    def body(model, x):
        return model.linear(model.linear(x).relu()).sin().square().mean()

    with pytest.raises(GradientError, match=r"the loss is off by(.|\n)*aten.cos(.|\n)*result"):
        check(odd.Odd(body), torch.randn(4, 4))


def test_hooks_on_gradients_are_refused():
    model = odd.Odd(lambda model, x: model.linear(x).square().mean())
    handle = model.linear.bias.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(CaptureError, match=r"'linear.bias' has a hook on its gradient"):
        check(model, torch.randn(4, 4))
    handle.remove()
    check(model, torch.randn(4, 4))
    model.linear.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(CaptureError, match=r"'linear.bias' has a hook on its gradient"):
        check(model, torch.randn(4, 4))


def test_backward_hooks_of_modules_are_refused():
    model = odd.Odd(lambda model, x: model.linear(x).square().mean())
    handle = model.linear.register_full_backward_hook(lambda module, given, got: None)
    with pytest.raises(CaptureError, match="module 'linear' has a backward hook"):
        check(model, torch.randn(4, 4))
    handle.remove()
    check(model, torch.randn(4, 4))


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["python", "numpy"])
def test_a_model_that_draws_outside_of_torch_is_refused_where_it_matters(draw):
    model, x = odd.Odd(lambda model, x: (model.linear(x) * draw()).sum()), torch.randn(4, 4)
    with pytest.raises(GradientError, match="another result each time"):
        check(model, x)
    check(odd.Odd(lambda model, x: (model.linear(x) * (draw() < 0)).sum()), x)


class Everything(nn.Module):
    """Dropout of all kinds, batch norm, tied and frozen parameters, and visible state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = F.dropout(self.norm(self.first(x)), 0.3)
        self.kept.append(y)
        z = F.alpha_dropout(self.frozen(y), 0.2, True) + torch.rand_like(y) * F.rrelu(y, 0.1, 0.3)
        z, _ = self.attention(z[None], y[None], y[None], need_weights=False)
        z = F.dropout2d(z.view(1, 8, 8, 1), 0.4).view(8, 8) + F.gumbel_softmax(y)
        return self.second(z * torch.bernoulli(torch.full_like(z, 0.5)))


def test_the_model_and_every_generator_stay_as_they_are():
    torch.manual_seed(0)
    model, x, target = Everything(), torch.randn(8, 8), torch.randint(0, 8, (8,))
    model.attention.eval()
    model(x).sum().backward()
    model.kept.clear()
    before = copy.deepcopy(model.state_dict())
    grads = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    modes = [m.training for m in model.modules()]
    wanted = [p.requires_grad for p in model.parameters()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    check(model, x, target, loss_fn=F.cross_entropy)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])
    assert model.kept == []
    assert [m.training for m in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == wanted
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    for name, parameter in model.named_parameters():
        kept = grads[name]
        assert parameter.grad is None if kept is None else torch.equal(parameter.grad, kept), name


def test_the_model_runs_thrice_where_nothing_differs():
    """Once to be compared, and twice for what the first of two calls leaves for the second."""
    calls = []
    model = odd.Odd(lambda model, x: model.linear(x).square().mean())
    captured = capture(model, (torch.randn(4, 4),))
    model.linear.register_forward_hook(lambda *_: calls.append(1))
    compare_with_eager(captured, model, (torch.randn(4, 4),))
    assert len(calls) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "vit"])
def test_low_precision_raises_no_alarm(name, dtype):
    model, make_batch = build(name)
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in make_batch(0).items()}
    model = model.to(dtype)
    compare_with_eager(capture(model, batch), model, batch)


def test_gradients_that_are_only_rounding_raise_no_alarm(monkeypatch):
    """A bias before a batch norm has none except rounding, here different on either side."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    x = torch.randn(64, 8)
    call, run = capture(model, (x,), loss_fn=lambda y: y.square().mean()), gradients.Trial.of_graph

    def shaken(self: gradients.Trial) -> gradients.Numbers:
        numbers = run(self)
        bias = numbers.gradients["0.bias"]
        assert bias is not None
        assert bias.norm() < 1e-6
        return gradients.Numbers(
            loss=numbers.loss, outputs=numbers.outputs, buffers=numbers.buffers,
            gradients={**numbers.gradients, "0.bias": -bias},
        )  # fmt: skip

    monkeypatch.setattr(gradients.Trial, "of_graph", shaken)
    compare_with_eager(call, model, (x,), loss_fn=lambda y: y.square().mean())


def test_where_memory_forbids_it_fewer_rows_and_fewer_gradients_are_checked(monkeypatch):
    seen: list[tuple[int, tuple[str, ...]]] = []
    compare = gradients._compare

    def note(trial: gradients.Trial, expected: gradients.Numbers) -> None:
        seen.append((trial.call.args[0].shape[0], trial.checked))
        compare(trial, expected)

    monkeypatch.setattr(gradients, "_compare", note)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    x = torch.randn(512, 16)

    def checked(free: int) -> tuple[int, tuple[str, ...]] | None:
        seen.clear()
        monkeypatch.setattr(gradients, "free_bytes", lambda device: free)
        check(model, x, loss_fn=lambda y: y.square().mean())
        return seen[0] if seen else None

    everything = tuple(name for name, _ in model.named_parameters())
    assert checked(1 << 30) == (512, everything)
    rows, names = checked(100_000) or (0, ())
    assert 1 <= rows < 512
    assert names == everything
    rows, names = checked(15_000) or (0, ())
    assert rows == 1
    assert names == everything[: len(names)]
    assert 1 <= len(names) < len(everything)
    assert checked(1_000) is None


def test_what_cannot_be_checked_is_said(caplog):
    x = torch.randn(4, 4)
    with caplog.at_level(logging.INFO, "autopar"):
        with torch.device("meta"):
            model = odd.Odd(lambda model, x: model.linear(x).sum())
        check(model, x)
        assert "meta device" in caplog.text


def out_of_range(model, x):
    rows = torch.full((3,), 9)
    return F.embedding(rows, model.linear.weight).sum()


def changed_after_it_was_kept(model, x):
    y = model.linear(x).sin()
    z = y * y
    y.add_(1)
    return z.sum()


def too_wide(model, x):
    return model.linear(torch.cat([x, x], 1)).sum()


def raised_by_the_model(model, x):
    raise ValueError("no such thing")


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (out_of_range, "F.embedding", "in torch.nn.functional.embedding at .*IndexError"),
        (changed_after_it_was_kept, "y * y", "in the gradient of Mul at .*modified by an inplace"),
        (too_wide, "model.linear", "in torch.nn.functional.linear at .*RuntimeError: mat1"),
        (raised_by_the_model, "raise ", "at .*ValueError: no such thing"),
    ],
)
def test_a_model_that_fails_itself_is_told_apart_from_its_capture(body, code, message):
    lines, first = inspect.getsourcelines(body)
    number = first + next(i for i, line in enumerate(lines) if code in line)
    with pytest.raises(InputError, match=f"the model itself fails in eager mode, .*{message}") as e:
        check(odd.Odd(body), torch.randn(4, 4))
    assert f"{__file__}:{number}: " in str(e.value)


def test_a_model_without_data_fails_for_its_own_reason() -> None:
    """Not as its parameters are on another device than its inputs."""
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(InputError, match=r"itself fails in eager mode.*linear at .*\[4, 3\]"):
        capture(model, (torch.zeros(4, 3),), loss_fn=lambda y: y.sum())

    def body(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Not as a tensor that it makes has data."""
        return (x * torch.arange(4, device=x.device) * model.missing).sum()

    with torch.device("meta"):
        model = odd.Odd(body)
    with pytest.raises(InputError, match=r"itself fails in eager mode.*no attribute 'missing'"):
        capture(model, (torch.zeros(4, 4, device="meta"),))


def test_what_only_capture_cannot_do_is_no_failure_of_the_model():
    def body(model, x):
        return model.linear(x).sum() * float(x.sum().numpy())

    with pytest.raises(CaptureError, match="cannot be captured"):
        check(odd.Odd(body), torch.randn(4, 4))


def test_a_loss_without_trainable_parameters_is_refused():
    def loss(y: Tensor) -> Tensor:
        return y.detach().sum()

    model, x = nn.Linear(4, 4), torch.randn(4, 4)
    with pytest.raises(InputError, match="depends on no parameter that requires a gradient"):
        check_trainable(capture(model, (x,), loss_fn=loss).graph)
    check_trainable(capture(model, (x,), loss_fn=lambda y: y.sum()).graph)
    model.requires_grad_(False)
    with pytest.raises(InputError, match="none of its parameters requires a gradient"):
        check_trainable(capture(model, (x,), loss_fn=lambda y: y.sum()).graph)
