"""Pipelines as users run them: plans are fixed, saved, replayed, run and checkpointed."""

from __future__ import annotations

import copy
import functools
import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.base.errors import InputError, OptimizerError, PlanError
from autopar.cost_models import Cluster
from autopar.plans.document import Plan
from autopar.schedules import (
    Action,
    Durations,
    Kind,
    Memory,
    Schedule,
    format_schedule,
    with_offloading,
)
from autopar.schedules import build as build_schedule
from autopar.schedules.generators.refine import Costs, refine
from tests.models.zoo import build
from tests.oracles import Trained, assert_same, reference_steps, to_double
from tests.runtime.conftest import Groups
from tests.runtime.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("reused_workers")

TOLERANCE = 2e-6  # GPT-2's loss is computed in float32
sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return build("gpt2")[0].double()


@functools.cache
def batches() -> list[dict[str, Tensor]]:
    return [to_double(build("gpt2")[1](seed)) for seed in range(3)]


def compiled_for(model: nn.Module, num_devices: int, **options: Any) -> Any:
    given = {"example_inputs": batches()[0], "optimizer": sgd, "profile_limit_s": 0, **options}
    return autopar.compile(model, num_devices, **given)


def trained(compiled: Any) -> Trained:
    losses, gradients = [], {}
    for batch in batches():
        losses.append(compiled.train_step(**batch).item())
        gradients = gradients or compiled.gradients()
    weights = compiled.full_state_dict()
    return Trained(losses=losses, gradients=gradients, weights=weights, buffers={})


FIXED: list[tuple[int, dict[str, Any]]] = [
    (2, {"num_stages": 2, "num_microbatches": 2}),
    (2, {"num_stages": 4, "schedule": "zb_v", "num_microbatches": 2}),
    (2, {"num_stages": 4, "schedule": "interleaved", "num_microbatches": 4}),
    (2, {"num_stages": 2, "schedule": "chimera", "num_microbatches": 2, "max_grad_norm": 1e3}),
    (2, {"cuts": ["transformer.h.1"], "num_microbatches": 2, "schedule": "gpipe"}),
    (2, {"cuts": ["transformer.h.1.mlp"], "num_microbatches": 2, "recompute": "full"}),
    (2, {"num_stages": 2, "num_microbatches": 4, "recompute": "full"}),
    (2, {"num_stages": 4, "schedule": "zb_v", "num_microbatches": 2, "recompute": 0.3}),
    (4, {"num_stages": 2, "num_microbatches": 2, "mesh": {"dp": 2}}),
    (
        4,
        {
            "num_stages": 2,
            "num_microbatches": 2,
            "mesh": {"dp": 2},
            "constraints": [autopar.Force("zero3")],
        },
    ),
    (4, {"num_stages": 4, "schedule": "interleaved", "num_microbatches": 2, "mesh": {"tp": 2}}),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("num_devices", "options"), FIXED, ids=str)
def test_what_the_user_fixes_trains_as_eager(
    model: nn.Module, num_devices: int, options: dict[str, Any]
) -> None:
    compiled = compiled_for(model, num_devices, **options)
    schedule = compiled.plan.schedule
    assert schedule.num_microbatches == options["num_microbatches"]
    assert schedule.name.split(",")[0] == options.get("schedule", "1f1b")
    assert bool(compiled.plan.recomputation) == ("recompute" in options)
    expected = reference_steps(model, batches(), sgd)
    got = trained(compiled)
    assert_same(
        Trained(
            losses=got.losses,
            gradients=got.gradients,
            weights={n: got.weights[n] for n in expected.weights},
            buffers={},
        ),
        expected,
        tolerance=TOLERANCE,
    )
    replayed = compiled_for(model, num_devices, plan=Plan.from_json(compiled.plan.to_json()))
    assert trained(replayed).losses == pytest.approx(expected.losses, abs=TOLERANCE)


