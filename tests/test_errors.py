"""A user's mistakes: each error names the value, the rule and the fix."""

from __future__ import annotations

import copy
import functools
import math
import os
import pathlib

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import autopar
from autopar.runtime.compiled import Compiled
from autopar.runtime.runners.local import LocalRunner
from tests.models.zoo import build, vector_batch


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.sum() > 0:  # branches on data
            y = -y
        return y.mean()


class Items(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        scale = x.max().item()
        return (self.linear(x) * int(scale)).mean()


def line_of(code: str) -> int:
    lines = pathlib.Path(__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if code in line)


def test_capture_error_has_the_users_file_line_and_a_hint():
    with pytest.raises(autopar.CaptureError) as caught:
        autopar.capture(Branches(), (torch.randn(2, 4),))
    text = str(caught.value)
    assert f"{os.path.basename(__file__)}:{line_of('if y.sum() > 0:')}" in text
    assert "torch.where(" in text


def test_capture_error_for_item_names_the_line():
    with pytest.raises(autopar.CaptureError) as caught:
        autopar.capture(Items(), (torch.randn(2, 4),))
    assert os.path.basename(__file__) in str(caught.value)


def test_model_that_fails_on_its_inputs_is_not_called_uncapturable():
    with pytest.raises(
        autopar.InputError,
        match=r"fails in eager mode.*on these inputs.*(reduction dim|mat1)",
    ):
        autopar.capture(nn.Linear(4, 4), (torch.randn(2, 5),))


@pytest.mark.parametrize("inputs", [3, "text", None])
def test_example_inputs_of_the_wrong_kind(inputs):
    with pytest.raises(autopar.InputError, match=r"example_inputs=\(x, y\)"):
        autopar.capture(nn.Linear(4, 4), inputs)


def test_not_a_module():
    with pytest.raises(autopar.InputError, match=r"must be a torch.nn.Module, got function"):
        autopar.capture(lambda x: x, (torch.randn(2),))


def test_loss_fn_with_too_few_inputs():
    with pytest.raises(autopar.InputError, match="loss_fn takes 1 targets"):
        autopar.capture(nn.Linear(4, 4), (), loss_fn=nn.functional.mse_loss)


def test_batch_of_another_shape_names_the_input():
    captured = autopar.capture(*build("mlp")[:1], vector_batch(0))
    with pytest.raises(autopar.InputError, match=r"input 'x' has shape \(3, 16\)"):
        captured.signature.flatten((), {"x": torch.randn(3, 16), "y": vector_batch(0)["y"]})
    with pytest.raises(autopar.InputError, match="input 'x' must be a tensor, got str"):
        captured.signature.flatten((), {"x": "1", "y": vector_batch(0)["y"]})
    with pytest.raises(autopar.InputError, match="same structure"):
        captured.signature.flatten((), {"x": torch.randn(4, 16)})


def test_batch_that_cannot_be_split():
    model, _ = build("mlp")
    cluster = autopar.Cluster.preset("cpu", nodes=1, devices_per_node=4)
    with pytest.raises(autopar.ConstraintError, match=r"5 is too far.* of 4\. .*of 4 or 8"):
        autopar.plan(
            model, cluster, vector_batch(0, batch=5), mesh={"dp": 4},
            constraints=[autopar.Force("data_parallel")],
        )  # fmt: skip


@pytest.mark.parametrize("mesh", [{}, [2], {"microbatch": 2}, {"dp": 2.0}], ids=str)
def test_a_mesh_names_axes_and_sizes(mesh):
    model, make_batch = build("mlp")
    with pytest.raises(
        autopar.InputError, match="give axis names and sizes of at least 1, such as mesh="
    ):
        autopar.compile(model, 2, example_inputs=make_batch(0), mesh=mesh)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_more_devices_than_there_are():
    model, make_batch = build("mlp")
    with pytest.raises(autopar.DeviceError, match="cuda"):
        autopar.compile(model, ["cuda:0", "cuda:1"], example_inputs=make_batch(0))
    with pytest.raises(autopar.DeviceError):
        autopar.compile(model, 100_000, example_inputs=make_batch(0))


def test_methods_before_the_first_call_name_the_fix():
    compiled = autopar.compile(build("mlp")[0], 2)
    with pytest.raises(autopar.InputError, match="call train_step"):
        compiled.state_dict()


@pytest.mark.parametrize("size", ["lots", "1.2.3GiB", -1, True])
def test_memory_budget_that_is_no_size(size):
    with pytest.raises(autopar.ConstraintError, match="60GiB"):
        autopar.MemoryBudget(size)


def test_unknown_strategy_lists_the_known():
    with pytest.raises(autopar.ConstraintError, match="data_parallel, zero3, tensor_parallel"):
        autopar.Force("magic")


def test_one_constraint_needs_no_list_and_others_are_refused():
    model, make_batch = build("mlp")
    cluster = autopar.Cluster.preset("cpu", nodes=1, devices_per_node=2)
    plan = autopar.plan(model, cluster, make_batch(0), constraints=autopar.Force("zero3"))
    assert set(plan.parameters.values()) == {"S0"}
    with pytest.raises(autopar.ConstraintError, match="'zero3', which is not a Force"):
        autopar.plan(model, cluster, make_batch(0), constraints=["zero3"])
    with pytest.raises(autopar.ConstraintError, match="'zero3', which is not a Force"):
        autopar.plan(model, cluster, make_batch(0), constraints="zero3")


def test_nothing_to_optimize():
    model, make_batch = build("mlp")
    model.requires_grad_(False)
    with pytest.raises(autopar.InputError, match="none of its parameters requires a gradient"):
        autopar.compile(
            model, 2, example_inputs=make_batch(0), optimizer=torch.optim.SGD, profile_limit_s=0
        )


def test_optimizer_instance_and_count_for_a_cluster_name_the_fix():
    model, make_batch = build("mlp")
    with pytest.raises(autopar.OptimizerError, match=r"functools.partial\(torch.optim.SGD"):
        autopar.compile(
            model, 2, example_inputs=make_batch(0), optimizer=torch.optim.SGD(model.parameters())
        )
    with pytest.raises(autopar.InputError, match=r"Cluster.preset"):
        autopar.plan(model, 4, make_batch(0))


@pytest.mark.parametrize("size", [".GB", "0GB", "0.1B"])
def test_memory_budget_of_nothing(size):
    with pytest.raises(autopar.ConstraintError, match="neither a positive number"):
        autopar.MemoryBudget(size)
    assert autopar.MemoryBudget(".5GB").size_bytes == 5 * 10**8


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stored": "Q7"}, "'Q7' is not R, P.*write Pin.'weight', stored='S0 R'"),
        ({"stored": "V"}, "stored replicated .R. or split"),
        ({"choice": "m//2"}, "'m//2' is neither.*write Pin.'weight', choice='m0 -'"),
    ],
)
def test_pin_that_cannot_be_read(given, message):
    with pytest.raises(autopar.ConstraintError, match=message):
        autopar.Pin("weight", **given)


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        (autopar.Pin("weight", stored="S0 S1"), "has 2 entries, but the mesh has 1 axes"),
        (autopar.Pin("linear", choice="n -"), "has 2 entries, but the mesh has 1 axes"),
        (autopar.Pin("weight", stored="S5"), r"'weight' of shape \(4, 4\): split on dimension 5"),
        (autopar.Pin("weight", stored="S0/3"), r"'weight' of shape \(4, 4\): .*cannot be split"),
    ],
    ids=str,
)
def test_pin_of_the_wrong_rank(pin, message):
    cluster = autopar.Cluster.preset("cpu", nodes=1, devices_per_node=2)
    with pytest.raises(autopar.ConstraintError, match=message):
        autopar.plan(
            nn.Linear(4, 4), cluster, torch.randn(8, 4), constraints=pin, loss_fn=lambda y: y.mean()
        )


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        ("ce", "loss_fn is 'ce'; it must be a function"),
        (nn.CrossEntropyLoss, "is the class CrossEntropyLoss; pass an instance"),
        (torch.dist, "loss_fn=lambda output, target: dist"),
        (nn.CrossEntropyLoss(reduction="none"), r"shape \(8,\).*one floating-point number"),
        (lambda output, target: None, "is a NoneType; a model is trained on one"),
        (lambda output, target: target.sum(), "dtype torch.int64; a model is trained on one"),
        (lambda output, *, other: other, r"takes 1 targets \['other'\]"),
    ],
)
def test_loss_fn_that_makes_no_loss(loss_fn, message):
    inputs = torch.randn(8, 4), torch.randint(0, 4, (8,))
    with pytest.raises(autopar.InputError, match=message):
        autopar.capture(nn.Linear(4, 4), inputs, loss_fn=loss_fn)


