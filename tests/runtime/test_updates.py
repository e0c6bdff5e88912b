"""Fused updates equal the optimizer's own, and the assumed costs of optimizers are right."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from autopar.cost_models import Cluster
from autopar.cost_models.update import OptimizerSpec
from autopar.runtime.state.optimizers import optimizer_spec, update

MAKES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda ps, **o: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01, **o),
    "nesterov": lambda ps, **o: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, **o),
    "adam": lambda ps, **o: torch.optim.Adam(ps, lr=0.01, amsgrad=True, **o),
    "adamw": lambda ps, **o: torch.optim.AdamW(ps, lr=0.01, **o),
    "tensor": lambda ps, **o: torch.optim.AdamW(ps, lr=torch.tensor(0.01), **o),
    "rmsprop": lambda ps, **o: torch.optim.RMSprop(ps, lr=0.01, **o),
}


def trained(make: Any, step: Any, **options: Any) -> tuple[list[torch.Tensor], Any]:
    generator = torch.Generator().manual_seed(0)
    parameters = [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        for shape in ((64, 33), (7,), ())
    ]
    optimizer = make(parameters, **options)
    for _ in range(4):
        for parameter in parameters[:2]:  # the last one has no gradient
            drawn = torch.randn(parameter.shape[::-1], generator=generator).double()
            parameter.grad = drawn.permute(*range(drawn.dim())[::-1])  # lies otherwise
        step(optimizer)
    return [p.detach() for p in parameters], optimizer


@pytest.mark.parametrize("name", MAKES)
def test_the_weights_are_those_of_the_optimizers_own_step(name: str) -> None:
    expected, own = trained(MAKES[name], lambda optimizer: optimizer.step())
    got, optimizer = trained(MAKES[name], update)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert optimizer.state_dict()["param_groups"] == own.state_dict()["param_groups"]
    own.load_state_dict(optimizer.state_dict())
    own.step()


def test_what_the_user_chose_runs() -> None:
    expected, _ = trained(MAKES["adamw"], lambda optimizer: optimizer.step(), foreach=False)
    got, _ = trained(MAKES["adamw"], update, foreach=False)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_a_fused_kernel_that_the_user_chose_gets_gradients_that_lie_as_weights(name: str) -> None:
    expected, _ = trained(MAKES[name], lambda optimizer: optimizer.step())
    got, _ = trained(MAKES[name], update, fused=True)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def refused(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    raise ValueError(f"{len(parameters)} parameters are too few")


@pytest.mark.parametrize(
    ("make", "num_states", "is_fused", "temporaries"),
    [
        (None, 2, True, (0, 0, 0)),
        (partial(torch.optim.SGD, lr=0.1), 0, True, (0, 0, 0)),
        (MAKES["sgd"], 1, True, (0, 0, 0)),
        # A root, a part of it, and that of the parameter before, which lasts until then.
        (partial(torch.optim.AdamW, foreach=False), 2, False, (0, 2, 1)),
        (partial(torch.optim.AdamW, foreach=True), 2, False, (1, 0, 0)),
        (partial(torch.optim.AdamW, fused=True), 2, True, (0, 0, 0)),
        (MAKES["adam"], 3, True, (0, 0, 0)),
        (MAKES["rmsprop"], 1, False, (0, 1, 1)),
        (torch.optim.LBFGS, 2, True, (0, 0, 0)),
        (refused, 2, True, (0, 0, 0)),
    ],
)
def test_what_an_optimizer_holds_is_counted(
    make: Any, num_states: int, is_fused: bool, temporaries: tuple[int, int, int]
) -> None:
    device = Cluster.preset("cpu").device
    expected = OptimizerSpec(
        num_states=num_states,
        is_fused=is_fused,
        temporaries_of_all=temporaries[0],
        temporaries_of_one=temporaries[1],
        temporaries_before=temporaries[2],
    )
    assert optimizer_spec(make, device) == expected


def test_what_looks_at_all_parameters_updates_them_at_once() -> None:
    device = Cluster.preset("cpu").device
    found = optimizer_spec(torch.optim.Adafactor, device)
    assert found.num_states == 0  # a row and a column, which are no parameter's size
    assert found.is_joint
    assert optimizer_spec(MAKES["adamw"], device, is_clipped=True).is_joint
    sgd = OptimizerSpec(num_states=0, is_fused=False, temporaries_of_one=2, temporaries_before=1)
    assert sgd.workspace_bytes([300, 100, 100]) == max(2 * 300, 2 * 100 + 300, 2 * 100 + 100)
    assert sgd.workspace_bytes([]) == 0


def test_on_cuda_updates_are_fused_where_the_user_says_so() -> None:
    device = Cluster.preset("h100-sxm").device
    assert not optimizer_spec(None, device).is_fused
    assert not optimizer_spec(MAKES["adamw"], device).is_fused
    # torch updates many tensors at once there, and holds a root of each.
    assert optimizer_spec(MAKES["adamw"], device).temporaries_of_all == 1
    assert optimizer_spec(None, device).temporaries_of_all == 1
    assert optimizer_spec(partial(torch.optim.AdamW, fused=True), device).is_fused


@pytest.mark.parametrize(
    ("num_states", "is_fused", "num_passes"),
    [(0, True, 3), (0, False, 3), (1, True, 5), (2, True, 7), (2, False, 19)],
)
def test_an_update_goes_through_memory(num_states: int, is_fused: bool, num_passes: int) -> None:
    """SGD reads weights and gradient and writes weights; every state is read and written."""
    assert OptimizerSpec(num_states=num_states, is_fused=is_fused).num_passes == num_passes
