"""The parts of a predicted step: they add up, and casts and copies are no communication."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor, nn

import autopar
from autopar import Plan
from autopar.cost_models import Cluster
from autopar.plans.timeline import predicted_timeline, predicted_trace
from autopar.schedules.action import Kind
from tests.models import families

WIDTH, ROWS = 512, 64
ONE = Cluster.preset("a100-80", devices_per_node=1)
TWO = Cluster.preset("a100-80", devices_per_node=2)
FOUR = Cluster.preset("a100-80", devices_per_node=4)
PIPELINE: dict[str, Any] = {"num_stages": 4, "num_microbatches": 8}


class Product(nn.Module):
    """One product, so that what is cast and copied can be counted by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum()


class Tall(nn.Module):
    """Most parameters in the embedding, most computation in the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50_000, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(*[nn.Linear(16, 16) for _ in range(8)]) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x.sum()


@functools.cache
def planned(schedule: str, *constraints: autopar.Force) -> Plan:
    tokens = torch.zeros(32, 16, dtype=torch.int64)
    inputs = {"input_ids": tokens, "labels": tokens}
    return autopar.plan(
        families.llama(4), FOUR, example_inputs=inputs, schedule=schedule, precision="bf16",
        constraints=constraints, **PIPELINE,
    )  # fmt: skip


def parts_s(plan: Plan) -> float:
    p = plan.prediction
    return p.forward_s + p.backward_s + p.communication_s + p.copies_s + p.update_s


def test_casts_are_a_pass_over_memory_each() -> None:
    """The weight is read in one dtype and written in another, as its gradient is, which may
    overlap."""
    plan = autopar.plan(
        Product(), ONE, example_inputs={"x": torch.randn(ROWS, WIDTH)}, precision="bf16"
    )
    device, p = plan.cluster.device, plan.prediction
    bandwidth = device.memory_bandwidth_bytes_per_s
    cast_s = device.kernel_launch_s + WIDTH**2 * (2 + 4) / bandwidth
    input_s = 2 * 4 * ROWS * WIDTH / bandwidth
    assert (cast_s + input_s) * (1 - 1e-6) <= p.copies_s <= 2 * cast_s + input_s
    assert p.communication_s == p.hidden_s == 0
    assert "communication  0" not in str(plan)
    assert parts_s(plan) == pytest.approx(p.step_time_s)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved", "fast_forward"])
def test_no_sums_are_communication_where_stages_have_one_rank(schedule: str) -> None:
    plan = planned(schedule)
    p = plan.prediction
    assert p.communication_s == p.hidden_s == 0
    assert 0 < p.copies_s < parts_s(plan) < p.step_time_s
    assert f"pipeline rank {p.pipeline_rank}, which computes most" in " ".join(str(plan).split())


@pytest.mark.parametrize("schedule", ["conventional", "reverse_first_k"])
def test_overlapped_sums_are_no_part_of_the_step(schedule: str) -> None:
    """Every device has all stages, and reduces its gradients while it computes."""
    plan = planned(schedule, autopar.Force("data_parallel"))
    p = plan.prediction
    assert p.hidden_s > 0
    assert parts_s(plan) <= p.step_time_s * (1 + 1e-6)
    assert parts_s(plan) == pytest.approx(p.step_time_s * (1 - p.bubble_share), rel=0.05)
    assert "computes most" not in str(plan)


@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "zb_h1", "interleaved", "fast_forward", "chimera", "gems"]
)
def test_the_timeline_ends_with_the_step(schedule: str) -> None:
    """It has the messages, sums and updates that the search has simulated, after JSON too."""
    plan = Plan.from_json(planned(schedule).to_json())
    timeline = predicted_timeline(plan)
    assert timeline is not None
    assert timeline.makespan_s == pytest.approx(plan.prediction.step_time_s, rel=1e-6)
    events = json.loads(predicted_trace(plan))["traceEvents"]
    assert max(each.get("ts", 0) + each.get("dur", 0) for each in events) == pytest.approx(
        plan.prediction.step_time_s * 1e6, rel=1e-3
    )
    assert {"compute", "communication"} <= {each.get("cat") for each in events}


def test_the_update_of_a_step_is_that_of_the_rank_that_computes_most() -> None:
    """Not that of the rank whose update takes longest, which is another here."""
    plan = autopar.plan(
        Tall(), TWO, example_inputs={"x": torch.zeros(8, 4, dtype=torch.int64)},
        schedule="1f1b", num_microbatches=4, cuts=["layers.0"],
    )  # fmt: skip
    p, timeline, costs = plan.prediction, predicted_timeline(plan), plan.stage_costs
    assert timeline is not None
    assert costs is not None
    after_s = costs.update_after_s
    assert after_s[p.pipeline_rank] < max(after_s)
    updates = [i for i in timeline.of_device(p.pipeline_rank) if i.action.kind is Kind.U]
    assert p.update_s == pytest.approx(sum(i.duration_s for i in updates))


def test_the_timeline_of_unequal_islands_ends_with_the_step() -> None:
    cluster = Cluster.joined(
        [Cluster.preset(name, devices_per_node=2) for name in ("a100-80", "v100")],
        bandwidth_bytes_per_s=1e10,
        latency_s=1e-5,
    )
    tokens = torch.zeros(32, 16, dtype=torch.int64)
    plan = autopar.plan(
        families.llama(4), cluster, example_inputs={"input_ids": tokens, "labels": tokens},
        schedule="1f1b", **PIPELINE,
    )  # fmt: skip
    timeline = predicted_timeline(plan)
    assert timeline is not None
    assert timeline.makespan_s == pytest.approx(plan.prediction.step_time_s, rel=1e-6)


def test_edited_stages_have_no_timeline() -> None:
    plan = planned("1f1b")
    assert plan.stage_costs is not None
    shorter = structs.replace(plan.stage_costs, update_after_s=(0.0,), reduce_after_s=(0.0,))
    edited = structs.replace(plan, stage_costs=shorter)
    assert predicted_timeline(edited) is None
    with pytest.raises(autopar.InputError, match="it has no prices for the blocks of its stages"):
        edited.figure("timeline")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input_grad_s", (1.0,)),
        ("weight_grad_s", (1.0, -1.0, 1.0, 1.0)),
        ("update_after_s", (1.0,)),
        ("links", ({"ranks": [1, 1], "latency_s": 0.0, "bandwidth_bytes_per_s": None},)),
        ("links", ({"ranks": [0, 1], "latency_s": 0.0, "bandwidth_bytes_per_s": 0.0},)),
    ],
)
def test_costs_that_no_stage_has_are_refused_by_their_path(field: str, value: Any) -> None:
    document = json.loads(planned("1f1b").to_json())
    document["stage_costs"][field] = value
    with pytest.raises(autopar.PlanError, match=rf"\$\.stage_costs\.{field}"):
        Plan.from_json(json.dumps(document))


def test_the_parts_of_replicated_stages_fit_into_the_step() -> None:
    plan = planned("chimera")
    p = plan.prediction
    assert p.communication_s + p.hidden_s > 0
    assert parts_s(plan) <= p.step_time_s
