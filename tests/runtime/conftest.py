"""Worker groups shared by the runtime's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from autopar.runtime.runners.local import LocalRunner
from autopar.runtime.workers.group import WorkerGroup
from tests.runtime.processes import ProbedService

Groups = Callable[[int], WorkerGroup]


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
