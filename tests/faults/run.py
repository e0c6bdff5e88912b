"""Run fault injections in parallel and print every violation.

``python -m tests.faults.run --numbers 0-999 --parallel 4``; exit code 1 if there is any.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

import autopar
from tests.faults.check import faults_of, faults_of_resume
from tests.faults.draw import LANE, PLANS, Injection, draw
from tests.faults.launch import Job, Outcome, run
from tests.faults.model import OPTIONS, batch, make_model, optimizer
from tests.faults.script import NUM_CHECKED
from tests.warm import import_what_it_imports

NUM_STEPS = NUM_CHECKED * (LANE + 2)
LANE_LIMIT_S = 1200.0


def write_plans(folder: Path) -> None:
    """Write the plans of all lanes."""
    for name in PLANS:
        num_ranks = 4 if name == "data x 1f1b" else 2
        cluster = autopar.Cluster.preset("cpu", nodes=1, devices_per_node=num_ranks)
        plan = autopar.plan(
            make_model(), cluster, (batch(0),), optimizer=optimizer, **OPTIONS[name]
        )
        plan.to_json(folder / f"{name}.json")


class Lane:
    """Injections of one launcher and plan, each resuming from what the previous one has left."""

    def __init__(self, root: Path, numbers: list[int]) -> None:
        self.root = root
        self.injections = [draw(number) for number in numbers]
        first = self.injections[0]
        self.launcher, self.plan, self.num_ranks = first.launcher, first.plan, first.num_ranks
        self.folder = root / f"lane{numbers[0]}"
        self.ranks = [-1] if self.launcher == "local" else list(range(self.num_ranks))
        self.steps = (0,)

    def run(self) -> None:
        self.folder.mkdir()
        expected = self._expected()
        before: Injection | None = None
        for injection in self.injections:
            outcome = run(self._job(f"{injection.number}", injection.number, NUM_CHECKED))
            resumed = list(self._resumed(injection, outcome, expected))
            if before is not None:
                self._report(before, resumed_faults=resumed)
            elif resumed:
                self._report(injection, faults=resumed)
            self._report(injection, faults=list(faults_of(injection, outcome)), outcome=outcome)
            before = injection
        outcome = run(self._job("behind", None, NUM_CHECKED))
        resumed = list(faults_of_resume(outcome, expected, self.steps, self.ranks))
        resumed += [f"the job behind it ended with {outcome.codes}"] * any(outcome.codes)
        assert before is not None
        self._report(before, resumed_faults=resumed)

    def _resumed(self, injection: Injection, outcome: Outcome, expected: list[float]) -> list[str]:
        """The violations after the previous injection; records where the next launch may resume."""
        shown = [rank for rank in self.ranks if f"resumed.{rank}" in outcome.told]
        early = injection.place in ("compile", "load", "first step")
        faults = faults_of_resume(outcome, expected, self.steps, shown if early else self.ranks)
        found = list(faults)
        if shown:
            step = outcome.told[f"resumed.{shown[0]}"]["step"] + NUM_CHECKED
            self.steps = (*self.steps, step) if early else (step,)
        return found

    def _expected(self) -> list[float]:
        """The losses of an uninterrupted run on the same plan and launcher."""
        kind = "local" if self.launcher == "local" else "plain"
        path = self.root / f"expected {kind} {self.plan}.json"
        if not path.exists():
            job = dataclasses.replace(
                self._job("expected", None, NUM_STEPS), launcher=kind, lane=self.folder / "none"
            )
            outcome = run(job)
            rank = -1 if kind == "local" else 0
            assert f"resumed.{rank}" in outcome.told, outcome.log[-4000:]
            draft = self.folder / "expected.json"
            draft.write_text(json.dumps(outcome.told[f"resumed.{rank}"]["losses"]))
            draft.rename(path)
        losses: list[float] = json.loads(path.read_text())
        return losses

    def _job(self, name: str, number: int | None, num_steps: int) -> Job:
        return Job(
            folder=self.folder / name,
            lane=self.folder,
            launcher=self.launcher,
            num_ranks=self.num_ranks,
            plan=self.root / f"{self.plan}.json",
            number=number,
            num_steps=num_steps,
        )

    def _report(
        self,
        injection: Injection,
        *,
        faults: list[str] | None = None,
        resumed_faults: list[str] | None = None,
        outcome: Outcome | None = None,
    ) -> None:
        """Append a line to the results of an injection, which the run's main process reads."""
        entry = {
            "number": injection.number,
            "faults": faults or [],
            "resume": resumed_faults,
            "log": outcome.log[-6000:] if outcome is not None and faults else "",
            "late_s": _late_s(outcome),
        }
        with (self.root / "results").open("a") as results:
            results.write(json.dumps(entry) + "\n")


