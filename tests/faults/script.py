"""The user's script: resume from the checkpoint, check the losses, and train until the fault.

Every rank runs it, or the parent of local workers. It records what it sees in its folder:
``resumed`` (step and losses after the checkpoint), ``pids``, ``fault_s`` (the time of the fault)
and ``error`` (the error that this process got, and when).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

import autopar
import autopar.api  # a fault in `compile` shall not strike its imports
from autopar.base.errors import AutoparError
from autopar.runtime.faults import liveness, progress, step_limit
from tests.faults.draw import OP_FAULTS, SCRIPT_FAULTS, Injection, draw
from tests.faults.model import batch, make_model, optimizer, order

NUM_CHECKED = 2
"""The number of steps after a checkpoint whose losses are compared."""
LIMIT_S = 50.0
"""Time after which a script that got no error reports it."""
FIRE_ANYWAY_S = 2.0
"""Time after which a fault happens even if its action has not been seen."""


class Script:
    def __init__(self, folder: Path, lane: Path, injection: Injection | None) -> None:
        self.folder = folder
        self.lane = lane
        self.injection = injection
        self.rank = int(os.environ["RANK"]) if "RANK" in os.environ else -1
        self.compiled: Any = None
        self.over = threading.Event()

    def run(self, plan: str, num_ranks: int, num_steps: int) -> None:
        liveness.SILENT_S, step_limit.STALL_S = 4.0, 5.0  # shorter than a user's limits
        self.note("pid", os.getpid())
        if self.rank >= 0 and "TORCHELASTIC_RUN_ID" not in os.environ:
            dist.init_process_group("gloo")
        with self.told_errors():
            self.note("begun", time.time())
            if self.at("compile"):
                self.fire_after(self.injection.delay_s)
            self.compiled = autopar.compile(
                make_model(), num_ranks, example_inputs=(batch(0),), optimizer=optimizer, seed=5,
                plan=plan, profile_limit_s=0, start_timeout_s=40.0, call_timeout_s=40.0,
            )  # fmt: skip
            self.note("workers", [*self.worker_pids()])
            if self.at("load"):
                self.fire_after(self.injection.delay_s / 30)
            step = self.resume()
            if self.at("first step"):
                self.fire_when_doing()
                self.train_until_error(step)
            self.check(step, num_steps)
            if self.injection is None:
                self.compiled.close()
                return
            self.compiled.save(self.lane / "last")
            self.act(step + num_steps)

    def act(self, step: int) -> None:
        """Do what the script does when the fault happens."""
        injection = self.injection
        assert injection is not None
        if injection.kind in SCRIPT_FAULTS:
            self.script_fault()
        elif injection.place in ("step", "load", "compile"):
            self.fire_when_doing()
        elif injection.place == "between steps":
            self.fire()
        elif injection.place == "close":
            self.fire_after(injection.delay_s / 30)
            self.compiled.close()
            time.sleep(0.3)  # a late fault still needs a victim
            self.over.set()
            return
        else:
            self.fire_after(injection.delay_s)
        self.train_until_error(step)

    def train_until_error(self, step: int) -> None:
        place = "" if self.injection is None else self.injection.place
        end_s = time.monotonic() + LIMIT_S
        while time.monotonic() < end_s:
            if place == "evaluation":
                self.compiled.eval()(batch(0))
            elif place == "save":
                self.compiled.train().save(self.lane / "last")
            else:
                self.compiled.train().train_step(batch(step))
                step += 1
        raise SystemExit("no error though a rank had a fault")

    def script_fault(self) -> None:
        assert self.injection is not None
        if self.injection.victim != self.rank:
            return
        self.note("fault_s", time.time(), common=True)
        if self.injection.kind == "script raises":
            raise OSError("the loader has lost its file")
        sys.exit(3 if self.injection.kind == "script exits" else 0)

    # --- state -----------------------------------------------------------------------------

    def resume(self) -> int:
        """Load the checkpoint; returns its step."""
        if not (self.lane / "last").exists():
            return 0
        self.compiled.load(self.lane / "last")
        state = self.compiled.optimizer_state_dict()["state"]
        return int(next(iter(state.values()))["step"])

    def check(self, step: int, num_steps: int) -> None:
        losses = [self.compiled.train_step(batch(step + i)).item() for i in range(num_steps)]
        self.note("resumed", {"step": step, "losses": losses})

    # --- faults ----------------------------------------------------------------------------

    def at(self, place: str) -> bool:
        return self.injection is not None and self.injection.place == place

    def worker_pids(self) -> tuple[int, ...]:
        return () if self.rank >= 0 else self.compiled._runner.group.pids

    def victim_pid(self) -> int | None:
        """The process to signal; None where another process signals itself."""
        assert self.injection is not None
        if self.rank >= 0:
            return os.getpid() if self.rank == self.injection.victim else None
        if self.injection.victim < 0:
            return os.getpid()
        if self.compiled is not None:
            pids = self.worker_pids()
        else:  # still starting: children of the fork server, by age
            servers = psutil.Process().children()
            workers = [child for server in servers for child in server.children()]
            pids = tuple(c.pid for c in sorted(workers, key=lambda c: c.create_time()))
        return pids[self.injection.victim] if self.injection.victim < len(pids) else None

    def fire(self) -> None:
        assert self.injection is not None
        if self.injection.kind in OP_FAULTS:
            if self.rank in (-1, self.injection.victim):
                order(self.folder, self.injection.victim, self.injection.kind)
            return
        deadline_s = time.monotonic() + 5.0
        while (pid := self.victim_pid()) is None and time.monotonic() < deadline_s:
            if self.rank >= 0 or self.over.is_set():
                return
            time.sleep(0.01)
        if pid is not None and not self.over.is_set():
            self.note("fault_s", time.time(), common=True)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.Signals[self.injection.kind])

    def fire_after(self, delay_s: float) -> None:
        threading.Timer(delay_s, self.fire).start()

    def fire_when_doing(self) -> None:
        """Cause the fault as soon as the victim is in the drawn action."""
        assert self.injection is not None
        if self.injection.kind in OP_FAULTS:
            self.fire()
            return
        doing = self.doing()
        pattern, end_s = self.injection.action, time.monotonic() + FIRE_ANYWAY_S

        def watch() -> None:
            while not re.search(pattern, doing()) and time.monotonic() < end_s:
                time.sleep(5e-5)
            self.fire()

        threading.Thread(target=watch, daemon=True).start()

    def doing(self) -> Callable[[], str]:
        assert self.injection is not None
        if self.rank >= 0 or self.injection.victim < 0:
            return progress.current
        return self.compiled._runner.group._workers[self.injection.victim].doing

    # --- what is written down --------------------------------------------------------------

    def note(self, name: str, value: Any, *, common: bool = False) -> None:
        path = self.folder / (name if common else f"{name}.{self.rank}")
        path.write_text(json.dumps(value))

    @contextlib.contextmanager
    def told_errors(self) -> Iterator[None]:
        try:
            yield
        except AutoparError as error:
            told = {
                "kind": type(error).__name__,
                "rank": getattr(error, "rank", None),
                "text": str(error),
                "at_s": time.time(),
            }
            self.note("error", told)
            self.over.set()
            raise


def main(folder: Path, lane: Path, plan: str, number: int | None, num_steps: int) -> None:
    injection = None if number is None else draw(number)
    num_ranks = int(os.environ["AUTOPAR_FAULT_RANKS"])
    Script(folder, lane, injection).run(plan, num_ranks, num_steps)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(
        Path(arguments[0]), Path(arguments[1]), arguments[2],
        None if arguments[3] == "none" else int(arguments[3]), int(arguments[4]),
    )  # fmt: skip
