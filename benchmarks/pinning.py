"""Which tensors stay on the device, at 30 to 95% of the memory that a step needs without moving.

Run: ``python benchmarks/pinning.py [NETWORK...]``. The tensor lifetimes of full-size networks
(float32, AdamW, blocks of single ops, on the meta device) are planned in three forms:

* ``twice the largest``: the pinned set under the condition of GeePS and of the NTU thesis, by
  GeePS's greedy policy, by the thesis's dynamic program, and by an integer program (the optimum);
* ``adjacent``: the same under the tighter condition, by both programs;
* ``gap by gap``: where each tensor moves in the gaps between its uses that cost least.

Every plan is verified under its capacity. *Saved* are the bytes that pinning keeps from being
copied, of those that are copied if nothing is pinned; *pinned* are tensors that would be copied.
GeePS has two chances: with all tensors, and with those only that would be copied; the better one
counts. The second group of networks was first run when the planners were done. Writes
``benchmarks/results/pinning.json``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from networks import captured
from setting import setting

from autopar.base.errors import MovementError
from autopar.cost_models import Cluster
from autopar.cost_models.update import FUSED_ADAMW
from autopar.lowering.program import lower
from autopar.movement import residency
from autopar.movement.gaps import gaps_of, movement_plan
from autopar.movement.lifetimes import StepLifetimes
from autopar.movement.pinning.dynamic import pin_by_dynamic_program
from autopar.movement.pinning.greedy import pin_greedily
from autopar.movement.pinning.integer import least_capacity, pin_by_program
from autopar.movement.pinning.problem import (
    Pinning,
    PinningProblem,
    Window,
    adjacent,
    twice_largest,
)
from autopar.movement.program import lifetimes_of
from autopar.movement.single_ops import single_op_blocks
from autopar.movement.verify import verify
from autopar.sharding.strategy import Analysis, unsplit

RESULT = Path(__file__).parent / "results" / "pinning.json"
SHOWN = ("vgg16", "resnet50", "inception_v3", "bert", "gpt2")
HELD_OUT = ("alexnet", "densenet121", "mobilenet_v2", "vit", "transformer")
PERCENTS = (30, 45, 60, 75, 90, 95)
THESIS_PERCENT = 20.0
TOLERANCE, LIMIT_S = 5e-3, 3.0
OPTIMUM = {"relative_gap": 1e-4, "time_limit_s": 120.0}
Row = dict[str, Any]


def lifetimes(network: str) -> StepLifetimes:
    analysis = Analysis(captured(network).graph)
    program = lower(unsplit(analysis), blocks=single_op_blocks(analysis))
    device = Cluster.preset("h100-sxm", nodes=1, devices_per_node=1).device
    return lifetimes_of(program, device, optimizer=FUSED_ADAMW)


def timed(solve: Callable[[], Any]) -> tuple[Any, float, float]:
    """A result, or the error in its place, with its wall and processor time."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    try:
        found = solve()
    except MovementError as error:
        found = error
    return found, time.perf_counter() - wall_s, time.process_time() - cpu_s


def only_copied(problem: PinningProblem) -> PinningProblem:
    """The problem in which tensors that are never copied are memory of their operations."""
    free = {item for item, saved in enumerate(problem.savings) if not saved}
    windows = tuple(
        Window(
            items=tuple(i for i in window.items if i not in free),
            reserved_bytes=window.reserved_bytes
            + sum(problem.sizes[i] for i in window.items if i in free),
        )
        for window in problem.windows
    )
    sizes = tuple(0 if i in free else size for i, size in enumerate(problem.sizes))
    return replace(problem, sizes=sizes, windows=windows)


def geeps(problem: PinningProblem) -> Pinning:
    first = pin_greedily(problem)
    second = pin_greedily(only_copied(problem))
    return max(first, second, key=lambda found: found.saved_bytes)


