"""A constant added to a loss does not prevent micro-batches, and changes no result."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.frontend.rewrites.loss_offsets import offsets_as_tensors


class Losses(nn.Module):
    def __init__(self, join: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        return self.join(y.square().mean(), y.abs().mean())


JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda a, b: sum([a, b]),  # type: ignore[arg-type, return-value]
    "more": lambda a, b: a + 0.25 + b,
    "less": lambda a, b: a * b.detach().mean() * 0 + (a - 3) - b,
    "from": lambda a, b: 1 - a + (2.5 - b),
    "scaled": lambda a, b: 2 * (a + 1) / 4 + b,
}
FREE = [name for name in JOINS if name != "less"]  # which has a product of two parts


def batch() -> Tensor:
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("join", JOINS)
def test_it_is_the_same_function(join: str) -> None:
    torch.manual_seed(0)
    model = Losses(JOINS[join]).double()
    exported = torch.export.export(model, (batch().double(),), strict=False)
    module = exported.run_decompositions({})
    offsets_as_tensors(module.graph_module)
    numbers = [
        node
        for node in module.graph.nodes
        if node.op == "call_function"
        and node.target.name().startswith(("aten::add", "aten::sub", "aten::rsub"))
        and not all(isinstance(given, torch.fx.Node) for given in node.args)
    ]
    assert not numbers
    expected, got = model(batch().double()), module.module()(batch().double())
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("join", FREE)
def test_parts_of_a_batch_train_as_the_whole(join: str) -> None:
    torch.manual_seed(0)
    model = Losses(JOINS[join])
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    expected = []
    for _ in range(3):
        loss = eager(batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    compiled = autopar.compile(
        model, 2, example_inputs=(batch(),), num_microbatches=2, profile_limit_s=0,
        constraints=autopar.Force("data_parallel"),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )  # fmt: skip
    with compiled:
        assert [compiled.train_step(batch()).item() for _ in range(3)] == pytest.approx(expected)
