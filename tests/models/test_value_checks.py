"""Checks of tensor values are taken to pass; every other decision by a value is refused."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.base.errors import CaptureError
from autopar.ir.mesh import Mesh
from tests.models.checked_models import CHECKS, DECISIONS, Check, Checked, Decided, asserted
from tests.oracles import assert_splits_equal_eager

sgd = functools.partial(torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize("check", CHECKS)
def test_a_model_with_checks_trains_as_in_eager(
    check: Check, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, x = Checked(check).double(), torch.randn(4, 4, dtype=torch.float64)
    reference = copy.deepcopy(model)
    optimizer = sgd(reference.parameters())
    with caplog.at_level(logging.WARNING, "autopar"):
        compiled = autopar.compile(model, 1, example_inputs=x, optimizer=sgd, profile_limit_s=0)
    assert isinstance(compiled, autopar.Compiled)
    with compiled:
        for _ in range(2):
            optimizer.zero_grad()
            expected = reference(x)
            expected.backward()
            optimizer.step()
            torch.testing.assert_close(compiled.train_step(x), expected.detach())
    found = [
        each.getMessage() for each in caplog.records if "in eager mode only" in each.getMessage()
    ]
    lines = [line for _, _, line in check.__code__.co_lines() if line is not None]
    told = {int(message.split("checked_models.py:")[1].split()[0]) for message in found}
    assert told
    assert told <= set(lines)
    assert len(found) == len(told)  # once for each


class Density(nn.Module):
    """The mean log density of targets under a distribution that a linear layer parameterizes."""

    def __init__(self, density: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.density = density

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return -self.density(self.linear(x), y).mean()


def normal(h: Tensor, y: Tensor) -> Tensor:
    mean, log_scale = h.chunk(2, 1)
    return torch.distributions.Normal(mean, log_scale.exp()).log_prob(y)


def gaussian(h: Tensor, y: Tensor) -> Tensor:
    mean, log_scale = h.chunk(2, 1)
    return -F.gaussian_nll_loss(mean, y, var=log_scale.exp(), full=True)


def divergence(h: Tensor, y: Tensor) -> Tensor:
    mean, log_scale = h.chunk(2, 1)
    prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
    found = torch.distributions.Normal(mean + y, log_scale.exp())
    return torch.distributions.kl_divergence(found, prior).sum(1)


def categorical(h: Tensor, y: Tensor) -> Tensor:
    return torch.distributions.Categorical(logits=h).log_prob(y.argmax(1))


def bernoulli(h: Tensor, y: Tensor) -> Tensor:
    return torch.distributions.Bernoulli(logits=h[:, :4]).log_prob((y > 0).to(h.dtype)).sum(1)


def mixture(h: Tensor, y: Tensor) -> Tensor:
    weights, means = h.chunk(2, 1)
    parts = torch.distributions.Normal(means, torch.ones_like(means))
    chosen = torch.distributions.Categorical(logits=weights)
    return torch.distributions.MixtureSameFamily(chosen, parts).log_prob(y[:, 0])


def joint(h: Tensor, y: Tensor) -> Tensor:
    mean, scale = h.chunk(2, 1)
    alone = torch.distributions.Laplace(mean, F.softplus(scale))
    return torch.distributions.Independent(alone, 1).log_prob(y)


def correlated(h: Tensor, y: Tensor) -> Tensor:
    mean, scale = h.chunk(2, 1)
    scale = torch.diag_embed(1 + F.softplus(scale))
    return torch.distributions.MultivariateNormal(mean, scale_tril=scale).log_prob(y)


DENSITIES = [normal, gaussian, divergence, categorical, bernoulli, mixture, joint, correlated]
MESHES = [Mesh(("a",), (2,)), Mesh(("a", "b"), (2, 2))]


@pytest.mark.parametrize("density", DENSITIES)
def test_distributions_train_as_in_eager(density: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    batches = [
        {"x": torch.randn(8, 6, dtype=torch.float64), "y": torch.randn(8, 4, dtype=torch.float64)}
        for _ in range(3)
    ]
    assert_splits_equal_eager(Density(density).double(), batches, MESHES)


def test_modules_may_be_converted_to_what_they_are() -> None:
    torch.manual_seed(0)
    batches = [{"x": torch.randn(4, 4, dtype=torch.float64)} for _ in range(2)]
    assert_splits_equal_eager(Converting(torch.float64).double(), batches, MESHES)
    with pytest.raises(CaptureError, match=r"converts a module to torch.float32 on cpu\n.*Convert"):
        autopar.capture(Converting(torch.float32).double(), batches[0])


class Converting(nn.Module):
    """Converts its layer in the forward pass."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        self.linear = self.linear.to(self.dtype)
        return self.linear(x.to(self.dtype)).square().mean()


def test_a_failing_check_of_the_example_is_told_before_training() -> None:
    model, x = Checked(asserted), torch.full((4, 4), torch.inf)
    with pytest.raises(AssertionError, match="inf"):
        model(x)
    with pytest.raises(autopar.AutoparError, match="AssertionError: inf"):
        autopar.compile(model, 1, example_inputs=x, optimizer=sgd, profile_limit_s=0)


@pytest.mark.parametrize("decide", DECISIONS)
def test_other_decisions_by_values_are_refused_in_few_lines(
    decide: Check, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CaptureError, match=r"checked_models\.py:\d+ in .*\n.*\nHow to fix it: Con"):
        autopar.capture(Decided(decide), torch.randn(4, 4))
    said = capfd.readouterr()
    assert not said.err  # torch prints all of the graph before the error
    assert not said.out
