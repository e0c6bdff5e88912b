"""Local workers flush denormal numbers to zero on every thread; this process does not."""

from __future__ import annotations

import torch

from autopar.runtime.workers.group import WorkerGroup

DENORMAL = 1e-39


class Scaler:
    def __init__(self, rank: int, world_size: int) -> None:
        del rank, world_size

    def num_left(self) -> tuple[int, int]:
        """The number of torch's threads, and of denormal numbers that they do not flush to zero."""
        numbers = torch.full((1 << 20,), DENORMAL)
        return torch.get_num_threads(), int((numbers * 1.0 != 0).sum())


def test_workers_take_denormals_for_zero() -> None:
    with WorkerGroup(2, service=Scaler, threads_per_worker=2) as group:
        assert group.call("num_left") == [(2, 0), (2, 0)]
    assert Scaler(0, 1).num_left()[1] == 1 << 20
