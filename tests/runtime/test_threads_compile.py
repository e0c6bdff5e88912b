"""Two threads compile and train models of their own at once, on real worker processes."""

from __future__ import annotations

import functools

import psutil
import pytest
import torch
from torch import Tensor

import autopar
from tests.test_threads import Layers, at_once

sgd = functools.partial(torch.optim.SGD, lr=0.5)
X = torch.linspace(-1, 1, 64).view(8, 8)
NUM_STEPS = 3


def eager_losses(num_layers: int) -> list[float]:
    model = Layers(num_layers)
    optimizer = sgd(model.parameters())
    losses = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss: Tensor = model(X)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compiled_losses(model: Layers) -> list[float]:
    compiled = autopar.compile(model, 2, example_inputs={"x": X}, optimizer=sgd, profile_limit_s=0)
    try:
        return [compiled.train_step(x=X).item() for _ in range(NUM_STEPS)]
    finally:
        compiled.close()


def test_two_threads_compile_and_train_as_eager() -> None:
    sizes = (2, 3)
    models = [Layers(size) for size in sizes]  # here: threads would draw from one generator
    found = at_once([lambda model=model: compiled_losses(model) for model in models])
    for size, losses in zip(sizes, found):
        assert losses == pytest.approx(eager_losses(size), rel=1e-5)


def workers_here() -> set[int]:
    """The children of this process's fork servers."""
    servers = psutil.Process().children()
    return {worker.pid for server in servers for worker in server.children()}


def test_the_first_calls_of_two_threads_compile_once() -> None:
    before = workers_here()
    compiled = autopar.compile(Layers(2), 2, optimizer=sgd, profile_limit_s=0)
    try:
        losses = at_once([lambda: compiled.train_step(x=X).item()] * 2)
        assert len(workers_here() - before) == 2
        assert sorted(losses) == pytest.approx(sorted(eager_losses(2)[:2]), rel=1e-5)
    finally:
        compiled.close()
