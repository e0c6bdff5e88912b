"""Joint planning finds the best combination that fits, at the price it has when it is fixed."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.base.errors import AutoparError, ConstraintError, InputError
from autopar.cost_models import Cluster
from autopar.frontend.capture import capture
from autopar.planning.combinations import Combinations
from autopar.planning.planner import make_setting
from autopar.planning.schedule_search import Search
from autopar.planning.sharding_search import search_meshes
from autopar.planning.space import Space
from autopar.plans.document import Plan
from autopar.pricing.step_time import time_parts
from autopar.schedules.generators.forms import forms
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
    assert "pipelines considered" in plan.report("full")


def test_each_price_is_that_of_the_plan_with_the_combination_fixed(plan: Plan) -> None:
    """Every fourth combination is checked, except searched orders, which have no name of a form."""
    model, make_batch = build("gpt2")
    named = [item for item in plan.search.pipelines.items() if not item[0].startswith("searched")]
    for name, time_s in named[::4]:
        options: dict[str, Any] = {}
        if name.startswith("no pipeline, "):
            options = {"num_microbatches": int(name.split()[2])}
        elif name != "no pipeline":
            form, stages, num = re.fullmatch(
                r"(.+), (\d+) stages on 2, (\d+) micro-batches(?:, cut inside layers)?", name
            ).groups()  # type: ignore[union-attr]
            counts = {"num_stages": int(stages), "num_microbatches": int(num)}
            made = next(f for f in forms(2, *counts.values()) if str(f) == form)
            if made.is_listed:  # ordered by the prices, so that only the plan has it
                continue
            options = {"schedule": made.build()}
        fixed = autopar.plan(model, CLUSTER, make_batch(0), **options)
        if fixed.graph.block_cuts and not name.endswith("cut inside layers"):
            # The other search may have left divided layers out, as they cannot be the fastest.
            assert fixed.prediction.step_time_s <= time_s, name
        else:
            assert fixed.prediction.step_time_s == pytest.approx(time_s), name


def test_a_search_without_time_has_the_first_option(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(time_limit_s=0)
    assert len(found.search.pipelines) == 1
    reasons = found.search.not_pipelines.values()
    assert any(why == "not tried: the search reached its time limit of 0 s" for why in reasons)
    planned(progress=True)
    assert "; best so far " in capsys.readouterr().err


def test_a_search_without_time_tries_nothing_beside_a_plan_that_is_known() -> None:
    model, make_batch = build("gpt2")
    setting = make_setting(
        capture(model, make_batch(0)), CLUSTER, Space(is_open=True), time_limit_s=0
    )
    assert len(Search(setting).run().options) == 1
    assert not Search(setting, best_s=1e9).run().options


@pytest.mark.parametrize("limit_s", [-1, "60", True])
def test_a_time_limit_is_a_number_of_seconds(limit_s: Any) -> None:
    with pytest.raises(InputError, match=r"time_limit_s is .*; it must be a number of seconds"):
        planned(time_limit_s=limit_s)


def test_what_is_fixed_stays() -> None:
    plan = planned(num_stages=4, num_microbatches=2)
    assert (plan.schedule.num_stages, plan.schedule.num_microbatches) == (4, 2)
    assert all("4 stages on 2, 2 micro-batches" in name for name in plan.search.pipelines)
    four = Cluster.preset("a100-80", nodes=1, devices_per_node=4)
    plan = planned(cluster=four, mesh={"x": 2})
    assert plan.device_mesh.axis_sizes == (2,)
    assert plan.schedule.num_devices == 2


def named(schedule: str, cluster: Cluster = CLUSTER, **options: Any) -> Plan:
    model, make_batch = build("gpt2")
    return autopar.plan(model, cluster, make_batch(0), schedule=schedule, **options)


@pytest.mark.parametrize("name", ["gpipe", "zb_h1", "zb_h2", "chimera", "dualpipe", "zb_v"])
def test_beside_a_named_schedule_the_rest_is_searched(name: str) -> None:
    found = named(name)
    assert found.search.pipelines
    assert all(option.startswith(f"{name}, ") for option in found.search.pipelines)
    assert found.schedule.num_microbatches > 1
    assert found.prediction.step_time_s == pytest.approx(min(found.search.pipelines.values()))
    assert found.search.not_pipelines["no pipeline"] == "a pipeline was asked for"


def test_a_named_schedule_is_searched_where_its_parts_are_not_given() -> None:
    of_num = named("1f1b", num_microbatches=2)
    assert of_num.schedule.num_microbatches == 2
    of_stages = named("1f1b", num_stages=2)
    assert of_stages.schedule.num_microbatches > 1
    assert len(of_stages.search.pipelines) > 1
    assert not named("1f1b", num_stages=2, num_microbatches=2).search.pipelines


def test_one_micro_batch_can_be_fixed() -> None:
    plan = planned(num_stages=2, num_microbatches=1)
    assert (plan.schedule.num_stages, plan.schedule.num_microbatches) == (2, 1)
    assert all("1 micro-batches" in name for name in plan.search.pipelines)


def test_axes_are_fixed_one_by_one() -> None:
    four = Cluster.preset("a100-80", nodes=1, devices_per_node=4)
    alone = planned(cluster=four, mesh={"dp": None, "tp": 2}, num_stages=1)
    assert (alone.device_mesh.axis_names, alone.device_mesh.axis_sizes) == (("dp", "tp"), (2, 2))
    both = planned(cluster=four, mesh={"dp": None, "tp": 2}, num_microbatches=4)
    assert both.device_mesh.axis_sizes[1] == 2
    considered = {*both.search.pipelines, *both.search.not_pipelines}
    assert any("on 2" in name for name in considered)
    assert not any("on 4" in name for name in considered)
    staged = planned(cluster=four, mesh={"dp": None, "tp": None}, num_stages=2)
    assert staged.device_mesh.num_devices == 2
    model, make_batch = build("gpt2")
    plain = autopar.plan(model, four, make_batch(0), mesh={"dp": 4, "tp": None})
    assert plain.device_mesh.axis_sizes == (4, 1)


def test_interleaved_takes_any_number_of_stages_a_device() -> None:
    model = torch.nn.ModuleList(
        torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(5))) for _ in range(6)
    )

    class Chain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x.square().mean()

    plan = autopar.plan(
        Chain(), CLUSTER, torch.randn(8, 16), schedule="auto", num_stages=6, num_microbatches=4
    )
    found = {name.split(",")[0] for name in plan.search.pipelines if "searched" not in name}
    assert "interleaved" in found <= {"interleaved", "fast_forward"}
    assert plan.schedule.num_stages == 6


def test_a_model_of_one_block_says_that_it_has_no_stages() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Flatten(0))
    loss = {"loss_fn": lambda output, target: (output - target).square().mean()}
    batch = (torch.randn(8, 4), torch.randn(32))
    found = autopar.plan(model, CLUSTER, batch, schedule="auto", **loss)
    assert "this model has only 1 place" in found.search.not_pipelines["2 pipeline ranks"]
    with pytest.raises(ConstraintError, match=r"this model has only 1 place.*fix fewer options"):
        autopar.plan(model, CLUSTER, batch, schedule="auto", num_stages=2, **loss)


def test_memory_decides_too(plan: Plan) -> None:
    """Under a budget that the fastest plan exceeds, another is found, and the reason is given."""
    needed = sum(plan.prediction.memory_bytes.values())
    other = planned(constraints=[autopar.MemoryBudget(int(needed * 0.95))])
    assert sum(other.prediction.memory_bytes.values()) <= needed * 0.95
    assert other.prediction.step_time_s >= plan.prediction.step_time_s


def test_a_budget_below_an_even_share_of_what_is_stored_is_refused_before_the_search() -> None:
    model, make_batch = build("gpt2")
    parameters = sum(parameter.numel() * 4 for parameter in model.parameters())
    budget = [autopar.MemoryBudget(parameters)]  # with AdamW's two states: 3/2 of it on each of 2
    least = rf"at least {parameters * 3 // 2:,} on each of 2"
    with pytest.raises(ConstraintError, match=least):
        autopar.plan(
            model, CLUSTER, make_batch(0), constraints=budget, schedule="auto", offload=False
        )


def test_batch_norm_over_the_whole_batch_leaves_no_micro_batches() -> None:
    plan = planned("resnet")
    assert not plan.is_pipeline
    reasons = plan.search.not_pipelines
    assert "needs the whole batch at once" in reasons["2 micro-batches"]
    local = planned("resnet", batch_norm="local", num_microbatches=2)
    assert any("1f1b" in name for name in local.search.pipelines)


def test_blocks_recompute_where_the_memory_does_not_suffice_otherwise() -> None:
    """With one device per stage there is nothing to shard: below the memory of 1F1B, which holds
    least, only recomputation fits, and no more of it than is needed."""
    fixed: dict[str, Any] = {
        "num_stages": 2, "num_microbatches": 4, "mesh": {"x": 1}, "update": "at_end"
    }  # fmt: skip
    plain = planned(recompute="none", **fixed)
    assert not any("recomputed" in name for name in plain.search.pipelines)
    again = planned(recompute="full", **fixed)
    assert all("recomputed" in name for name in again.search.pipelines)
    assert again.prediction.step_time_s > plain.prediction.step_time_s
    assert again.prediction.model_flops == plain.prediction.model_flops
    model, make_batch = build("gpt2")
    none, full = (
        autopar.plan(model, CLUSTER, make_batch(0), schedule="1f1b", recompute=recompute, **fixed)
        for recompute in ("none", "full")
    )
    needed, least = (sum(p.prediction.memory_bytes.values()) for p in (none, full))
    assert least < needed
    budget = [autopar.MemoryBudget((needed + least) // 2)]
    chosen = planned(constraints=budget, **fixed)
    assert chosen.recomputation
    assert plain.prediction.step_time_s < chosen.prediction.step_time_s
    assert chosen.prediction.step_time_s < full.prediction.step_time_s
    assert sum(chosen.prediction.memory_bytes.values()) <= budget[0].size_bytes
    assert "recomputed" in str(chosen)
    with pytest.raises(ConstraintError, match="no combination of stages"):
        planned(constraints=budget, recompute="none", offload=False, **fixed)


@pytest.mark.parametrize("share", [1.02, 1.5])
def test_what_fits_only_as_it_is_recomputed_is_simulated(share: float) -> None:
    """All activations would take several times the memory."""
    with torch.device("meta"):
        parts = [[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)] for _ in range(4)]
        model, x = (
            nn.Sequential(*(nn.Sequential(*part) for part in parts)),
            torch.empty(16, 512, 64),
        )
    planned = functools.partial(
        autopar.plan, model, CLUSTER, (x,), loss_fn=lambda out: out.mean(),
        num_stages=2, num_microbatches=4, mesh={"x": 1}, recompute="full", update="at_end",
        offload=False,
    )  # fmt: skip
    alone = planned(schedule="1f1b")
    budget = autopar.MemoryBudget(int(share * sum(alone.prediction.memory_bytes.values())))
    found = planned(schedule="auto", constraints=budget)
    assert sum(found.prediction.memory_bytes.values()) <= budget.size_bytes
    assert found.prediction.step_time_s <= alone.prediction.step_time_s * (1 + 1e-9)
    assert found.prediction.step_time_s == pytest.approx(min(found.search.pipelines.values()))


def test_a_number_of_stages_that_no_schedule_has_is_told() -> None:
    with pytest.raises(ConstraintError, match="no schedule of 3 stages fits 2 pipeline ranks"):
        planned(num_stages=3)


def test_what_was_left_out_says_why(plan: Plan) -> None:
    """Every combination has either a time or a reason against it."""
    reasons = plan.search.not_pipelines
    assert not set(reasons) & set(plan.search.pipelines)
    slower = [name for name, time_s in plan.search.pipelines.items() if name != "no pipeline"]
    assert slower
    assert all(name in plan.report("full") or len(slower) > 13 for name in slower)


def test_a_bound_is_below_every_price() -> None:
    """Combinations that were excluded by their bound would indeed have been slower."""
    model, make_batch = build("gpt2")
    captured = capture(model, make_batch(0))
    setting = make_setting(captured, CLUSTER, Space(is_open=True))
    space, point = Combinations(setting), replace(setting, space=Space())  # searched both ways
    checked = 0
    for combination in space.all():
        cut = setting.prepared.cut(combination.num_microbatches)
        for found in search_meshes(point, cut, [combination.mesh]):
            step_s = time_parts(found).step_s
            assert space.bound_s(combination) <= step_s / combination.num_devices
            checked += 1
    assert checked > 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recompute": "yes"}, r"recompute is 'yes'"),
        ({"recompute": True}, r"write recompute='full'"),
        ({"recompute": 1.5}, r"from 0\.0"),
        ({"recompute": []}, r"recompute is \[\]"),
        ({"cuts": ["transformer.h.1"]}, r"the search cuts the stages itself"),
        ({"num_stages": "four"}, r"num_stages is 'four'"),
        ({"mesh": {"pipeline": 2}}, r"'pipeline' are reserved"),
        ({"constraints": 5}, r"constraints holds 5"),
        ({"num_microbatches": 0}, r"num_microbatches is 0; it must be a whole number"),
        ({"num_microbatches": -2}, r"num_microbatches is -2"),
        ({"num_microbatches": 2.0}, r"num_microbatches is 2\.0"),
        ({"num_microbatches": "2"}, r"num_microbatches is '2'"),
        ({"num_microbatches": True}, r"num_microbatches is True"),
        ({"mesh": {"x": True}}, r"sizes of at least 1"),
        ({"mesh": {"x": 0}}, r"sizes of at least 1"),
        ({"mesh": {3: 2}}, r"mesh is \{3: 2\}"),
        ({"mesh": {"x": 3, "y": None}}, r"the sizes must multiply"),
    ],
)
def test_what_cannot_be_fixed_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(AutoparError, match=message):
        planned(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "1f1b", "cuts": 4, "num_microbatches": 2}, r"cuts is 4; give a list"),
        ({"schedule": "", "num_stages": 2, "num_microbatches": 2}, r"no schedule is called ''"),
        ({"schedule": "1f1b", "num_stages": 2.0}, r"num_stages is 2\.0"),
        ({"schedule": "1F1B"}, r"did you mean '1f1b'"),
    ],
)
def test_a_named_schedule_with_nonsense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(AutoparError, match=message):
        named(**options)


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


class Encoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        layer = functools.partial(nn.TransformerEncoderLayer, width, 8, 4 * width, dropout=0.0)
        self.layers = nn.Sequential(*(layer(batch_first=True) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize("share", [1.0, 0.8])
def test_a_searched_schedule_is_no_slower_than_none(share: float) -> None:
    """Under slow links between two nodes, and under a budget that the fastest plan exceeds."""
    cluster = Cluster.preset("v100-pcie", nodes=2, devices_per_node=2)
    model, batch = Encoder(512), torch.randn(8, 64, 512)
    free = autopar.plan(model, cluster, batch)
    needed = sum(free.prediction.memory_bytes.values())
    budget = autopar.MemoryBudget(int(share * needed))
    alone = autopar.plan(model, cluster, batch, constraints=budget)
    searched = autopar.plan(model, cluster, batch, constraints=budget, schedule="auto")
    limit_s = alone.prediction.step_time_s * (1 + 1e-9)
    assert searched.prediction.step_time_s <= limit_s
    assert sum(searched.prediction.memory_bytes.values()) <= share * needed
