"""Gradients that are reduce-scattered in every micro-batch, on real processes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Forbid, Force, InputError, Update
from autopar.base.errors import PlanError
from tests.models.zoo import build
from tests.oracles import reference_steps, to_double
from tests.runtime.processes import counted_bytes
from tests.runtime.test_counted_memory import Deep, Tower, rows
from tests.runtime.test_early_clipping import LIMIT, eager

pytestmark = pytest.mark.usefixtures("reused_workers")

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
AdamW = functools.partial(torch.optim.AdamW, lr=1e-3)
QUICK = {"profile_limit_s": 0, "check_gradients": False}
ZERO3: dict[str, Any] = {"constraints": Force("zero3")}
HYBRID: dict[str, Any] = {
    "mesh": {"replicate": 2, "shard": 2},
    "constraints": [Force("data_parallel", "replicate"), Force("zero3", "shard")],
}


def compiled_for(model: nn.Module, batch: dict[str, Tensor], num: int, **options: Any) -> Any:
    return autopar.compile(
        model, num, example_inputs=batch,
        **{"optimizer": SGD, "reduce_every_microbatch": True, **QUICK, **options},
    )  # fmt: skip


FORMS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "ZeRO-2, tied weights": ("gpt2", 2, {**ZERO3, "reshard_after_forward": False}),
    "ZeRO-3, tied weights": ("gpt2", 2, {**ZERO3, "reshard_after_forward": True}),
    "hybrid": ("mlp", 4, HYBRID),
    "early": ("gpt2", 2, {**ZERO3, "update": "early"}),
    "early, clipped": (
        "bert", 2, {**ZERO3, "update": Update(clipping="second_pass"), "max_grad_norm": LIMIT}
    ),
    "clipped at the end": ("bert", 2, {**ZERO3, "max_grad_norm": LIMIT}),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", FORMS)
def test_five_steps_equal_eager(form: str) -> None:
    name, num, options = FORMS[form]
    model, make_batch = build(name)
    model = model.double()
    batches = [to_double(make_batch(step, 16)) for step in range(5)]
    if "max_grad_norm" in options:
        _, expected = eager(model, batches, SGD, by="second_pass")
    else:
        expected = reference_steps(model, batches, SGD).weights
    with compiled_for(model, batches[0], num, num_microbatches=4, **options) as compiled:
        assert any(p.scattered for p in compiled.program.parameters)
        for batch in batches:
            compiled.train_step(**batch)
        state = compiled.full_state_dict()
    for key, tensor in expected.items():
        torch.testing.assert_close(state[key], tensor, rtol=1e-8, atol=1e-9, msg=key)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("make_model", "make_batch", "options"),
    [
        (Deep, rows, {"reshard_after_forward": False}),
        (Deep, rows, {"reshard_after_forward": True}),
        (Tower, rows, {"precision": "bf16"}),
        (Deep, rows, {"update": "early"}),
    ],
)
def test_what_is_held_is_counted_and_less(
    make_model: Any, make_batch: Any, options: dict[str, Any]
) -> None:
    held = []
    for scattered in (False, True):
        torch.manual_seed(0)
        with compiled_for(
            make_model(), make_batch(), 2, optimizer=AdamW, num_microbatches=4,
            reduce_every_microbatch=scattered, **ZERO3, **options,
        ) as compiled:  # fmt: skip
            held.append(max(compiled.peak_tensor_bytes(**make_batch())))
        assert counted_bytes(compiled) == pytest.approx(held[-1], rel=0.01)
    assert held[1] < held[0]


class Blocks(nn.Module):
    """Layers whose weights are large and whose activations are small."""

    def __init__(self, num: int = 16, width: int = 4096) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return x.square().mean()


def planned(budget: str | int, **options: Any) -> autopar.Plan:
    with torch.device("meta"):
        model, example = Blocks(), torch.empty(256, 4096)
    return autopar.plan(
        model, autopar.Cluster.preset("h100-sxm", nodes=1, devices_per_node=8), example,
        constraints=[Force("zero3"), autopar.MemoryBudget(budget)], mesh={"dp": 8},
        num_microbatches=4, **options,
    )  # fmt: skip


def test_the_memory_decides_how_many_are_scattered() -> None:
    """All accumulate whole if they fit; else only the gradients of the last blocks do not."""
    fixed: dict[str, Any] = {"reshard_after_forward": True, "recompute": "none", "update": "at_end"}
    ample = planned("40GiB", **fixed)
    least = planned("40GiB", reduce_every_microbatch=True, **fixed)
    assert ample.scattered == ()
    assert len(least.scattered) == 32
    whole, shards = (sum(p.prediction.memory_bytes.values()) for p in (ample, least))
    tight = planned(whole - (whole - shards) // 3, **fixed)
    tighter = planned(whole - (whole - shards) * 2 // 3, **fixed)
    assert 0 < len(tight.scattered) < len(tighter.scattered) < 32
    assert "layers.15.weight" in tight.scattered
    assert "layers.0.weight" not in tighter.scattered
    plans = (ample, tight, tighter, least)
    times = [each.prediction.step_time_s for each in plans]
    assert times == sorted(times)
    assert "accumulate as shards" in " ".join(tight.report("full").split())
    assert autopar.Plan.from_json(tight.to_json()) == tight
    with pytest.raises(autopar.ConstraintError, match="no strategy found that fits"):
        planned(shards, reduce_every_microbatch=False, offload=False, **fixed)
    moved = planned(shards, reduce_every_microbatch=False, **fixed)
    assert moved.scattered == ()
    assert moved.offload is not None
    away = {transfer.tensor for plan in moved.offload.plans() for transfer in plan.transfers}
    assert any(name.endswith(":gradient") for name in away)
    assert moved.prediction.step_time_s > least.prediction.step_time_s


def test_what_fits_no_other_way_is_released_and_scattered() -> None:
    fixed: dict[str, Any] = {"recompute": "none", "update": "at_end"}
    both = planned("40GiB", reshard_after_forward=True, reduce_every_microbatch=True, **fixed)
    plan = planned(sum(both.prediction.memory_bytes.values()), **fixed)
    assert plan.released
    assert plan.scattered


def test_a_plan_says_what_is_scattered_and_is_replayed_with_it(tmp_path: Path) -> None:
    model, make_batch = build("mlp")
    batch = make_batch(0)
    cluster = autopar.Cluster.preset("cpu", nodes=1, devices_per_node=2)
    plan = autopar.plan(
        model, cluster, batch, num_microbatches=2, reduce_every_microbatch=True, **ZERO3
    )
    plan.to_json(tmp_path / "plan.json")
    replayed: dict[str, Any] = {"reduce_every_microbatch": None, "plan": tmp_path / "plan.json"}
    with compiled_for(model, batch, 2, **replayed) as compiled:
        assert compiled.plan.to_json() == plan.to_json()
        scattered = {p.name for p in compiled.program.parameters if p.scattered}
    assert scattered == set(plan.scattered) == {name for name, _ in model.named_parameters()}
    text = plan.to_json().replace(f'"scattered": [\n    "{plan.scattered[0]}"', '"scattered": ["x"')
    with pytest.raises(PlanError, match="'x' is scattered, but it is no parameter"):
        compiled_for(model, batch, 2, **{**replayed, "plan": autopar.Plan.from_json(text)})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_microbatches": 4, "constraints": Forbid("zero3")}, "no gradient becomes smaller"),
        ({"num_microbatches": 4, "num_stages": 2}, "with a pipeline or a schedule"),
        ({"schedule": "auto"}, "with a pipeline or a schedule"),
        ({}, "without micro-batches"),
        ({"reduce_every_microbatch": 1}, "it must be True, False or None"),
    ],
)
def test_what_cannot_be_scattered_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        compiled_for(Deep(64), {"x": torch.ones(8, 64)}, 2, **options)
