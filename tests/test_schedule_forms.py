"""Plans take the best form of the best schedule: drawn models, clusters, micro-batches, limits.

8 of them, 300 in ``make exhaustive``.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import autopar
from autopar.base.errors import AutoparError
from autopar.cost_models import Cluster
from autopar.planning import refinement
from autopar.schedules import Kind
from autopar.schedules.generators.forms import forms
from tests.effort import EXHAUSTIVE

NUM_CASES = 300 if EXHAUSTIVE else 8
NUM_BY_HAND = 2


class Chain(torch.nn.Module):
    """Blocks of drawn widths, so that stages are uneven."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Linear(256, width), torch.nn.GELU(), torch.nn.Linear(width, 256),
                torch.nn.GELU(), torch.nn.Linear(256, 256),
            )
            for width in widths
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def drawn(seed: int) -> tuple[random.Random, Chain, Cluster, int, dict[str, Any]]:
    rng = random.Random(seed)
    num_devices = rng.choice((2, 4))
    model = Chain([rng.choice((256, 1024, 4096)) for _ in range(2 * num_devices)])
    name = rng.choice(("v100", "a100-80", "cpu"))
    cluster = Cluster.preset(name, nodes=1, devices_per_node=num_devices)
    num = rng.choice((num_devices, 2 * num_devices, 4 * num_devices))
    batch = torch.randn(16 * 64, 256)
    options = {"example_inputs": batch, "mesh": {"x": 1}, "recompute": "none"}
    return rng, model, cluster, num, options


@pytest.mark.parametrize("seed", range(NUM_CASES))
def test_no_schedule_by_hand_is_faster(seed: int) -> None:
    """One device per pipeline rank; a limit on the memory in half of the cases."""
    rng, model, cluster, num, options = drawn(seed)
    plain = autopar.plan(
        model, cluster, schedule="1f1b", num_stages=cluster.num_devices, num_microbatches=num,
        **options,
    )  # fmt: skip
    if rng.random() < 0.5:
        needed = sum(plain.prediction.memory_bytes.values())
        options["constraints"] = [autopar.MemoryBudget(int(needed * rng.uniform(1.0, 2.0)))]
    best = autopar.plan(model, cluster, schedule="auto", num_microbatches=num, **options)
    every = [
        form
        for per_device in (1, 2)
        for form in forms(cluster.num_devices, per_device * cluster.num_devices, num)
    ]
    for form in rng.sample(every, NUM_BY_HAND):
        try:
            by_hand = autopar.plan(model, cluster, schedule=form.build(), **options)
        except AutoparError:
            continue  # no such schedule, or it does not fit
        assert best.prediction.step_time_s <= by_hand.prediction.step_time_s * (1 + 1e-9), form.text


def chain_plan(**options: Any) -> autopar.Plan:
    return planned_on("a100-80", 16 * 64, **options)


def planned_on(preset: str, num_rows: int, **options: Any) -> autopar.Plan:
    cluster = Cluster.preset(preset, nodes=1, devices_per_node=4)
    batch = torch.randn(num_rows, 256)
    return autopar.plan(Chain([1024] * 4), cluster, batch, mesh={"x": 1}, **options)


def test_a_named_schedule_is_searched_in_all_its_forms() -> None:
    found = chain_plan(schedule="chimera", num_stages=4, num_microbatches=8)
    considered = {*found.search.pipelines, *found.search.not_pipelines}
    for form in ("chimera", "chimera, merged", "chimera, 2 pairs, merged"):
        assert f"{form}, 4 stages on 4, 8 micro-batches" in considered
    best = min(found.search.pipelines, key=found.search.pipelines.__getitem__)
    assert best.startswith(f"{found.schedule.name}, 4 stages")
    assert found.schedule.name in str(found)