def _late_s(outcome: Outcome | None) -> float | None:
    if outcome is None or "fault_s" not in outcome.told:
        return None
    times = [v["at_s"] for k, v in outcome.told.items() if k.startswith("error.")]
    return max(times) - outcome.told["fault_s"] if times else None


def start_lane(root: Path, numbers: list[int]) -> int:
    """Fork a process for a lane.

    Its ranks exit by unwinding this stack, so nothing here may catch anything.
    """
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    Lane(root, numbers).run()
    os._exit(0)


def run_all(root: Path, numbers: list[int], parallel: int) -> None:
    lanes = [list(group) for _, group in itertools.groupby(numbers, lambda n: n // LANE)]
    running: dict[int, tuple[float, list[int]]] = {}
    started_s, done = time.monotonic(), 0
    while lanes or running:
        while lanes and len(running) < parallel:
            lane = lanes.pop(0)
            running[start_lane(root, lane)] = time.monotonic(), lane
        time.sleep(0.1)
        for pid, (since_s, lane) in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended and time.monotonic() - since_s > LANE_LIMIT_S:
                os.killpg(pid, signal.SIGKILL)
                continue
            if ended:
                del running[pid]
                done += len(lane)
                failed = "" if status == 0 else f" ended with {os.waitstatus_to_exitcode(status)}"
                print(
                    f"{time.monotonic() - started_s:6.0f} s: {done} of {len(numbers)}, "
                    f"lane {lane[0]}-{lane[-1]}{failed}",
                    flush=True,
                )


def tally(root: Path, numbers: list[int]) -> int:
    """Print the violations by injection and the totals; returns the number of failures."""
    entries: dict[int, list[dict[str, object]]] = {number: [] for number in numbers}
    for line in (root / "results").read_text().splitlines():
        entry = json.loads(line)
        entries[entry["number"]].append(entry)
    counts: Counter[tuple[str, str]] = Counter()
    failed, late = 0, []
    for number, found in entries.items():
        injection = draw(number)
        faults = [text for entry in found for text in entry["faults"]]  # type: ignore[attr-defined]
        for entry in found:
            faults += [f"after it: {text}" for text in entry["resume"] or ()]  # type: ignore[attr-defined]
            late += [entry["late_s"]] if entry["late_s"] is not None else []
        if all(entry["resume"] is None for entry in found):
            faults.append("nobody has resumed after it")
        counts[injection.launcher, injection.place] += 1
        if faults:
            failed += 1
            print(f"\n{injection}")
            print("\n".join(f"    {text}" for text in dict.fromkeys(faults)))
            print("".join(str(entry["log"]) for entry in found)[-3000:])
    for (launcher, place), count in sorted(counts.items()):
        print(f"{launcher:9} {place:14} {count}")
    latest = f", named after {max(late):.1f} s at most" if late else ""
    print(f"{len(numbers)} injections{latest}: {len(numbers) - failed} held, {failed} did not")
    return failed


def numbers_of(text: str) -> list[int]:
    spans = (part.partition("-") for part in text.split(","))
    return [n for first, _, last in spans for n in range(int(first), int(last or first) + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numbers", default="0-59", help="such as 0-999 or 0-7,17")
    parser.add_argument("--parallel", type=int, default=4, help="lanes side by side")
    parser.add_argument("--keep", type=Path, help="a folder for logs, not removed")
    options = parser.parse_args()
    torch.set_num_threads(1)  # every process forked from here computes on one thread
    numbers = numbers_of(options.numbers)
    root = Path(options.keep or tempfile.mkdtemp(prefix="faults-"))
    root.mkdir(parents=True, exist_ok=True)
    (root / "results").touch()
    import_what_it_imports(lambda: write_plans(root))
    run_all(root, numbers, options.parallel)
    failed = tally(root, numbers)
    if options.keep is None:
        shutil.rmtree(root)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
