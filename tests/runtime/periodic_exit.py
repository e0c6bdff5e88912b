"""The script of test_periodic_checkpoints.py that ends without closing its model.

Arguments: the folder of checkpoints, and whether the script raises in the end.
"""

from __future__ import annotations

import functools
import os
import sys

import torch
from torch import nn

import autopar


def main(folder: str, raises: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1000))
    batch = torch.randn(4, 1000)
    compiled = autopar.compile(
        model, int(os.environ.get("WORLD_SIZE", "2")), example_inputs=(batch, batch),
        loss_fn=nn.functional.mse_loss, optimizer=functools.partial(torch.optim.Adam, lr=1e-3),
        profile_limit_s=0, check_gradients=False,
    )  # fmt: skip
    compiled.checkpoint_every(2, folder)
    for _ in range(4):
        compiled.train_step(batch, batch)
    if raises:
        raise RuntimeError("the script has failed")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "raises")