def described(problem: PinningProblem, step: StepLifetimes, solved: tuple[Any, ...]) -> Row:
    """The bytes of a planner's verified plan, or the least capacity that it needs."""
    found, wall_s, cpu_s = solved
    times = {"wall_s": round(wall_s, 3), "cpu_s": round(cpu_s, 3)}
    if isinstance(found, MovementError):
        return {"least_bytes": found.least_bytes, **times}
    moved = [gap for gap in gaps_of(step) if gap.tensor not in found.pinned]
    plan = movement_plan(step, moved)
    verify(plan, step, problem.capacity_bytes)
    return {
        "pinned_bytes": sum(problem.sizes[i] for i in found.pinned if problem.savings[i]),
        "saved_bytes": found.saved_bytes,
        "moved_bytes": plan.moved_bytes({t.name: t.size_bytes for t in step.tensors}),
        **times,
    }


def pinned_sets(problem: PinningProblem, step: StepLifetimes, *, greedy: bool) -> Row:
    solvers: dict[str, Callable[[PinningProblem], Pinning]] = {
        **({"geeps": geeps} if greedy else {}),
        "ours": lambda p: pin_by_dynamic_program(p, tolerance=TOLERANCE, time_limit_s=LIMIT_S),
        "optimum": lambda p: pin_by_program(p, **OPTIMUM),
    }
    found = {name: timed(lambda s=solve: s(problem)) for name, solve in solvers.items()}
    row: Row = {name: described(problem, step, each) for name, each in found.items()}
    optimum = found["optimum"][0]
    if isinstance(optimum, Pinning):
        row["optimum"]["bound_bytes"] = optimum.bound_bytes
        row["ours_of_optimum"] = round(row["ours"]["saved_bytes"] / optimum.bound_bytes, 5)
    if "saved_bytes" in row.get("geeps", {}):
        for key in ("saved", "pinned"):
            ours, theirs = row["ours"][f"{key}_bytes"], row["geeps"][f"{key}_bytes"]
            percent = round(100 * (ours / theirs - 1), 1) if theirs else None
            row[f"{key}_above_geeps_percent"] = percent
    return row


def gap_by_gap(step: StepLifetimes, capacity_bytes: int) -> Row:
    found, wall_s, cpu_s = timed(
        lambda: residency.least_traffic(
            step, capacity_bytes, relative_gap=TOLERANCE, time_limit_s=LIMIT_S
        )
    )
    times = {"wall_s": round(wall_s, 3), "cpu_s": round(cpu_s, 3)}
    if isinstance(found, MovementError):
        return {"ours": {"least_bytes": found.least_bytes, **times}}
    verify(found.plan(step), step, capacity_bytes)
    best = found
    if found.moved_bytes > (1 + OPTIMUM["relative_gap"]) * found.bound_bytes:
        best = residency.least_traffic(step, capacity_bytes, **OPTIMUM)
    bound = max(best.bound_bytes, found.bound_bytes)
    return {
        "ours": {"moved_bytes": found.moved_bytes, **times},
        "optimum": {"moved_bytes": best.moved_bytes, "bound_bytes": bound},
        "ours_of_optimum": round(found.moved_bytes / bound, 5) if bound else 1.0,
    }


def network_rows(network: str) -> Row:
    step = lifetimes(network)
    peak = step.peak_bytes
    everything = sum(twice_largest(step, 0).savings)
    least = {
        "geeps": 2 * max(twice_largest(step, 0).full_loads),
        "twice the largest": least_capacity(twice_largest(step, peak)),
        "adjacent": least_capacity(adjacent(step, peak)),
        "gap by gap": residency.least_capacity(step),
    }
    cases = []
    for percent in PERCENTS:
        capacity = peak * percent // 100
        cases.append(
            {
                "percent": percent,
                "twice the largest": pinned_sets(twice_largest(step, capacity), step, greedy=True),
                "adjacent": pinned_sets(adjacent(step, capacity), step, greedy=False),
                "gap by gap": gap_by_gap(step, capacity),
            }
        )
        print(line(network, cases[-1], everything, peak), flush=True)
    return {
        "num_operations": step.num_ops,
        "num_tensors": len(step.tensors),
        "peak_bytes": peak,
        "moved_if_nothing_is_pinned_bytes": everything,
        "least_capacity_bytes": least,
        "cases": cases,
    }


