"""The script of each rank in test_data.py: ranks that load their own samples train as eager."""

from __future__ import annotations

import functools
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import autopar
from autopar.integrations.data import LocalBatches, ahead

sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def batches_of(data: TensorDataset, seed: int) -> BatchSampler:
    generator = torch.Generator().manual_seed(seed)
    return BatchSampler(RandomSampler(data, generator=generator), batch_size=8, drop_last=False)


def train(data: TensorDataset, *, num_left_out: int = 0, **options: object) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    reference = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    reference.load_state_dict(model.state_dict())
    optimizer = sgd(reference.parameters())
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("autopar").addHandler(handler)
    with autopar.compile(
        model, 2, example_inputs=data[:8], loss_fn=F.cross_entropy, optimizer=sgd,
        profile_limit_s=0, check_gradients=False, **options,
    ) as compiled:  # fmt: skip
        local = LocalBatches(batches_of(data, 1), compiled)
        own = DataLoader(data, batch_sampler=local, num_workers=1)
        whole = DataLoader(data, batch_sampler=batches_of(data, 1))
        assert len(own) == len(whole) == 5
        for given, (x, y) in zip(ahead(own), whole, strict=not num_left_out):
            assert len(given[0]) == len(x) // 2
            optimizer.zero_grad()
            expected = F.cross_entropy(reference(x), y)
            expected.backward()
            optimizer.step()
            loss = compiled.train_step(*given, local=True)
            assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
        state = compiled.full_state_dict()
    for name, tensor in reference.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-9)
    assert len([text for text in told if "samples is left out" in text]) == num_left_out


def main() -> None:
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(34, 6).double(), torch.randint(0, 3, (34,)))
    parallel = autopar.Force("data_parallel")
    train(data, constraints=[parallel])  # the last batch has two samples
    train(data, constraints=[parallel], num_microbatches=2)
    train(data, constraints=[autopar.Force("zero3")])
    odd = TensorDataset(*data[:33])
    train(odd, num_left_out=1, constraints=[parallel])
    with autopar.compile(
        nn.Linear(6, 3).double(), 2, example_inputs=data[:7], loss_fn=F.cross_entropy,
        optimizer=sgd, profile_limit_s=0, check_gradients=False, constraints=[parallel],
    ) as compiled, pytest.raises(autopar.InputError, match="do not divide"):  # fmt: skip
        LocalBatches(batches_of(data, 1), compiled)


if __name__ == "__main__":
    main()