def test_loss_fn_is_checked_before_the_first_call():
    with pytest.raises(autopar.InputError, match="loss_fn is 'ce'"):
        autopar.compile(nn.Linear(4, 4), 2, loss_fn="ce")


class VectorLoss(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": x.mean(1)}


def test_a_models_own_loss_that_is_a_vector():
    with pytest.raises(autopar.InputError, match=r"the model's .loss is a tensor of shape \(8,\)"):
        autopar.capture(VectorLoss(), torch.randn(8, 4))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lr_scheduler": 3, "optimizer": torch.optim.SGD}, autopar.OptimizerError, "is 3, with"),
        ({"lr_scheduler": print}, autopar.OptimizerError, "with optimizer=None"),
        ({"seed": "x"}, autopar.InputError, "seed is 'x'"),
        ({"plan": 3}, autopar.PlanError, "plan is 3"),
        *(
            ({name: value}, autopar.InputError, rf"{name} is {value!r}; .*{name}=\d+")
            for name in ("profile_limit_s", "start_timeout_s", "call_timeout_s")
            for value in ("x", None, True, -1, math.nan)
        ),
        *(
            ({name: value}, autopar.InputError, f"{name} is {value!r}; it must be a positive fin")
            for name in ("start_timeout_s", "call_timeout_s")
            for value in (0, math.inf)
        ),
    ],
    ids=str,
)
def test_options_of_the_wrong_kind(options, error, message):
    with pytest.raises(error, match=message):
        autopar.compile(build("mlp")[0], 2, **options)


