"""Plans as documents: equal inputs give equal bytes, round trips are exact, rejections clear."""

from __future__ import annotations

import functools
import gc
import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import autopar
from autopar.base.errors import ConstraintError, InputError, PlanError
from autopar.cost_models import (
    Cluster,
    Collective,
    CommunicationModel,
    Profiler,
    ProfileStore,
    RooflineModel,
)
from autopar.cost_models.communication import MeasuredCurve
from autopar.cost_models.efficiency import CPU, table_of
from autopar.cost_models.store import OpTime
from autopar.cost_models.work import Family
from autopar.frontend.capture import capture
from autopar.ir.mesh import Mesh
from autopar.planning.constraints import Forbid, Force, MemoryBudget, Pin
from autopar.planning.planner import make_planned
from autopar.planning.recompute_request import Recompute
from autopar.planning.space import Space
from autopar.plans.binding import strategy_of
from autopar.plans.document import Plan
from autopar.pricing.local_calls import calls_of
from autopar.pricing.problem import PricedGraph
from autopar.pricing.tables import Pricing
from autopar.sharding.strategy import Analysis
from tests.models.zoo import build

CLUSTER = Cluster.preset("cpu", nodes=1, devices_per_node=4)
DATA_PARALLEL = [Force("data_parallel")]


def captured_of(name: str = "gpt2", **changes: object):
    model, make_batch = build(name)
    return capture(model, make_batch(0))


@pytest.fixture(scope="module")
def captured():
    return captured_of()


@pytest.fixture(scope="module")
def plan(captured):
    return make_planned(
        captured, CLUSTER, Space(mesh={"x": 2, "y": 2}), constraints=DATA_PARALLEL
    ).plan


def test_same_inputs_give_the_same_bytes(plan):
    again = make_planned(
        captured_of(), CLUSTER, Space(mesh={"x": 2, "y": 2}), constraints=DATA_PARALLEL
    ).plan
    assert again.to_json() == plan.to_json()


def test_schema_version_comes_first(plan):
    assert next(iter(json.loads(plan.to_json()))) == "schema_version"


def test_json_is_read_back_exactly(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.to_json(path)
    assert Plan.from_json(path) == plan
    assert Plan.from_json(path.read_text()).to_json() == plan.to_json()


def test_a_loaded_plan_gives_the_same_strategy(captured):
    planned = make_planned(
        captured, CLUSTER, Space(mesh={"x": 2, "y": 2}),
        constraints=[Force("zero3", axis="x"), Force("tensor_parallel", axis="y")],
    )  # fmt: skip
    loaded = strategy_of(Plan.from_json(planned.plan.to_json()), captured, 4)
    graph = captured.graph
    for op in graph.ops:
        assert loaded.needs(op) == planned.strategy.needs(op)
        assert loaded.supplies(op) == planned.strategy.supplies(op)
    for value in graph.values:
        if not value.fixed:
            assert loaded.interface(value) == planned.strategy.interface(value), value.name


def edited(plan: Plan, **changes: object) -> str:
    return json.dumps({**json.loads(plan.to_json()), **changes})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: edited(p, schema_version=99), "schema_version 99"),
        (lambda p: edited(p, surprise=1), "unknown field `surprise`"),
        (lambda p: "not json", "cannot read"),
        (lambda p: "{", "not JSON"),
        (lambda p: edited(p, ops=[1]), r"ops"),
    ],
)
def test_unreadable_plans_are_refused(plan, make, message):
    with pytest.raises(PlanError, match=message):
        Plan.from_json(make(plan))


def test_plan_for_another_model_names_the_difference(plan):
    with pytest.raises(PlanError, match="inputs is"):
        strategy_of(plan, captured_of("mlp"))


def test_plan_for_another_batch_names_the_inputs(plan):
    model, make_batch = build("gpt2")
    with pytest.raises(PlanError, match="inputs is"):
        strategy_of(plan, capture(model, make_batch(0, batch=8)))


def test_plan_for_other_arithmetic_differs_by_fingerprint(plan):
    model, make_batch = build("gpt2")
    model.transformer.h[0].ln_1.eps = 0.5
    with pytest.raises(PlanError, match="fingerprint is"):
        strategy_of(plan, capture(model, make_batch(0)))


