"""The properties that must hold after a fault: it is reported in time and nothing is left behind.

Training must also resume from the checkpoint. Input: an injection and what its job has left.
Output: a text for each violation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tests.faults.draw import Injection
from tests.faults.launch import Outcome

LATE_S = 30.0
TORCHRUN_LOGS = "torchelastic_"
OWN_ERRORS = ("WorkerError", "StepError", "InputError", "DeviceError")


def faults_of(injection: Injection, outcome: Outcome) -> Iterator[str]:
    """The violations in the job that had the fault."""
    if outcome.orphans:
        yield f"processes are left: {', '.join(outcome.orphans)}"
    strays = [name for name in outcome.strays if not name.startswith(TORCHRUN_LOGS)]
    if strays:
        yield f"temporary files are left: {', '.join(strays)}"
    if None in outcome.codes and not (injection.place == "close" and injection.kind == "SIGSTOP"):
        yield "a process did not end and was killed"  # no peer waits for one stopped in close()
    if "fault_s" not in outcome.told:
        if injection.place not in ("close", "compile"):
            yield "the fault has not happened"
        return
    if injection.place == "close" or injection.victim < 0:
        return
    if injection.launcher == "local":
        yield from _told(injection, outcome, -1)
        return
    for rank in range(injection.num_ranks):
        if rank != injection.victim:
            yield from _told(injection, outcome, rank)


def _told(injection: Injection, outcome: Outcome, rank: int) -> Iterator[str]:
    """Check that a surviving process gets an error that names the rank at fault, in time."""
    error = outcome.told.get(f"error.{rank}")
    if error is None:
        has_begun = f"begun.{rank}" in outcome.told
        if (injection.launcher, injection.place) == ("torchrun", "compile") and not has_begun:
            return  # torchrun ended it before it had reached autopar
        # A process in an uninterruptible call can only be killed, and its log says why.
        named = rf"WorkerError: rank {injection.victim} of .*\n(?:.*\n)*?rank {rank} is stuck in"
        if not re.search(named, outcome.log):
            yield f"rank {rank} was told nothing"
        return
    if error["kind"] not in OWN_ERRORS:
        yield f"rank {rank} was told by {error['kind']}"
    if error["rank"] != injection.victim:
        yield f"rank {rank} was told of rank {error['rank']}: {error['text'].splitlines()[0]}"
    late_s = error["at_s"] - outcome.told["fault_s"]
    if late_s > LATE_S:
        yield f"rank {rank} was told after {late_s:.1f} s"


def faults_of_resume(
    outcome: Outcome, expected: Sequence[float], steps: Sequence[int], ranks: Sequence[int]
) -> Iterator[str]:
    """The violations in a job that resumes from a checkpoint of one of ``steps``."""
    for rank in ranks:
        resumed = outcome.told.get(f"resumed.{rank}")
        if resumed is None:
            yield f"rank {rank} did not resume"
            continue
        step, losses = resumed["step"], resumed["losses"]
        if step not in steps:
            yield f"rank {rank} resumed behind step {step}, not {' or '.join(map(str, steps))}"
        if losses != list(expected[step : step + len(losses)]):
            yield f"rank {rank} has losses {losses} behind step {step}, expected {expected[step:]}"
