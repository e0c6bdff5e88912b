"""Checkpoints every so many steps: going on from them, and what goes wrong while they are made."""

from __future__ import annotations

import functools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.base.errors import InputError, WorkerError
from autopar.runtime.checkpointing import PeriodicCheckpoints
from autopar.runtime.runners.local import LocalRunner
from autopar.runtime.state.numbered_checkpoints import complete_checkpoints
from autopar.runtime.workers.group import WorkerGroup
from tests.runtime.conftest import Groups
from tests.runtime.processes import ProbedService, runner_of
from tests.runtime.ranks import run_ranks
from tests.runtime.test_checkpoints import differing, everything, resumable
from tests.runtime.test_spmd import torchrun
from tests.runtime.test_state import (
    BATCHES,
    SCHEDULERS,
    adamw,
    eager,
    lowered,
    make_batch,
    make_model,
    start,
)


class Job:
    """A runner that trains as `autopar.compile`'s result does."""

    def __init__(self, runner: LocalRunner) -> None:
        self.runner, self.checkpoints = runner, PeriodicCheckpoints(runner)

    def train(self, batches: Sequence[dict[str, Tensor]]) -> list[float]:
        flatten, losses = lowered("2")[0].signature.flatten, []
        for batch in batches:
            with self.checkpoints.step():
                losses.append(self.runner.train_step(flatten((), batch)).item())
        return losses


def names(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir())


@pytest.fixture
def released(groups: Groups, tmp_path: Path) -> Iterator[Path]:
    """Writes in the group of two wait until this path exists."""
    path = tmp_path / "released"
    groups(2).call("hold_writes", str(path))
    yield path
    path.touch()
    groups(2).call("hold_writes", None)


