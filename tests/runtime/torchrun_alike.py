"""The script of each rank in test_spmd.py: processes that disagree on their models and batches."""

from __future__ import annotations

import copy
import functools
import logging
import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.base.errors import InputError

RANK = int(os.environ["RANK"])
sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5)


class Shifted(nn.Module):
    """A layer and a constant of its own."""

    def __init__(self, shift: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.norm = nn.BatchNorm1d(8)
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.norm(x) + self.shift)


def batch_of(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 1, generator=generator)


def compiled_of(model: nn.Module) -> autopar.Compiled:
    return autopar.compile(
        model, 2, example_inputs=batch_of(0), loss_fn=nn.functional.mse_loss, profile_limit_s=0,
        optimizer=sgd, constraints=[autopar.Force("data_parallel")],
    )  # fmt: skip


def from_rank_0(model: nn.Module) -> nn.Module:
    """A copy of rank 0's model."""
    found = copy.deepcopy(model)
    for tensor in found.state_dict().values():
        dist.broadcast(tensor, src=0)
    return found


def weights() -> None:
    """All ranks train rank 0's model, as with DDP."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("autopar").addHandler(handler)
    torch.manual_seed(RANK)
    model = Shifted(torch.zeros(8))
    model.norm.running_mean.fill_(RANK)
    with compiled_of(model) as compiled:
        assert [text for text in told if "3 tensors" in text and "rank 0" in text] or RANK
        reference = from_rank_0(model)
        optimizer = sgd(reference.parameters())
        for seed in range(3):
            x, y = batch_of(seed)
            loss = compiled.train_step(x, y)
            optimizer.zero_grad()
            expected = nn.functional.mse_loss(reference(x), y)
            expected.backward()
            optimizer.step()
            torch.testing.assert_close(loss, expected.detach())
        found = compiled.full_state_dict()
        for name, tensor in reference.state_dict().items():
            torch.testing.assert_close(found[name], tensor, msg=name)


def constants() -> None:
    torch.manual_seed(RANK)
    with pytest.raises(InputError, match=r"constant '.*shift.*' differs between ranks 0 and 1"):
        compiled_of(Shifted(torch.randn(8)))


def batches() -> None:
    """A batch of its own on each rank is refused, and training can go on."""
    torch.manual_seed(0)
    with compiled_of(Shifted(torch.zeros(8))) as compiled:
        with pytest.raises(InputError, match=r"ranks 0 and 1 differ in 'args_0'.*local=True"):
            compiled.train_step(*batch_of(RANK))
        parts = [whole if RANK == 0 else whole[4:] for whole in batch_of(0)]
        with pytest.raises(InputError, match=r"ranks 0 and 1 differ in local="):
            compiled.train_step(*parts, local=RANK == 1)
        first = compiled.train_step(*batch_of(0))
        assert compiled.train_step(*batch_of(0)) < first
        compiled.eval()
        with pytest.raises(InputError, match=r"ranks 0 and 1 differ in 'args_0'"):
            compiled(batch_of(RANK)[0])


def states() -> None:
    """State that ranks load, each its own, is refused; DTensors are shards, and differ rightly."""
    torch.manual_seed(0)
    with compiled_of(Shifted(torch.zeros(8))) as compiled:
        before = compiled.full_state_dict()
        other = {**before, "layer.bias": before["layer.bias"] + RANK}
        with pytest.raises(InputError, match=r"'layer.bias' differs between ranks 0 and 1"):
            compiled.load_state_dict(other)
        torch.testing.assert_close(compiled.full_state_dict(), before, rtol=0, atol=0)
        compiled.load_state_dict(compiled.state_dict())
        compiled.train_step(*batch_of(0))
        held = compiled.optimizer_state_dict()
        held["state"]["layer.weight"]["momentum_buffer"] = torch.full((1, 8), float(RANK))
        with pytest.raises(InputError, match=r"'state.layer.weight.momentum_buffer' differs"):
            compiled.load_optimizer_state_dict(held)


if __name__ == "__main__":
    for check in (weights, constants, batches, states):
        check()
