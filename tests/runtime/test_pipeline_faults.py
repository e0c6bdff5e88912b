"""Faults during a pipeline's step: every process ends, and the error names the action.

A worker is killed at some kinds of action of a running step; ``make exhaustive`` does so at each,
five times.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar.base.errors import WorkerError
from autopar.runtime.faults import liveness, step_limit
from autopar.schedules import Durations, with_recomputation, with_reductions
from autopar.schedules import build as build_schedule
from tests.effort import EXHAUSTIVE
from tests.models.zoo import build
from tests.oracles import reference_steps, to_double
from tests.runtime.held_up import HeldUp

NUM_KILLS = 50 if EXHAUSTIVE else 3
ZB_H1 = {"schedule": "zb_h1"}
PLAIN = build_schedule("1f1b", num_stages=2, num_microbatches=4)
REDUCES = {"schedule": with_reductions(PLAIN, Durations(F=1.0, I=1.0, W=1.0, G=0.5))}
# Kinds of action, each under a schedule that has it.
KINDS: list[tuple[str, dict[str, Any]]] = [
    (r"action \d+F\d+", ZB_H1),
    (r"action \d+SEND_[FB]\d+", ZB_H1),
    (r"action \d+R\d+", {"schedule": with_recomputation(PLAIN, [0, 1])}),
    (r"action \d+W\d+", ZB_H1),
    (r"action \d+RECV_[FB]\d+", {"schedule": "1f1b"}),
    (r"the update", ZB_H1),
    (r"action \d+I\d+", ZB_H1),
    (r"action \d+B\d+", {"schedule": "1f1b"}),
    (r"action \d+G", REDUCES),
    (r"the (reductions|last sends)", {"schedule": "chimera"}),
]
sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@functools.cache
def prepared() -> tuple[Any, list[dict[str, Tensor]]]:
    model, make_batch = build("gpt2")
    return model.double(), [to_double(make_batch(seed)) for seed in range(4)]


def pipeline(**options: Any) -> Any:
    model, batches = prepared()
    return autopar.compile(
        model, 2, example_inputs=batches[0], optimizer=sgd, profile_limit_s=0,
        **{"num_stages": 2, "num_microbatches": 4, "schedule": "zb_h1", **options},
    )  # fmt: skip


def workers_of(compiled: Any) -> list[Any]:
    return list(compiled._runner.group._workers)


def when_doing(worker: Any, pattern: str, do: Callable[[], None]) -> threading.Thread:
    """Call ``do`` as soon as a worker is in such an action."""

    def watch() -> None:
        while not re.search(pattern, worker.doing()):
            time.sleep(5e-5)
        do()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def trained_until_it_fails(compiled: Any) -> tuple[WorkerError, float]:
    """The error that ends training, and the seconds since the last successful step."""
    _, batches = prepared()
    well_s = time.monotonic()
    for step in itertools.count():
        try:
            compiled.train_step(**batches[step % 4])
        except WorkerError as error:
            return error, time.monotonic() - well_s
        well_s = time.monotonic()
    raise AssertionError("unreachable")


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("number", range(NUM_KILLS))
def test_a_killed_rank_ends_all_and_training_resumes(
    number: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Losses continue from the checkpoint without a difference, on another schedule too."""
    model, batches = prepared()
    expected = reference_steps(model, batches, sgd).losses
    turn, kind = divmod(number, len(KINDS))
    (action, options), rank = KINDS[kind], (number + turn) % 2
    compiled = pipeline(**options)
    compiled.train_step(**batches[0])
    compiled.train_step(**batches[1])
    compiled.save(tmp_path / "last")
    workers = workers_of(compiled)
    pids = [worker.pid for worker in workers]
    thread = when_doing(workers[rank], action, lambda: os.kill(pids[rank], signal.SIGKILL))
    error, late_s = trained_until_it_fails(compiled)
    assert late_s < 30
    thread.join()
    record_property("stopped after seconds", round(late_s, 2))
    assert error.rank == rank
    assert re.match(rf"worker {rank} of 2 .*killed by SIGKILL .*train_step", str(error))
    assert re.search(r"train_step\(\), within [^)]* in (action|the) ", str(error))
    assert all(map(has_ended, pids))
    with pipeline(**(options if turn % 2 else ZB_H1)) as resumed:
        resumed.load(tmp_path / "last")
        got = [resumed.train_step(**batch).item() for batch in batches[2:]]
    assert got == pytest.approx(expected[2:], abs=2e-6)


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_stopped_rank_is_named(num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first step, which has no limit of its own, as in a later one."""
    monkeypatch.setattr(liveness, "SILENT_S", 3.0)
    _, batches = prepared()
    compiled = pipeline()
    for batch in batches[:num_steps]:
        compiled.train_step(**batch)
    workers = workers_of(compiled)
    pids = [worker.pid for worker in workers]
    thread = when_doing(workers[1], r"action 1F\d", lambda: os.kill(pids[1], signal.SIGSTOP))
    error, late_s = trained_until_it_fails(compiled)
    assert late_s < 30
    thread.join()
    named = r"worker 1 of 2 \(process \d+\) is stopped and gives no sign of life in action \d"
    assert re.match(named, str(error))
    assert re.search(r"Python stack of worker 0 in ", str(error))
    assert all(map(has_ended, pids))


def test_a_rank_that_is_stopped_before_its_first_step_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(liveness, "SILENT_S", 3.0)
    compiled = pipeline()
    pids = [worker.pid for worker in workers_of(compiled)]
    os.kill(pids[1], signal.SIGSTOP)
    error, late_s = trained_until_it_fails(compiled)
    assert late_s < 30
    named = r"worker 1 of 2 .* no sign of life: it had not begun \(during train_step\(\)"
    assert re.match(named, str(error))
    assert all(map(has_ended, pids))


def held_up(how: str, time_s: float) -> tuple[Any, Any, Tensor]:
    """A pipeline whose second stage is delayed in its first step, its model and a batch."""
    torch.manual_seed(0)
    model, x = HeldUp(how, time_s), torch.randn(8, 8)
    compiled = autopar.compile(
        model, 2, example_inputs=(x,), optimizer=sgd, profile_limit_s=0,
        num_stages=2, num_microbatches=4, schedule="1f1b",
        check_gradients=False,  # or the check, which runs the model here, would be held up
    )  # fmt: skip
    return compiled, model, x


def test_a_rank_that_does_nothing_in_its_first_step_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_limit, "STALL_S", 4.0)
    compiled, _, x = held_up("sleep", 1000.0)
    pids = [worker.pid for worker in workers_of(compiled)]
    started_s = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        compiled.train_step(x)
    assert time.monotonic() - started_s < 30
    named = r"worker 1 of 2 hangs in action 1F0: for 4 s no worker has used its processor"
    assert re.match(named, str(caught.value))
    assert "in hold_up" in caught.value.traceback
    assert all(map(has_ended, pids))


def test_a_first_step_that_only_takes_long_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_limit, "STALL_S", 3.0)
    monkeypatch.setattr(liveness, "SILENT_S", 3.0)
    compiled, model, x = held_up("compute", 9.0)
    with compiled:
        loss = compiled.train_step(x)
    model.time_s = 0.0
    torch.testing.assert_close(loss, model(x).detach())
