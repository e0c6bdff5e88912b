"""Joint planning: the best of all combinations that fit, by the same prices as when it is fixed."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from autopar.cost_models import Cluster, CommunicationModel, RooflineModel
from autopar.cost_models.update import adamw

import autopar
from autopar.capture import capture
from autopar.combinations import Combinations, Fixed
from autopar.errors import AutoparError, ConstraintError
from autopar.microbatches import analysed
from autopar.plan import Plan
from autopar.planner import search_meshes
from autopar.step_time import time_parts
from autopar.strategy import Analysis
from tests.models.zoo import build

CLUSTER = Cluster.preset("a100-80", nodes=1, devices_per_node=2)


def planned(name: str = "gpt2", cluster: Cluster = CLUSTER, **options: Any) -> Plan:
    model, make_batch = build(name)
    return autopar.plan(model, cluster, make_batch(0), schedule="auto", **options)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned()


def test_the_plan_is_the_fastest_of_all(plan: Plan) -> None:
    times_s = plan.search.pipelines
    assert len(times_s) > 8
    assert plan.prediction.step_time_s == pytest.approx(min(times_s.values()))
    assert Plan.from_json(plan.to_json()) == plan
    assert "pipelines considered" in str(plan)


def test_each_price_is_that_of_the_plan_with_the_combination_fixed(plan: Plan) -> None:
    model, make_batch = build("gpt2")
    for name, time_s in plan.search.pipelines.items():
        options: dict[str, Any] = {}
        if name.startswith("no pipeline, "):
            options = {"num_microbatches": int(name.split()[2])}
        elif name != "no pipeline":
            schedule, stages, num = re.fullmatch(
                r"(\S+), (\d+) stages on 2, (\d+) micro-batches", name
            ).groups()  # type: ignore[union-attr]
            options = {
                "schedule": schedule, "num_stages": int(stages), "num_microbatches": int(num),
            }  # fmt: skip
        fixed = autopar.plan(model, CLUSTER, make_batch(0), **options)
        assert fixed.prediction.step_time_s == pytest.approx(time_s), name


def test_what_is_fixed_stays() -> None:
    plan = planned(num_stages=4, num_microbatches=2)
    assert (plan.schedule.num_stages, plan.schedule.num_microbatches) == (4, 2)
    assert all("4 stages on 2, 2 micro-batches" in name for name in plan.search.pipelines)
    four = Cluster.preset("a100-80", nodes=1, devices_per_node=4)
    plan = planned(cluster=four, mesh={"x": 2})
    assert plan.device_mesh.axis_sizes == (2,)
    assert plan.schedule.num_devices == 2


def test_memory_decides_too(plan: Plan) -> None:
    """Under a budget that the fastest one exceeds another plan is found, and the reason is said."""
    needed = sum(plan.prediction.memory_bytes.values())
    other = planned(constraints=[autopar.MemoryBudget(int(needed * 0.95))])
    assert sum(other.prediction.memory_bytes.values()) <= needed * 0.95
    assert other.prediction.step_time_s >= plan.prediction.step_time_s
    with pytest.raises(ConstraintError, match="no combination of stages"):
        planned(constraints=[autopar.MemoryBudget(1000)])


def test_batch_norm_over_the_whole_batch_leaves_no_micro_batches() -> None:
    plan = planned("resnet")
    assert not plan.is_pipeline
    reasons = plan.search.not_pipelines
    assert "needs the whole batch at once" in reasons["2 micro-batches"]
    local = planned("resnet", batch_norm="local", num_microbatches=2)
    assert any("1f1b" in name for name in local.search.pipelines)


def test_stages_are_recomputed_where_the_memory_does_not_suffice_otherwise() -> None:
    """With one device a stage there is nothing to shard: below the memory of 1F1B, which holds
    least, only recomputation is left."""
    fixed: dict[str, Any] = {"num_stages": 2, "num_microbatches": 4, "mesh": {"x": 1}}
    plain = planned(recompute=False, **fixed)
    assert not any("recomputed" in name for name in plain.search.pipelines)
    again = planned(recompute=True, **fixed)
    assert all("recomputed" in name for name in again.search.pipelines)
    assert again.prediction.step_time_s > plain.prediction.step_time_s
    assert again.prediction.model_flops == plain.prediction.model_flops
    model, make_batch = build("gpt2")
    needed, least = (
        sum(
            autopar.plan(
                model, CLUSTER, make_batch(0), schedule="1f1b", recompute=recompute, **fixed
            ).prediction.memory_bytes.values()
        )
        for recompute in (False, True)
    )  # fmt: skip
    assert least < needed
    budget = [autopar.MemoryBudget((needed + least) // 2)]
    chosen = planned(constraints=budget, **fixed)
    stages = chosen.schedule.pipeline()
    assert stages is not None
    assert stages[1].shape.recomputed == (0, 1)
    assert sum(chosen.prediction.memory_bytes.values()) <= budget[0].size_bytes
    assert "recomputed" in str(chosen)
    with pytest.raises(ConstraintError, match="no combination of stages"):
        planned(constraints=budget, recompute=False, **fixed)


def test_a_number_of_stages_that_no_schedule_has_is_told() -> None:
    with pytest.raises(ConstraintError, match="has no schedule of 3 stages"):
        planned(num_stages=3)


def test_what_was_left_out_says_why(plan: Plan) -> None:
    """Every combination has its time, or the reason against it; none is both."""
    reasons = plan.search.not_pipelines
    assert not set(reasons) & set(plan.search.pipelines)
    slower = [name for name, time_s in plan.search.pipelines.items() if name != "no pipeline"]
    assert slower
    assert all(name in str(plan) or len(slower) > 13 for name in slower)


def test_a_bound_is_below_every_price() -> None:
    """What is left out by its bound would indeed have been slower."""
    model, make_batch = build("gpt2")
    captured = capture(model, make_batch(0))
    communication, compute = CommunicationModel(CLUSTER), RooflineModel(CLUSTER.device)
    space = Combinations(
        Analysis(captured.graph), CLUSTER, Fixed(), compute, communication, adamw(CLUSTER.device),
        2**40,
    )  # fmt: skip
    checked = 0
    for combination in space.all():
        _, analysis, microbatches = analysed(captured, combination.num_microbatches)
        for found in search_meshes(
            analysis, CLUSTER, [combination.mesh], microbatches=microbatches,
            compute=compute, communication=communication,
        ):  # fmt: skip
            step_s = time_parts(found).step_s
            assert space.bound_s(combination) <= step_s / combination.num_devices
            checked += 1
    assert checked > 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recompute": "yes"}, r"recompute is 'yes'"),
        ({"cuts": ["transformer.h.1"]}, r"the search cuts the stages itself"),
        ({"num_stages": "four"}, r"num_stages is 'four'"),
        ({"mesh": {"pipeline": 2}}, r"'pipeline' that of num_stages"),
        ({"constraints": 5}, r"constraints holds 5"),
    ],
)
def test_what_cannot_be_fixed_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(AutoparError, match=message):
        planned(**options)


def test_compile_runs_what_was_searched() -> None:
    model, make_batch = build("gpt2")
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    options: dict[str, Any] = {"example_inputs": make_batch(0), "optimizer": optimizer}
    with autopar.compile(
        model, 2, schedule="auto", num_stages=2, num_microbatches=2, profile_limit_s=0, **options
    ) as compiled:
        assert compiled.plan.is_pipeline
        loss = compiled.train_step(**make_batch(0))
    torch.testing.assert_close(loss, model(**make_batch(0)).loss.detach(), rtol=1e-4, atol=1e-4)
