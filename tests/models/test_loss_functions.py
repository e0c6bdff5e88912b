"""Tensors that a loss function holds: trainable ones are refused, others are constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.base.errors import CaptureError, InputError
from tests.models.test_gradient_check import check

X, LABELS = torch.ones(8, 16), torch.arange(8) % 4
MODEL = nn.Linear(16, 4)
OTHER = nn.Linear(4, 4)
FACTOR = nn.Parameter(torch.tensor(2.0))
Loss = Callable[[Tensor, Tensor], Tensor]


class Scaled(nn.Module):
    """A loss with a factor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output * self.factor, target)


class Unregistered(nn.Module):
    """A model with a parameter in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.factors = nn.Linear(16, 4), [nn.Parameter(torch.ones(4))]

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) * self.factors[0]


def by_teacher(output: Tensor, _: Tensor) -> Tensor:
    with torch.no_grad():
        wanted = OTHER(output)
    return F.mse_loss(output, wanted)


def test_parameters_of_a_loss_function_are_refused_or_frozen() -> None:
    loss = Scaled()
    with pytest.raises(InputError, match="loss_fn has the trainable parameter 'factor'"):
        autopar.capture(MODEL, (X, LABELS), loss_fn=loss)
    check(MODEL, X, LABELS, loss_fn=loss.requires_grad_(False))


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, t: F.cross_entropy(y, t) + 0.1 * MODEL.weight.square().sum(),
        lambda y, t: F.cross_entropy(y * FACTOR, t),
        lambda y, t: F.cross_entropy(OTHER(y), t),
        Scaled().forward,
    ],
    ids=["the model's", "a parameter", "a module", "a bound method"],
)
def test_gradients_of_what_a_loss_function_closes_over_are_refused(loss: Loss) -> None:
    with pytest.raises(CaptureError, match=r"test_loss_functions.py:\d+ .* needs a gradient"):
        autopar.capture(MODEL, (X, LABELS), loss_fn=loss)


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, t: F.cross_entropy(y, t) + (MODEL.weight.detach() * y.sum()).sum(),
        lambda y, t: F.cross_entropy(y, t) + (MODEL.weight.data * y.sum()).sum(),
    ],
    ids=["detach", "data"],
)
def test_weights_that_are_read_past_the_model_are_refused(loss: Loss) -> None:
    with pytest.raises(CaptureError, match="the call reads 'weight' past the model"):
        autopar.capture(MODEL, (X, LABELS), loss_fn=loss)


def test_a_parameter_that_is_not_registered_is_refused() -> None:
    with pytest.raises(CaptureError, match="is no parameter of the model"):
        autopar.capture(Unregistered(), (X, LABELS), loss_fn=F.cross_entropy)


def test_a_teacher_without_gradients_is_a_constant() -> None:
    check(MODEL, X, LABELS, loss_fn=by_teacher)
