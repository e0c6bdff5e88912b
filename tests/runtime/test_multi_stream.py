"""Weight gradients on a second stream as users run them: planned, replayed, trained, counted.

On a CPU the actions of both streams run in their order of issue; the streams themselves are checked
in `test_streams`, and on a GPU in `test_gpu`.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.base.errors import PlanError
from autopar.cost_models import Cluster
from autopar.plans.document import Plan
from autopar.schedules import build as build_schedule
from tests.models.zoo import build
from tests.oracles import Trained, assert_same, reference_steps, to_double
from tests.runtime.test_streams import ALL_BEHIND, by_hand

pytestmark = pytest.mark.usefixtures("reused_workers")

TOLERANCE = {"gpt2": 2e-6, "resnet": 1e-8}  # GPT-2's loss is computed in float32
sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@functools.cache
def model_of(name: str) -> nn.Module:
    return build(name)[0].double()


@functools.cache
def batches(name: str) -> list[dict[str, Tensor]]:
    return [to_double(build(name)[1](seed)) for seed in range(3)]


def compiled_for(name: str, num_devices: int, **options: Any) -> Any:
    given = {"example_inputs": batches(name)[0], "optimizer": sgd, "profile_limit_s": 0}
    return autopar.compile(model_of(name), num_devices, **given, **options)


def check(name: str, compiled: Any) -> None:
    """Train it, and compare losses, gradients and weights with eager PyTorch."""
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for batch in batches(name):
        losses.append(compiled.train_step(**batch).item())
        gradients = gradients or compiled.gradients()
    expected = reference_steps(model_of(name), batches(name), sgd)
    weights = compiled.full_state_dict()
    got = Trained(
        losses=losses,
        gradients={n: gradients[n] for n in expected.gradients},
        weights={n: weights[n] for n in expected.weights},
        buffers={},
    )
    assert_same(got, expected, tolerance=TOLERANCE[name])


SPLIT = {"constraints": [autopar.Force("data_parallel")]}
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("resnet", 1, {"schedule": "multi_stream", "num_stages": 4}),
    ("gpt2", 1, {"schedule": "multi_stream", "num_stages": 3, "num_microbatches": 2}),
    ("gpt2", 1, {"schedule": by_hand(ALL_BEHIND, 3)}),
    ("gpt2", 1, {"schedule": "multi_stream", "num_stages": 3, "recompute": "full"}),
    ("resnet", 2, {"schedule": "multi_stream", "num_stages": 4, **SPLIT}),
    ("gpt2", 2, {"schedule": "multi_stream", "num_stages": 3, "max_grad_norm": 1e3, **SPLIT}),
    (
        "gpt2",
        2,
        {
            "schedule": "multi_stream",
            "num_stages": 3,
            "constraints": [autopar.Force("zero3")],
        },
    ),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "num_devices", "options"), CASES, ids=str)
def test_training_equals_eager(name: str, num_devices: int, options: dict[str, Any]) -> None:
    compiled = compiled_for(name, num_devices, **options)
    made = compiled.plan.schedule
    assert made.name in ("multi_stream", "by hand")
    assert any("@side" in line for line in made.actions)
    assert "one, as on every CPU" in str(compiled.plan)
    assert "one, as on every CPU" in " ".join(compiled.plan.report("full").split())
    check(name, compiled)


def test_a_saved_plan_is_replayed() -> None:
    first = compiled_for("gpt2", 1, schedule="multi_stream", num_stages=3)
    again = compiled_for("gpt2", 1, plan=Plan.from_json(first.plan.to_json()))
    assert again.plan.schedule == first.plan.schedule
    check("gpt2", again)


def test_a_plan_for_gpus_names_both_streams() -> None:
    """And predicts no gain: two streams that fill the device share it."""
    cluster = Cluster.preset("h100-sxm", nodes=1, devices_per_node=2)
    options = {"example_inputs": batches("gpt2")[0], "num_stages": 3}
    plan = autopar.plan(model_of("gpt2"), cluster, schedule="multi_stream", **options)
    plain = autopar.plan(
        model_of("gpt2"), cluster, **options,
        schedule=build_schedule("conventional", num_stages=3, num_microbatches=1),
    )  # fmt: skip
    assert "multi_stream" in str(plan)
    assert "weight gradients on a second one; no gain" in str(plan)
    assert plan.prediction.step_time_s == pytest.approx(plain.prediction.step_time_s, rel=0.02)
    ours, theirs = (sum(p.prediction.memory_bytes.values()) for p in (plan, plain))
    assert ours > theirs


def test_early_updates_are_refused() -> None:
    with pytest.raises(PlanError, match=r"makes gradients on a second compute.*update='at_end'"):
        compiled_for("gpt2", 1, schedule="multi_stream", num_stages=3, update="early")
