"""One process per device under torchrun: all of `Compiled`, checked on every rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from autopar.base.errors import DeviceError
from autopar.runtime.runners import membership
from tests.runtime.ranks import run_ranks

ROOT = Path(__file__).parents[2]


def torchrun(num_processes: int, *arguments: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={num_processes}", "-m", *arguments]
    path = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path.rstrip(os.pathsep)}
    ran = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=150, check=False
    )
    assert ran.returncode == 0, ran.stderr[-6000:]


@pytest.mark.parametrize("how", ["split", "random"])
def test_training_equals_eager_on_every_rank(tmp_path: Path, how: str) -> None:
    torchrun(2, "tests.runtime.torchrun_script", str(tmp_path), how)
    losses = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert losses[0] == losses[1]
    assert torch.tensor(losses).isfinite().all()


def test_batches_of_other_shapes() -> None:
    run_ranks(2, "tests.runtime.torchrun_shapes")


def test_shards_of_other_shapes() -> None:
    run_ranks(2, "tests.runtime.torchrun_local_shapes")


def test_ranks_that_disagree_are_told_or_made_alike() -> None:
    run_ranks(2, "tests.runtime.torchrun_alike")


def test_compiling_again_joins_a_new_process_group() -> None:
    run_ranks(2, "tests.runtime.torchrun_again")


def test_a_process_group_without_a_backend_for_the_devices_is_refused() -> None:
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(DeviceError, match=r"'cuda:gloo', without a backend for cpu devices"):
            membership.join(torch.device("cpu"), timeout_s=5)
    finally:
        dist.destroy_process_group()
