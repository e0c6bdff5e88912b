"""The script of each rank in test_spmd.py: compile, close, and compile again in one process."""

from __future__ import annotations

import functools

import torch
from torch import nn

import autopar


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    inputs = torch.randn(8, 8), torch.randn(8, 1)
    losses = []
    for _ in range(3):
        compiled = autopar.compile(
            model, 2, example_inputs=inputs, loss_fn=nn.functional.mse_loss, profile_limit_s=0,
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        )  # fmt: skip
        losses.append(compiled.train_step(*inputs).item())
        compiled.close()
    assert losses == losses[:1] * 3


if __name__ == "__main__":
    main()
