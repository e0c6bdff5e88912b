"""Optimizers that update whole parameters: the plan stores them whole, and training is exact."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Cluster, Force
from autopar.base.errors import ConstraintError, OptimizerError
from autopar.planning.constraints import Pin

H100S = Cluster.preset("h100-sxm", nodes=1, devices_per_node=4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))
        self.fixed = nn.Parameter(torch.eye(16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) @ self.fixed
        return x.square().mean()


class Own(torch.optim.SGD):
    """An optimizer of the user's, of which nothing is known."""


MUON = functools.partial(torch.optim.Muon, lr=0.02)
OWN = functools.partial(Own, lr=0.1, momentum=0.9)


def made() -> tuple[Net, Tensor]:
    torch.manual_seed(3)
    return Net(), torch.randn(64, 16)


def planned(optimizer: Any, **options: Any) -> autopar.Plan:
    model, x = made()
    return autopar.plan(model, H100S, example_inputs=(x,), optimizer=optimizer, **options)


def stored(plan: autopar.Plan) -> set[str]:
    return {words for name, words in plan.parameters.items() if name != "fixed"}


@pytest.mark.parametrize("optimizer", [MUON, torch.optim.Adafactor, OWN])
def test_parameters_are_stored_whole(optimizer: Any) -> None:
    forced = [Force("tensor_parallel")]
    assert any("S" in words for words in stored(planned(torch.optim.AdamW, constraints=forced)))
    for constraints in (forced, []):
        plan = planned(optimizer, constraints=constraints)
        assert all(set(words.split()) == {"R"} for words in stored(plan))


@pytest.mark.parametrize("optimizer", [MUON, OWN])
def test_forced_shards_are_refused(optimizer: Any) -> None:
    with pytest.raises(ConstraintError, match="each device stores whole parameters"):
        planned(optimizer, constraints=[Force("zero3")])
    with pytest.raises(ConstraintError, match=r"it can have stored='R'"):
        planned(optimizer, constraints=[Pin("layers.0.weight", stored="S0")], mesh={"x": 4})


def test_only_optimizers_of_single_parameters_train_pipelines() -> None:
    options = {"num_stages": 2, "num_microbatches": 4, "schedule": "1f1b"}
    assert planned(MUON, **options).is_pipeline
    with pytest.raises(OptimizerError, match="update each parameter by itself"):
        planned(OWN, **options)
    assert not planned(OWN, schedule="auto").is_pipeline
    with pytest.raises(ConstraintError, match="update each parameter by itself"):
        planned(OWN, schedule="auto", num_stages=2)


@pytest.mark.parametrize(
    ("optimizer", "least", "reason"),
    [
        (torch.optim.AdamW, (4 * 3 * 1024 + 1024) // 4, "on each of 4. Use"),
        (MUON, (4 * 2 * 1024 + 1024) // 4, "on each of 4. Use"),
        (OWN, 4 * 2 * 1024, "on each of 4, where the optimizer needs 8,192 whole. Use"),
    ],
)
def test_the_least_memory_is_told_before_a_search(optimizer: Any, least: int, reason: str) -> None:
    """Whole parameters may be in different stages; an optimizer of all of them needs all."""
    budget = autopar.MemoryBudget(least - 1)
    with pytest.raises(ConstraintError, match=f"at least {least:,} {reason}"):
        planned(optimizer, constraints=[budget], offload=False)


def test_the_products_of_muon_are_priced() -> None:
    """Five steps of Newton-Schulz, each of three products in bfloat16."""
    short, long = 2048, 8192
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Linear(short, long, bias=False), nn.Linear(long, short, bias=False)
        )
        x, y = torch.empty(64, short), torch.empty(64, short)
    muon_s, other_s = (
        autopar.plan(
            model, H100S, (x, y), loss_fn=nn.functional.mse_loss, optimizer=optimizer, mesh={"x": 4}
        ).prediction.update_s
        for optimizer in (MUON, OWN)
    )
    flops = 2 * 5 * 2 * short * short * (long + short + long)
    peak = H100S.device.peak_flops_per_s.bfloat16
    assert 0.3 < flops / (muon_s - other_s) / peak < 1


@pytest.mark.parametrize("optimizer", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_optimizers_that_train_nothing_are_refused_when_planned(optimizer: Any) -> None:
    with pytest.raises(OptimizerError, match=optimizer.__name__):
        planned(optimizer)


@pytest.mark.parametrize("optimizer", [MUON, OWN])
@pytest.mark.parametrize("kind", ["tensor_parallel", "data_parallel"])
def test_training_is_exact(optimizer: Any, kind: str) -> None:
    model, x = made()
    reference, _ = made()
    steps = optimizer([p for p in reference.parameters() if p.requires_grad])
    with autopar.compile(
        model, 2, example_inputs=(x,), optimizer=optimizer, constraints=[Force(kind)]
    ) as compiled:
        for _ in range(3):
            steps.zero_grad()
            loss = reference(x)
            loss.backward()
            steps.step()
            assert float(compiled.train_step(x)) == pytest.approx(float(loss), rel=1e-5)
        for name, value in compiled.state_dict().items():
            torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-4, atol=1e-5)
