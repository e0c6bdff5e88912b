"""The script of each rank in test_torchrun_faults.py: train a pipeline until one rank fails.

Arguments: a folder, the fault, the rank that has it, the action that it is in, and the options of
``autopar.compile`` as JSON. ``first stop`` stops in the first step of all, ``between stop`` outside
of a step. Without a fault (``resume``) it trains on from the checkpoint.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import autopar
from autopar.base.errors import StepError, WorkerError
from autopar.runtime.faults import liveness, progress, step_limit
from tests.models.zoo import build
from tests.oracles import to_double
from tests.runtime.held_up import hold_up

sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "sleep": signal.SIGUSR1,
    "compute": signal.SIGUSR2,
    "hold": signal.SIGURG,
}


def main(folder: Path, fault: str, at: int, action: str, options: dict[str, object]) -> None:
    rank = int(os.environ["RANK"])
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        dist.init_process_group("gloo")
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    liveness.SILENT_S, step_limit.STALL_S = 5.0, 6.0  # a test need not wait for what a user would
    model, make_batch = build("gpt2")
    batches = [to_double(make_batch(seed)) for seed in range(4)]
    compiled = autopar.compile(
        model.double(), int(os.environ["WORLD_SIZE"]),
        example_inputs=batches[0], optimizer=sgd, profile_limit_s=0, **options,
    )  # fmt: skip
    if fault == "resume":
        compiled.load(folder / "last")
        losses = [compiled.train_step(**batch).item() for batch in batches[2:]]
        compiled.close()
        (folder / f"losses{rank}.json").write_text(json.dumps(losses))
        return
    when, _, fault = fault.rpartition(" ")
    if when != "first":
        compiled.train_step(**batches[0])
        compiled.train_step(**batches[1])
        compiled.save(folder / "last")
        compiled._runner.step_limit.longest_s = 0.1  # the first step also made its kernels
    signal.signal(signal.SIGUSR1, lambda *_: hold_up("sleep", 1000.0))
    signal.signal(signal.SIGUSR2, lambda *_: hold_up("compute", 12.0))
    signal.signal(signal.SIGURG, lambda *_: hold_up("hold", 12.0))
    if rank == at and when == "between":
        os.kill(os.getpid(), SIGNALS[fault])
    elif rank == at and fault in SIGNALS:
        when_doing(action, lambda: os.kill(os.getpid(), SIGNALS[fault]))
    if fault == "raise":
        wrong = {**batches[2], "input_ids": batches[2]["input_ids"] + 1000}  # no such words
        try:
            compiled.train_step(**wrong)
        except StepError as error:
            told = {"text": str(error), "rank": error.rank}
            (folder / f"error{rank}.json").write_text(json.dumps(told))
        losses = [compiled.train_step(**batch).item() for batch in batches[2:]]
        compiled.close()
        (folder / f"losses{rank}.json").write_text(json.dumps(losses))
        return
    well_s = time.time()
    try:
        for step in range(2, 10_000):
            well_s = time.time()
            compiled.train_step(**batches[step % 4])
            if fault in ("compute", "hold"):
                return
    except WorkerError as error:
        told = {"text": str(error), "rank": error.rank, "late_s": time.time() - well_s}
        (folder / f"error{rank}.json").write_text(json.dumps(told))
        raise


def when_doing(pattern: str, do: Callable[[], None]) -> None:
    """Call ``do`` as soon as this process is in such an action."""

    def watch() -> None:
        while not re.search(pattern, progress.current()):
            time.sleep(5e-5)
        do()

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], json.loads(sys.argv[5]))
