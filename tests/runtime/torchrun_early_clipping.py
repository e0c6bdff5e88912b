"""What each process of `tests.runtime.test_early_clipping` runs under torchrun."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import autopar
from tests.models.zoo import build
from tests.runtime.test_early_clipping import compiled_by, trained


def main(folder: Path) -> None:
    """Train under ZeRO-3, clipped by a second pass; write norms and weights."""
    model, make_batch = build("mlp")
    batches = [make_batch(step) for step in range(3)]
    with compiled_by(
        "second_pass", model, batches[0], 2, constraints=[autopar.Force("zero3")]
    ) as compiled:
        found = {"norms": trained(compiled, batches), "state": compiled.full_state_dict()}
        torch.save(found, folder / f"rank{dist.get_rank()}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
