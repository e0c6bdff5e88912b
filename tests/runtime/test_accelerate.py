"""Accelerate's loop over a compiled model: the losses and weights of the plain one."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

import autopar

pytestmark = pytest.mark.usefixtures("reused_workers")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.outer(self.inner(x).tanh()), y)


def rows(num: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num, 8, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 4, (num,), generator=generator)
    return [{"x": a, "y": b} for a, b in zip(x, y)]


def trained(model: Any, optimizer: Any, accelerator: Accelerator) -> list[float]:
    """The losses of an epoch of 6 batches, with an update and a smaller rate after every second."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    loader = DataLoader(rows(24), batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_accelerate_trains_as_without_autopar() -> None:
    torch.manual_seed(0)
    model = Net().double()
    make = functools.partial(torch.optim.AdamW, lr=0.1)
    plain = copy.deepcopy(model)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    expected = trained(plain, make(plain.parameters()), accelerator)
    example = {name: torch.stack([row[name] for row in rows(4)]) for name in ("x", "y")}
    compiled = autopar.compile(model, 2, example, optimizer=make, profile_limit_s=0)
    with compiled:
        found = trained(compiled, compiled.optimizer, accelerator)
        compiled.copy_to(model)
    assert found == pytest.approx(expected, rel=1e-9)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, plain.state_dict()[name], rtol=1e-9, atol=1e-9)


def test_accelerates_checkpoints_have_the_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    make = functools.partial(torch.optim.AdamW, lr=0.1)
    example = {name: torch.stack([row[name] for row in rows(4)]) for name in ("x", "y")}
    accelerator = Accelerator(cpu=True)
    with autopar.compile(Net().double(), 2, example, optimizer=make, profile_limit_s=0) as compiled:
        model, optimizer = accelerator.prepare(compiled, compiled.optimizer)
        accelerator.register_for_checkpointing(model)

        def train() -> list[float]:
            losses = []
            for _ in range(2):
                loss = model(**example)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            return losses

        train()
        accelerator.save_state(str(tmp_path))
        expected = train()
        assert train() != expected
        accelerator.load_state(str(tmp_path))
        assert train() == expected
        with pytest.raises(autopar.MissingError, match=r"compiled\.copy_to\(model\)"):
            accelerator.unwrap_model(model)