def test_a_searched_order_trains_as_eager_and_is_replayed(model: nn.Module) -> None:
    costs = Costs(
        durations=Durations(F=(1.0, 2.0), I=(1.0, 2.0), W=(1.0, 2.0)), links=None,
        memory=Memory(activation_bytes=1.0), max_bytes=[3.0, 3.0],
    )  # fmt: skip
    start = build_schedule("1f1b", num_stages=2, num_microbatches=4)
    made = refine(start, costs, num_moves=2000).schedule
    assert made.devices != start.devices
    compiled = compiled_for(model, 2, schedule=made)
    expected = reference_steps(model, batches(), sgd)
    assert trained(compiled).losses == pytest.approx(expected.losses, abs=TOLERANCE)
    plan = Plan.from_json(compiled.plan.to_json())
    replayed = compiled_for(model, 2, plan=plan)
    assert replayed.plan.schedule == compiled.plan.schedule
    assert trained(replayed).losses == pytest.approx(expected.losses, abs=TOLERANCE)


def test_a_schedule_of_the_user(model: nn.Module) -> None:
    made = build_schedule("zb_h1", num_stages=2, num_microbatches=4)
    compiled = compiled_for(model, 2, schedule=made)
    assert compiled.plan.schedule.pipeline()[1] == made
    expected = reference_steps(model, batches(), sgd)
    assert trained(compiled).losses == pytest.approx(expected.losses, abs=TOLERANCE)


def test_message_buffers_are_released_with_their_program(model: nn.Module, groups: Groups) -> None:
    options = {"schedule": "gpipe", "num_stages": 2, "num_microbatches": 4}
    with compiled_for(model, 2, **options) as compiled:
        compiled.train_step(**batches()[0])
    assert max(groups(2).call("mapped_bytes")) > 0
    with compiled_for(model, 2, mesh={"x": 2}, constraints=autopar.Force("data_parallel")):
        assert groups(2).call("mapped_bytes") == [0, 0]


def test_times_of_actions(model: nn.Module) -> None:
    """Every action of the schedule and its messages, in sequence and after their dependencies."""
    options = {"schedule": "1f1b", "num_stages": 2, "num_microbatches": 4}
    with compiled_for(model, 2, **options) as compiled:
        assert compiled.action_times() == [[], []]
        compiled.train_step(**batches()[0])
        ranks = compiled.action_times()
    for device, times in enumerate(ranks):
        assert all(t.start_s <= t.end_s for t in times)
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(times))
        counts = Counter(t.action.kind.value for t in times)
        sent, received = ("SEND_F", "RECV_B") if device == 0 else ("SEND_B", "RECV_F")
        assert {k: counts[k] for k in ("F", "B", sent, received)} == {
            "F": 4, "B": 4, sent: 4, received: 4,
        }  # fmt: skip
    found = {t.action: t for times in ranks for t in times}
    for microbatch in range(4):
        sent_f = found[Action(0, Kind.SEND_F, microbatch)]
        assert found[Action(1, Kind.F, microbatch)].start_s >= sent_f.start_s
        sent_b = found[Action(1, Kind.SEND_B, microbatch)]
        assert found[Action(0, Kind.B, microbatch)].start_s >= sent_b.start_s


def test_evaluation_and_other_calls(model: nn.Module) -> None:
    compiled = compiled_for(model, 2, num_stages=2, num_microbatches=2)
    compiled.train_step(**batches()[0])
    reference = copy.deepcopy(model)
    compiled.copy_to(reference)
    reference.eval()
    batch = batches()[1]
    for call in (batch, {"input_ids": batch["input_ids"][:3]}):
        ours, theirs = compiled.eval()(**call), reference(**call)
        torch.testing.assert_close(ours.logits, theirs.logits.detach())
    torch.testing.assert_close(compiled.train()(**batch).loss, reference(**batch).loss.detach())


