"""Plans with an open schedule against every generator by hand, over drawn cases.

Run a part: ``PYTHONPATH=. python benchmarks/drawn_schedules.py --first 0 --last 40 --limit-s 900``.
A case is a drawn model, cluster, number of micro-batches and perhaps memory limit
(``tests/test_schedule_forms.py``). By hand, schedules are given to ``autopar.plan`` one by one,
with the same sharding and memory: the ``--by-hand`` ones that were fastest in the search, so that
most could win, and as many others at random, and move nothing to the host unless the plan does. A
plan must not be slower than any. Results are added to ``results/drawn_schedules.json``, which keeps
the cases of earlier runs. Times are predicted, nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from setting import setting

import autopar
from autopar.base.errors import AutoparError
from autopar.schedules.generators.forms import Form, forms
from tests.test_schedule_forms import drawn

RESULT = Path(__file__).parent / "results" / "drawn_schedules.json"
TARGET = 300
TOLERANCE = 1e-9
Row = dict[str, Any]


def row_of(seed: int, num_by_hand: int) -> Row:
    """One case: the plan's step, and those of schedules by hand, None where one does not fit."""
    rng, model, cluster, num, options = drawn(seed)
    plain = autopar.plan(
        model, cluster, schedule="1f1b", num_stages=cluster.num_devices, num_microbatches=num,
        **options,
    )  # fmt: skip
    if rng.random() < 0.5:
        needed = sum(plain.prediction.memory_bytes.values())
        options["constraints"] = [autopar.MemoryBudget(int(needed * rng.uniform(1.0, 2.0)))]
    started_s = time.process_time()
    best = autopar.plan(model, cluster, schedule="auto", num_microbatches=num, **options)
    planning_s = time.process_time() - started_s
    by_hand: dict[str, float | None] = {}
    for form in chosen(cluster.num_devices, num, best, rng, num_by_hand):
        try:
            made = autopar.plan(
                model, cluster, schedule=form.build(),
                offload=None if best.offload is not None else False, **options,
            )  # fmt: skip
            by_hand[form.text] = made.prediction.step_time_s
        except AutoparError:  # no such schedule, or it does not fit
            by_hand[form.text] = None
    step_s = best.prediction.step_time_s
    fastest_s = min((each for each in by_hand.values() if each is not None), default=None)
    return {
        "seed": seed, "cluster": cluster.device.name, "devices": cluster.num_devices,
        "micro_batches": num, "limited": "constraints" in options, "step_s": step_s,
        "schedule": best.schedule.name, "gap": best.schedule.gap,
        "planning_cpu_s": round(planning_s, 2), "by_hand_s": by_hand,
        "plan_over_best_by_hand": None if fastest_s is None else round(step_s / fastest_s, 6),
        "held": fastest_s is None or step_s <= fastest_s * (1 + TOLERANCE),
    }  # fmt: skip


def chosen(
    num_devices: int, num: int, best: autopar.Plan, rng: random.Random, count: int
) -> list[Form]:
    """The forms that were fastest in the search, and others at random."""
    every = [
        form for per_device in (1, 2) for form in forms(num_devices, per_device * num_devices, num)
    ]
    times_s = best.search.pipelines
    every.sort(key=lambda form: times_s.get(form.text, float("inf")))
    return [*every[:count], *rng.sample(every[count:], min(count, len(every) - count))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int, default=TARGET, help="one behind the last case")
    parser.add_argument("--by-hand", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="wall-clock seconds")
    asked = parser.parse_args()
    rows: dict[int, Row] = {}
    if RESULT.exists():
        rows = {row["seed"]: row for row in json.loads(RESULT.read_text())["cases"]}
    ends_s = time.monotonic() + asked.limit_s
    for seed in range(asked.first, asked.last):
        if time.monotonic() > ends_s:
            break
        row = rows[seed] = row_of(seed, asked.by_hand)
        print(seed, row["schedule"], row["plan_over_best_by_hand"], row["held"], flush=True)
        write([rows[key] for key in sorted(rows)])


def write(rows: list[Row]) -> None:
    ratios = [row["plan_over_best_by_hand"] for row in rows if row["plan_over_best_by_hand"]]
    document = {
        **setting("torch", "ortools"),
        "target": f"never above the best by hand, in {TARGET} cases",
        "num_cases": len(rows),
        "num_held": sum(row["held"] for row in rows),
        "num_searched_orders": sum(row["schedule"].startswith("searched") for row in rows),
        "num_proved_optimal": sum(row["gap"] == 0 for row in rows),
        "least_and_most_over_best_by_hand": [min(ratios), max(ratios)] if ratios else None,
        "cases": rows,
    }
    RESULT.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
