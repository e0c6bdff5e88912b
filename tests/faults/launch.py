"""The launcher of one job: it starts the processes, waits within a limit, and finds what they left.

Everything here runs in a process with one thread that has imported torch. A rank is forked from it
and exits as an interpreter does, by unwinding the stack, so no caller may catch what a script
raises.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.faults.model import FOLDER
from tests.faults.script import main as script

ROOT = Path(__file__).parents[2]
LIMIT_S = 100.0
"""Time after which a job counts as hung."""
TORCHRUN_S = 45.0
"""How long torchrun may take to end its processes: after 30 s it kills those that do not react."""
GONE_S = 20.0
"""How long other processes of a job may outlive those that were waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One launch. ``number`` is that of its fault, None without one."""

    folder: Path
    lane: Path
    launcher: str
    num_ranks: int
    plan: Path
    number: int | None
    num_steps: int

    @property
    def arguments(self) -> list[str]:
        number = "none" if self.number is None else str(self.number)
        return [str(self.folder), str(self.lane), str(self.plan), number, str(self.num_steps)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The remains of a job: exit codes by process, texts, and processes that had to be killed."""

    codes: tuple[int | None, ...]
    log: str
    orphans: tuple[str, ...]
    strays: tuple[str, ...]
    told: dict[str, Any]


def run(job: Job) -> Outcome:
    job.folder.mkdir(parents=True, exist_ok=True)
    (job.folder / "tmp").mkdir(exist_ok=True)
    pids = _start(job)
    codes = _wait(pids, LIMIT_S, TORCHRUN_S if job.launcher == "torchrun" else 0.0)
    orphans = _end_orphans(job, pids)
    told = {
        path.name: json.loads(path.read_text() or "null")
        for path in job.folder.iterdir()
        if path.is_file() and path.name.split(".")[0] in ("error", "resumed", "fault_s", "workers")
    }
    return Outcome(
        codes=tuple(codes),
        log=(job.folder / "log").read_text(errors="replace"),
        orphans=tuple(orphans),
        strays=tuple(sorted(p.name for p in (job.folder / "tmp").iterdir())),
        told=told,
    )


def _start(job: Job) -> list[int]:
    env = {
        FOLDER: str(job.folder),
        "AUTOPAR_FAULT_RANKS": str(job.num_ranks),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(job.folder / "tmp"),
        "TORCHINDUCTOR_CACHE_DIR": str(job.folder / "torch"),  # torch keeps it between runs
    }
    if job.launcher == "local":
        return [_fork(job, env)]
    if job.launcher == "torchrun":
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "0",
            f"--nproc-per-node={job.num_ranks}", "-m", "tests.faults.script", *job.arguments,
        ]  # fmt: skip
        with (job.folder / "log").open("ab") as log:
            started = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **env}, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        return [started.pid]
    env |= {"WORLD_SIZE": str(job.num_ranks), "MASTER_ADDR": "127.0.0.1"}
    env["MASTER_PORT"] = str(_free_port())
    return [_fork(job, {**env, "RANK": str(rank)}) for rank in range(job.num_ranks)]


def _free_port() -> int:
    """A port that is free, and is given to no other socket of the machine in the meantime."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)  # below those of outgoing sockets
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("", port))
            return port


def _fork(job: Job, env: dict[str, str]) -> int:
    """Fork a process that runs the script and exits as an interpreter does."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    os.environ.update(env)
    tempfile.tempdir = None
    log = os.open(job.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    script(job.folder, job.lane, str(job.plan), job.number, job.num_steps)
    sys.exit(0)


def _wait(pids: list[int], limit_s: float, end_s: float) -> list[int | None]:
    """Exit codes of the processes; None for one that had to be ended at the limit.

    A stopped process cannot exit by itself: its peers have to kill it before the limit. One that is
    ended may first end its own processes for ``end_s``, as torchrun does.
    """
    codes: dict[int, int | None] = {}
    _collect(codes, pids, limit_s)
    late = [pid for pid in pids if pid not in codes]
    for pid in late:
        os.kill(pid, signal.SIGTERM)
    _collect(codes, late, end_s)
    for pid in late:
        if pid not in codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        codes[pid] = None
    return [codes[pid] for pid in pids]


def _collect(codes: dict[int, int | None], pids: list[int], limit_s: float) -> None:
    """Add the exit codes of processes that end within the limit."""
    deadline_s = time.monotonic() + limit_s
    while any(pid not in codes for pid in pids) and time.monotonic() < deadline_s:
        for pid in pids:
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)


def _end_orphans(job: Job, pids: list[int]) -> list[str]:
    """Kill processes of the job that outlive those waited for; returns a text for each."""
    deadline_s = time.monotonic() + GONE_S
    while (left := _processes_of(job, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    texts = []
    for process in left:
        texts.append(f"{process.pid} ({process.status()})")
        process.kill()
    return texts


def _processes_of(job: Job, pids: list[int]) -> list[psutil.Process]:
    """The processes with the job's mark in their environment.

    They are local workers, processes of torchrun, and their children. A forked rank has its
    parent's environment and has been waited for.
    """
    found = []
    mark = f"{FOLDER}={job.folder}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                process = psutil.Process(int(entry.name))
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        except (OSError, psutil.Error):  # it has exited meanwhile
            continue
    return found
