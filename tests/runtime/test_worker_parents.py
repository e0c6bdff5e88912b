"""The process that drives local workers: a script, a notebook, or one that ends in any way."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import nbclient
import nbformat
import psutil
import pytest

from tests.runtime.ended import STOPPED_WITHIN_S, assert_gone, is_running

SCRIPT = """
import json, os, signal, sys, time
import torch.distributed as dist
from autopar.runtime.workers.group import WorkerGroup

# As a terminal's job has it, also where the tests are a background job, which ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)

class Service:
    def __init__(self, rank, world_size, doing="nothing"):
        self.rank = rank
        if doing == "slow start":
            time.sleep(600)
    def hello(self, decorate):
        print(decorate(f"hello from worker {self.rank}"))
    def wait(self):
        if self.rank == 1:
            time.sleep(600)
        dist.barrier()

print("script runs")
"""
STARTED = """
group = WorkerGroup(2, service=Service)
print(json.dumps(group.pids), flush=True)
"""
ONE_STARTED = STARTED.replace("2", "1")
ENDINGS = {
    "end of the script": "pass",
    "exception": "raise ValueError('the parent failed')",
    "sys.exit": "sys.exit(3)",
}


@contextlib.contextmanager
def script(*parts: str, stdin: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A parent in a process group of its own, as a terminal's foreground job is."""
    source = "".join(parts)
    with subprocess.Popen(
        [sys.executable, "-"] if stdin else [sys.executable, "-c", source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as process:
        try:
            assert process.stdin is not None
            if stdin:
                process.stdin.write(source)
            process.stdin.close()
            process.stdin = None
            yield process
        finally:
            process.kill()


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The workers whose ids the script prints after its first line."""
    assert process.stdout is not None
    assert process.stdout.readline() == "script runs\n"
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    return [psutil.Process(pid) for pid in json.loads(line)]


class TestTheParentEnds:
    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("ending", ENDINGS)
    def test_without_closing(self, ending: str) -> None:
        with script(SCRIPT, ONE_STARTED, "sys.stdin.read()\n", ENDINGS[ending]) as process:
            workers = workers_of(process)
            _, errors = process.communicate(timeout=60)
            assert process.returncode == {"sys.exit": 3, "exception": 1}.get(ending, 0)
            assert ("the parent failed" in errors) == (ending == "exception")
            assert_gone(workers)

    def test_by_ctrl_c_during_a_call(self) -> None:
        ending = """
try:
    group.call("wait")
except KeyboardInterrupt:
    print("closed:", group.closed, flush=True)
    raise
"""
        with script(SCRIPT, STARTED, ending) as process:
            workers = workers_of(process)
            time.sleep(0.5)
            os.killpg(process.pid, signal.SIGINT)
            output, errors = process.communicate(timeout=STOPPED_WITHIN_S)
            assert output == "closed: True\n"
            assert errors.rstrip().endswith("KeyboardInterrupt")
            assert errors.count("Traceback") == 1  # the parent's alone
            assert process.returncode == -signal.SIGINT
            assert_gone(workers, within_s=0.5)

    def test_by_sigkill_during_a_call(self) -> None:
        with script(SCRIPT, STARTED, "group.call('wait')") as process:
            workers = workers_of(process)
            time.sleep(0.3)
            process.kill()
            assert_gone(workers)

    def test_by_sigkill_while_a_forked_child_holds_its_sockets(self) -> None:
        fork = "\nif os.fork() == 0:\n    time.sleep(60)\n    os._exit(0)\n"
        with script(SCRIPT, ONE_STARTED, fork, "time.sleep(600)") as process:
            workers = workers_of(process)
            time.sleep(0.3)
            children = psutil.Process(process.pid).children()
            forked = [child for child in children if child != workers[0].parent()]
            process.kill()
            assert_gone(workers)
            assert len(forked) == 1
            assert is_running(forked[0])
            forked[0].kill()

    def test_by_sigkill_during_the_start(self) -> None:
        start = "sys.stdout.flush()\nWorkerGroup(2, service=Service, service_args=('slow start',))"
        with script(SCRIPT, start) as process:
            assert process.stdout is not None
            process.stdout.readline()
            deadline_s = time.monotonic() + 30
            started: list[psutil.Process] = []
            while len(started) < 3 and time.monotonic() < deadline_s:
                started = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            assert len(started) == 3  # the fork server and its workers
            assert_gone(started)

    def test_a_forked_child_neither_ends_nor_uses_the_workers(self) -> None:
        fork = """
from autopar.base.errors import WorkerError
forked = os.fork()
if forked == 0:
    try:
        group.call("hello", str.upper)
    except WorkerError as error:
        print(str(error)[:35], flush=True)
    group.close()
    sys.exit()
print("left", os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]), flush=True)
group.call("hello", str.upper)
"""
        with script(SCRIPT, ONE_STARTED, fork) as process:
            workers = workers_of(process)
            output, errors = process.communicate(timeout=60)
            refused, *others = output.splitlines()
            assert refused.startswith("cannot call hello() in process "), output + errors
            assert others == ["left 0", "HELLO FROM WORKER 0"], output + errors
            assert_gone(workers)


class TestWhereTheParentRuns:
    @pytest.mark.parametrize("where", ["file", "stdin"])
    def test_a_script_without_a_main_guard_runs_once(self, where: str, tmp_path: Path) -> None:
        (tmp_path / "beside_the_script.py").write_text("MARK = '!'\n")
        use = 'import beside_the_script as it\ngroup.call("hello", lambda text: text + it.MARK)\n'
        if where == "stdin":
            path = f"sys.path.append({str(tmp_path)!r})\n"
            with script(SCRIPT, path, STARTED, use, stdin=True) as process:
                output, errors = process.communicate(timeout=60)
        else:
            (tmp_path / "train.py").write_text(SCRIPT + STARTED + use)
            command = [sys.executable, str(tmp_path / "train.py")]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            output, errors = ran.stdout, ran.stderr
        first, _pids, *hellos = output.splitlines()
        assert first == "script runs", errors
        assert sorted(hellos) == ["hello from worker 0!", "hello from worker 1!"], errors

    def test_a_notebook(self) -> None:
        call = "group.call('hello', lambda text: text)\nprint(json.dumps(group.pids))"
        cells = [nbformat.v4.new_code_cell(source) for source in (SCRIPT, STARTED, call)]
        notebook = nbformat.v4.new_notebook(cells=cells)
        nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
        output = "".join(out.get("text", "") for out in notebook.cells[2].outputs)
        *_, pids = (line for line in output.splitlines() if line.startswith("["))
        assert len(json.loads(pids)) == 2
        with contextlib.suppress(psutil.NoSuchProcess):
            assert_gone([psutil.Process(pid) for pid in json.loads(pids)])
