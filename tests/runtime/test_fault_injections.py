"""Drawn faults: each is named in time, nothing is left behind, training goes on bit-equal.

``make faults`` runs a thousand; `tests.faults.draw` says what is drawn.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.faults.launch import ROOT

NUMBERS = "0-15,110,118,179"
"""The last three are faults in compile, and in a capture, that were once not named."""
NUM_INJECTIONS = 19
LIMIT_S = 540


def test_drawn_faults_are_named_and_leave_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults.run", "--numbers", NUMBERS, "--parallel", "6"]
    run = subprocess.run(
        [*command, "--keep", str(tmp_path / "run")], cwd=ROOT, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-4000:]
    assert f"{NUM_INJECTIONS} held, 0 did not" in run.stdout
