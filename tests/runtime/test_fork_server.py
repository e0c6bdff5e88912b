"""The fork server: workers come from one warm process, and inherit what a child would."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from autopar.base.errors import WorkerError
from autopar.runtime.faults import liveness
from autopar.runtime.workers import fork_server
from autopar.runtime.workers.group import WorkerGroup

GONE_WITHIN_S = 10.0


class Service:
    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank

    def inherited(self) -> tuple[str, dict[str, str], list[str], int]:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        return os.getcwd(), dict(os.environ), sys.path, nice

    def variable_of_c(self, name: str) -> str | None:
        libc = ctypes.CDLL(None)
        libc.getenv.restype = ctypes.c_char_p
        found = libc.getenv(name.encode())
        return None if found is None else found.decode()

    def say(self, text: str) -> None:
        print(text, flush=True)
        print(text, file=sys.stderr, flush=True)

    def drawn(self) -> tuple[float, float]:
        return random.random(), float(torch.rand(1))

    def compiler_imported_by_an_update(self) -> list[str]:
        before, weight = set(sys.modules), torch.zeros(1, requires_grad=True)
        weight.grad = torch.zeros(1)
        torch.optim.Adam([weight]).step()
        compiler = ("torch._dynamo", "torch._inductor")
        return [name for name in sys.modules if name not in before and name.startswith(compiler)]

    def cores(self) -> set[int]:
        return os.sched_getaffinity(0)


@pytest.fixture(scope="module")
def group() -> Iterator[WorkerGroup]:
    with WorkerGroup(2, service=Service, threads_per_worker=1) as started:
        yield started


def server_of(group: WorkerGroup) -> psutil.Process:
    parents = {psutil.Process(pid).parent() for pid in group.pids}
    (server,) = parents
    assert server is not None
    return server


def wait_until_gone(process: psutil.Process) -> None:
    """A zombie has ended too: its parent may not have waited for it yet."""
    deadline_s = time.monotonic() + GONE_WITHIN_S
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s, process
        time.sleep(0.05)


def test_groups_share_a_server_that_is_the_parents_child(group: WorkerGroup) -> None:
    with WorkerGroup(1, service=Service) as other:
        assert server_of(other) == server_of(group)
        assert server_of(group).ppid() == os.getpid()


def test_the_first_update_of_a_worker_imports_no_compiler(group: WorkerGroup) -> None:
    assert group.call("compiler_imported_by_an_update") == [[], []]


def test_workers_have_the_parents_present_environment(
    group: WorkerGroup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("AUTOPAR_OF_A_TEST", "present")
    with WorkerGroup(2, service=Service) as other:
        assert server_of(other) == server_of(group)  # no library reads these
        assert other.call("variable_of_c", "AUTOPAR_OF_A_TEST") == ["present"] * 2
        for rank, (directory, env, path, nice) in enumerate(other.call("inherited")):
            assert directory == str(tmp_path)
            assert env["RANK"] == str(rank)
            assert path == [os.path.abspath(entry) if entry == "" else entry for entry in sys.path]
            assert nice == os.getpriority(os.PRIO_PROCESS, 0)
    monkeypatch.delenv("AUTOPAR_OF_A_TEST")
    with WorkerGroup(1, service=Service) as other:
        assert other.call("variable_of_c", "AUTOPAR_OF_A_TEST") == [None]


def test_a_variable_that_libraries_may_read_as_they_load_needs_another_server(
    group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_OF_A_TEST", "new")
    with WorkerGroup(1, service=Service) as other:
        server = server_of(other)
        assert server != server_of(group)
        assert server.environ()["TORCH_OF_A_TEST"] == "new"
        assert group.call("drawn")  # the workers of the server before are as they were
        monkeypatch.delenv("TORCH_OF_A_TEST")
        with WorkerGroup(1, service=Service) as another:
            assert server_of(another) not in (server, server_of(group))
        assert server.is_running()
    wait_until_gone(server)  # with its last worker


def test_workers_write_to_the_standard_streams_of_the_moment(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with WorkerGroup(2, service=Service) as started:
        started.call("say", "from a worker")
    written = capfd.readouterr()
    assert written.out.split("\n") == ["from a worker"] * 2 + [""]
    assert written.err.count("from a worker\n") == 2


def test_forks_draw_python_numbers_of_their_own_and_torch_numbers_of_one_seed(
    group: WorkerGroup,
) -> None:
    (first, ours), (second, theirs) = group.call("drawn")
    assert first != second
    assert ours == theirs


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs affinities")
def test_workers_take_the_parents_present_cores() -> None:
    before = os.sched_getaffinity(0)
    one = {min(before)}
    os.sched_setaffinity(0, one)
    try:
        with WorkerGroup(1, service=Service, threads_per_worker=1) as started:
            assert started.call("cores") == [one]
    finally:
        os.sched_setaffinity(0, before)
    with WorkerGroup(1, service=Service, threads_per_worker=1) as started:
        assert started.call("cores") == [before]


def test_a_server_that_is_killed_ends_its_workers_and_is_replaced() -> None:
    group = WorkerGroup(2, service=Service)
    workers = [psutil.Process(pid) for pid in group.pids]
    server = server_of(group)
    server.kill()
    for worker in workers:
        wait_until_gone(worker)
    with pytest.raises(WorkerError, match=r"ended with the fork server that it came from"):
        group.call("drawn")
    with WorkerGroup(2, service=Service) as other:
        assert server_of(other) != server
        assert len(other.call("drawn")) == 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("start_timeout_s", "silent_s", "message"),
    [
        (60.0, 1.0, r"fork server.*process \d+.*has been stopped for 1 s"),
        (2.0, 60.0, r"fork server.*did not answer.*start_timeout_s"),
    ],
)
def test_a_server_that_is_stopped_is_named_in_time_and_replaced(
    start_timeout_s: float, silent_s: float, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "SILENT_S", silent_s)
    with WorkerGroup(1, service=Service) as before:
        server = server_of(before)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(WorkerError, match=message):
                WorkerGroup(1, service=Service, start_timeout_s=start_timeout_s)
            with WorkerGroup(1, service=Service) as behind:
                assert server_of(behind) != server
        finally:
            os.kill(server.pid, signal.SIGCONT)
        # It forks the worker that nobody waits for any more, which ends at once.
        time.sleep(1.0)
        deadline_s = time.monotonic() + 30.0
        while (left := [child.pid for child in server.children()]) != list(before.pids):
            assert time.monotonic() < deadline_s, left
            time.sleep(0.1)
        assert before.call("drawn")
    wait_until_gone(server)


def test_a_server_that_cannot_import_torch_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no such torch')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TORCH_OF_A_TEST", "a new server")
    with pytest.raises(WorkerError, match=r"fork server.*ended with exit code 1"):
        WorkerGroup(1, service=Service)


def test_beginning_waits_for_nothing_and_starts_one_server() -> None:
    source = """
