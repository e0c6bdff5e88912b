"""A process that ends right after its last collective exits cleanly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from autopar.runtime.faults import gloo_threads

_NUM_JOBS = 8  # without the wait, more than half of such jobs abort


def test_gloos_threads_are_waited_for_at_exit(tmp_path: Path) -> None:
    for job in range(_NUM_JOBS):
        store = str(tmp_path / str(job))
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.runtime.gloo_exit", str(rank), store],
                stderr=subprocess.PIPE, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        for rank in ranks:
            _, errors = rank.communicate(timeout=120)
            assert rank.returncode == 0, errors


def test_without_gloo_there_is_no_wait() -> None:
    assert gloo_threads.threads() == []