class TestGoingOn:
    def test_it_is_as_if_training_had_not_ended(self, groups: Groups, tmp_path: Path) -> None:
        """Bit by bit, with a learning-rate schedule."""
        job = Job(resumable(groups))
        assert job.checkpoints.begin(2, tmp_path / "all", keep=3) == 0
        losses = job.train(BATCHES)
        job.checkpoints.finish()
        assert names(tmp_path / "all") == [2, 4]
        expected = everything(job.runner)
        again = Job(resumable(groups))
        assert again.checkpoints.begin(2, tmp_path / "all", keep=3) == 4
        assert again.train(BATCHES[4:]) == losses[4:]
        assert differing(everything(again.runner), expected) == []
        assert losses == pytest.approx(eager(adamw, BATCHES, SCHEDULERS["cosine"])[2], rel=1e-9)

    def test_under_another_plan(self, groups: Groups, tmp_path: Path) -> None:
        job = Job(start(groups, "2", adamw))
        job.checkpoints.begin(1, tmp_path, keep=1)
        losses = job.train(BATCHES[:3])
        job.checkpoints.finish()
        again = Job(start(groups, "2x2", adamw))
        assert again.checkpoints.begin(1, tmp_path, keep=1) == 3
        losses += again.train(BATCHES[3:])
        again.checkpoints.finish()
        assert losses == pytest.approx(eager(adamw, BATCHES)[2], rel=1e-9)

    def test_from_the_one_before_a_damaged_one(
        self, groups: Groups, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        job = Job(resumable(groups))
        job.checkpoints.begin(1, tmp_path, keep=3)
        losses = job.train(BATCHES[:3])
        job.checkpoints.finish()
        file = next((tmp_path / "step-00000003").glob("*.safetensors"))
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        again = Job(resumable(groups))
        with caplog.at_level(logging.WARNING):
            assert again.checkpoints.begin(1, tmp_path, keep=1) == 2
        assert "step-00000003" in caplog.text
        assert "goes on from" in caplog.text
        assert again.train(BATCHES[2:3]) == losses[2:]
        again.checkpoints.finish()
        assert names(tmp_path) == [3]
        assert Job(resumable(groups)).checkpoints.begin(1, tmp_path, keep=1) == 3

    def test_nothing_is_begun_anew_where_all_are_damaged(
        self, groups: Groups, tmp_path: Path
    ) -> None:
        job = Job(resumable(groups))
        job.checkpoints.begin(1, tmp_path, keep=2)
        job.train(BATCHES[:2])
        job.checkpoints.finish()
        for path in tmp_path.iterdir():
            (path / "autopar.json").write_bytes(b"{")
        with pytest.raises(InputError, match=r"none of the 2 checkpoints .*step-00000002"):
            Job(resumable(groups)).checkpoints.begin(1, tmp_path, keep=2)

    def test_skipped_steps_count_and_a_with_block_waits(
        self, reused_workers: None, tmp_path: Path
    ) -> None:
        def compiled() -> Any:
            torch.manual_seed(0)
            batch = torch.linspace(-1, 1, 32).reshape(8, 4), torch.zeros(8, 4)
            sgd = functools.partial(torch.optim.SGD, lr=1.0)
            return batch, autopar.compile(
                nn.Linear(4, 4), 2, example_inputs=batch, profile_limit_s=0, nonfinite="skip",
                loss_fn=nn.functional.mse_loss, optimizer=sgd,
            )  # fmt: skip

        (x, y), first = compiled()
        with first:
            assert first.checkpoint_every(3, tmp_path) == 0
            for scale in (1.0, float("nan"), 2.0, 3.0):
                loss = first.train_step(x * scale, y)
        _, second = compiled()
        assert second.checkpoint_every(3, tmp_path) == 3
        assert second.num_skipped_steps == 1
        assert torch.equal(second.train_step(x * 3.0, y), loss)
        second.close()


class TestWhileFilesAreWritten:
    def test_a_checkpoint_is_of_its_step(
        self, groups: Groups, tmp_path: Path, released: Path
    ) -> None:
        """Training goes on in the middle of every file, and the file has nothing of it."""
        job, folder = Job(resumable(groups)), tmp_path / "all"
        job.train(BATCHES[:1])
        job.checkpoints.begin(2, folder, keep=3)
        job.train(BATCHES[1:2])
        job.runner.save(tmp_path / "plain")
        losses = job.train(BATCHES[2:3])
        wait_for(folder, "step-00000002/*.part", 2)
        assert not (folder / "step-00000002" / "autopar.json").exists()
        released.touch()
        job.checkpoints.finish()
        found = []
        for path in (folder / "step-00000002", tmp_path / "plain"):
            other = Job(resumable(groups))
            other.runner.load(path)
            found.append(everything(other.runner))
            assert other.train(BATCHES[2:3]) == losses
        assert differing(*found) == []

    def test_a_killed_worker_leaves_the_checkpoint_before(
        self, groups: Groups, tmp_path: Path
    ) -> None:
        folder = tmp_path / "all"
        with WorkerGroup(2, service=ProbedService, threads_per_worker=1) as group:
            captured, program = lowered("2")
            options = {"optimizer": adamw, "lr_scheduler": SCHEDULERS["cosine"]}
            job = Job(runner_of(group, captured, program, make_model(), **options))
            job.checkpoints.begin(1, folder, keep=3)
            losses = job.train(BATCHES[:1])
            wait_for(folder, "step-00000001/autopar.json", 1)
            group.call("hold_writes", str(tmp_path / "never"))
            losses += job.train(BATCHES[1:2])
            wait_for(folder, "step-00000002/*.part", 2)
            os.kill(group.pids[0], signal.SIGKILL)
            with pytest.raises(WorkerError, match="worker 0"):
                job.train(BATCHES[2:3])
            job.checkpoints.finish()
        assert list((folder / "step-00000002").glob("*.part"))
        again = Job(resumable(groups))
        assert again.checkpoints.begin(1, folder, keep=3) == 1
        assert again.train(BATCHES[1:3])[:1] == losses[1:]
        again.checkpoints.finish()
        assert names(folder) == [1, 2, 3]
        assert not list(folder.glob("*/*.part"))

    def test_a_full_disk_is_told_before_the_next_step(self, groups: Groups, tmp_path: Path) -> None:
        job = Job(resumable(groups))
        job.checkpoints.begin(1, tmp_path, keep=3)
        job.train(BATCHES[:1])
        job.checkpoints.finish()
        job.runner.group.call("limit_file_size", 1500)
        try:
            job.train(BATCHES[1:2])
            job.runner.save_outcomes(wait=True)
            state = everything(job.runner)
            with pytest.raises(InputError, match=r"written to '.*-00000002': rank [01]: OSError: "):
                job.train(BATCHES[2:3])
        finally:
            job.runner.group.call("limit_file_size", -1)
        assert differing(everything(job.runner), state) == []
        assert complete_checkpoints(str(tmp_path)) == [str(tmp_path / "step-00000001")]
        job.train(BATCHES[2:3])
        job.checkpoints.finish()
        assert names(tmp_path) == [1, 3]

    def test_a_lost_folder_is_told_before_the_next_step_or_at_the_end(
        self, groups: Groups, tmp_path: Path, released: Path
    ) -> None:
        job, folder = Job(resumable(groups)), tmp_path / "all"
        job.checkpoints.begin(1, folder, keep=3)
        job.train(BATCHES[:1])
        wait_for(folder, "step-00000001/*.part", 2)
        shutil.rmtree(folder)
        folder.touch()
        released.touch()
        with pytest.raises(InputError, match=r"step-00000001': rank [01]: NotADirectoryError"):
            job.checkpoints.finish()
        job.train(BATCHES[1:2])
        with pytest.raises(InputError, match=r"step-00000002': rank 0: \w*Error"):
            job.train(BATCHES[2:3])
        folder.unlink()
        job.train(BATCHES[2:3])
        job.checkpoints.finish()
        assert names(folder) == [3]


class TestNumberKept:
    def test_the_newest_are(self, groups: Groups, tmp_path: Path) -> None:
        job = Job(resumable(groups))
        job.checkpoints.begin(1, tmp_path, keep=2)
        job.train(BATCHES[:1])
        job.checkpoints.finish()
        (tmp_path / "step-00000001" / "notes").write_text("the user's own")
        job.train([*BATCHES[1:], make_batch(5)])
        job.checkpoints.finish()
        assert names(tmp_path) == [1, 5, 6]
        assert [file.name for file in (tmp_path / "step-00000001").iterdir()] == ["notes"]
        assert Job(resumable(groups)).checkpoints.begin(1, tmp_path, keep=2) == 6


class TestBadInput:
    @pytest.mark.parametrize(
        ("num_steps", "folder", "keep", "told"),
        [
            (0, "all", 1, "num_steps is 0"),
            (1.5, "all", 1, "num_steps is 1.5"),
            (1, "all", 0, "keep is 0"),
            (1, "", 1, "cannot be at ''"),
            (1, "file/all", 1, "is a file"),
        ],
    )
    def test_it_is_refused(
        self, groups: Groups, tmp_path: Path, num_steps: Any, folder: str, keep: int, told: str
    ) -> None:
        (tmp_path / "file").touch()
        job = Job(start(groups, "2", adamw))
        with pytest.raises(InputError, match=told):
            job.checkpoints.begin(num_steps, folder and tmp_path / folder, keep=keep)
        job.train(BATCHES[:1])
        assert [path.name for path in tmp_path.iterdir()] == ["file"]

    def test_without_an_optimizer(self, reused_workers: None, tmp_path: Path) -> None:
        batch = torch.ones(2, 4), torch.zeros(2, 4)
        compiled = autopar.compile(
            nn.Linear(4, 4), 2, example_inputs=batch, profile_limit_s=0,
            loss_fn=nn.functional.mse_loss,
        )  # fmt: skip
        with pytest.raises(InputError, match="needs an optimizer"):
            compiled.checkpoint_every(1, tmp_path)
        compiled.close()


def wait_for(folder: Path, pattern: str, num: int) -> None:
    deadline_s = time.monotonic() + 120
    while len(list(folder.glob(pattern))) < num:
        assert time.monotonic() < deadline_s, pattern
        time.sleep(0.01)


def test_under_torchrun(tmp_path: Path) -> None:
    """A write that fails on one rank is told on both; another job goes on as if there were one."""
    for _ in range(2):
        run_ranks(2, "tests.runtime.torchrun_periodic", str(tmp_path))
    losses = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert losses[0] == losses[1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["returns", "raises"])
def test_a_script_that_ends_without_closing_waits_for_the_last(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-m", "tests.runtime.periodic_exit", str(tmp_path / "saved"), how]
    ran = subprocess.run(command, timeout=120, capture_output=True, text=True)
    assert ("the script has failed" in ran.stderr) == (how == "raises"), ran.stderr[-3000:]
    paths = complete_checkpoints(tmp_path / "saved")
    assert [Path(path).name for path in paths] == ["step-00000004", "step-00000002"]


def test_ranks_that_end_without_closing_wait_for_the_last(tmp_path: Path) -> None:
    torchrun(2, "tests.runtime.periodic_exit", str(tmp_path / "saved"), "returns")
    paths = complete_checkpoints(tmp_path / "saved")
    assert [Path(path).name for path in paths] == ["step-00000004", "step-00000002"]