def test_checkpoints_between_plans(model: nn.Module, tmp_path: Path) -> None:
    """Data parallelism, another pipeline and the same pipeline load a pipeline's checkpoint."""
    compiled = compiled_for(model, 2, num_stages=2, num_microbatches=2)
    compiled.train_step(**batches()[0])
    compiled.save(tmp_path / "first")
    expected = [compiled.train_step(**batch).item() for batch in batches()]
    for options in (
        {"num_stages": 4, "schedule": "zb_v", "num_microbatches": 2},
        {"mesh": {"x": 2}},
        {"num_stages": 2, "schedule": "chimera", "num_microbatches": 2},
    ):
        other = compiled_for(model, 2, **options)
        other.load(tmp_path / "first")
        got = [other.train_step(**batch).item() for batch in batches()]
        assert got == pytest.approx(expected, abs=TOLERANCE)


def test_state_goes_out_and_comes_back(model: nn.Module) -> None:
    compiled = compiled_for(
        model, 2, num_stages=2, num_microbatches=2,
        optimizer=functools.partial(torch.optim.AdamW, lr=0.01),
    )  # fmt: skip
    compiled.train_step(**batches()[0])
    state, optimizer = compiled.state_dict(), compiled.optimizer_state_dict()
    assert set(state) == set(model.state_dict())
    assert set(optimizer["state"]) == {n for n, _ in model.named_parameters()}
    assert set(optimizer["param_groups"][0]["params"]) == set(optimizer["state"])
    expected = [compiled.train_step(**batch).item() for batch in batches()]
    compiled.load_state_dict(state)
    compiled.load_optimizer_state_dict(optimizer)
    assert [compiled.train_step(**batch).item() for batch in batches()] == expected


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
def test_groups_are_those_of_the_whole_model(model: nn.Module, options: dict[str, Any]) -> None:
    """On every device, though it holds a part of the parameters; kernels that refuse tensors
    without data too."""

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": parameters[:5], "lr": 0.0}, {"params": parameters[5:], "lr": 0.5}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, **options)

    compiled = compiled_for(model, 2, num_stages=2, num_microbatches=2, optimizer=make)
    expected = reference_steps(model, batches(), make)
    assert trained(compiled).losses == pytest.approx(expected.losses, abs=TOLERANCE)
    names = [name for name, _ in model.named_parameters()]
    groups = compiled.optimizer_state_dict()["param_groups"]
    assert [group["params"] for group in groups] == [names[:5], names[5:]]


class Normalised(torch.optim.SGD):
    """Its step depends on all gradients."""


