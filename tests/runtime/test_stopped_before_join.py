"""A rank that is stopped before it calls `autopar.compile` is named, where the host shows it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autopar.runtime.faults.liveness import is_stopped

ROOT = Path(__file__).parents[2]
NAMED_S = 30.0
SCRIPT = """
import functools, os, signal
import torch, torch.distributed as dist
import autopar, autopar.api

dist.init_process_group("gloo")
dist.barrier()
if os.environ["RANK"] == os.environ["STOPPED"]:
    os.kill(os.getpid(), signal.SIGSTOP)
batch = {"input": torch.zeros(12, 4)}
optimizer = functools.partial(torch.optim.SGD, lr=0.1)
autopar.compile(
    torch.nn.Linear(4, 2), int(os.environ["WORLD_SIZE"]), example_inputs=batch,
    loss_fn=lambda x: x.square().mean(), optimizer=optimizer, profile_limit_s=0,
)
"""


@pytest.mark.sampled(1)
@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="needs Linux's /proc")
@pytest.mark.parametrize(("num_ranks", "stopped"), [(2, 1), (3, 1), (2, 0)])
def test_it_is_named_and_killed(num_ranks: int, stopped: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {
        **os.environ, "WORLD_SIZE": str(num_ranks), "STOPPED": str(stopped),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(num_ranks):
            process = subprocess.Popen(
                [sys.executable, "-c", SCRIPT], env={**env, "RANK": str(rank)},
                stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            stack.callback(process.kill)
            ranks.append(process)
        victim = ranks[stopped]
        end_s = time.monotonic() + 60.0
        while not is_stopped(victim.pid) and victim.poll() is None and time.monotonic() < end_s:
            time.sleep(0.01)
        for process in ranks:
            if process is not victim:
                _, errors = process.communicate(timeout=NAMED_S)
                what = f"WorkerError: rank {stopped} of {num_ranks} is stopped"
                assert what in errors, errors
        assert victim.wait(timeout=5.0) == -signal.SIGKILL
