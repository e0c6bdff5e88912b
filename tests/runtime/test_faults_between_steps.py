"""A rank ends outside a step, or in another call: all others stop with an error that names it.

Started by ``torchrun`` and as plain processes. ``make exhaustive`` tries every place and kind under
both, ``make faults`` drawn ones.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.effort import EXHAUSTIVE
from tests.runtime.test_pipeline_faults import has_ended
from tests.runtime.test_torchrun_faults import ended, start

MODULE = "tests.runtime.faulty_script"
OUTSIDE = ("after compile", "between steps", "after evaluation")
IN_CALL = {
    "in compile": r"in compile\(\) number 1",
    "in evaluation": r"in (.* of )?a forward pass number 1",
    "in save": r"in save\(\) number 1",
}
KILLED = r"rank {at} of {num} \(process \d+ on .*\) died {where}: its process was killed"
WAYS = {
    "kill": KILLED,
    "stop": r"rank {at} of {num} .* hangs {where}: it gives no sign of life",
    "terminate": r"rank {at} of {num} .* died {where}: it was told to end \(SIGTERM\)",
    "raise": r"rank {at} of {num} .* ended {where}: its script raised OSError: the loader has lost",
    "exit": r"rank {at} of {num} .* left {where}: its script ended while others need it",
    "leave": r"rank {at} of {num} .* left {where}: its script ended while others need it",
}
CASES = [
    ("torchrun", "between steps", "raise", 2, 1),
    ("plain", "between steps", "exit", 3, 0),
    ("torchrun", "between steps", "kill", 2, 0),
    ("plain", "in compile", "kill", 2, 1),
]
if EXHAUSTIVE:
    CASES = [
        (launcher, place, kind, num, at)
        for launcher in ("torchrun", "plain")
        for place in (*OUTSIDE, *IN_CALL)
        for kind in WAYS
        for num, at in ((2, 0), (3, 1))
        if place in OUTSIDE or kind in ("kill", "stop", "terminate")
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("launcher", "place", "kind", "num", "at"), CASES)
def test_all_others_stop_and_name_the_rank(
    launcher: str, place: str, kind: str, num: int, at: int, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    arguments = (str(tmp_path), place, kind, str(at))
    codes = ended(start(launcher, num, log, *arguments, module=MODULE), 100)
    text = log.read_text()
    assert any(codes), text[-6000:]
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in range(num)]
    assert all(map(has_ended, pids)), text[-6000:]
    where = IN_CALL.get(place, "outside of a step")
    named = WAYS[kind].format(at=at, num=num, where=where)
    # Who waits in a call that nothing interrupts can only be ended, and says so itself.
    ended_by_watch = {int(rank) for rank in re.findall(r"rank (\d+) is stuck in", text)}
    for rank in {*range(num)} - {at} - ended_by_watch:
        told = json.loads((tmp_path / f"error{rank}.json").read_text())
        assert told["rank"] == at
        assert re.match(named, told["text"]), told["text"]
        assert told["late_s"] < 30
    assert len(re.findall("WorkerError: " + named, text)) >= num - 1, text[-6000:]
