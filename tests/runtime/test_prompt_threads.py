"""gloo's threads run before those that compute where that is allowed, and as ever elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from autopar.prompt_threads import make_gloo_prompt, prompt_threads
from autopar.runtime.workers.group import WorkerGroup

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux' real-time priorities")
NOBODY = 65534


def policies() -> dict[str, set[int]]:
    """Scheduling policies of this process's threads by their names."""
    found: dict[str, set[int]] = {}
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/comm") as file:
            policy = os.sched_getscheduler(int(thread)) & ~os.SCHED_RESET_ON_FORK
            found.setdefault(file.read().strip(), set()).add(policy)
    return found


def is_allowed() -> bool:
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        return False
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return True


class Policies:
    def __init__(self, rank: int, world_size: int) -> None:
        del rank, world_size

    def after_a_sum(self) -> tuple[float, int, dict[str, set[int]]]:
        x = torch.ones(1 << 20)
        dist.all_reduce(x)
        return float(x[0]), os.sched_getscheduler(0), policies()


def test_messages_go_first_and_computing_does_not() -> None:
    if not is_allowed():
        pytest.skip("this process may not use real-time priorities")
    with WorkerGroup(2, service=Policies, threads_per_worker=1) as group:
        for total, own, by_name in group.call("after_a_sum"):
            assert total == 2
            assert own == os.SCHED_OTHER
            of_gloo = {name: found for name, found in by_name.items() if "gloo" in name}
            assert {"gloo_tcp_loop", "pt_gloo_runloop"} <= of_gloo.keys()
            assert all(found == {os.SCHED_FIFO} for found in of_gloo.values()), by_name


def test_threads_of_a_group_that_is_there_already_go_first_too() -> None:
    if not is_allowed():
        pytest.skip("this process may not use real-time priorities")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(1))  # its threads have their names by then
        make_gloo_prompt()
        found = policies()
    finally:
        dist.destroy_process_group()
    assert all(("gloo" in name) == (os.SCHED_FIFO in found[name]) for name in found), found


def test_nothing_changes_where_it_is_not_allowed() -> None:
    """In a process that has given up the right."""
    script = f"""
import os, torch, torch.distributed as dist
from autopar.prompt_threads import prompt_threads
if os.getuid() == 0:
    os.setuid({NOBODY})
store = dist.HashStore()
with prompt_threads("cpu"):
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
print({{os.sched_getscheduler(int(t)) for t in os.listdir("/proc/self/task")}})
dist.destroy_process_group()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str({os.SCHED_OTHER})


def test_other_devices_threads_are_left_alone() -> None:
    with prompt_threads("cuda"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert set.union(*policies().values()) == {os.SCHED_OTHER}
    finally:
        dist.destroy_process_group()
