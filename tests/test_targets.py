"""The arguments passed to ``loss_fn``: as many as Python would bind, in its order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.frontend.targets import find_targets, without_targets


class Two(nn.Module):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x * scale


class Any_(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args


def plain(output, a, b):
    return output, a, b


def optional(output, a, b=20):
    return output, a, b


def named(output, *, a, b=20):
    return output, a, b


def several(output, *targets):
    return output, *targets


def default(output, a=10):
    return output, a


@pytest.mark.parametrize(
    ("loss_fn", "model", "args", "kwargs", "of_model", "expected"),
    [
        (plain, Two(), (0, 1, 2), {}, ((0,), {}), (1, 2)),
        (plain, Two(), (0, 1.0, 1, 2), {}, ((0, 1.0), {}), (1, 2)),
        (plain, Two(), (0, 2), {"a": 1}, ((0,), {}), (1, 2)),
        (plain, Two(), (0,), {"b": 2, "a": 1}, ((0,), {}), (1, 2)),
        (optional, Two(), (0, 1), {}, ((0,), {}), (1, 20)),
        (optional, Two(), (0, 1.0, 1, 2), {}, ((0, 1.0), {}), (1, 2)),
        (optional, Two(), (0, 1), {"b": 2}, ((0,), {}), (1, 2)),
        (optional, Any_(), (0, 1), {"b": 2}, ((0,), {"b": 2}), (1, 20)),
        (named, Two(), (0,), {"a": 1}, ((0,), {}), (1, 20)),
        (named, Two(), (0,), {"a": 1, "b": 2, "scale": 3}, ((0,), {"scale": 3}), (1, 2)),
        (several, Two(), (0, 1.0, 1, 2), {}, ((0, 1.0), {}), (1, 2)),
        (default, nn.Linear(1, 1), (0, 1), {}, ((0,), {}), (1,)),
        (default, nn.Linear(1, 1), (0,), {"a": 1}, ((0,), {}), (1,)),
        (default, nn.Linear(1, 1), (0,), {}, ((0,), {}), (10,)),
        (nn.MSELoss(), nn.Linear(1, 1), (0, 1), {}, ((0,), {}), None),
    ],
)
def test_arguments_are_taken_apart(loss_fn, model, args, kwargs, of_model, expected):
    targets = find_targets(loss_fn, model, args, kwargs)
    own_args, own_kwargs, (positional, by_name) = targets.take(args, kwargs)
    assert (own_args, own_kwargs) == of_model == without_targets(loss_fn, model, args, kwargs)
    if expected is not None:
        assert loss_fn("output", *positional, **by_name) == ("output", *expected)


def test_a_target_with_a_default_trains():
    import autopar

    def loss_fn(output: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
        error = (output - target).square()
        return (error if weight is None else error * weight).mean()

    model, x, y = nn.Linear(4, 4), torch.randn(8, 4), torch.randn(8, 4)
    for inputs in ((x, y), (x, y, y.abs()), {"input": x, "target": y, "weight": y.abs()}):
        graph = autopar.capture(model, inputs, loss_fn=loss_fn).graph
        assert len(graph.inputs) == len(inputs)
        assert any("mul" in op.target_name for op in graph.ops) == (len(inputs) == 3)
