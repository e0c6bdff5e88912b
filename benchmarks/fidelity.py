"""Predicted against measured: step time and peak memory of many plans on this machine's processes.

    python benchmarks/fidelity.py [--models gpt2 resnet50] [--processes 1 2] [--steps 8]
                                   [--fresh | --again]

Every model is profiled, planned (searched, data parallel, ZeRO-3, tensor parallel), and trained for
a few steps, one plan after another, as a user trains one: concurrent plans that take turns would
evict each other's data from the caches. A row is stored as soon as it is measured, so a run can be
interrupted and continued. Rows during whose steps the processors were never at their usual pace
(`Pace`) are measured again by the next run, whatever their errors.

fidelity.json in benchmarks/results/ has the rows with errors and, per model, Kendall's tau between
the predicted and the measured order of its plans; fidelity.png plots them. With --again the plans
of existing rows are made from the stored prices and their steps timed once more: "repeat_error"
compares the same code's later time with that of the row, which is the host's share of the error.

Memory is compared twice: the tensors held at once, which a GPU's allocator counts too, and the
growth of a process on the CPU, which also includes the heap's fragmentation and libraries.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from cpu_models import MODELS, fresh
from setting import setting

from autopar.cost_models.others import watched
from autopar.cost_models.pace import SLOW, Pace

RESULT = Path(__file__).parent / "results" / "fidelity.json"
PICTURE = RESULT.with_suffix(".png")
PROFILE_LIMIT_S = 120.0
WARM_UP = 4
DISTURBED = 0.05
MAX_TURNS = 3
TIED = 1.03
PACE = Pace()
TARGETS = {
    "time": {"median": 0.10, "worst": 0.30},
    "memory": {"median": 0.03, "worst": 0.10},
    "kendall_tau": 0.8,
}
Row = dict[str, Any]
Key = tuple[str, int, str]
"""Model, processes and plan."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--fresh", action="store_true", help="measure rows again that are there")
    parser.add_argument("--again", action="store_true", help="only time rows that are there again")
    arguments = parser.parse_args()
    rows = {key: recounted(made) for key, made in by_key(known_rows()).items()}
    usual = set(rows) - slow_rows(rows)
    for name in arguments.models:
        for count in arguments.processes:
            wanted = [
                plan
                for plan in plans_of(count)
                if arguments.fresh or ((name, count, plan) in usual) == arguments.again
            ]
            for plan in wanted:
                made = measured(name, count, plan, arguments.steps)
                if made is None:
                    continue
                key = name, count, plan
                if arguments.again:
                    again_s, first_s = made["measured_s"], rows[key]["measured_s"]
                    rows[key] |= {
                        "again_s": again_s,
                        "repeat_error": round(again_s / first_s - 1, 4),
                    }
                    print(f"{name} {count} {made['plan']}: {first_s:.4f} s, then {again_s:.4f} s")
                else:
                    rows[key] = made
                    show(made)
                write(list(rows.values()))
    if rows:
        draw(list(rows.values()))
        print(json.dumps(summary(list(rows.values())), indent=1))


def known_rows() -> list[Row]:
    """The stored rows, if they were measured on a machine like this."""
    if not RESULT.exists():
        return []
    document = json.loads(RESULT.read_text())
    here, there = setting()["machine"], document["machine"]
    differing = [k for k in ("processor", "num_cores", "gpu") if here[k] != there.get(k)]
    if differing:
        found = ", ".join(f"{k} {there.get(k)!r} for {here[k]!r}" for k in differing)
        print(f"rows of another machine are left out ({found})")
    return [] if differing else document["rows"]


def by_key(rows: list[Row]) -> dict[Key, Row]:
    return {(r["model"], r["processes"], r["plan"]): r for r in rows}


def slow_rows(rows: dict[Key, Row]) -> set[Key]:
    """Rows measured while the processors were slow, by the paces of all steps."""
    usual_s = SLOW * min((r["pace_s"] for r in rows.values()), default=0.0)
    return {key for key, r in rows.items() if r["pace_s"] > usual_s}


def plans_of(count: int) -> dict[str, list[Any]]:
    """Constraints of each plan; a single process has only one plan."""
    from autopar import Force

    if count == 1:
        return {"one process": []}
    known = {"data parallel": "data_parallel", "ZeRO-3": "zero3"}
    known["tensor parallel"] = "tensor_parallel"
    return {"searched": [], **{name: [Force(what)] for name, what in known.items()}}