def test_the_fastest_pipelines_are_reordered_and_what_is_proved_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(refinement, "EXACT_S", 60.0)  # enough on a busy machine
    found = planned_on("v100", 4 * 128, schedule="auto", num_microbatches=4, time_limit_s=600)
    assert found.schedule.name.startswith("searched")
    assert found.schedule.gap == 0
    assert "proved optimal for these stages in this memory" in " ".join(
        found.report("full").split()
    )
    times = found.search.pipelines
    best = min(time_s for name, time_s in times.items() if not name.startswith("searched"))
    assert found.prediction.step_time_s < best
    again = autopar.Plan.from_json(found.to_json())
    assert again == found
    assert again.schedule.pipeline() == found.schedule.pipeline()


def test_actions_of_no_length_are_in_an_order_that_runs() -> None:
    """CP-SAT starts them together with those that they wait for."""
    found = planned_on("v100", 5 * 128, schedule="auto", num_microbatches=5)
    assert found.schedule.num_microbatches == 5


def test_a_pipeline_is_compared_with_the_schedules_of_other_systems() -> None:
    """GPipe and 1F1B as they are planned by name; the others may not be planned, or never run."""
    found = chain_plan(schedule="zb_h1", num_stages=4, num_microbatches=8)
    known = found.search.baselines
    by_hand = {"GPipe": "gpipe", "1F1B (DAPPLE)": "1f1b", "GEMS": "gems"}
    asynchronous = {"PipeDream": "3 updates", "PipeDream-2BW": "1 update"}
    assert {*known, *found.search.missing} == {*by_hand, *asynchronous, "interleaved 1F1B"}
    for name, schedule in by_hand.items():
        planned = chain_plan(schedule=schedule, num_stages=4, num_microbatches=8)
        assert known[name].time_s == pytest.approx(planned.prediction.step_time_s)
        assert not known[name].note
    for name, age in asynchronous.items():
        assert known[name].note == f"not eager's result: on weights up to {age} old"
        assert known[name].time_s < known["1F1B (DAPPLE)"].time_s
        assert known[name].memory_bytes > known["1F1B (DAPPLE)"].memory_bytes
        assert f"weights up to {age} old" in " ".join(found.report("full").split())
    assert "PipeDream-2BW" in str(found)


def test_peers_that_these_numbers_exclude_are_named_with_the_reason() -> None:
    found = chain_plan(schedule="1f1b", num_stages=4, num_microbatches=2)
    assert "needs as many micro-batches as stages" in found.search.missing["PipeDream-2BW"]


def test_a_named_schedule_keeps_its_order() -> None:
    found = chain_plan(schedule="zb_h1", num_stages=4)
    assert found.schedule.name == "zb_h1"
    assert found.schedule.gap is None
    assert not any(name.startswith("searched") for name in found.search.pipelines)


@pytest.mark.parametrize("name", ["chimera", "gems", "dualpipe"])
def test_gradients_of_replicas_are_reduced_where_the_prices_say(name: str) -> None:
    """The plan has the reductions, one for each copy of a stage, and is no slower than by hand."""
    found = chain_plan(schedule=name, num_stages=4, num_microbatches=8)
    schedule = found.schedule.pipeline()[1]  # type: ignore[index]
    reductions = [
        str(item) for steps in schedule.devices for item in steps if item.action.kind is Kind.G
    ]
    assert len(reductions) == 4 * schedule.shape.num_replicas == len(set(reductions))
    bare = replace(
        schedule,
        shape=replace(schedule.shape, reduces=False),
        devices=tuple(
            tuple(item for item in steps if item.action.kind is not Kind.G)
            for steps in schedule.devices
        ),
    )
    by_hand = chain_plan(schedule=bare)
    assert by_hand.schedule.pipeline()[1] == bare  # type: ignore[index]
    assert found.prediction.step_time_s <= by_hand.prediction.step_time_s * (1 + 1e-9)


def test_a_schedule_that_is_given_is_fixed() -> None:
    made = autopar.schedules.build(
        "chimera", num_stages=4, num_microbatches=8, num_pipelines=4, concatenation="merged"
    )
    found = chain_plan(schedule=made)
    assert found.schedule.name == "chimera, 2 pairs, merged"
    assert found.schedule.pipeline()[1] == made  # type: ignore[index]
