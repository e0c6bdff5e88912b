"""Several threads of one process: concurrent plans equal plans made alone; training continues."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.base.errors import InputError
from autopar.base.exclusive import in_turn
from autopar.base.torch_private import without_patched_modules
from autopar.cost_models import Cluster

CLUSTER = Cluster.preset("cpu", nodes=1, devices_per_node=4)
WAIT_S = 120


class Doubled(torch.autograd.Function):
    """Doubles the gradient of the clamp, which no trace of its forward pass shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Layers(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        torch.manual_seed(num_layers)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Doubled.apply(torch.tanh(layer(x)))
        return x.square().mean()


def planned(num_layers: int) -> str:
    return autopar.plan(Layers(num_layers), CLUSTER, {"x": torch.zeros(8, 8)}).to_json()


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """The results of calls that start at the same moment."""
    begin = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        begin.wait(WAIT_S)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(run, call) for call in calls]
        return [future.result(WAIT_S) for future in futures]


def test_threads_that_plan_at_once_plan_as_one_does() -> None:
    sizes = (2, 3, 4, 3)
    alone = [planned(size) for size in sizes]
    assert at_once([lambda size=size: planned(size) for size in sizes]) == alone


def test_a_thread_that_trains_is_not_disturbed_by_one_that_plans() -> None:
    """Its own autograd functions and modules are not traced."""
    model, x, is_planned = Layers(3), torch.ones(8, 8), threading.Event()

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(x).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    def train() -> int:
        count = 0
        while not is_planned.is_set():
            assert all(map(torch.equal, gradients(), expected))
            count += 1
        return count

    def plan() -> str:
        try:
            return planned(3)
        finally:
            is_planned.set()

    expected, alone = gradients(), planned(3)
    count, beside = at_once([train, plan])
    assert beside == alone
    assert count > 0


def test_under_torchrun_the_second_thread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their order could differ between ranks, and their collectives would not match."""
    monkeypatch.setattr(autopar.api, "is_spmd", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with in_turn(), ThreadPoolExecutor(1) as pool:
        refused = pool.submit(
            autopar.compile, Layers(2), 2, example_inputs={"x": torch.zeros(8, 8)}
        )
        with pytest.raises(InputError, match=r"under torchrun .* call it from one thread"):
            refused.result(WAIT_S)


def test_another_thread_traces_modules_while_a_plan_is_made() -> None:
    """Tracing for a plan leaves out torch.fx's patches of nn.Module, in its own thread alone."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with without_patched_modules(), ThreadPoolExecutor(1) as pool:
        traced = pool.submit(torch.fx.symbolic_trace, model).result(WAIT_S)
    assert [n.op for n in traced.graph.nodes].count("call_module") == 2
