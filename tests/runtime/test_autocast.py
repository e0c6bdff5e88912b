"""``torch.autocast``: refused around a compiled model, equal to eager inside one."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.base.errors import InputError

SGD = functools.partial(torch.optim.SGD, lr=0.1)
NAMED = r"torch\.autocast\('cpu', dtype=torch\.bfloat16\)"


class Mixed(nn.Module):
    """The first layer in the low precision that the model asks for, the second in its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.first(x).relu()
        return F.cross_entropy(self.second(hidden.float()), y)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 16, generator=generator), torch.randint(0, 8, (8,), generator=generator)


def test_autocast_around_plan_and_compile_is_refused():
    model = Mixed()
    cluster = autopar.Cluster.preset("cpu", nodes=1, devices_per_node=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(InputError, match=f"autopar.plan was called inside {NAMED}"):
            autopar.plan(model, cluster, batch())
        with pytest.raises(InputError, match=f"autopar.compile was called inside {NAMED}"):
            autopar.compile(model, 2, example_inputs=batch(), optimizer=SGD)
        with torch.autocast("cpu", enabled=False):
            autopar.plan(model, cluster, batch())


def test_autocast_counts_inside_the_model_and_is_refused_around_steps_and_calls():
    torch.manual_seed(0)
    model, inputs = Mixed(), batch()
    eager = copy.deepcopy(model)
    optimizer = SGD(eager.parameters())
    with autopar.compile(
        model, 2, optimizer=SGD, profile_limit_s=0, mesh={"dp": 2},
        constraints=[autopar.Force("data_parallel")],
    ) as compiled:  # fmt: skip
        with (
            torch.autocast("cpu", dtype=torch.bfloat16),
            pytest.raises(InputError, match=f"the model is captured inside {NAMED}"),
        ):
            compiled.train_step(*inputs)  # the first call compiles
        for _ in range(2):
            optimizer.zero_grad()
            expected = eager(*inputs)
            expected.backward()
            optimizer.step()
            loss = compiled.train_step(*inputs)
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with pytest.raises(InputError, match=f"train_step was called inside {NAMED}"):
                compiled.train_step(*inputs)
            with pytest.raises(InputError, match=f"model was called inside {NAMED}"):
                compiled(*inputs)
        torch.testing.assert_close(compiled(*inputs), eager(*inputs), rtol=1e-3, atol=1e-3)
