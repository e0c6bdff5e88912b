"""The script of each rank in test_spmd.py: shards of other sizes, passed with ``local=True``."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from torch import Tensor, nn

from autopar.base.errors import InputError
from autopar.runtime.compiled import Compiled
from tests.effort import EXHAUSTIVE
from tests.runtime.test_other_shapes import Net, Tagger, adamw, compile_two, rows, text

Batch = tuple[Tensor, ...]


def shard(batch: Batch, rank: int) -> Batch:
    return tuple(x.chunk(2)[rank].contiguous() for x in batch)


def refuse_different_shapes(compiled: Compiled, batches: list[Batch], rank: int) -> None:
    """Whether both shapes are known, or one, or none; nothing changes."""
    with pytest.raises(InputError, match=r"own part.*example's global batch.*leave local=True out"):
        compiled.train_step(*batches[0], local=True)
    for longer in (batches[0], batches[1]):
        for shorter in (batches[1], batches[2], batches[3]):
            if shorter[0].shape == longer[0].shape:
                continue
            odd = shard(shorter if rank else longer, rank)
            with pytest.raises(InputError, match=r"0 and 1 pass shards of different shapes"):
                compiled.train_step(*odd, local=True)
            with pytest.raises(InputError, match=r"0 and 1 pass shards of different shapes"):
                compiled.eval()(*odd, local=True)
            compiled.train()
    for batch in batches[:2]:
        given = batch if rank else shard(batch, rank)
        with pytest.raises(InputError, match=r"0 and 1 differ in local="):
            compiled.train_step(*given, local=rank == 0)


def train(model: nn.Module, batches: list[Batch], strategy: str, **options: int) -> None:
    """Losses, outputs and weights as one process's, whose batches are those of both ranks."""
    rank, reference = int(os.environ["RANK"]), copy.deepcopy(model)
    optimizer = adamw(reference.parameters())
    with compile_two(model, batches[0], strategy, **options) as compiled:
        refuse_different_shapes(compiled, batches, rank)
        for batch in batches:
            optimizer.zero_grad()
            expected = reference(*batch)
            expected.backward()
            optimizer.step()
            loss = compiled.train_step(*shard(batch, rank), local=True)
            assert loss.item() == pytest.approx(expected.item(), rel=1e-8)
            reference.eval()
            compiled.eval()
            got = compiled(*shard(batch, rank), local=True)
            torch.testing.assert_close(got, reference(*batch).detach())
            reference.train()
            compiled.train()
        state = compiled.full_state_dict()
        refuse_different_shapes(compiled, batches, rank)
        compiled.train_step(*shard(batches[0], rank), local=True)
    for name, tensor in reference.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-8, atol=1e-8)


def main() -> None:
    torch.manual_seed(0)
    lengths = [(8, 8), (6, 8), (8, 5), (2, 6), (12, 4), (6, 8), (8, 8)]
    texts = [text(seed, *shape) for seed, shape in enumerate(lengths)]
    fewer = texts if EXHAUSTIVE else texts[:4]
    train(Tagger().double(), texts, "data parallel")
    train(Tagger().double(), fewer, "zero3")
    samples = [rows(seed, num) for seed, num in enumerate((8, 6, 4, 8))]
    train(Net().double(), samples, "data parallel")
    train(Tagger().double(), fewer, "data parallel", num_microbatches=2)


if __name__ == "__main__":
    main()