def measured(name: str, count: int, plan: str, num_steps: int) -> Row | None:
    """The row of one plan, whose processes have the machine to themselves.

    None where there is no such plan.
    """
    import autopar
    from autopar.base.errors import ConstraintError

    model, batch = fresh(name)
    start = time.perf_counter()
    try:
        compiled = autopar.compile(
            model, count, example_inputs=batch, constraints=plans_of(count)[plan],
            optimizer=functools.partial(torch.optim.AdamW, lr=1e-4),
            profile_limit_s=PROFILE_LIMIT_S, mesh={"x": count},
        )  # fmt: skip
    except ConstraintError as error:
        print(f"{name} on {count}, {plan}: {error}")
        return None
    with compiled:
        compiled_s = time.perf_counter() - start
        for _ in range(WARM_UP):
            compiled.train_step(**batch)
        steps = Steps(functools.partial(compiled.train_step, **batch))
        for turn in range(MAX_TURNS * num_steps):
            if turn >= num_steps and steps.num_quiet >= num_steps:
                break
            steps.take()
        return row(name, count, plan, compiled, steps.best(num_steps), compiled_s, batch)


class Steps:
    """Seconds of steps, and how much each was disturbed.

    Disturbances are other programs on the machine and processors that were not at their usual pace
    before or after the step; below 1 a step counts as undisturbed. Each step follows another, as in
    training: measuring the pace leaves none of its data in the caches.
    """

    def __init__(self, step: Callable[[], Any]) -> None:
        self.step = step
        self.num_quiet = 0
        self._found: list[tuple[float, float, float]] = []
        self._usual_s = PACE()

    def take(self) -> None:
        me = psutil.Process()
        processes = [me, *me.children(recursive=True)]
        with watched(lambda: sum(sum(p.cpu_times()[:2]) for p in processes)) as others:
            before_s = PACE()
            self.step()
            start = time.perf_counter()
            self.step()
            seconds = time.perf_counter() - start
            pace_s = max(before_s, PACE())
        self._usual_s = min(self._usual_s, pace_s)
        disturbance = max(others.share / DISTURBED, pace_s / (SLOW * self._usual_s))
        self._found.append((disturbance, seconds, pace_s))
        self.num_quiet += disturbance < 1

    def best(self, num_steps: int) -> Times:
        """The least disturbed steps."""
        best = sorted(self._found)[:num_steps]
        return Times([seconds for _, seconds, _ in best], [pace_s for *_, pace_s in best])


@dataclasses.dataclass(frozen=True)
class Times:
    steps_s: list[float]
    paces_s: list[float]


def row(
    name: str,
    count: int,
    plan: str,
    compiled: Any,
    times: Times,
    compiled_s: float,
    batch: dict[str, Any],
) -> Row:
    time_s = statistics.median(times.steps_s)
    growth = max(compiled.memory_growth_bytes())
    tensors = max(compiled.peak_tensor_bytes(**batch))
    predicted = compiled.plan.prediction
    counted = predicted.memory_bytes
    # CPU workers read the batch from the caller's memory.
    own = sum(counted.values()) - (counted.get("inputs", 0) if predicted.resident_bytes else 0)
    return recounted({
        "model": name,
        "processes": count,
        "plan": plan,
        "predicted_s": float(f"{predicted.step_time_s:.5g}"),
        "measured_s": float(f"{time_s:.5g}"),
        "fastest_s": float(f"{min(times.steps_s):.5g}"),
        "time_error": round(predicted.step_time_s / time_s - 1, 4),
        "predicted_parts_s": {
            part: float(f"{getattr(predicted, part + '_s'):.4g}")
            for part in ("forward", "backward", "communication", "update")
        },
        "sources": predicted.sources,
        "measured_bytes": growth,
        "predicted_tensor_bytes": own,
        "measured_tensor_bytes": tensors,
        "tensor_error": round(own / tensors - 1, 4),
        "predicted_memory_bytes": predicted.memory_bytes,
        "compile_s": round(compiled_s, 1),
        "load": round(os.getloadavg()[0], 2),
        "pace_s": float(f"{statistics.median(times.paces_s):.3g}"),
    })  # fmt: skip


