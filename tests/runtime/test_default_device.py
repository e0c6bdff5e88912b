"""What `torch.set_default_device` says, which a training script may have set, changes nothing.

Scripts for GPUs set it to "cuda". Here it is "meta", whose tensors hold no data and mix with no
others, so that each tensor made on the default device would show.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopar


class Positions(nn.Module):
    """Makes tensors of its own in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 50)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.words(x) + self.words(torch.arange(x.shape[1]))
        h = torch.ones(x.shape[1], x.shape[1]).tril() @ h
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


@pytest.fixture
def model() -> Iterator[Positions]:
    torch.manual_seed(0)
    yield Positions()
    torch.set_default_device(None)


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(50, (8, 6), generator=generator) for _ in range(2))  # type: ignore[return-value]


def test_a_plan_is_the_same(model: Positions, batch: tuple[Tensor, Tensor]) -> None:
    cluster = autopar.Cluster.preset("h100-sxm", nodes=1, devices_per_node=8)
    expected = autopar.plan(model, cluster, batch)
    torch.set_default_device("meta")
    assert autopar.plan(model, cluster, batch).to_json() == expected.to_json()


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_and_state_are_those_of_eager(
    model: Positions, batch: tuple[Tensor, Tensor], world_size: int, tmp_path: Path
) -> None:
    reference = Positions()
    reference.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    expected = []
    for _ in range(3):
        loss = reference(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    torch.set_default_device("meta")
    with autopar.compile(
        model, world_size, batch, optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-2)
    ) as compiled:
        losses = [float(compiled.train_step(*batch))]
        compiled.save(tmp_path / "saved")
        compiled.train_step(*batch)
        compiled.load(tmp_path / "saved")
        losses.append(float(compiled.train_step(*batch)))
        loss = compiled(*batch)
        loss.backward()
        compiled.optimizer.step()
        losses.append(float(loss))
        state = compiled.state_dict()
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)
