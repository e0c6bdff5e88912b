"""Faults in scripts that every rank runs: all end, with an error that names the faulty rank.

Started by ``torchrun``, which ends the other processes itself, and as plain processes, which nobody
ends. ``make exhaustive`` tries every fault under both, ``make faults`` drawn ones.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.effort import EXHAUSTIVE
from tests.models.zoo import build
from tests.oracles import reference_steps, to_double
from tests.runtime.test_pipeline_faults import has_ended
from tests.runtime.test_spmd import ROOT
from tests.runtime.torchrun_faults import sgd

MODULE = "tests.runtime.torchrun_faults"
TWO = {"num_stages": 2, "num_microbatches": 4, "schedule": "zb_h1"}
FOUR = {"num_stages": 2, "num_microbatches": 2, "mesh": {"dp": 2}}
WAYS = {
    "kill": r"rank {at} of {num} \(process \d+ on .*\) died in action \d{action}\d\b",
    "stop": r"rank {at} of {num} .* hangs in action \d{action}\d\b.* no sign of life",
    "sleep": r"rank {at} of {num} .* hangs in action \d{action}\d of train_step",
    "first stop": r"rank {at} of {num} .* hangs in action \d{action}\d\b.* its process is stopped",
    "first sleep": r"rank {at} of {num} .* hangs in action \d{action}\d of .*: no rank has used",
    "between stop": r"rank {at} of {num} .* hangs outside of a step: it gives no sign of life, ",
}


def start(
    launcher: str, num: int, log: Path, *arguments: str, module: str = MODULE
) -> list[subprocess.Popen[bytes]]:
    """The processes of one job, or the one that starts them."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, *arguments]
    with log.open("ab") as out:
        if launcher == "torchrun":
            elastic = ["-m", "torch.distributed.run", "--standalone", "--max-restarts", "0"]
            command[1:1] = [*elastic, f"--nproc-per-node={num}"]
            return [subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        env.update(WORLD_SIZE=str(num), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        return [
            subprocess.Popen(
                command, cwd=ROOT, env={**env, "RANK": str(rank)}, stdout=out, stderr=out
            )
            for rank in range(num)
        ]


def ended(processes: list[subprocess.Popen[bytes]], limit_s: float) -> list[int]:
    """The exit codes; a process left behind fails the test, and is killed."""
    deadline_s = time.monotonic() + limit_s
    try:
        return [p.wait(max(0.1, deadline_s - time.monotonic())) for p in processes]
    finally:
        for process in processes:
            process.kill()


CASES = [
    ("torchrun", "kill", 2, 1, "F", TWO),
    ("plain", "stop", 2, 0, "I", TWO),
    ("plain", "first stop", 2, 1, "F", TWO),
    ("torchrun", "first sleep", 2, 1, "F", TWO),
    ("plain", "between stop", 2, 1, "", TWO),
]
if EXHAUSTIVE:
    CASES.append(("plain", "kill", 4, 3, "B", FOUR))
    CASES += [
        ("plain", fault, 2, 0, "F", TWO) for fault in ("first stop", "first sleep", "between stop")
    ]
    CASES += [
        (launcher, fault, 2, at, action, TWO)
        for launcher in ("torchrun", "plain")
        for fault in ("kill", "stop", "sleep")
        for at, action in ((0, "F"), (1, "W"))
    ]
    CASES += [("torchrun", fault, 4, at, "F", FOUR) for fault in ("stop", "sleep") for at in (0, 2)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("launcher", "fault", "num", "at", "action", "options"), CASES)
def test_a_fault_ends_all_and_training_resumes(
    launcher: str, fault: str, num: int, at: int, action: str, options: dict[str, Any],
    tmp_path: Path,
) -> None:  # fmt: skip
    log = tmp_path / "log"
    plan = json.dumps(options)
    pattern = f"action \\d+{action}\\d"
    started = start(launcher, num, log, str(tmp_path), fault, str(at), pattern, plan)
    codes = ended(started, 150)
    text = log.read_text()
    assert all(codes), text[-6000:]
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in range(num)]
    assert all(map(has_ended, pids)), text[-6000:]
    named = WAYS[fault].format(at=at, num=num, action=action)
    # Who waits for a process that lives on can only be ended, and says so itself.
    ended_by_watch = {int(rank) for rank in re.findall(r"rank (\d+) is stuck in train_step", text)}
    for rank in {*range(num)} - {at} - ended_by_watch:
        told = json.loads((tmp_path / f"error{rank}.json").read_text())
        assert told["rank"] == at
        assert re.match(named, told["text"]), told["text"]
        assert told["late_s"] < 30
    assert len(re.findall("WorkerError: " + named, text)) >= num - 1
    if fault == "kill":
        resumed_equals_eager(num, log, tmp_path)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("how", "rank"), [("compute", 1), ("hold", 1), ("hold", 0)])
def test_a_first_step_that_only_takes_long_is_waited_for(
    how: str, rank: int, tmp_path: Path
) -> None:
    """Also while C code holds the interpreter's lock, so that there is no heartbeat."""
    log = tmp_path / "log"
    arguments = (str(tmp_path), f"first {how}", str(rank), r"action \dF\d", json.dumps(TWO))
    codes = ended(start("plain", 2, log, *arguments), 150)
    assert not any(codes), log.read_text()[-6000:]


def test_training_goes_on_after_an_error_in_a_step(tmp_path: Path) -> None:
    """Tokens outside the vocabulary: all ranks name the one whose embedding rejects them."""
    log = tmp_path / "log"
    codes = ended(start("torchrun", 2, log, str(tmp_path), "raise", "0", "", json.dumps(TWO)), 150)
    assert not any(codes), log.read_text()[-6000:]
    for rank in range(2):
        told = json.loads((tmp_path / f"error{rank}.json").read_text())
        assert told["rank"] == 0
        assert re.match(r"rank 0 of 2 raised IndexError: .* in action 0F0 of tr", told["text"])
    losses_equal_eager(2, tmp_path)


def resumed_equals_eager(num: int, log: Path, folder: Path) -> None:
    """Resume as plain processes, under another plan."""
    options = json.dumps({"num_stages": num, "num_microbatches": 2})
    codes = ended(start("plain", num, log, str(folder), "resume", "0", "", options), 150)
    assert not any(codes), log.read_text()[-6000:]
    losses_equal_eager(num, folder)


def losses_equal_eager(num: int, folder: Path) -> None:
    """Those from the third step on."""
    model, make_batch = build("gpt2")
    batches = [to_double(make_batch(seed)) for seed in range(4)]
    expected = reference_steps(model.double(), batches, sgd).losses[2:]
    for rank in range(num):
        got = json.loads((folder / f"losses{rank}.json").read_text())
        assert got == pytest.approx(expected, abs=2e-6)
