"""Clipping by global norm on shards equals ``torch.nn.utils.clip_grad_norm_`` on one device."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.base.errors import InputError
from autopar.frontend.capture import capture
from autopar.ir.mesh import Mesh
from autopar.ir.placement import S
from autopar.lowering.program import lower
from autopar.lowering.training import lower_training
from autopar.planning.planner import make_planned
from autopar.planning.space import Space
from autopar.sharding.strategy import Analysis, Strategy
from tests.models.zoo import build
from tests.oracles import loss_of, random_assignment, to_double
from tests.runtime.conftest import Groups
from tests.runtime.processes import runner_of, stored_assignment
from tests.runtime.test_state import BATCHES, STORED, assert_close, make_model, start

OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.05),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.05),
}


def clipped_steps(
    model: nn.Module, make: Any, batches: Any, max_norm: float
) -> tuple[list[float], dict[str, Tensor]]:
    """Eager: the norms before clipping, and the last gradients after it."""
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    norms = []
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model(**batch)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return norms, grads


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("max_norm", [0.3, 1e6], ids=["clipped", "small enough"])
def test_sharded_replicated_padded_and_tied_parameters(
    groups: Groups, stored: str, optimizer: str, max_norm: float
) -> None:
    make, model = OPTIMIZERS[optimizer], make_model()
    expected, gradients = clipped_steps(model, make, BATCHES, max_norm)
    assert all((norm > max_norm) == (max_norm < 1) for norm in expected)
    runner = start(groups, stored, make, max_grad_norm=max_norm)
    assert runner.grad_norm is None
    norms = []
    for batch in BATCHES:
        runner.train_step(list(batch.values()))
        assert runner.grad_norm is not None
        norms.append(runner.grad_norm.item())
    assert norms == pytest.approx(expected, rel=1e-10)
    assert_close(runner.full_state_dict(), dict(model.state_dict()))
    got = runner.gradients()
    assert_close({name: got[name] for name in gradients}, gradients)
    assert got.keys() == gradients.keys()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["mlp", "odd_layers"])
def test_drawn_assignments(groups: Groups, name: str, seed: int) -> None:
    model, make_batch = build(name)
    model = model.double()
    batches = [to_double(make_batch(seed)) for seed in range(3)]
    captured = capture(model, batches[0])
    analysis = Analysis(captured.graph)
    mesh = Mesh(("x", "y"), (2, 2))
    program = lower(Strategy(analysis, random_assignment(analysis, mesh, seed)))
    runner = runner_of(
        groups(4), captured, program, model, optimizer=OPTIMIZERS["sgd"], max_grad_norm=0.05
    )
    norms = []
    for batch in batches:
        runner.train_step(captured.signature.flatten((), batch))
        assert runner.grad_norm is not None
        norms.append(runner.grad_norm.item())
    expected, _ = clipped_steps(model, OPTIMIZERS["sgd"], batches, 0.05)
    assert norms == pytest.approx(expected, rel=1e-8)
    for key, tensor in runner.full_state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[key], rtol=1e-8, atol=1e-8)


class Sum(nn.Module):
    """Two parameters whose gradients share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.ones(4, 4))
        self.right = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ (self.left + self.right)).square().sum()


def test_a_gradient_that_two_parameters_share_is_scaled_once(groups: Groups) -> None:
    model, x = Sum().double(), torch.randn(4, 4, dtype=torch.float64)
    captured = capture(model, (x,))
    mesh = Mesh(("x",), (2,))
    assignment = stored_assignment(Analysis(captured.graph), mesh, {})
    program = lower(Strategy(Analysis(captured.graph), assignment))
    make = OPTIMIZERS["sgd"]
    runner = runner_of(groups(2), captured, program, model, optimizer=make, max_grad_norm=0.5)
    runner.train_step([x])
    clipped_steps(model, make, [{"x": x}], 0.5)
    assert_close(runner.full_state_dict(), dict(model.state_dict()))


def test_the_norm_is_that_of_all_micro_batches_together(groups: Groups) -> None:
    model, make_batch = build("mlp")
    model, batch = model.double(), to_double(make_batch(0))
    captured = capture(model, batch)
    cluster = autopar.Cluster.preset("cpu", nodes=1, devices_per_node=2)
    planned = make_planned(captured, cluster, Space(mesh={"x": 2}, num_microbatches=2))
    make = OPTIMIZERS["sgd"]
    runner = runner_of(
        groups(2), captured, lower_training(planned.strategy, 2), model,
        optimizer=make, max_grad_norm=0.05,
    )  # fmt: skip
    runner.train_step(captured.signature.flatten((), batch))
    (expected,), gradients = clipped_steps(model, make, [batch], 0.05)
    assert runner.grad_norm is not None
    assert runner.grad_norm.item() == pytest.approx(expected, rel=1e-10)
    got = runner.gradients()
    assert_close({name: got[name] for name in gradients}, gradients)


def test_low_precision_gradients_are_added_up_in_single_precision(groups: Groups) -> None:
    model = Sum().bfloat16()
    x = torch.full((4, 4), 1 / 256, dtype=torch.bfloat16)
    captured = capture(model, (x,))
    mesh = Mesh(("x",), (2,))
    stored = {"left": (S(0),)}
    strategy = Strategy(
        Analysis(captured.graph), stored_assignment(Analysis(captured.graph), mesh, stored)
    )
    runner = runner_of(
        groups(2), captured, lower(strategy), model, optimizer=OPTIMIZERS["sgd"], max_grad_norm=1e-4
    )
    runner.train_step([x])
    got = runner.gradients()
    loss_of(model(x)).backward()
    assert model.left.grad is not None
    norm = math.sqrt(2) * model.left.grad.double().norm().item()
    assert runner.grad_norm is not None
    assert runner.grad_norm.item() == pytest.approx(norm, rel=1e-6)
    assert got["left"].dtype is torch.bfloat16
    expected = model.left.grad.double() * 1e-4 / (norm + 1e-6)
    torch.testing.assert_close(got["left"].double(), expected, rtol=1e-2, atol=0)


@pytest.mark.usefixtures("reused_workers")
def test_compile_clips_and_tells_the_norm() -> None:
    model, make_batch = build("mlp")
    batch = make_batch(0)
    make = OPTIMIZERS["sgd"]
    options: dict[str, Any] = {"example_inputs": batch, "optimizer": make, "profile_limit_s": 0}
    compiled = autopar.compile(model, 2, max_grad_norm=0.1, **options)
    assert compiled.grad_norm is None
    compiled.train_step(**batch)
    (expected,), _ = clipped_steps(model, make, [batch], 0.1)
    assert compiled.grad_norm is not None
    assert compiled.grad_norm.dim() == 0
    assert compiled.grad_norm.item() == pytest.approx(expected, rel=1e-4)
    for key, tensor in compiled.full_state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[key], rtol=1e-4, atol=1e-5)
    plain = autopar.compile(model, 2, **options)
    plain.train_step(**batch)
    assert plain.grad_norm is None


@pytest.mark.parametrize("wrong", [0, -1.0, math.inf, math.nan, True, "1", torch.tensor(1.0)])
def test_a_bound_that_is_none(wrong: Any) -> None:
    model, make_batch = build("mlp")
    with pytest.raises(InputError, match=r"max_grad_norm is .* positive finite number"):
        autopar.compile(model, 2, example_inputs=make_batch(0), max_grad_norm=wrong)
