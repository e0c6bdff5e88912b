"""Ranks with the environment that torchrun gives them, forked from a process with their imports.

Starting torchrun and importing torch and autopar in every rank takes longer than what most tests of
ranks check. `tests.runtime.test_spmd.torchrun` starts the real launcher.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
LIMIT_S = 150.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "tests.runtime.processes",
        "transformers.models.gpt2.modeling_gpt2",
        "transformers.models.llama.modeling_llama",
        "tests.runtime.rank_imports",
    ]
)


def run_ranks(num_ranks: int, module: str, *arguments: str) -> None:
    """Run ``python -m module arguments`` as each rank of a job on this machine.

    Raises AssertionError, with the end of the ranks' output, if a rank fails, which ends the
    others, or does not exit in `LIMIT_S` seconds.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks), "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    with tempfile.NamedTemporaryFile() as log:
        ranks = [
            _context.Process(
                target=_run,
                args=(env | {"RANK": str(i), "LOCAL_RANK": str(i)}, log.name, module, arguments),
            )
            for i in range(num_ranks)
        ]
        for rank in ranks:
            rank.start()
        try:
            _wait(ranks)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        output = Path(log.name).read_text(errors="replace")[-6000:]
    codes = [rank.exitcode for rank in ranks]
    assert codes == [0] * num_ranks, f"exit codes {codes}\n{output}"


def _wait(ranks: list[ForkServerProcess]) -> None:
    """Until all ranks have exited, one has failed, or the time is over."""
    deadline_s = time.monotonic() + LIMIT_S
    while any(rank.exitcode is None for rank in ranks) and not any(rank.exitcode for rank in ranks):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return
        connection.wait([rank.sentinel for rank in ranks if rank.exitcode is None], left_s)


def _run(env: dict[str, str], log: str, module: str, arguments: tuple[str, ...]) -> None:
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(env)
    torch.set_num_threads(1)
    sys.argv = [module, *arguments]
    multiprocessing.set_start_method("fork", force=True)  # what scripts start is forked, as usual
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # multiprocessing does not
