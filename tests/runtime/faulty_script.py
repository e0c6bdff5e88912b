"""The script of each rank in test_faults_between_steps.py; one rank has a fault.

Arguments: a folder, the place and the kind of the fault, and the rank that has it. Every other rank
writes down the error that it is told, and how long after the fault it was.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.base.errors import WorkerError
from autopar.runtime.faults import liveness, progress

NUM_STEPS = 3
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}
IN_CALL = {
    "in compile": "the start of compile()",
    "in evaluation": "the start of a forward pass",
    "in save": "the start of save()",
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class Fault:
    """A fault on one rank at one place."""

    def __init__(self, folder: Path, place: str, kind: str, *, is_here: bool) -> None:
        self.folder, self.place, self.kind, self.is_here = folder, place, kind, is_here

    def at(self, place: str) -> None:
        if not self.is_here or place != self.place:
            return
        if place in IN_CALL:  # in a call that comes next
            when_doing(IN_CALL[place], self.have)
        else:
            self.have()

    def have(self) -> None:
        (self.folder / "fault_s").write_text(str(time.time()))
        if self.kind in SIGNALS:
            os.kill(os.getpid(), SIGNALS[self.kind])
        elif self.kind == "raise":
            raise OSError("the loader has lost its file")
        elif self.kind == "exit":
            sys.exit(3)
        elif self.kind == "leave":
            sys.exit(0)


def main(folder: Path, place: str, kind: str, at: int) -> None:
    liveness.SILENT_S = 5.0  # a test need not wait for what a user would
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    try:
        train(folder, Fault(folder, place, kind, is_here=rank == at))
    except WorkerError as error:
        late_s = time.time() - float((folder / "fault_s").read_text())
        told = {"text": str(error), "rank": error.rank, "late_s": late_s}
        (folder / f"error{rank}.json").write_text(json.dumps(told))
        raise


def train(folder: Path, fault: Fault) -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(8, 8)
    fault.at("in compile")
    compiled = autopar.compile(
        model, int(os.environ["WORLD_SIZE"]), example_inputs=(x,), profile_limit_s=0,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    )  # fmt: skip
    fault.at("after compile")
    for _ in range(NUM_STEPS):
        compiled.train_step(x)
        fault.at("between steps")
    fault.at("in evaluation")
    compiled.eval()(x)
    fault.at("after evaluation")
    compiled.train_step(x)
    fault.at("in save")
    compiled.save(folder / "saved")
    compiled.train_step(x)
    compiled.close()


def when_doing(text: str, do: Callable[[], None]) -> None:
    """Call ``do`` as soon as this process is doing that."""

    def watch() -> None:
        while text not in progress.current():
            time.sleep(5e-5)
        do()

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
