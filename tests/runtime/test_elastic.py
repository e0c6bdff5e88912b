"""Elastic jobs: the number of processes changes, and training goes on under a plan made anew."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.oracles import reference_steps
from tests.runtime.test_spmd import ROOT
from tests.runtime.torchrun_elastic import JOINED_AT, LEFT_AT, NUM_STEPS
from tests.runtime.torchrun_periodic import adamw, make_batch, make_model

LIMIT_S = 240.0


class Agents:
    """The agents of one job, each started by ``torchrun`` as if on a host of its own.

    They meet at agent ``a``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.endpoint = f"127.0.0.1:{free.getsockname()[1]}"

    def start(self, name: str, num_processes: int) -> None:
        env = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "AGENT": name,
            # The ranks' store must not be that of an agent, in which the rounds before left keys.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }  # fmt: skip
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2",
            "--nproc-per-node", str(num_processes), "--max-restarts", "3", "--rdzv-backend", "c10d",
            "--rdzv-id", "job", "--rdzv-endpoint", self.endpoint, "--monitor-interval", "0.1",
            "--local-addr", "127.0.0.1",
            "--rdzv-conf",
            f"is_host={name == 'a'},last_call_timeout=2,keep_alive_interval=2,"
            "keep_alive_max_attempt=4",
            "-m", "tests.runtime.torchrun_elastic", str(self.folder),
        ]  # fmt: skip
        with (self.folder / f"log-{name}").open("wb") as out:
            agent = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out)
        self.started[name] = agent

    def kill(self, name: str) -> None:
        """Kill an agent and its processes at once, as the loss of a host does."""
        agent = self.started.pop(name)
        processes: list[psutil.Process] = []
        if agent.poll() is None:
            whole = psutil.Process(agent.pid)
            processes = [whole, *whole.children(recursive=True)]
        for process in processes:
            if process.is_running():
                process.kill()
        agent.wait()

    def wait_for(self, happened: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not happened():
            assert time.monotonic() < deadline_s, self.logs()
            time.sleep(0.1)

    def wait_for_files(self, pattern: str, num: int) -> None:
        self.wait_for(lambda: len(list(self.folder.glob(pattern))) == num)

    def logs(self) -> str:
        return "\n".join(log.read_text()[-4000:] for log in sorted(self.folder.glob("log-*")))


@pytest.mark.timeout(900)
def test_training_goes_on_when_processes_leave_and_join(tmp_path: Path) -> None:
    """Four processes, of which two die with their agent; two go on; a third one joins them."""
    agents = Agents(tmp_path)
    try:
        agents.start("a", 2)
        agents.start("b", 2)
        agents.wait_for_files(f"waiting-4-{LEFT_AT}-*", 2)
        agents.kill("b")
        agents.wait_for_files(f"waiting-2-{JOINED_AT}-*", 2)
        agents.start("c", 1)
        agents.wait_for(lambda: all(a.poll() is not None for a in agents.started.values()))
        assert [a.returncode for a in agents.started.values()] == [0, 0], agents.logs()
    finally:
        for name in list(agents.started):
            agents.kill(name)
    found = [json.loads(line) for line in (tmp_path / "losses").read_text().splitlines()]
    begun = dict.fromkeys((num_ranks, done) for num_ranks, done, _, _ in found)
    assert [num_ranks for num_ranks, _ in begun] == [4, 2, 3], agents.logs()
    _, after_loss, after_join = (done for _, done in begun)
    assert after_loss in (LEFT_AT - 1, LEFT_AT)
    assert after_join in (JOINED_AT - 1, JOINED_AT)
    assert found[-1][2] == NUM_STEPS - 1
    batches = [make_batch(step) for step in range(NUM_STEPS)]
    expected = reference_steps(make_model(), batches, adamw).losses
    for _, _, step, loss in found:
        assert loss == pytest.approx(expected[step], rel=1e-9)
