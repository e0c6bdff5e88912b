"""Values that a trace knows: those computed from constants only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.frontend.traced_constants import constant_of


class Traced(nn.Module):
    def __init__(self, make: Callable[..., Tensor]) -> None:
        super().__init__()
        self.make = make
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(4.0))
        self.found: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        made = self.make(self, x)
        self.found.append(constant_of(made))
        return x + made


def found(make: Callable[..., Tensor]) -> Tensor | None:
    model = Traced(make)
    notes = model.found
    program = torch.export.export(model, (torch.randn(4),), strict=False)
    # Nothing of the evaluation is part of the graph, such as a switch of the gradient mode.
    assert not [name for name, _ in program.graph_module.named_modules() if name]
    return notes[-1]


def test_constants_have_values() -> None:
    value = found(lambda _, x: (torch.arange(4.0) * 2 + x.shape[0]).flip(0).cumsum(0))
    assert value is not None
    assert value.tolist() == [10.0, 18.0, 24.0, 28.0]


def written(x: Tensor) -> Tensor:
    made = torch.zeros(4)
    made[:2] = x[:2]
    return made


@pytest.mark.parametrize(
    "make",
    [
        lambda _, x: x * 0,
        lambda m, _: m.weight.detach(),
        lambda m, _: m.table + 1,
        lambda _, __: torch.rand(4),
        lambda _, x: torch.zeros_like(x),
        lambda _, x: written(x),
        lambda _, x: torch.zeros(4).copy_(x),
    ],
    ids=["input", "parameter", "buffer", "random", "like an input", "slice", "copy"],
)
def test_others_have_none(make: Callable[..., Tensor]) -> None:
    assert found(make) is None


def test_outside_of_a_trace_nothing_is_known() -> None:
    assert constant_of(torch.arange(4)) is None
