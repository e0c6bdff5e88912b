"""Workers are pinned to cores of their own if the cores divide evenly, and not otherwise."""

from __future__ import annotations

import os
import sys

import pytest
import torch
import torch.distributed as dist

from autopar.cost_models.detect import usable_cores
from autopar.runtime.workers.group import WorkerGroup, cores_by_worker

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or usable_cores() != len(CORES),
    reason="cores cannot be told apart here, or are shares of time",
)


class Cores:
    def __init__(self, rank: int, world_size: int) -> None:
        del rank, world_size

    def own(self) -> list[int]:
        return sorted(os.sched_getaffinity(0))

    def sum_of_threads(self) -> set[tuple[int, ...]]:
        """The cores of the threads that a collective and a product of matrices start."""
        before = set(os.listdir("/proc/self/task"))
        dist.all_reduce(torch.ones(1 << 20))
        torch.ones(512, 512) @ torch.ones(512, 512)
        started = set(os.listdir("/proc/self/task")) - before
        return {tuple(sorted(os.sched_getaffinity(int(thread)))) for thread in started}


def test_each_has_its_own_where_they_go_out_exactly() -> None:
    if len(CORES) < 2:
        pytest.skip("one core")
    with WorkerGroup(len(CORES), service=Cores, threads_per_worker=1) as group:
        assert group.call("own") == [[core] for core in CORES]
        for own, threads in zip(group.call("own"), group.call("sum_of_threads")):
            assert threads <= {tuple(own)}


@pytest.mark.parametrize(
    ("num_workers", "num_threads"),
    [(1, max(1, len(CORES))), (len(CORES) + 1, 1), (max(2, len(CORES)), 2)],
)
def test_all_have_all_elsewhere(num_workers: int, num_threads: int) -> None:
    assert cores_by_worker(num_workers, num_threads) is None
    with WorkerGroup(num_workers, service=Cores, threads_per_worker=num_threads) as group:
        assert group.call("own") == [CORES] * num_workers


def test_a_container_with_shares_of_time_leaves_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.runtime.workers.group.usable_cores", lambda: len(CORES) - 1)
    assert cores_by_worker(len(CORES), 1) is None
