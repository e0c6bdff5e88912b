"""Micro-batches are searched where the memory takes the whole batch at once at a loss, or not, and
pipelines where communication between nodes is exposed."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Cluster, ConstraintError, MemoryBudget, Plan
from autopar.cost_models import ComputeModel, RooflineModel
from autopar.cost_models.calls import TensorSpec
from autopar.frontend.capture import capture
from autopar.passes.prepare import prepare
from autopar.planning.fit import Fit
from autopar.planning.planner import make_planned, make_setting
from autopar.planning.recompute_request import Recompute
from autopar.planning.schedule_search import Search
from autopar.planning.space import Space
from autopar.planning.worth_measuring import calls_worth_measuring
from tests.models.zoo import build

NUM_ROWS = 16
CLUSTERS = {
    "one": Cluster.preset("a100-80", nodes=1, devices_per_node=1),
    "two": Cluster.preset("v100-pcie", nodes=1, devices_per_node=2),
}


class Deep(nn.Module):
    """Layers whose activations take most of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def planned(cluster: str, **options: Any) -> Plan:
    with torch.device("meta"):
        model, x = Deep(), torch.empty(NUM_ROWS, 1024, 256)
    return autopar.plan(model, CLUSTERS[cluster], (x,), **options)


def planned_wide(nodes: int, **options: Any) -> Plan:
    """Large parameters and few rows, so that moving gradients between nodes takes longest."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048))
                for _ in range(8)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x.square().mean()

    cluster = Cluster.preset("v100", nodes=nodes, devices_per_node=4 // nodes)
    with torch.device("meta"):
        model, x = Wide(), torch.empty(1024, 2048)
    return autopar.plan(model, cluster, (x,), **options)


def test_pipelines_are_searched_between_nodes() -> None:
    found = planned_wide(4)
    assert found.is_pipeline
    without = planned_wide(4, num_microbatches=1)
    assert found.prediction.step_time_s < without.prediction.step_time_s
    assert not planned_wide(4, mesh={"dp": 4}).is_pipeline


def test_no_pipelines_are_searched_within_a_node() -> None:
    found = planned_wide(1)
    assert not found.is_pipeline
    assert not found.search.pipelines


@functools.cache
def needed_bytes(cluster: str) -> int:
    return sum(planned(cluster).prediction.memory_bytes.values())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("share", [0.8, 0.4, 0.25])
def test_no_number_of_micro_batches_is_faster(cluster: str, share: float) -> None:
    budget = MemoryBudget(int(share * needed_bytes(cluster)))
    found = planned(cluster, constraints=budget)
    assert sum(found.prediction.memory_bytes.values()) <= budget.size_bytes
    assert found.offload is None
    times_s = []
    for num in (1, 2, 4, 8, 16):
        try:
            fixed = planned(cluster, constraints=budget, num_microbatches=num, offload=False)
        except ConstraintError:
            continue
        times_s.append(fixed.prediction.step_time_s)
    assert found.prediction.step_time_s <= min(times_s) * (1 + 1e-9)


def test_a_budget_that_takes_everything_leaves_one() -> None:
    free = planned("two")
    assert free.schedule.num_microbatches == 1
    budget = MemoryBudget(needed_bytes("two"))
    assert planned("two", constraints=budget).ops == free.ops


def test_what_fits_in_no_other_way_is_cut() -> None:
    budget = MemoryBudget(needed_bytes("one") // 4)
    fixed: dict[str, Any] = {"constraints": budget, "recompute": "none", "offload": False}
    with pytest.raises(ConstraintError, match="no strategy found that fits"):
        planned("one", num_microbatches=1, **fixed)
    found = planned("one", **fixed)
    assert found.schedule.num_microbatches > 1
    assert not found.is_pipeline
    assert not found.recomputation
    assert "micro-batches" in str(found)
    assert "no pipeline" in found.report("full")


def test_micro_batches_are_searched_before_anything_moves() -> None:
    budget = MemoryBudget(needed_bytes("one") // 4)
    assert planned("one", constraints=budget).offload is None


def test_a_model_that_needs_the_whole_batch_is_not_cut() -> None:
    model, make_batch = build("resnet")
    plan = functools.partial(autopar.plan, model, CLUSTERS["one"], make_batch(0))
    needed = sum(plan().prediction.memory_bytes.values())
    least = sum(plan(recompute="full").prediction.memory_bytes.values())
    tight = plan(constraints=MemoryBudget((needed + least) // 2))
    assert tight.schedule.num_microbatches == 1
    assert tight.recomputation


def test_a_fixed_recomputation_counts_where_the_whole_batch_may_fit() -> None:
    with torch.device("meta"):
        model = prepare(capture(Deep(), (torch.empty(NUM_ROWS, 1024, 256),)))
    for recompute, may_fit in (("full", True), ("none", False)):
        setting = make_setting(
            model, CLUSTERS["one"], Space(recompute=Recompute.of(recompute)),
            constraints=MemoryBudget(int(0.4 * needed_bytes("one"))),
        )  # fmt: skip
        search = Search(setting).run()
        assert search.pricing.may_fit(search.options[0]) == may_fit


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_ops_are_measured_for_what_is_searched(share: float) -> None:
    """A second time where micro-batches are searched, with their shapes."""
    spaces: list[Space] = []

    def measure(space: Space) -> ComputeModel:
        spaces.append(space)
        return RooflineModel(CLUSTERS["one"].device)

    with torch.device("meta"):
        model = prepare(capture(Deep(), (torch.empty(NUM_ROWS, 1024, 256),)))
    budget = MemoryBudget(int(share * needed_bytes("one")))
    found = make_planned(model, CLUSTERS["one"], constraints=budget, measure=measure)
    num = found.plan.schedule.num_microbatches
    assert [space.is_open for space in spaces] == [False, True][: 1 if share == 1 else 2]
    rows = {
        part.shape[0]
        for call in calls_worth_measuring(model, CLUSTERS["one"], spaces[-1])
        for part in call.args
        if isinstance(part, TensorSpec)
    }
    assert NUM_ROWS // num in rows


@pytest.mark.parametrize(("nodes", "limit_s"), [(1, 60.0), (512, 60.0), (2048, 240.0)])
def test_the_default_time_limit_grows_with_the_devices(nodes: int, limit_s: float) -> None:
    cluster = Cluster.preset("h100-sxm", nodes=nodes, devices_per_node=8)
    batch = torch.zeros(16, 8), torch.zeros(16, 8)
    captured = capture(nn.Linear(8, 8), batch, loss_fn=nn.functional.mse_loss)
    setting = make_setting(captured, cluster)
    shares = setting.search_limit_s, setting.refine_limit_s, setting.lower_limit_s
    assert sum(shares) == pytest.approx(limit_s)
    shorter = replace(setting, time_limit_s=6.0)
    assert shorter.search_limit_s == pytest.approx(2.0)


def test_an_open_search_updates_early_where_that_alone_fits() -> None:
    """At the peak, its update at the end holds temporaries of all parameters too."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        batch = torch.empty(4, 256), torch.empty(4, 256)
    captured = capture(model, batch, loss_fn=nn.functional.mse_loss)
    size_bytes = 4 * sum(p.numel() for p in model.parameters())
    space = Space(is_open=True, num_microbatches=1, recompute=Recompute.of("none"))
    setting = make_setting(
        captured, CLUSTERS["one"], space, constraints=[MemoryBudget(int(3.7 * size_bytes))]
    )
    fitted = Fit(Search(setting).run(), moves=False).best()
    assert fitted.update.update.is_early
    assert fitted.option.trial == 0