import os, time
from autopar.runtime.faults import liveness
from autopar.runtime.workers import fork_server
fork_server.begin()
first = fork_server.present_server()
fork_server.begin()
assert fork_server.present_server() is first
import psutil
(child,) = psutil.Process().children()
assert child.cpu_times().user < 0.5, child.cpu_times()
print(child.pid)
"""
    ran = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True
    )
    assert not psutil.pid_exists(int(ran.stdout)), "it outlived its parent"
    assert not ran.stderr


def test_a_server_that_still_imports_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import time; time.sleep(120.0)\n")
    source = f"""
import os, psutil, signal, sys
from autopar.runtime.workers import fork_server
sys.path.insert(0, {str(tmp_path)!r})
fork_server.begin()
(child,) = psutil.Process().children()
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ran = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    if psutil.pid_exists(pid := int(ran.stdout)):
        wait_until_gone(psutil.Process(pid))


def test_a_variable_that_torch_sets_itself_needs_no_other_server() -> None:
    source = """
import os
from autopar.base.torch_private import import_compiler
from autopar.runtime.workers import fork_server
os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
fork_server.begin()
first = fork_server.present_server()
import_compiler()
assert "TORCHINDUCTOR_CACHE_DIR" in os.environ
assert fork_server.present_server() is first
"""
    subprocess.run([sys.executable, "-c", source], timeout=60, check=True)


def test_a_forked_process_has_a_server_of_its_own(group: WorkerGroup) -> None:
    ours = server_of(group).pid
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with WorkerGroup(1, service=Service) as own:
                os.write(writing, str(server_of(own).pid).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading) as pipe:
        theirs = int(pipe.read())
    assert theirs != ours
    assert fork_server.present_server().serves()
    assert len(group.call("drawn")) == 2


def test_a_server_loads_nothing_that_only_few_workers_need() -> None:
    source = "import sys, autopar.runtime.workers.fork_server_main; print(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = set(ran.stdout.split())
    assert {"torch.distributed", "torch._dynamo"} <= loaded  # the second for optimizers
    assert not {"torch._inductor.compile_fx", "torch.distributed.checkpoint", "triton"} & loaded


def test_a_server_has_one_thread(group: WorkerGroup) -> None:
    assert server_of(group).num_threads() == 1