@pytest.mark.parametrize("limit_s", [0, 0.5, math.inf])
def test_measuring_may_take_any_time(limit_s):
    autopar.compile(build("mlp")[0], 2, profile_limit_s=limit_s)


class Steps:
    def step(self):
        """A scheduler without state, which could not be saved."""


@pytest.mark.parametrize("is_array", [False, True])
@pytest.mark.parametrize(
    "made", [lambda _: None, lambda optimizer: optimizer, lambda _: Steps(), lambda _: StepLR]
)
def test_lr_scheduler_that_returns_no_scheduler(made, is_array, monkeypatch):
    monkeypatch.setattr(LocalRunner, "start_workers", None)  # refused before any worker starts
    model, make_batch = build("mlp")
    with pytest.raises(autopar.InputError, match=r"returned a .*step, state_dict.*lr_scheduler="):
        autopar.compile(
            [model, copy.deepcopy(model)] if is_array else model, 1,
            example_inputs=make_batch(0), profile_limit_s=0, check_gradients=False,
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
            lr_scheduler=[None, made] if is_array else made,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "must be a torch.nn.Module, got NoneType"),
        (nn.Linear(2, 2), "(?s)the Linear given to copy_to is not .*Missing.*copy_to"),
    ],
)
def test_copying_to_another_model(given, message):
    compiled = Compiled.__new__(Compiled)
    compiled.full_state_dict = build("mlp")[0].state_dict
    with pytest.raises(autopar.InputError, match=message):
        compiled.copy_to(given)


@pytest.mark.parametrize("options", [{"mesh": {"a": "2"}}, {"constraints": None}], ids=str)
def test_planning_options_of_the_wrong_kind(options):
    model, make_batch = build("mlp")
    cluster = autopar.Cluster.preset("cpu", nodes=1, devices_per_node=2)
    with pytest.raises((autopar.InputError, autopar.ConstraintError), match=r"such as|write"):
        autopar.plan(model, cluster, make_batch(0), **options)


@pytest.mark.parametrize("given", [{"stored": 3}, {"choice": ["n"]}])
def test_pin_that_is_no_text(given):
    with pytest.raises(autopar.ConstraintError, match="is not a string; write Pin"):
        autopar.Pin("weight", **given)
