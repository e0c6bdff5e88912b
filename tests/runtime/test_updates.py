"""Fused updates equal the optimizer's own, and the assumed costs of optimizers are right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.cost_models import Cluster
from autopar.cost_models.update import OptimizerSpec
from autopar.runtime.state.optimizers import optimizer_spec, update

MAKES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda ps, **o: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01, **o),
    "nesterov": lambda ps, **o: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, **o),
    "adam": lambda ps, **o: torch.optim.Adam(ps, lr=0.01, amsgrad=True, **o),
    "adamw": lambda ps, **o: torch.optim.AdamW(ps, lr=0.01, **o),
    "adam_decoupled": lambda ps, **o: torch.optim.Adam(
        ps, lr=0.01, weight_decay=0.3, decoupled_weight_decay=True, **o
    ),
    "adam_decayed": lambda ps, **o: torch.optim.Adam(ps, lr=0.01, weight_decay=0.3, **o),
    "tensor": lambda ps, **o: torch.optim.AdamW(ps, lr=torch.tensor(0.01), **o),
    "rmsprop": lambda ps, **o: torch.optim.RMSprop(ps, lr=0.01, **o),
}


def trained(
    make: Any, step: Any, *, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[list[torch.Tensor], Any]:
    generator = torch.Generator().manual_seed(0)
    parameters = [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for shape in ((64, 33), (7,), ())
    ]
    optimizer = make(parameters, **options)
    for _ in range(4):
        for parameter in parameters[:2]:  # the last one has no gradient
            drawn = torch.randn(parameter.shape[::-1], generator=generator).to(dtype)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["sgd", "nesterov", "adamw", "adam_decayed"])
def test_half_precision_is_updated_as_by_the_own_step(name: str, dtype: torch.dtype) -> None:
    """Bit by bit: torch's fused SGD leaves most elements of half precision unchanged on CPUs."""
    expected, _ = trained(MAKES[name], lambda optimizer: optimizer.step(), dtype=dtype)
    got, _ = trained(MAKES[name], update, dtype=dtype)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_what_the_user_chose_runs() -> None:
    expected, _ = trained(MAKES["adamw"], lambda optimizer: optimizer.step(), foreach=False)
    got, _ = trained(MAKES["adamw"], update, foreach=False)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_a_fused_kernel_that_the_user_chose_gets_gradients_that_lie_as_weights(name: str) -> None:
    expected, _ = trained(MAKES[name], lambda optimizer: optimizer.step())
    got, _ = trained(MAKES[name], update, fused=True)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


FUSED = ["sgd", "nesterov", "adam", "adamw", "adam_decoupled", "adam_decayed"]


@pytest.mark.parametrize("name", FUSED)
def test_the_weights_and_the_state_are_those_of_the_fused_step_bit_by_bit(name: str) -> None:
    def own_step(optimizer: torch.optim.Optimizer) -> None:
        for parameter in optimizer.param_groups[0]["params"][:2]:
            parameter.grad = parameter.grad.contiguous()  # as the kernel needs it
        optimizer.step()

    expected, own = trained(MAKES[name], own_step, fused=True)
    got, optimizer = trained(MAKES[name], update, fused=True)
    assert all(map(torch.equal, got, expected))
    assert_equal_state(optimizer, own)


def assert_equal_state(optimizer: torch.optim.Optimizer, own: torch.optim.Optimizer) -> None:
    got, expected = optimizer.state_dict(), own.state_dict()
    assert got["param_groups"] == expected["param_groups"]
    assert got["state"].keys() == expected["state"].keys()
    for number, entries in expected["state"].items():
        assert got["state"][number].keys() == entries.keys()
        assert all(torch.equal(got["state"][number][key], value) for key, value in entries.items())


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_a_loaded_state_is_stepped_on_from(name: str) -> None:
    _, own = trained(MAKES[name], update)
    results = []
    for step in (update, lambda optimizer: optimizer.step()):
        parameters = [nn.Parameter(torch.ones(s).double()) for s in ((64, 33), (7,), ())]
        optimizer = MAKES[name](parameters, fused=True)
        optimizer.load_state_dict(copy.deepcopy(own.state_dict()))
        for group in optimizer.param_groups:
            group["fused"] = True
        for parameter in parameters[:2]:
            parameter.grad = torch.full_like(parameter, 0.5)
        step(optimizer)
        results.append((parameters, optimizer))
    assert all(map(torch.equal, results[0][0], results[1][0]))
    assert_equal_state(results[0][1], results[1][1])


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_a_group_without_gradients_stays_as_it_is(name: str) -> None:
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = MAKES[name]([{"params": [first]}, {"params": [second]}])
    first.grad, second.grad = torch.ones(3), torch.ones(3)
    update(optimizer)
    held, first.grad, second.grad = second.detach().clone(), torch.ones(3), None
    before = first.detach().clone()
    update(optimizer)
    assert torch.equal(second, held)
    assert not torch.equal(first, before)
    first.grad = None
    update(optimizer)  # of nothing


@pytest.mark.parametrize("by", ["hook", "hook of all", "step", "class"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_what_the_user_added_to_a_step_runs_in_each(by: str, name: str) -> None:
    calls = []

    def note(*_: Any) -> None:
        calls.append(by)

    class Own(torch.optim.AdamW if name == "adamw" else torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            note()
            return super().step(closure)

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if by == "class":
            return Own(parameters, lr=0.1)
        optimizer = MAKES[name](parameters)
        if by == "hook":
            optimizer.register_step_post_hook(note)
        if by == "step":
            before = optimizer.step
            optimizer.step = lambda: (note(), before())[1]
        return optimizer

    handle = register_optimizer_step_pre_hook(note) if "all" in by else None
    try:
        trained(make, update)
    finally:
        if handle is not None:
            handle.remove()
    assert len(calls) == 4


@pytest.mark.filterwarnings("error")  # that the scheduler's step was before the optimizer's
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}])
def test_a_scheduler_changes_the_next_step(options: dict[str, float]) -> None:
    found = []
    for step in (update, lambda optimizer: optimizer.step()):
        parameter = nn.Parameter(torch.ones(5).double())
        optimizer = torch.optim.SGD([parameter], lr=0.5, fused=True, **options)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for _ in range(4):
            parameter.grad = torch.ones_like(parameter)
            step(optimizer)
            scheduler.step()
        found.append(parameter.detach())
    assert torch.equal(*found)
    if not options:
        assert found[0].tolist() == [1 - 0.5 - 0.25 - 0.125 - 0.0625] * 5


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
