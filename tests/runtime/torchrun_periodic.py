"""The script of each rank in test_periodic_checkpoints.py: train with checkpoints, go on from them.

The first job fails to write one of them on rank 1, and ends before its last batch; the second takes
that batch.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.base.errors import InputError
from tests.oracles import reference_steps
from tests.runtime.processes import ProbedService

NUM_STEPS = 5
adamw = functools.partial(torch.optim.AdamW, lr=0.01)


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.outer(torch.tanh(self.inner(x))), y)


def make_batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(12, 8, generator=generator).double() for name in "xy"}


def make_model() -> nn.Module:
    return Regression().double()


def compiled_here() -> autopar.Compiled:
    return autopar.compile(
        make_model(), int(os.environ["WORLD_SIZE"]), example_inputs=make_batch(0),
        optimizer=adamw, profile_limit_s=0,
    )  # fmt: skip


def main(folder: Path) -> None:
    rank, saved = int(os.environ["RANK"]), folder / "saved"
    told = folder / f"rank{rank}.json"
    with compiled_here() as compiled:
        done = compiled.checkpoint_every(2, saved)
        losses = json.loads(told.read_text()) if done else []
        for step in range(done, NUM_STEPS if done else NUM_STEPS - 1):
            if step == 1 and rank == 1:
                ProbedService.limit_file_size(None, 200)  # type: ignore[arg-type]
            losses.append(compiled.train_step(**make_batch(step)).item())
            if step == 1:
                compiled._runner.save_outcomes(wait=True)
                with pytest.raises(InputError, match=r"-00000002': rank 1: OSError: .*too large"):
                    compiled.train_step(**make_batch(step))
                ProbedService.limit_file_size(None, -1)  # type: ignore[arg-type]
    assert [path.name for path in saved.iterdir()] == ["step-00000004"]
    if done:
        assert done == NUM_STEPS - 1
        batches = [make_batch(step) for step in range(NUM_STEPS)]
        assert losses == pytest.approx(reference_steps(make_model(), batches, adamw).losses)
    told.write_text(json.dumps(losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
