"""The script of each rank in test_full_masks.py: one rank's shard is padded, the other's is not."""

from __future__ import annotations

import copy
import os

import pytest
import torch

from autopar.base.errors import InputError
from autopar.planning.constraints import Force
from tests.runtime.test_full_masks import BATCHES, Batch, compiled_with, decoder, sgd, text


def shard(batch: Batch, rank: int) -> Batch:
    return {name: x.chunk(2)[rank].contiguous() for name, x in batch.items()}


def main() -> None:
    rank = int(os.environ["RANK"])
    model = decoder()
    reference = copy.deepcopy(model)
    optimizer = sgd(reference.parameters())
    example = BATCHES[rank]  # that of the first rank has no padding
    strategy = Force("data_parallel")
    with compiled_with(model, example, 2, constraints=strategy) as compiled:
        assert compiled.plan.graph.full_masks == ("attention_mask",)
        for seed, padded in enumerate([(), (0,), (3,), (), (1, 2), ()]):
            batch = text(seed, padded)
            optimizer.zero_grad()
            expected = reference(**batch).loss
            expected.backward()
            optimizer.step()
            loss = compiled.train_step(**shard(batch, rank), local=True)
            assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
            with torch.no_grad():
                got = compiled.eval()(**shard(batch, rank), local=True)
                assert got.loss.item() == pytest.approx(reference.eval()(**batch).loss.item())
            compiled.train()
            reference.train()
        with pytest.raises(InputError, match=r"batches of ranks 0 and 1 differ"):
            compiled.train_step(**BATCHES[rank])
        whole = text(7, (2,))
        assert compiled.train_step(**whole).item() == pytest.approx(reference(**whole).loss.item())


if __name__ == "__main__":
    main()
