"""The cost of agreeing on finite steps: nonfinite="raise" and "ignore" on two local processes.

    python benchmarks/nonfinite.py [--rounds 10] [--cases "data parallel" zero3] [--model gpt2]

One model is compiled twice under one plan; a round has `STEPS` steps of each, in a new order.
Prints and writes to benchmarks/results/nonfinite.json the median time of a step as the caller sees
it, and the processor time that the workers spend on a step, which other programs on the machine
disturb less; also "raise" over "ignore" by round, with its median and quartiles.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from cpu_models import MODELS, fresh
from setting import setting

import autopar
from autopar.planning.constraints import Force
from autopar.runtime.compiled import Compiled
from autopar.runtime.runners.local import LocalRunner

RESULT = Path(__file__).parent / "results" / "nonfinite.json"
STEPS = 5
CASES: dict[str, dict[str, Any]] = {
    "data parallel": {"constraints": Force("data_parallel")},
    "zero3": {"constraints": Force("zero3")},
    "tensor parallel": {"constraints": Force("tensor_parallel")},
    "conventional": {
        "constraints": Force("data_parallel"), "schedule": "conventional", "num_stages": 8,
    },
    "pipeline": {"num_stages": 2, "num_microbatches": 4},
}  # fmt: skip
make_optimizer = functools.partial(torch.optim.AdamW, lr=1e-4)


def processor_s(compiled: Compiled) -> float:
    """Processor time of the workers so far, over all their threads."""
    runner = compiled._runner
    assert isinstance(runner, LocalRunner)
    files = (f for pid in runner.group.pids for f in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def measured(compiled: Compiled, batch: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Median time and processor time of one step, in seconds."""
    times_s, before_s = [], processor_s(compiled)
    for _ in range(STEPS):
        start_s = time.perf_counter()
        compiled.train_step(**batch)
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s), (processor_s(compiled) - before_s) / STEPS


def summary(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Medians and quartiles of the rounds' (ignore, raise) times."""
    low, middle, high = statistics.quantiles([b / a for a, b in pairs], n=4)
    return {
        "ignore_s": statistics.median(a for a, _ in pairs),
        "raise_s": statistics.median(b for _, b in pairs),
        "ratio": middle, "ratio_quartiles": [low, high],
    }  # fmt: skip


def compare(model_name: str, case: str, rounds: int) -> dict[str, Any]:
    model, batch = fresh(model_name)
    options: dict[str, Any] = {
        "example_inputs": batch, "optimizer": make_optimizer, "profile_limit_s": 0,
    }  # fmt: skip
    with (
        autopar.compile(model, 2, nonfinite="ignore", **options, **CASES[case]) as ignoring,
        autopar.compile(model, 2, nonfinite="raise", plan=ignoring.plan, **options) as raising,
    ):
        found: dict[str, list[tuple[float, float]]] = {"step": [], "processors": []}
        both = {"ignore": ignoring, "raise": raising}
        for number in range(rounds + 1):
            order = random.sample(list(both), 2)
            times = {name: measured(both[name], batch) for name in order}
            if number:  # the first round warms up
                for place, what in enumerate(found):
                    found[what].append((times["ignore"][place], times["raise"][place]))
    result = {what: summary(pairs) for what, pairs in found.items()}
    for what, numbers in result.items():
        low, high = numbers["ratio_quartiles"]
        print(
            f"{case}, {what}: {numbers['ignore_s'] * 1e3:.1f} -> {numbers['raise_s'] * 1e3:.1f} ms,"
            f" ratio {numbers['ratio']:.4f} (quartiles {low:.4f} to {high:.4f})",
            flush=True,
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--dry", action="store_true", help="keep no results")
    given = parser.parse_args()
    results = {case: compare(given.model, case, given.rounds) for case in given.cases}
    if not given.dry:
        kept = {**setting("torch"), "model": given.model, "rounds": given.rounds, "cases": results}
        RESULT.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
