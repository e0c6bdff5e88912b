"""Modules and parameters with several names are explained by each, as the same thing."""

from __future__ import annotations

import functools
import itertools
import json
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Cluster, Pin, Plan
from autopar.base.errors import InputError, PlanError
from autopar.frontend.names import shared_names
from autopar.ir.shared_names import SharedNames

CLUSTER = Cluster.preset("a100-80", devices_per_node=2)
WIDTH = 16


class Unit(nn.Module):
    """A norm and a perceptron around a residual."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), activation, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    """``groups.0.0`` is ``groups.1.1``, and so is ``unused``; one activation is in all units.
    ``head.weight`` is ``tail.weight``."""

    def __init__(self) -> None:
        super().__init__()
        activation = nn.GELU()
        shared = Unit(activation)
        self.groups = nn.ModuleList(
            [nn.ModuleList([shared, Unit(activation)]), nn.ModuleList([Unit(activation), shared])]
        )
        self.unused = shared
        self.head, self.tail = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tail.weight = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for unit in itertools.chain(*self.groups):
            x = unit(x)
        return self.tail(self.head(x)).square().mean()


@functools.cache
def planned() -> Plan:
    return autopar.plan(Model(), CLUSTER, (torch.zeros(4, WIDTH),))


def names_of_all(model: nn.Module) -> dict[str, set[str]]:
    """All names of each module and parameter, by each of its names."""
    found: dict[int, set[str]] = {}
    parts = [
        *model.named_modules(remove_duplicate=False),
        *model.named_parameters(remove_duplicate=False),
    ]
    for name, part in parts:
        found.setdefault(id(part), set()).add(name)
    return {name: found[id(part)] for name, part in parts if name}


def ops_of(plan: Plan, name: str) -> list[str]:
    sections = [s for s in plan.explain(name).sections if s.title.startswith("ops, ")]
    return [row[0] for section in sections for row in section.rows]


def parameters_of(plan: Plan, name: str) -> list[str]:
    sections = [s for s in plan.explain(name).sections if s.title.startswith("parameters, ")]
    return [row[0] for section in sections for row in section.rows]


def test_every_name_of_a_module_and_parameter_is_explained_alike() -> None:
    model, plan = Model(), planned()
    everything = names_of_all(model)
    for name, names in everything.items():
        explained = plan.explain(name)
        rows = dict(row for row in explained.sections[-1].rows)
        assert (len(names) > 1) == ("shared" in rows), name
        assert all(set(ops_of(plan, name)) == set(ops_of(plan, other)) for other in names)
        assert len({tuple(parameters_of(plan, other)) for other in names}) == 1
        assert set(SharedNames(plan.graph.shared).others(name)) == names - {name}
    shared = "one module, also named groups.0.0, groups.1.1"
    assert shared in " ".join(str(plan.explain("unused")).split())
    assert "one parameter, also named head.weight" in " ".join(
        str(plan.explain("tail.weight")).split()
    )


def test_a_shared_module_has_the_ops_of_all_its_uses_and_its_neighbours_do_not() -> None:
    plan = planned()
    num_ops = {name: len(ops_of(plan, name)) for name in ("groups.0", "groups.1", "groups.1.0")}
    assert len(ops_of(plan, "unused")) == 2 * num_ops["groups.1.0"]
    assert num_ops["groups.0"] == num_ops["groups.1"] == 2 * num_ops["groups.1.0"]
    assert set(ops_of(plan, "groups.1.0")).isdisjoint(ops_of(plan, "unused"))
    own = {name for name, _ in Model().groups[1].named_parameters()}
    assert len(parameters_of(plan, "groups.1")) == len(own)
    assert parameters_of(plan, "tail") == ["head.weight", "tail.bias"]
    text = str(plan.explain("groups.1.1"))
    assert "all of it" not in text  # each use has another choice of its own


def test_a_plan_of_a_file_knows_the_names_too() -> None:
    plan = Plan.from_json(planned().to_json())
    assert str(plan.explain("unused.mlp.2")) == str(planned().explain("unused.mlp.2"))
    with pytest.raises(InputError, match="did you mean 'unused'"):
        plan.explain("unsed")
    document = json.loads(plan.to_json())
    document["graph"]["shared"] = [[]]
    with pytest.raises(PlanError, match=r"two names or more.*\$\.graph\.shared\[0\]|\$\.graph\.s"):
        Plan.from_json(json.dumps(document))


def test_names_that_follow_from_others_are_left_out() -> None:
    assert shared_names(Model()) == (
        ("groups.0.0", "groups.1.1", "unused"),
        ("groups.0.0.mlp.1", "groups.0.1.mlp.1", "groups.1.0.mlp.1"),
        ("head.weight", "tail.weight"),
    )
    assert shared_names(nn.Linear(2, 2)) == ()


def test_pins_and_recomputation_take_any_name() -> None:
    def plan_of(**options: Any) -> Plan:
        return autopar.plan(Model(), CLUSTER, (torch.zeros(4, WIDTH),), mesh={"x": 2}, **options)

    for first, *others in shared_names(Model()):
        is_module = not first.endswith("weight")
        pin = {"choice": "d0" if ".mlp" in first else "m0"} if is_module else {"stored": "S1"}
        inner = ".mlp.0" if first == "groups.0.0" else ""
        plans = [plan_of(constraints=[Pin(n + inner, **pin)]) for n in (first, *others)]
        assert all(plan.ops == plans[0].ops for plan in plans)
        assert all(plan.parameters == plans[0].parameters for plan in plans)
        if is_module:
            plans = [plan_of(recompute=[name]) for name in (first, *others)]
            assert all(plan.recomputation == plans[0].recomputation for plan in plans)
    pinned = plan_of(constraints=[Pin("tail.weight", stored="S1")])
    assert pinned.parameters["head.weight"] == "S1"
    assert plan_of(recompute=["unused"]).recomputation != plan_of(recompute="none").recomputation
