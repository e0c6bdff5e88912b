"""Indices that count a dimension are removed; only the possible splits change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.base.errors import CaptureError
from autopar.frontend.capture import capture
from autopar.frontend.rewrites.counting_indices import free_counted_dimensions

B, N, T, D = 4, 5, 3, 6
INDEX = torch.ops.aten.index.Tensor
arange = torch.arange


class Called(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def chosen(high: int, *shape: int) -> Tensor:
    """Indices, some of them negative."""
    return torch.randint(-high, high, shape, generator=torch.Generator().manual_seed(1))


# What is computed, of what, and the indices that are left: "d" where a dimension has one.
CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], list[str]]] = {
    "labels": (lambda x, y: x[arange(B), y], (drawn(B, N), chosen(N, B)), []),
    "vectors": (lambda x, y: x[arange(B), y], (drawn(B, N, D), chosen(N, B)), []),
    "several": (lambda x, y: x[arange(B)[:, None], y], (drawn(B, N, D), chosen(N, B, T)), []),
    "apart": (lambda x, y: x[arange(B)[:, None], :, y], (drawn(B, D, N), chosen(N, B, T)), []),
    "two rows": (
        lambda x, y: x[arange(B)[:, None], arange(T)[None], y],
        (drawn(B, T, N, D), chosen(N, B, T)),
        [],
    ),
    "mask": (
        lambda x, y: x[arange(B)[:, None, None, None], y[None, None, None]],
        (drawn(B, N), chosen(N, 7)),
        ["-d"],
    ),
    "apart, alike": (
        lambda x, y: x[arange(B)[:, None], :, y[None]],
        (drawn(B, D, N), chosen(N, 7)),
        ["--d"],
    ),
    "second": (lambda x, y: x[y[:, None], arange(D)], (drawn(N, D), chosen(N, B)), ["d-"]),
    "inside": (lambda x, y: x[:, arange(T), :, y], (drawn(B, T, N, D), chosen(D, T)), []),
    "both": (lambda x: x[arange(B)[:, None, None], arange(N)], (drawn(B, N, D),), []),
    "all": (lambda x: x[arange(B)], (drawn(B, N, D),), []),
    "computed": (lambda x, y: x[arange(1, B + 1) - 1, y], (drawn(B, N), chosen(N, B)), []),
    "backwards": (lambda x, y: x[arange(B).flip(0), y], (drawn(B, N), chosen(N, B)), ["dd"]),
    "a part": (lambda x, y: x[arange(T), y], (drawn(B, N), chosen(N, T)), ["dd"]),
    "two others": (lambda x, y: x[arange(B), y, y], (drawn(B, N, N), chosen(N, B)), ["ddd"]),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_same_function(case: str) -> None:
    function, given, left = CASES[case]
    module = torch.export.export(Called(function), given, strict=False).run_decompositions({})
    graph = module.graph_module
    free_counted_dimensions(graph)
    indices = [node.args[1] for node in graph.graph.nodes if node.target is INDEX]
    assert ["".join("-" if i is None else "d" for i in found) for found in indices] == left
    first, *others = given
    first = first.double().requires_grad_()
    expected, (got,) = function(first, *others), graph(first, *others)
    assert torch.equal(got, expected)
    weights = drawn(*expected.shape).double()
    gradients = [torch.autograd.grad((y * weights).sum(), first)[0] for y in (got, expected)]
    torch.testing.assert_close(*gradients)


def test_running_averages_over_all_batches_are_named() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None))
    with pytest.raises(CaptureError, match=r"BatchNorm1d '1' has momentum=None.*momentum=0.1"):
        capture(model, (drawn(8, 4),))
    model.eval()
    assert capture(model, (drawn(8, 4),)).graph.ops