def test_plan_for_another_number_of_devices(plan, captured):
    with pytest.raises(PlanError, match=r"for 4 devices .* but there are 2"):
        strategy_of(plan, captured, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ops": {"nonsense": "d0 -"}}, "op 'nonsense'"),
        ({"parameters": {}}, "is missing from the"),
    ],
)
def test_plans_that_contradict_the_graph_are_refused(plan, captured, changes, message):
    with pytest.raises(PlanError, match=message):
        strategy_of(Plan.from_json(edited(plan, **changes)), captured)


def test_an_impossible_choice_names_the_op(plan, captured):
    ops = {**plan.ops, "addmm": "k k"}
    ops["addmm"] = "h -"
    with pytest.raises(PlanError, match="op 'addmm' cannot be split as 'h -'"):
        strategy_of(Plan.from_json(edited(plan, ops=ops)), captured)


class Returned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_loss_that_nothing_computes_is_refused():
    with pytest.raises(InputError, match="nothing to plan"):
        autopar.plan(Returned(), Cluster.preset("cpu"), (torch.tensor(1.0),))


def test_model_without_loss_names_the_fix():
    model, make_batch = build("mlp")
    captured = capture(model, (make_batch(0)["x"],))
    with pytest.raises(InputError, match="loss_fn"):
        make_planned(captured, CLUSTER)


def test_every_price_names_its_source(plan):
    prediction = plan.prediction
    assert set(prediction.sources) == {"analytical"}
    assert prediction.communication_source == "analytical"
    text = plan.report("full")
    assert "(analytical)" in text
    assert "counted; the peak is " in text
    assert prediction.num_noisy == 0
    assert "spread" not in text


@pytest.mark.parametrize(
    ("strategy", "source"), [("data_parallel", "interpolated"), ("zero3", "analytical")]
)
def test_communication_has_the_source_of_what_was_chosen(captured, strategy, source):
    """All-reduces were measured, gathers were not: only a plan that gathers is analytical."""
    sizes = tuple(4**n for n in range(3, 16))
    ranks, roofline = (0, 1, 2, 3), CommunicationModel(CLUSTER)
    times_s = tuple(roofline.estimate("all_reduce", size, ranks).time_s for size in sizes)
    curve = MeasuredCurve(sizes_bytes=sizes, times_s=times_s)
    measured = {(Collective.ALL_REDUCE, roofline.group_shape(ranks)): curve}
    plan = make_planned(
        captured, CLUSTER, Space(mesh={"x": 4}), constraints=[Force(strategy)],
        communication=CommunicationModel(CLUSTER, measured),
    ).plan  # fmt: skip
    assert plan.prediction.communication_source == source


def priced_now() -> int:
    """The number of priced graphs in the process."""
    gc.collect()
    return sum(type(each) in (Pricing, PricedGraph) for each in gc.get_objects())


@pytest.mark.parametrize("schedule", [None, "auto"])
def test_the_prices_of_a_search_do_not_outlive_it(schedule):
    model, make_batch = build("mlp")
    before = priced_now()
    plan = autopar.plan(model, CLUSTER, make_batch(0), schedule=schedule)
    assert priced_now() == before
    assert plan.prediction.step_time_s > 0


def test_prices_of_too_large_a_spread_are_counted(captured):
    device = CLUSTER.device
    store, roofline = ProfileStore(None, device), RooflineModel(device)
    for call in calls_of(Analysis(captured.graph), [Mesh(("x",), (4,))]):
        if call.name == "addmm":
            base = roofline.estimate(call)
            times = OpTime(
                forward_s=base.forward_s, input_grad_s=base.input_grad_s,
                weight_grad_s=base.weight_grad_s, spread=0.5, num_samples=3,
            )  # fmt: skip
            store.put(call, times)
    measured = Profiler(store, device, measuring=False)
    found = make_planned(
        captured, CLUSTER, Space(mesh={"x": 4}), constraints=DATA_PARALLEL, compute=measured
    ).plan
    count = sum(op.target_name == "aten.addmm.default" for op in captured.graph.ops)
    assert found.prediction.num_noisy == found.prediction.sources["measured"] == count > 0
    assert f"{count} noisy" in str(found)


