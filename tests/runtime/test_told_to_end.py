"""SIGTERM, as a launcher sends it when one rank has ended: the others still say which one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

LIMIT_S = 60.0
ROOT = Path(__file__).parents[2]
SCRIPT = """
import functools, os, sys, time
import torch
import autopar

held = []

class Held(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x, labels):
        if held:  # an error makes autopar look for the line that it is from
            raise ValueError("of the model")
        held.append(True)
        try:
            print("held", flush=True)
            time.sleep(100)
        except BaseException:
            {instead}
        return torch.nn.functional.cross_entropy(self.layer(x), labels)

print("joins", flush=True)
batch = {{"x": torch.randn(8, 4), "labels": torch.randint(0, 2, (8,))}}
autopar.compile(
    Held(), 2, example_inputs=batch, optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    profile_limit_s=0, check_gradients=False,
)
"""
INSTEAD = {
    "another error": "raise ValueError('of the model')",
    "an error that hides it": "raise ValueError('of the model') from None",
    "nothing": "pass",
}


@contextlib.contextmanager
def start(rank: int, port: int, instead: str = "raise") -> Iterator[subprocess.Popen[str]]:
    env = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    env |= {"MASTER_PORT": str(port), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(instead=instead)],
        env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    for found in process.stdout:
        if found.strip() == line:
            return
    raise AssertionError(process.communicate()[1])


@pytest.fixture
def store() -> dist.TCPStore:
    """The launcher holds it, as torchrun does."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_a_rank_that_never_joined_is_named(store: dist.TCPStore) -> None:
    with start(0, store.port) as process:
        deadline_s = time.monotonic() + LIMIT_S
        while not any(key.endswith("join/0/0") for key in store.list_keys()):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "rank 1 of 2 had not joined when SIGTERM ended this process" in errors


@pytest.mark.sampled(1)
@pytest.mark.parametrize("instead", INSTEAD)
def test_code_that_catches_everything_hides_no_fault(store: dist.TCPStore, instead: str) -> None:
    with start(0, store.port, INSTEAD[instead]) as survivor, start(1, store.port) as victim:
        wait_for(survivor, "held")
        wait_for(victim, "held")
        victim.kill()
        survivor.send_signal(signal.SIGTERM)
        _, errors = survivor.communicate(timeout=LIMIT_S)
        victim.communicate(timeout=LIMIT_S)
    assert survivor.returncode == 1
    *_, last = [line for line in errors.splitlines() if "Error: " in line]
    assert "WorkerError: rank 1 of 2" in last, errors
    assert 'File "<string>"' in errors  # a traceback, or the stack of a call that took too long


def test_a_job_without_a_fault_ends_as_sigterm_ends_it(store: dist.TCPStore) -> None:
    with start(0, store.port) as first, start(1, store.port) as second:
        for process in (first, second):
            wait_for(process, "held")
        for process in (first, second):
            process.send_signal(signal.SIGTERM)
        for process in (first, second):
            process.communicate(timeout=LIMIT_S)
    assert first.returncode == second.returncode == -signal.SIGTERM
