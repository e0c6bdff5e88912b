"""The model under fault injection: two blocks with dropout, and an op that fails on command.

Local workers import this module for the op; the command to each rank is a file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.ir.graph import Op, Value
from autopar.rules import Space, SpaceBuilder, layout

WIDTH, ROWS = 16, 8
FOLDER = "AUTOPAR_FAULT_FOLDER"
"""Environment variable: where `order` writes."""


def order(folder: Path, rank: int, kind: str) -> None:
    """Command a rank to fail in a given way at its next call of the op."""
    draft = folder / f"draft{rank}"
    draft.write_text(kind)
    draft.rename(folder / f"order{rank}")


@torch.library.custom_op("faults::point", mutates_args=())
def point(x: Tensor) -> Tensor:
    _obey()
    return x.clone()


def _obey() -> None:
    folder = os.environ.get(FOLDER)
    if folder is None:
        return
    path = Path(folder, f"order{os.environ.get('RANK')}")
    try:
        kind = path.read_text()
        path.unlink()
    except FileNotFoundError:
        return
    Path(folder, "fault_s").write_text(str(time.time()))
    if kind == "op raises":
        raise OSError("told to fail")
    if kind == "op exits":
        os._exit(7)
    time.sleep(1000.0)


point.register_fake(lambda x: torch.empty_like(x))
point.register_autograd(lambda ctx, grad: grad)


@autopar.register_rule("faults.point.default")
def _space(op: Op, inputs: Sequence[Value], outputs: Sequence[Value | None]) -> Space:
    builder = SpaceBuilder()
    row, column = (builder.dim(name, size) for name, size in zip("mn", inputs[0].shape))
    return builder.build([layout(row, column)], [layout(row, column)])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, WIDTH))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + point(block(x))
        return x.square().mean()


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


OPTIONS: dict[str, dict[str, Any]] = {
    "data_parallel": {"constraints": [autopar.Force("data_parallel")]},
    "zero3": {"constraints": [autopar.Force("zero3")]},
    "tensor_parallel": {"constraints": [autopar.Force("tensor_parallel")]},
    "micro_batches": {"constraints": [autopar.Force("data_parallel")], "num_microbatches": 2},
    "1f1b": {"schedule": "1f1b", "num_stages": 2, "num_microbatches": 2},
    "zb_h1": {"schedule": "zb_h1", "num_stages": 2, "num_microbatches": 4},
    "chimera": {"schedule": "chimera", "num_stages": 2, "num_microbatches": 2},
    "conventional": {
        "schedule": "conventional", "num_stages": 3, "constraints": [autopar.Force("data_parallel")]
    },
    "reverse_first_k": {
        "schedule": "reverse_first_k", "num_stages": 4, "constraints": [autopar.Force("zero3")]
    },
    "data x 1f1b": {
        "schedule": "1f1b", "num_stages": 2, "num_microbatches": 2, "mesh": {"dp": 2},
        "constraints": [autopar.Force("data_parallel")],
    },
}  # fmt: skip
"""The options of ``autopar.plan`` for each plan of `tests.faults.draw.PLANS`."""
