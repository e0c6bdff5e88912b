"""A process that ends right after its last collective exits cleanly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_NUM_JOBS = 8  # without the wait, more than half of such jobs abort

_FIND = """
import time

import torch.distributed as dist
from autopar.runtime.faults import gloo_threads

assert gloo_threads.threads() == []
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
deadline_s = time.monotonic() + 60.0
while not gloo_threads.threads():  # a thread names itself once it runs
    assert time.monotonic() < deadline_s
    time.sleep(0.001)
"""


def test_gloos_threads_are_waited_for_at_exit(tmp_path: Path) -> None:
    for job in range(_NUM_JOBS):
        store = str(tmp_path / str(job))
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.runtime.gloo_exit", str(rank), store],
                stderr=subprocess.PIPE, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        for rank in ranks:
            _, errors = rank.communicate(timeout=120)
            assert rank.returncode == 0, errors


def test_the_threads_are_found_by_their_name() -> None:
    assert subprocess.run([sys.executable, "-c", _FIND], timeout=120, check=False).returncode == 0