def recounted(made: Row) -> Row:
    """The row with the growth of a process, or the memory of a GPU, by the current formula."""
    from autopar.cost_models.allocator import resident_bytes

    counted, grown = made["predicted_memory_bytes"], made["measured_bytes"]
    predicted = sum(counted.values()) if torch.cuda.is_available() else resident_bytes(counted)
    error = round(predicted / grown - 1, 4) if grown else None
    return made | {"predicted_bytes": predicted, "memory_error": error}


def summary(rows: list[Row]) -> Row:
    """Median and worst errors, and the ranking of each model's plans on two processes."""

    def of(key: str) -> Row:
        errors = sorted(abs(r[key]) for r in rows if r.get(key) is not None)
        if not errors:
            return {}
        return {"median": round(statistics.median(errors), 4), "worst": errors[-1]}

    taus = {}
    for name in dict.fromkeys(r["model"] for r in rows):
        own = [r for r in rows if r["model"] == name and r["processes"] > 1]
        taus[name] = kendall_tau(own)
    known = [tau for tau in taus.values() if tau is not None]
    return {
        "num_rows": len(rows),
        "num_rows_at_slow_pace": len(slow_rows(by_key(rows))),
        "time_error": of("time_error"),
        "repeat_error": of("repeat_error"),
        "tensor_error": of("tensor_error"),
        "memory_error": of("memory_error"),
        "kendall_tau": taus,
        "median_kendall_tau": statistics.median(known) if known else None,
        "targets": TARGETS,
    }


def kendall_tau(rows: list[Row]) -> float | None:
    """Tau-b between predicted and measured over pairs of plans; two within 3% are tied.

    None where neither has an order; 0 where only one of them has.
    """

    def order(key: str) -> list[int]:
        pairs = itertools.combinations([r[key] for r in rows], 2)
        return [0 if max(a, b) <= TIED * min(a, b) else 1 if a < b else -1 for a, b in pairs]

    predicted, measured = order("predicted_s"), order("measured_s")
    num_predicted, num_measured = (sum(map(abs, found)) for found in (predicted, measured))
    if not num_predicted and not num_measured:
        return None
    agreed = sum(a * b for a, b in zip(predicted, measured))
    return round(agreed / max(1.0, (num_predicted * num_measured) ** 0.5), 3)


def show(made: Row) -> None:
    memory = "" if made["memory_error"] is None else f"{made['memory_error']:+.1%}"
    print(
        f"{made['model']:20} {made['processes']} {made['plan']:16} "
        f"predicted {made['predicted_s'] * 1e3:8.1f} ms, measured {made['measured_s'] * 1e3:8.1f} "
        f"({made['time_error']:+.1%}); memory {made['predicted_bytes'] / 2**20:7.1f} MiB, "
        f"{made['measured_bytes'] / 2**20:7.1f} ({memory}), of tensors "
        f"{made['measured_tensor_bytes'] / 2**20:7.1f} ({made['tensor_error']:+.1%})",
        flush=True,
    )


def write(rows: list[Row]) -> None:
    document = {
        **setting("torch", "transformers"),
        "summary": summary(rows),
        "rows": rows,
    }
    RESULT.write_text(json.dumps(document, indent=1) + "\n")


def draw(rows: list[Row]) -> None:
    """Plot predicted over measured, time on the left and memory on the right, one point per row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    for axes, kind, unit, scale in zip(
        figure.subplots(1, 2), ("s", "bytes"), ("ms", "MiB"), (1e3, 2**-20)
    ):
        for plan in dict.fromkeys(r["plan"] for r in rows):
            own = [r for r in rows if r["plan"] == plan]
            axes.loglog(
                [r[f"measured_{kind}"] * scale for r in own],
                [r[f"predicted_{kind}"] * scale for r in own],
                "o", label=plan, markersize=4,
            )  # fmt: skip
        ends = [
            min(axes.get_xlim()[0], axes.get_ylim()[0]),
            max(*axes.get_xlim(), *axes.get_ylim()),
        ]
        axes.plot(ends, ends, color="grey", linewidth=0.8)
        axes.set(xlabel=f"measured [{unit}]", ylabel=f"predicted [{unit}]")
        axes.legend(fontsize="small")
    figure.savefig(PICTURE, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
