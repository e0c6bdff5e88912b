"""Values that a trace knows: those computed from constants, and from inputs that are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.frontend.traced_constants import constant_of, node_of


class Traced(nn.Module):
    """Notes what is known of the tensor that ``make`` computes, where ``known`` is the input."""

    def __init__(self, make: Callable[..., Tensor], known: Tensor | None = None) -> None:
        super().__init__()
        self.make = make
        self.known = [] if known is None else [known]
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(4.0))
        self.found: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        made = self.make(self, x)
        node = node_of(x)
        assert node is not None
        self.found.append(constant_of(made, {node: self.known[0]} if self.known else {}))
        return x + made


def found(make: Callable[..., Tensor], known: Tensor | None = None) -> Tensor | None:
    model = Traced(make, known)
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


def test_what_is_computed_from_a_known_input_has_a_value() -> None:
    value = found(lambda _, x: x.cumsum(0) - torch.arange(4.0), torch.tensor([1.0, 1.0, 1.0, 5.0]))
    assert value is not None
    assert value.tolist() == [1.0, 1.0, 1.0, 5.0]
    assert found(lambda m, x: x * m.weight, torch.ones(4)) is None
    assert found(lambda _, x: x.add_(1), torch.ones(4)) is None


def test_outside_of_a_trace_nothing_is_known() -> None:
    assert node_of(torch.arange(4)) is None
    assert constant_of(torch.arange(4), {}) is None