def line(network: str, case: Row, everything: int, peak: int) -> str:
    """One case on one line: saved percents by planner, or the least percent of the peak."""

    def cell(row: Row) -> str:
        if "least_bytes" in row:
            return f"(>{100 * row['least_bytes'] / peak:.0f}%)".rjust(7)
        return f"{100 * (1 - row['moved_bytes'] / everything):6.1f}%"

    twice, near, gaps = case["twice the largest"], case["adjacent"], case["gap by gap"]
    cells = [cell(twice[name]) for name in ("geeps", "ours", "optimum")]
    cells += [cell(near[name]) for name in ("ours", "optimum")]
    cells += [cell(gaps["ours"]), cell(gaps.get("optimum", gaps["ours"]))]
    above = twice.get("saved_above_geeps_percent")
    times = [row["ours"]["cpu_s"] for row in (twice, near, gaps)]
    return (
        f"{network:13s} {case['percent']:3d}%  {' '.join(cells)}  "
        f"{'' if above is None else f'{above:+.1f}%':>8s}  {max(times):5.2f} s"
    )


def summary(networks: dict[str, Row]) -> Row:
    """The extremes over all cases of a group."""
    cases = [case for row in networks.values() for case in row["cases"]]
    forms = ("twice the largest", "adjacent", "gap by gap")
    above = [c["twice the largest"].get("saved_above_geeps_percent") for c in cases]
    more = [c["twice the largest"].get("pinned_above_geeps_percent") for c in cases]
    known = sorted(value for value in above if value is not None)
    pinned = sorted(value for value in more if value is not None)
    refused = [
        c
        for c in cases
        if "least_bytes" in c["twice the largest"]["geeps"]
        and "moved_bytes" in c["gap by gap"]["ours"]
    ]
    ratios = {form: [c[form].get("ours_of_optimum") for c in cases] for form in forms}
    return {
        "saved_above_geeps_percent": [known[0], known[len(known) // 2], known[-1]],
        "pinned_above_geeps_percent": [pinned[0], pinned[len(pinned) // 2], pinned[-1]],
        "thesis_pinned_above_geeps_percent": THESIS_PERCENT,
        "cases_that_only_geeps_refuses": len(refused),
        "least_saved_of_optimum": {
            form: min(r for r in ratios[form] if r is not None) for form in forms[:2]
        },
        "most_moved_of_optimum": max(r for r in ratios[forms[2]] if r is not None),
        "infeasible_where_a_plan_exists": sum(
            "least_bytes" in case[form]["ours"]
            and row["least_capacity_bytes"][form] <= row["peak_bytes"] * case["percent"] // 100
            for row in networks.values()
            for case in row["cases"]
            for form in forms
        ),
        "longest_wall_s": max(case[form]["ours"]["wall_s"] for case in cases for form in forms),
        "longest_cpu_s": max(case[form]["ours"]["cpu_s"] for case in cases for form in forms),
    }


def main() -> None:
    groups = {"shown": SHOWN, "held out": HELD_OUT}
    if sys.argv[1:]:
        groups = {"asked": tuple(sys.argv[1:])}
    print(f"{'saved bytes of':19s} GeePS    ours     optimum adjacent        gap by gap     above")
    document: Row = {**setting("torch", "transformers", "ortools", "numpy"), "groups": {}}
    for group, names in groups.items():
        networks = {name: network_rows(name) for name in names}
        document["groups"][group] = {"summary": summary(networks), "networks": networks}
        print(group, json.dumps(document["groups"][group]["summary"], indent=1))
    if not sys.argv[1:]:
        RESULT.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