@pytest.mark.parametrize(
    ("preset", "layer", "factor"),
    [
        ("cpu", nn.Linear(1024, 1024), CPU.of(Family.MATMUL).error_factor),
        ("cpu", nn.LayerNorm(1024), CPU.of(Family.NORMALIZATION).error_factor),
        (
            "a100-80",
            nn.Linear(1024, 1024),
            table_of(Cluster.preset("a100-80").device).of(Family.MATMUL).error_factor,
        ),
    ],
)
def test_a_plan_states_the_error_of_what_most_time_is_spent_on(preset, layer, factor):
    batch = (torch.zeros(512, 1024),) * 2
    captured = capture(nn.Sequential(layer, nn.Tanh()), batch, loss_fn=mse_loss)
    plan = make_planned(captured, Cluster.preset(preset, devices_per_node=2)).plan
    assert plan.prediction.analytical_factor == factor
    assert f"may be off by a factor of {factor:g}" in " ".join(plan.report("full").split())


def test_operators_that_no_model_prices_are_listed():
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.matrix_exp(self.linear(x)).mean()

    plan = make_planned(capture(Sorted(), (torch.randn(8, 8),)), CLUSTER).plan
    listed = {**plan.redundant_ops, **plan.prediction.unpriced}
    assert "aten.linalg_matrix_exp.default" in listed
    assert "aten.linalg_matrix_exp.default" in " ".join(plan.report("full").split())


def test_mesh_must_multiply_to_the_devices(captured):
    with pytest.raises(InputError, match="must multiply"):
        make_planned(captured, CLUSTER, Space(mesh={"x": 3}))


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Pin("nowhere.*", choice="m0"), "matches no op"),
        (Pin("addmm", choice="zzz"), r"is left for op 'addmm'.*; it can have choice='-', 'm',"),
        (Force("zero3", axis="q"), r"no axis 'q'; write axis='x', .* mesh=\{'q': None\}"),
        (Pin("addm_2", choice="n"), r"matches no op; .*graph\.ops\].*; did you mean 'addmm_2'\?"),
        (
            Pin("transformer.wt.weight", stored="R"),
            r"matches no parameter .*named_parameters\(\)\]; did you mean 'transformer\.wte\.w",
        ),
        (MemoryBudget("10KiB"), "no strategy"),
    ],
)
def test_impossible_constraints_are_named(captured, constraint, message):
    with pytest.raises(ConstraintError, match=message):
        make_planned(captured, CLUSTER, Space(mesh={"x": 4}), constraints=[constraint])


def test_contradictory_constraints_name_both(captured):
    pins = [Pin("transformer.wte.weight", stored="R"), Pin("transformer.wte.weight", stored="S0")]
    with pytest.raises(ConstraintError, match=r"stored='R'.* and .*stored='S0'"):
        make_planned(captured, CLUSTER, Space(mesh={"x": 4}), constraints=pins)


def test_pinned_choices_are_kept(captured):
    planned = make_planned(
        captured, CLUSTER, Space(mesh={"x": 4}), constraints=[Pin("addmm_2", choice="n")]
    )
    assert planned.plan.ops["addmm_2"] == "n"


def test_memory_budget_makes_the_plan_split_or_recompute(captured):
    free = make_planned(captured, CLUSTER, Space(mesh={"x": 4}))
    budget = int(sum(free.plan.prediction.memory_bytes.values()) * 0.6)
    fixed = Space(mesh={"x": 4}, num_microbatches=1)
    keeping = replace(fixed, recompute=Recompute.of("none"))
    tight, searched = (
        make_planned(captured, CLUSTER, space, constraints=[MemoryBudget(budget)])
        for space in (keeping, fixed)
    )
    assert sum(searched.plan.prediction.memory_bytes.values()) <= budget
    assert searched.plan.prediction.step_time_s <= tight.plan.prediction.step_time_s
    assert not tight.plan.recomputation
    assert sum(tight.plan.prediction.memory_bytes.values()) <= budget
    assert tight.plan.prediction.step_time_s >= free.plan.prediction.step_time_s
    assert len(tight.plan.ops) > len(free.plan.ops)


