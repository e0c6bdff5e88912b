"""Updates by fused kernels are the optimizer's own updates, and nobody's options change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autopar.runtime.optimizers import update

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
