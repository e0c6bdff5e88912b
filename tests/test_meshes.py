"""The meshes that a plan is searched on: axes of a mesh that has many are merged."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import autopar
from autopar import Cluster, Force
from autopar.base.errors import ConstraintError
from autopar.planning.constraints import Pin
from autopar.planning.meshes import candidate_meshes

CLUSTER = Cluster.preset("h100-sxm", nodes=8, devices_per_node=8)
SIX = dict.fromkeys("abcdef", 2)


def found(sizes: dict[str, int | None], kept: set[str] = frozenset()) -> list[str]:  # type: ignore[assignment]
    return [str(mesh) for mesh in candidate_meshes(CLUSTER, sizes, kept_axes=kept)]


def test_six_axes_are_searched_as_one_or_two() -> None:
    assert found(SIX) == [
        "a_b_c_d_e_f=64", "a=2 x b_c_d_e_f=32", "a_b=4 x c_d_e_f=16", "a_b_c=8 x d_e_f=8",
        "a_b_c_d=16 x e_f=4", "a_b_c_d_e=32 x f=2",
    ]  # fmt: skip


def test_three_axes_are_searched_as_they_are() -> None:
    assert found({"a": 2, "b": 4, "c": 8}) == ["a=2 x b=4 x c=8"]


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        ({"f"}, ["a_b_c_d_e=32 x f=2"]),
        ({"c"}, ["a_b=4 x c=2 x d_e_f=8"]),
        (set(SIX), ["a=2 x b=2 x c=2 x d=2 x e=2 x f=2"]),
    ],
)
def test_axes_that_constraints_name_stay(kept: set[str], expected: list[str]) -> None:
    assert found(SIX, kept) == expected


def test_every_merged_mesh_has_all_devices() -> None:
    meshes = candidate_meshes(CLUSTER, {"a": 2, "b": None, "c": 2, "d": 2, "e": None})
    assert len({mesh.axis_sizes for mesh in meshes}) > 4
    assert all(math.prod(mesh.axis_sizes) == 64 for mesh in meshes)


def test_a_plan_on_six_axes_is_the_best_of_the_coarser_meshes() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 16384), nn.ReLU(), nn.Linear(16384, 4096))
        batch = torch.empty(256, 4096), torch.empty(256, 4096)
    options = {"loss_fn": nn.functional.mse_loss, "num_microbatches": 1}
    plan = autopar.plan(model, CLUSTER, batch, mesh=SIX, **options)
    coarser = [
        autopar.plan(model, CLUSTER, batch, mesh=dict(zip("xy", mesh.axis_sizes)), **options)
        for mesh in candidate_meshes(CLUSTER, SIX)
    ]
    assert plan.prediction.step_time_s == min(each.prediction.step_time_s for each in coarser)


def test_a_forced_axis_keeps_its_name() -> None:
    with torch.device("meta"):
        model, batch = nn.Linear(64, 64), (torch.empty(128, 64), torch.empty(128, 64))
    plan = autopar.plan(
        model, CLUSTER, batch, loss_fn=nn.functional.mse_loss, mesh=SIX,
        constraints=[Force("zero3", axis="a")],
    )  # fmt: skip
    assert "a" in plan.mesh.axis_names


def test_a_pin_keeps_all_axes() -> None:
    options = autopar.options.PlanOptions(mesh=SIX, constraints=[Pin("*", choice="- - - - - -")])
    assert options.space(64).kept_axes == set(SIX)


def test_no_merged_mesh_is_searched_twice() -> None:
    meshes = candidate_meshes(CLUSTER, dict.fromkeys("abcd"))
    assert len(set(meshes)) == len(meshes) == 1 + 3 * 7  # 7 ways to write 64 as two factors


def test_names_of_merged_axes_differ_from_those_of_others() -> None:
    assert found({"a": 2, "b": 2, "a_b": 4, "d": 4}, {"a_b"}) == ["a_b_=4 x a_b=4 x d=4"]
    assert "a_b_c=8 x a_b_c_=8" in found({"a": 2, "b_c": 4, "a_b": 4, "c": 2})


def test_an_axis_of_size_one_changes_nothing_but_the_words_of_a_plan() -> None:
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))
    cluster = Cluster.preset("cpu", nodes=1, devices_per_node=4)

    def planned(mesh: dict[str, int], *constraints: Pin | Force) -> autopar.Plan:
        return autopar.plan(
            model, cluster, example_inputs=(torch.randn(8, 8),), mesh=mesh,
            loss_fn=lambda y: y.square().mean(), constraints=constraints,
        )  # fmt: skip

    def splits(plan: autopar.Plan) -> list[list[str]]:
        return [words.split() for words in plan.ops.values()]

    for words in ("n m0", "m0 n"):
        two = planned({"x": 2, "y": 2}, Pin("0", words))
        for wide in (f"{words} -", f"{words} n"):
            three = planned({"x": 2, "y": 2, "z": 1}, Pin("0", wide))
            assert splits(three) == [[*each, "-"] for each in splits(two)]
            assert three.prediction.step_time_s == two.prediction.step_time_s
    with pytest.raises(ConstraintError, match="no choice is left for op 'linear'"):
        planned({"x": 2, "y": 2, "z": 1}, Pin("0", "n m0 unknown"))
    forced = planned({"x": 4, "y": 1}, Force("tensor_parallel", axis="y"))
    assert splits(forced) == [[*each, "-"] for each in splits(planned({"x": 4}))]


@pytest.mark.parametrize(
    ("mesh", "axis"), [({"dp": None, "tp": None}, "tp"), (None, None), ({"a": None}, "a")]
)
@pytest.mark.parametrize("schedule", [None, "auto", "1f1b"])
def test_a_forced_strategy_is_not_fulfilled_by_an_axis_of_one_device(
    mesh: dict[str, int | None] | None, axis: str | None, schedule: str | None
) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    options = {
        "example_inputs": (torch.randn(16, 64),), "mesh": mesh, "schedule": schedule,
        "loss_fn": lambda y: y.square().mean(),
        "constraints": [Force("tensor_parallel", axis=axis)],
    }  # fmt: skip
    cluster = Cluster.preset("h100-sxm", nodes=1, devices_per_node=4)
    plan = autopar.plan(model, cluster, **options)
    sizes = dict(zip(plan.mesh.axis_names, plan.mesh.axis_sizes))
    assert (math.prod(sizes.values()) if axis is None else sizes[axis]) > 1
    assert plan.is_pipeline or schedule != "1f1b"
    # One device is all there is.
    alone = Cluster.preset("h100-sxm", nodes=1, devices_per_node=1)
    if schedule != "1f1b":
        assert autopar.plan(model, alone, **options).mesh.axis_sizes in ((1,), (1, 1))


def test_a_size_of_one_that_is_given_fulfils_a_forced_strategy() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    cluster = Cluster.preset("h100-sxm", nodes=1, devices_per_node=4)
    plan = autopar.plan(
        model, cluster, example_inputs=(torch.randn(16, 64),), mesh={"tp": 1}, schedule="1f1b",
        loss_fn=lambda y: y.square().mean(), constraints=[Force("tensor_parallel", axis="tp")],
    )  # fmt: skip
    assert plan.is_pipeline
    assert plan.mesh.axis_sizes == (1,)


@pytest.mark.parametrize("schedule", [None, "1f1b"])
@pytest.mark.parametrize(
    ("constraints", "num_split"),
    [
        ([Pin("1.weight", stored="R S0")], 1),
        ([Pin("1", "- n")], 1),
        ([Force("data_parallel", axis="dp"), Force("tensor_parallel", axis="tp")], 2),
        # Three axes do not fit four devices, two do.
        (
            [Force("zero3", "dp"), Force("tensor_parallel", "tp"), Force("data_parallel", "z")],
            2,
        ),
    ],
)
def test_as_many_axes_as_can_be_split_are(
    constraints: list[Pin | Force], num_split: int, schedule: str | None
) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    cluster = Cluster.preset("h100-sxm", nodes=1, devices_per_node=4 if schedule is None else 8)
    mesh: dict[str, int | None] = {"dp": None, "tp": None}
    if num_split < len(constraints):
        mesh["z"] = None
    plan = autopar.plan(
        model, cluster, example_inputs=(torch.randn(16, 64),), mesh=mesh, schedule=schedule,
        num_stages=None if schedule is None else 2, loss_fn=lambda y: y.square().mean(),
        constraints=constraints,
    )  # fmt: skip
    sizes = dict(zip(plan.mesh.axis_names, plan.mesh.axis_sizes))
    if len(constraints) == 1:
        assert sizes["tp"] > 1
    else:
        assert sum(size > 1 for size in sizes.values()) == num_split
