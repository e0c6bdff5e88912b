"""The script of each rank in test_gpu.py: train on a GPU in a thread, and compare with eager."""

from __future__ import annotations

import functools
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import autopar
from tests.runtime.test_precision import batch, model_of

sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def train(compiled: autopar.Compiled) -> None:
    reference = model_of().double()
    optimizer = sgd(reference.parameters())
    for seed in range(3):
        x, y = (part.double() for part in batch(seed))
        optimizer.zero_grad()
        expected = F.mse_loss(reference(x), y)
        expected.backward()
        optimizer.step()
        assert compiled.train_step(x, y).item() == pytest.approx(expected.item(), rel=1e-9)
    with pytest.raises(autopar.NonFiniteError):
        compiled.train_step(x * torch.inf, y)
    for name, tensor in compiled.full_state_dict().items():
        torch.testing.assert_close(
            tensor.cpu(), reference.state_dict()[name], rtol=1e-9, atol=1e-9, msg=name
        )


def main(*, joins_first: bool) -> None:
    if joins_first:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    compiled = autopar.compile(
        model_of().double(),
        int(os.environ["WORLD_SIZE"]),
        example_inputs=tuple(part.double() for part in batch(0)),
        loss_fn=F.mse_loss,
        optimizer=sgd,
        profile_limit_s=0,
    )
    with ThreadPoolExecutor(1) as pool:
        pool.submit(train, compiled).result()
    compiled.close()
    assert dist.is_initialized() is joins_first
    if joins_first:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(joins_first=sys.argv[1] == "own_group")