def test_a_plan_for_plain_sgd_fits_where_adamws_does_not(captured):
    model, make_batch = build("gpt2")
    options = {"mesh": {"x": 4}, "num_microbatches": 1, "constraints": [Force("data_parallel")]}
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    plain = autopar.plan(model, CLUSTER, make_batch(0), optimizer=sgd, **options)
    usual = autopar.plan(model, CLUSTER, make_batch(0), **options)
    assert (plain.prediction.num_optimizer_states, usual.prediction.num_optimizer_states) == (0, 2)
    assert "optimizer_state" not in plain.prediction.memory_bytes
    assert plain.prediction.update_s < usual.prediction.update_s
    parameters = plain.graph.parameter_bytes
    assert usual.search.estimated_bytes - plain.search.estimated_bytes == 2 * parameters
    saved = {
        name: usual.search.baselines[name].memory_bytes - known.memory_bytes
        for name, known in plain.search.baselines.items()
        if name in ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")
    }
    split = 2 * parameters / 4
    assert list(saved.values()) == pytest.approx([2 * parameters, split, split, split], rel=0.01)
    options["constraints"].append(MemoryBudget(sum(plain.prediction.memory_bytes.values())))
    again = autopar.plan(model, CLUSTER, make_batch(0), optimizer=sgd, **options)
    assert again.parameters == plain.parameters
    with pytest.raises(ConstraintError, match="no strategy found that fits"):
        autopar.plan(model, CLUSTER, make_batch(0), **options)


def test_pipelines_are_planned_with_the_optimizer_too():
    model, make_batch = build("gpt2")
    sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    for options in (
        {"schedule": "1f1b", "num_stages": 2, "num_microbatches": 2},
        {"schedule": "auto", "num_stages": 2, "num_microbatches": 2},
    ):
        plan = autopar.plan(model, CLUSTER, make_batch(0), optimizer=sgd, **options)
        memory = plan.prediction.memory_bytes
        assert plan.prediction.num_optimizer_states == 1
        assert memory["optimizer_state"] == memory["parameters"]


def test_an_older_plan_is_of_adamw_and_analytical_updates(plan):
    document = json.loads(plan.to_json())
    for name in ("num_optimizer_states", "update_source"):
        del document["prediction"][name]
    assert Plan.from_json(json.dumps(document)) == plan


def test_of_three_constraints_the_two_that_contradict_each_other_are_named(captured):
    weight = "transformer.wte.weight"
    constraints = [
        Pin(weight, stored="R"),
        Force("data_parallel"),
        Pin(weight, stored="S0"),
    ]
    with pytest.raises(ConstraintError) as caught:
        make_planned(captured, CLUSTER, Space(mesh={"x": 4}), constraints=constraints)
    assert f"{constraints[0]} and {constraints[2]}; remove one" in str(caught.value)
    assert "Force" not in str(caught.value)


def test_the_strategy_that_was_meant_is_named():
    with pytest.raises(ConstraintError, match=r"unknown strategy 'ZeRO3'; .*did you mean 'zero3'"):
        Force("ZeRO3")


@pytest.mark.parametrize("name", ["zero1", "ZeRO-2"])
def test_strategies_of_another_name_are_explained(name):
    with pytest.raises(ConstraintError, match=r"Force\('zero3'\) with reshard_after_forward=False"):
        Force(name)


def test_a_batch_whose_micro_batches_cannot_be_split_says_their_rows():
    model, given = nn.Linear(4, 4), (torch.randn(8, 4), torch.randn(8, 4))
    cluster = Cluster.preset("h100-sxm", nodes=1, devices_per_node=8)
    reason = "each of 4 micro-batches has 2 rows, .* a multiple of 8. Use a batch of 32 or fewer"
    with pytest.raises(ConstraintError, match=reason):
        autopar.plan(
            model, cluster, given, loss_fn=nn.functional.mse_loss,
            constraints=Force("data_parallel"), num_microbatches=4,
        )  # fmt: skip


def test_a_known_strategy_that_cannot_be_forbidden_is_refused():
    with pytest.raises(ConstraintError, match="known are: data_parallel, zero3, tensor_parallel"):
        Forbid("megatron")


def test_an_empty_batch_is_refused():
    cluster = autopar.Cluster.preset("cpu", nodes=1, devices_per_node=2)
    batch = torch.zeros(0, 8), torch.zeros(0, 4)
    with pytest.raises(InputError, match=r"shape \(0, 8\): a step on an empty batch"):
        autopar.plan(nn.Linear(8, 4), cluster, batch, loss_fn=mse_loss)


def test_an_input_that_nothing_reads_is_planned():
    """It is a node without a reader: its copies belong to no block's op."""

    class Unread(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 1)

        def forward(self, x, y):
            return self.layer(x).square().mean()

    batch = torch.randn(8, 6), torch.randn(8)
    plan = autopar.plan(Unread(), autopar.Cluster.preset("cpu", nodes=1, devices_per_node=2), batch)
    assert plan.prediction.step_time_s > 0
