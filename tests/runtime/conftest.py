"""Worker groups and profiles shared by the runtime's tests."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import autopar
from autopar.runtime.profile import Profile
from autopar.runtime.runners.local import LocalRunner
from autopar.runtime.workers.group import WorkerGroup
from tests.models.zoo import build
from tests.runtime.processes import ProbedService

Groups = Callable[[int], WorkerGroup]
PROFILED: dict[str, dict[str, Any]] = {
    "data parallel": {"num_microbatches": 2, "constraints": autopar.Force("data_parallel")},
    "pipeline": {"schedule": "1f1b", "num_stages": 2, "num_microbatches": 4},
}


@pytest.fixture(scope="session")
def groups() -> Iterator[Groups]:
    """``groups(n)``: n gloo processes with one thread each, started on first use."""
    started: dict[int, WorkerGroup] = {}

    def group_of(num_workers: int) -> WorkerGroup:
        if num_workers not in started or started[num_workers].closed:
            started[num_workers] = WorkerGroup(
                num_workers, service=ProbedService, threads_per_worker=1, call_timeout_s=120
            )
        return started[num_workers]

    yield group_of
    for group in started.values():
        group.close()


@pytest.fixture
def reused_workers(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    """``autopar.compile`` onto the workers of `groups`, which outlive a compiled model."""
    monkeypatch.setattr(
        LocalRunner, "start_workers", staticmethod(lambda devices, **_: groups(len(devices)))
    )
    monkeypatch.setattr(LocalRunner, "close", lambda self: None)


@pytest.fixture(scope="module", params=PROFILED)
def profiled(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Profile]]:
    """GPT-2 compiled for two processes, and the profile of three of its steps."""
    model, make_batch = build("gpt2")
    adam = functools.partial(torch.optim.Adam, lr=1e-3)
    options = PROFILED[request.param]
    with autopar.compile(
        model, 2, make_batch(0), optimizer=adam, profile_limit_s=0.0, **options
    ) as compiled:
        yield compiled, compiled.profile(num_steps=3, **make_batch(1))
