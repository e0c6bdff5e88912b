"""Runner-ups of modules: brute force over all of a module's choices finds the same."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Cluster, Plan, PlanError
from autopar.base.units import format_seconds
from autopar.frontend.capture import capture
from autopar.planning.planner import Planned, make_planned
from autopar.plans.explanation import choice_text, signed
from autopar.plans.runner_up import runner_ups
from autopar.pricing.tables import OpTable
from tests.test_reports import planned as gpt2

CLUSTER = Cluster.preset("v100", devices_per_node=2)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 256), nn.ReLU())
        self.second = nn.Linear(64, 256, bias=False)
        self.last = nn.Linear(256, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) * self.second(x)).square().mean()


def planned(**options: Any) -> Planned:
    model, x = Branches(), torch.randn(16, 64)
    return make_planned(capture(model, (x,)), CLUSTER, **options)


def best_otherwise(found: Planned, path: str) -> float:
    """By how much the prices of a strategy rise if the module's longest op splits otherwise: the
    least over all of the module's assignments."""
    priced, picks = found.best.priced, list(found.best.solution.assignment)
    graph = priced.pricing.graph
    problem = priced.problem(exposed=found.best.exposed, released=bool(found.best.released))

    def home(number: int) -> str:
        node = priced.nodes[number]
        if node.kind == "op":
            return graph.ops[node.index].module_path
        value = graph.values[node.index]
        if value.target:
            return value.target.rpartition(".")[0]
        made = priced.pricing.analysis.producers.get(value.index)
        return "" if made is None else graph.ops[made[0]].module_path

    inside = [n for n in range(len(picks)) if (home(n) + ".").startswith(path + ".")]
    times = {
        n: priced.tables[n].estimates[picks[n]].total_s
        for n in inside
        if isinstance(priced.tables[n], OpTable)
    }
    pivot = max(times, key=times.__getitem__)
    least = math.inf
    for choices in itertools.product(*(range(problem.num_choices(n)) for n in inside)):
        other = list(picks)
        for number, choice in zip(inside, choices):
            other[number] = choice
        if other[pivot] != picks[pivot]:
            least = min(least, problem.cost(other))
    return least - problem.cost(picks)


def test_brute_force_finds_the_same_runner_up() -> None:
    found = planned()
    ups = {path: each for each in found.plan.runner_ups for path in each.modules}
    assert {"second", "last", "first", "first.0"} <= ups.keys()
    for path, each in ups.items():
        assert each.difference_s == pytest.approx(best_otherwise(found, path), abs=1e-11)
        assert each.chosen != each.other


def test_a_runner_up_is_within_the_constraints() -> None:
    found = planned(constraints=[autopar.Forbid("tensor_parallel")])
    for each in found.plan.runner_ups:
        assert each.other.needs in ("", "R", "V")
    assert runner_ups(found.best, found.best.priced.costs) != found.plan.runner_ups


def test_an_explanation_names_chosen_runner_up_and_difference() -> None:
    plan = gpt2("free")
    text = " ".join(str(plan.explain("transformer.h.1.mlp")).split())
    ups = [e for e in plan.runner_ups if "transformer.h.1.mlp.c_fc" in e.modules]
    (each,) = ups
    assert "transformer.h.0.mlp.c_fc" in each.modules  # equal layers are one
    assert choice_text(plan, each.chosen) in text
    other = choice_text(plan, each.other, each.chosen)
    assert f"{other} {signed(each.difference_s, format_seconds)}" in text
    assert "slower" in text
    assert "transformer.h.0" not in text
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("chosen", {"splits": "a b c"}, r"runner_ups\[0\].chosen"),
        ("other", {"splits": "-", "stored": "R R R", "needs": "R"}, r"runner_ups\[0\].other"),
    ],
)
def test_runner_ups_are_checked(field: str, value: object, message: str) -> None:
    found = json.loads(planned().plan.to_json())
    found["runner_ups"][0][field] = value
    with pytest.raises(PlanError, match=message):
        Plan.from_json(json.dumps(found))


@pytest.mark.parametrize(
    "text", ["", "0.0 1 F a", "x 1 2", "-1.0 {} F", "9e9 {} F a", "nan {} F a"]
)
def test_the_curve_of_memory_is_checked(text: str) -> None:
    found = json.loads(planned().plan.to_json())
    curve = found["memory_curve"]
    numbers = " ".join("1" for _ in curve["categories"])
    curve["points"][1] = text.format(numbers)
    with pytest.raises(PlanError, match=r"memory_curve.points\[1\].*is no moment"):
        Plan.from_json(json.dumps(found))