def with_hook(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = sgd(parameters)
    optimizer.register_step_pre_hook(
        lambda *_: torch.nn.utils.clip_grad_norm_(parameters, 0.1) and None
    )
    return optimizer


@pytest.mark.parametrize("make", [functools.partial(Normalised, lr=0.1), with_hook])
def test_what_may_look_at_all_parameters_has_them_on_every_device(
    model: nn.Module, make: Any
) -> None:
    with pytest.raises(OptimizerError, match="a pipeline has parameters on different devices"):
        compiled_for(model, 2, num_stages=2, num_microbatches=2, optimizer=make)
    forced = [autopar.Force("data_parallel")]
    compiled = compiled_for(model, 2, mesh={"x": 2}, constraints=forced, optimizer=make)
    expected = reference_steps(model, batches(), make)
    assert trained(compiled).losses == pytest.approx(expected.losses, abs=TOLERANCE)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_masks_of_padding_are_cut_into_micro_batches(name: str) -> None:
    model, make_batch = build(name)
    model = model.double()

    def padded(seed: int) -> dict[str, Tensor]:
        batch = to_double(make_batch(seed))
        rows, length = batch["input_ids"].shape
        lengths = length - torch.arange(rows) % 4
        mask = (torch.arange(length) < lengths[:, None]).long()
        return {**batch, "attention_mask": mask}

    given = [padded(seed) for seed in range(3)]
    compiled = autopar.compile(
        model, 2, example_inputs=given[0], optimizer=sgd, profile_limit_s=0, num_stages=2,
        num_microbatches=4,
    )  # fmt: skip
    losses = [compiled.train_step(**batch).item() for batch in given]
    assert losses == pytest.approx(reference_steps(model, given, sgd).losses, abs=TOLERANCE)


class Labelled(nn.Module):
    """Its loss picks each row's label."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        chances = self.second(torch.relu(self.first(x))).log_softmax(-1)
        return -chances[torch.arange(len(y)), y].mean()


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"x": 2}, "constraints": [autopar.Force("data_parallel")]},
        {"cuts": ["second"], "schedule": "gpipe"},
    ],
    ids=str,
)
def test_labels_are_picked_in_each_part_of_the_batch(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, labels = Labelled().double(), torch.arange(16) % 5
    given = [{"x": torch.randn(16, 8).double(), "y": labels - 5} for _ in range(3)]
    compiled = autopar.compile(
        model, 2, example_inputs=given[0], optimizer=sgd, profile_limit_s=0, num_microbatches=4,
        **options,
    )  # fmt: skip
    losses = [compiled.train_step(**batch).item() for batch in given]
    assert losses == pytest.approx(reference_steps(model, given, sgd).losses, rel=1e-9)


def test_norms_count_each_parameter_once(model: nn.Module) -> None:
    for options in ({}, {"num_stages": 2, "schedule": "chimera", "num_microbatches": 2}):
        compiled = compiled_for(model, 2, max_grad_norm=0.5, **options)
        compiled.train_step(**batches()[0])
        plain = copy.deepcopy(model)
        plain(**batches()[0]).loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.testing.assert_close(compiled.grad_norm, norm, rtol=1e-6, atol=1e-6)


def test_processes_of_torchrun(tmp_path: Path) -> None:
    run_ranks(2, "tests.runtime.torchrun_pipeline", str(tmp_path))
    losses = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert losses[0] == losses[1]


# --- plans -----------------------------------------------------------------------------------
CLUSTER = Cluster.preset("cpu", nodes=1, devices_per_node=4)


def planned(model: nn.Module, **options: Any) -> Plan:
    return autopar.plan(model, CLUSTER, batches()[0], **options)


def test_a_plan_says_what_its_pipeline_is(model: nn.Module) -> None:
    first = ["transformer.h.0", "transformer.h.1", "lm_head"]
    plan = planned(model, cuts=first, num_microbatches=4)
    assert Plan.from_json(plan.to_json()) == plan
    text = plan.report("full")
    assert "1f1b, 4 micro-batches, 4 pipeline ranks" in text
    assert f"stages begin at  {', '.join(['transformer', *first])}" in text
    assert "bubbles" in text
    assert "1F1B (DAPPLE)" in text  # beside other systems' schedules
    assert 0.3 < plan.prediction.bubble_share < 0.9  # stages of a small model are uneven
    assert plan.schedule.actions[-1].startswith("device 3: 3F0")
    assert "pipeline" not in planned(model).report("full")


def test_memory_follows_the_schedule(model: nn.Module) -> None:
    """GPipe holds the activations of all micro-batches, 1F1B of as many as there are stages."""
    options: dict[str, Any] = {"cuts": ["transformer.h.1"], "num_microbatches": 4}
    held = [
        planned(model, schedule=schedule, **options).prediction.memory_bytes["activations"]
        for schedule in ("gpipe", "1f1b")
    ]
    assert held[1] < 0.7 * held[0]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"schedule": "conventional"}, r"schedule='conventional' needs num_stages=..., or cuts="),
    ({"num_stages": 2, "schedule": "fancy"}, r"no schedule is called 'fancy'"),
    ({"num_stages": 2, "schedule": "ZB-H1"}, r"did you mean 'zb_h1'"),
    ({"num_stages": 3}, r"takes 3 pipeline ranks, which does not divide 4 devices"),
    ({"num_stages": 0}, r"num_stages is 0; stages are a whole number"),
    ({"num_stages": True}, r"num_stages is True"),
    ({"num_stages": 2, "cuts": ["a", "b"]}, r"given twice and differs: num_stages 2, cuts"),
    ({"cuts": "transformer.h.1"}, r"give a list of block names: cuts=\['transformer.h.1'\]"),
    ({"cuts": ["nowhere"]}, r"cuts names 'nowhere', which is no block"),
    ({"num_stages": 2, "mesh": {"x": 4}}, r"has 4 devices, each of 2 pipeline ranks 2"),
    ({"num_stages": 2, "mesh": {"pipeline": 2}}, r"'pipeline' are reserved"),
    (
        {"num_stages": 8, "schedule": "zb_v", "num_microbatches": 2},
        r"can begin at 4 places of this model",
    ),
    ({"num_stages": 4, "schedule": "dualpipe", "num_microbatches": 2}, r"use num_microbatches=8"),
    (
        {
            "schedule": build_schedule("1f1b", num_stages=2, num_microbatches=2),
            "num_microbatches": 4,
        },
        r"num_microbatches=4, but the schedule '1f1b' is for 2",
    ),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=lambda value: str(value)[:60])
def test_what_does_not_fit_is_named(
    model: nn.Module, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        planned(model, **options)


def offloading() -> Schedule:
    made = build_schedule("1f1b", num_stages=2, num_microbatches=2)
    return with_offloading(made, (0,))


def waiting() -> Schedule:
    """A dependency on the same stream has ended anyway; one on another stream is not checked."""
    made = build_schedule("conventional", num_stages=2, num_microbatches=1, reduces=True)
    *steps, last = made.devices[0]
    first = next(item.action for item in steps if item.action.kind is Kind.G)
    return replace(made, devices=((*steps, last._replace(after=first)),))


NOT_RUN: list[tuple[dict[str, Any], str]] = [
    (
        {
            "schedule": build_schedule("multi_stream", num_stages=2, num_microbatches=1,
                                       placement={1: 2}),
        },
        r"1W0@side~1 computes gradients of the last training step",
    ),
    (
        {"schedule": build_schedule("dualpipe", num_stages=2, num_microbatches=4, overlap=True)},
        r"runs on a second compute stream, where only weight gradients \(W\) run",
    ),
    ({"schedule": offloading()}, r"0O0 keeps values on the host"),
    ({"schedule": waiting()}, r"waits for 1G of another stream"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), NOT_RUN, ids=lambda value: str(value)[:40])
def test_schedules_that_are_only_simulated_are_refused(
    model: nn.Module, options: dict[str, Any], message: str
) -> None:
    """By their first unsupported step, which would otherwise run serially without notice."""
    name = r"'[\w, ]+'"
    fix = "simulated but not run.*schedule='1f1b'"
    text = rf"schedule={name}: schedule {name}: .*{message}.* {fix}"
    with pytest.raises(InputError, match=text):
        planned(model, **options)
    with pytest.raises(InputError, match=text):
        compiled_for(model, 2, **options)


def test_a_replayed_plan_with_such_a_schedule_is_refused(model: nn.Module) -> None:
    plan = planned(model, schedule="conventional", num_stages=4)
    made = build_schedule("multi_stream", num_stages=4, num_microbatches=1, placement={3: 4})
    document = json.loads(plan.to_json())
    document["schedule"].update(name=made.name, actions=format_schedule(made).splitlines())
    with pytest.raises(PlanError, match=r"3W0@side~1 computes gradients of the last"):
        compiled_for(model, 4, plan=Plan.from_json(json.dumps(document)))


def test_what_a_plan_has_is_not_given_beside_it(model: nn.Module) -> None:
    plan = planned(model, num_stages=2, num_microbatches=2)
    given = r"num_stages=2, schedule='gpipe' given with plan=.*remove"
    with pytest.raises(InputError, match=given):
        compiled_for(model, 4, plan=plan, num_stages=2, schedule="gpipe")
    for beside in ({"recompute": "none"}, {"num_microbatches": 1}):
        with pytest.raises(InputError, match=r"given with plan=.*a plan is replayed unchanged"):
            compiled_for(model, 4, plan=plan, **beside)


def test_a_plan_for_other_devices_is_refused(model: nn.Module) -> None:
    plan = planned(model, num_stages=2, num_microbatches=2)
    with pytest.raises(PlanError, match=r"for 4 devices \(pipeline=2 x x=2\), but there are 2"):
        compiled_for(model, 2, plan=plan)
    document = json.loads(plan.to_json())
    document["schedule"]["num_microbatches"] = 4
    with pytest.raises(PlanError, match="2 micro-batches; the plan says 2, 2 and 4"):
        compiled_for(model, 4, plan=Plan.from_json(json.dumps(document)))
    document = json.loads(plan.to_json())
    document["schedule"]["first_blocks"][1] = "elsewhere"
    with pytest.raises(PlanError, match="no block is called 'elsewhere'"):
        compiled_for(model, 4, plan=Plan.from_json(json.dumps(document)))


EDITED: list[tuple[list[str], int]] = [
    ([], 0),
    (["transformer"], 1),
    (["transformer", "transformer.h.0", "transformer.h.1"], 3),
]


@pytest.mark.parametrize(("first_blocks", "num"), EDITED, ids=str)
def test_a_plan_with_too_few_or_many_first_blocks_is_refused(
    model: nn.Module, first_blocks: list[str], num: int
) -> None:
    document = json.loads(planned(model, num_stages=2, num_microbatches=2).to_json())
    document["schedule"]["first_blocks"] = first_blocks
    with pytest.raises(PlanError, match=f"names {num} blocks, but its schedule has 2 stages"):
        compiled_for(model, 4, plan=Plan.from_json(json.dumps(document)))


# --- models with something special --------------------------------------------------------------
class Tower(nn.Module):
    """Layers of one kind with dropout, and a skip connection from the first to the last one."""

    def __init__(self, share: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(8, 16), nn.GELU(), nn.Dropout(share), nn.Linear(16, 8), nn.LayerNorm(8)
            )
            for _ in range(4)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = x = self.layers[0](x)
        for layer in self.layers[1:-1]:
            x = x + layer(x)
        return torch.nn.functional.mse_loss(self.layers[-1](x * first), y)


def tower_batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (8, 8)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name in ("x", "y")
    }


def tower_losses(model: nn.Module, num_devices: int = 2, **options: Any) -> tuple[list[float], Any]:
    compiled = autopar.compile(
        model, num_devices, example_inputs=tower_batch(0), profile_limit_s=0, seed=3,
        **{"optimizer": sgd, **options},
    )  # fmt: skip
    return [compiled.train_step(**tower_batch(seed)).item() for seed in range(3)], compiled


PIPELINES: list[dict[str, Any]] = [
    {"num_stages": 2, "num_microbatches": 4},
    {"num_stages": 4, "num_microbatches": 4, "schedule": "v_min"},
    {"num_stages": 2, "num_microbatches": 4, "schedule": "chimera"},
    {
        "schedule": build_schedule(
            "chimera", num_stages=2, num_microbatches=4, concatenation="forward_doubling"
        )
    },
]


@pytest.mark.parametrize("options", PIPELINES, ids=lambda o: str(o)[:70])
def test_dropout_is_the_same_under_every_schedule(options: dict[str, Any]) -> None:
    """Also where a stage is recomputed in the backward pass."""
    torch.manual_seed(0)
    model = Tower(0.5).double()
    alone, _ = tower_losses(model, num_microbatches=4, mesh={"x": 2}, constraints=WHOLE)
    got, _ = tower_losses(model, **options)
    assert got == pytest.approx(alone, rel=1e-9)


WHOLE = [autopar.Pin("*", choice="-")]


def test_a_stage_with_nothing_to_train(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tower().double()
    for layer in model.layers[:2]:
        layer.requires_grad_(False)
    cuts = {"cuts": ["layers.2"], "num_microbatches": 2}
    optimizer = functools.partial(torch.optim.AdamW, lr=0.01)
    expected = reference_steps(
        model, [tower_batch(seed) for seed in range(3)],
        lambda parameters: optimizer([p for p in parameters if p.requires_grad]),
    )  # fmt: skip
    got, compiled = tower_losses(model, optimizer=optimizer, max_grad_norm=1e6, **cuts)
    assert got == pytest.approx(expected.losses, rel=1e-9)
    names = {n for n, p in model.named_parameters() if p.requires_grad}
    assert set(compiled.optimizer_state_dict()["state"]) == names
    compiled.save(tmp_path / "frozen")
    further = compiled.train_step(**tower_batch(5)).item()
    compiled.load(tmp_path / "frozen")
    assert compiled.train_step(**tower_batch(5)).item() == further


def test_state_that_does_not_fit_one_device_is_refused_by_all(model: nn.Module) -> None:
    """The parameter is on the second device alone; the first one loads nothing either."""
    compiled = compiled_for(
        model, 2, num_stages=2, num_microbatches=2,
        optimizer=functools.partial(torch.optim.AdamW, lr=0.01),
    )  # fmt: skip
    compiled.train_step(**batches()[0])
    state = compiled.optimizer_state_dict()
    entries = dict(state["state"])
    entries["transformer.ln_f.weight"] = {"exp_avg": torch.zeros(3)}
    with pytest.raises(InputError, match=r"'transformer.ln_f.weight' has \['exp_avg'\]"):
        compiled.load_optimizer_state_dict({**state, "state": entries})
    after = compiled.optimizer_state_dict()["state"]
    for name, kept in state["state"].items():
        torch.testing.assert_close(after[name]["exp_avg"], kept["exp_avg"], rtol=0, atol=0)


class Plain(nn.Module):
    """Layers as attributes: tied weights, a layer called twice, a skip connection over them all."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("l1", "l2", "l3", "l4"):
            up, down = nn.Linear(8, 16), nn.Linear(16, 8)
            self.add_module(name, nn.Sequential(nn.LayerNorm(8), up, nn.GELU(), down))
        self.l4[1].weight = self.l1[1].weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = x = x + self.l1(x)
        x = x + self.l2(x)
        x = x + self.l2(x)
        x = x + self.l3(x)
        x = x + self.l4(x)
        return torch.nn.functional.mse_loss(x * first, y)


class Short(nn.Module):
    """Elements of a list, of fewer ops than make a block by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(8)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return torch.nn.functional.mse_loss(x, y)


OF_FEW_OPS: list[tuple[type[nn.Module], dict[str, Any]]] = [
    (Plain, {"num_stages": 2, "schedule": "1f1b"}),
    (Plain, {"num_stages": 2, "schedule": "zb_h1"}),
    (Plain, {"num_stages": 4, "schedule": "zb_v"}),
    (Plain, {"cuts": ["l3"]}),
    (Plain, {"cuts": ["l2#2"]}),
    (Short, {"num_stages": 2, "schedule": "1f1b"}),
    (Short, {"num_stages": 2, "schedule": "zb_h1"}),
    (Short, {"cuts": ["layers.5"]}),
]


@pytest.mark.parametrize(("make", "options"), OF_FEW_OPS, ids=str)
def test_layers_that_are_no_large_elements_train_as_eager(
    make: type[nn.Module], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = make().double()
    expected = reference_steps(model, [tower_batch(seed) for seed in range(3)], sgd)
    got, compiled = tower_losses(model, num_microbatches=4, **options)
    assert got == pytest.approx(expected.losses, rel=1e-9)
    assert compiled.plan.schedule.first_blocks[1:] == tuple(
        options.get("cuts", compiled.plan.schedule.first_blocks[1:])
    )
    weights = compiled.full_state_dict()
    for name, weight in expected.weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-9, atol=1e-12)
