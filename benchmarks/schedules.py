"""Figures of autopar.schedules: scale, bubbles, merged Chimera, search against CP-SAT, gains of k.

Run: ``python benchmarks/schedules.py [--quick]``. Prints tables and writes
``benchmarks/results/schedules.json`` with the machine and the versions. Times are wall seconds on
this machine under its current load and, where given, processor seconds; bubbles, gaps and gains
come from the simulation and are the same everywhere.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from setting import setting

from autopar.schedules import (
    CoRun,
    Durations,
    Links,
    SearchProblem,
    build,
    multi_stream_gain,
    reverse_first_k_gain,
    search_schedule,
    simulate,
    verify,
)
from autopar.schedules.generators.oracle import optimal_schedule

RESULT = Path(__file__).parent / "results" / "schedules.json"
ONE_COPY = ("gpipe", "1f1b", "zb_h1", "zb_h2")
Row = dict[str, Any]


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Wall seconds and the function's result."""
    start = time.perf_counter()
    value = function()
    return round(time.perf_counter() - start, 3), value


def scale() -> list[Row]:
    """Build, verify and simulate 64 stages and 512 micro-batches; the fastest of three runs."""
    schedules: tuple[tuple[str, Row], ...] = (
        ("1f1b", {}),
        ("zb_h1", {}),
        ("chimera", {"num_pipelines": 4}),
    )
    return [
        min((scaled(name, options) for _ in range(3)), key=lambda row: row["total_s"])
        for name, options in schedules
    ]


def scaled(name: str, options: Row) -> Row:
    """One run: wall seconds of each part, and processor seconds in total."""
    links = Links(latency_s=0.01, bandwidth_bytes_per_s=100.0, message_bytes=1.0)
    cpu = time.process_time()
    build_s, schedule = timed(lambda: build(name, num_stages=64, num_microbatches=512, **options))
    verify_s, _ = timed(lambda: verify(schedule))
    simulate_s, _ = timed(lambda: simulate(schedule, Durations(F=1, I=1, W=1), links))
    return {
        "schedule": name,
        "actions": schedule.num_actions,
        "build_s": build_s,
        "verify_s": verify_s,
        "simulate_s": simulate_s,
        "total_s": round(build_s + verify_s + simulate_s, 3),
        "total_cpu_s": round(time.process_time() - cpu, 3),
    }


def bubbles() -> list[Row]:
    """All pipeline schedules on 8 devices and 32 micro-batches of equal work."""
    rows = []
    for name, per_device, options in (
        ("gpipe", 1, {}),
        ("1f1b", 1, {}),
        ("interleaved", 2, {}),
        ("chimera", 1, {"concatenation": "direct"}),
        ("chimera", 1, {"concatenation": "forward_doubling"}),
        ("chimera", 1, {"concatenation": "merged"}),
        ("fast_forward", 2, {}),
        ("zb_h1", 1, {}),
        ("zb_h2", 1, {}),
        ("zb_v", 2, {}),
        ("v_half", 2, {}),
        ("v_min", 2, {}),
        ("dualpipe", 1, {}),
        ("dualpipe", 1, {"overlap": True}),
    ):
        schedule = build(name, num_stages=8 * per_device, num_microbatches=32, **options)
        unit = 1 / per_device
        # a pair on two streams takes F + B, in turns
        co_run = CoRun(end_together=True)
        found = simulate(schedule, Durations(F=unit, I=unit, W=unit), co_run=co_run)
        rows.append(
            {
                "schedule": name,
                **options,
                "bubble_ratio": round(found.bubble_ratio, 4),
                "bubble_in_device_span": round(found.bubble_s, 3),
                "peak_activations": max(found.peak_activations),
                "weights": schedule.shape.num_replicas,
            }
        )
    return rows


def merged_chimera() -> list[Row]:
    """Chimera at N = 4D and B = 2F compared with 1F1B."""
    rows = []
    for depth in (4, 8, 16, 32):
        costs = Durations(F=1, B=2)
        row: Row = {"stages": depth, "micro_batches": 4 * depth}
        plain = build("1f1b", num_stages=depth, num_microbatches=4 * depth)
        row["1f1b"] = round(simulate(plain, costs).bubble_ratio, 4)
        for way in ("direct", "merged"):
            schedule = build(
                "chimera", num_stages=depth, num_microbatches=4 * depth, concatenation=way
            )
            row[way] = round(simulate(schedule, costs).bubble_ratio, 4)
        rows.append(row)
    return rows


def drawn(seed: int, devices: int, batches: int) -> SearchProblem:
    rng = random.Random(seed)

    def costs(low: int) -> tuple[int, ...]:
        return tuple(rng.randint(low, 12) for _ in range(devices))

    return SearchProblem(
        num_devices=devices,
        num_microbatches=batches,
        num_blocks=devices,
        durations=Durations(F=costs(3), I=costs(3), W=costs(1)),
        links=rng.choice((None, Links(latency_s=1.0))),
        max_memory_bytes=rng.choice((devices, devices + 2, 2 * devices)),
        generators=ONE_COPY,
    )


def against_oracle(num_cases: int, devices: int, batches: int, limit_s: float) -> list[Row]:
    """The search, the best generator alone and CP-SAT on the same random cases."""
    rows = []
    for seed in range(num_cases):
        problem = drawn(seed, devices, batches)
        search_s, result = timed(lambda problem=problem: search_schedule(problem))
        generators = [
            item.makespan_s for item in result.candidates if item.fits and item.name in ONE_COPY
        ]
        oracle_s, oracle = timed(
            lambda problem=problem, result=result: optimal_schedule(
                result.best.schedule.shape,
                problem.durations,
                links=problem.links,
                max_bytes=[problem.max_memory_bytes] * devices,
                time_limit_s=limit_s,
                start_from=result.best.schedule,
            )
        )
        rows.append(
            {
                "seed": seed,
                "stages": devices,
                "micro_batches": batches,
                "cap": problem.max_memory_bytes,
                "search_s": search_s,
                "cp_sat_s": oracle_s,
                "searched": result.best.makespan_s,
                "best_generator": min(generators, default=None),
                "cp_sat": oracle.makespan_s,
                "proved_optimal": oracle.optimal,
                "above_bound": round(result.best.makespan_s / oracle.lower_bound_s - 1, 4),
            }
        )
    return rows


def gains() -> list[Row]:
    """Gains of reverse first-k and the second stream on a synthetic 50-layer profile.

    Forward, input and weight gradients take equal time; gradients grow with depth as in
    convolutional networks; reductions take ``load`` of the backward's time in total.
    """
    rows = []
    layers = 50
    growth = [1 + 3 * layer / (layers - 1) for layer in range(layers)]
    for load in (0.5, 0.8, 1.0, 1.2):
        reductions = [load * 2 * layers * part / sum(growth) for part in growth]
        gain = reverse_first_k_gain(Durations(F=1, I=1, W=1, G=reductions), num_layers=layers)
        rows.append(
            {
                "schedule": "reverse_first_k",
                "load": load,
                "speedup": round(gain.speedup, 4),
                "k": gain.best_k,
                "curve": [round(gain.conventional_s / p.iteration_s, 4) for p in gain.curve],
            }
        )
    for occupancy in (0.9, 0.7, 0.5):
        second = multi_stream_gain(
            Durations(F=1, I=1, W=1),
            num_layers=layers,
            co_run=CoRun(default_occupancy=occupancy, interference=0.05),
        )
        rows.append(
            {
                "schedule": "multi_stream",
                "occupancy": occupancy,
                "speedup": round(second.speedup, 4),
            }
        )
    for batches in (4, 8, 16):
        fast = build("fast_forward", num_stages=16, num_microbatches=batches, num_devices=4)
        pipe = build("gpipe", num_stages=4, num_microbatches=batches)
        ratio = (
            simulate(pipe, Durations(F=4, B=8)).makespan_s
            / simulate(fast, Durations(F=1, I=1, W=1)).makespan_s
        )
        rows.append(
            {
                "schedule": "fast_forward",
                "micro_batches": batches,
                "speedup_over_gpipe": round(ratio, 4),
            }
        )
    return rows


def show(title: str, rows: list[Row]) -> None:
    print(f"\n{title}")
    for row in rows:
        print("  " + "  ".join(f"{k}={v}" for k, v in row.items() if k != "curve"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter CP-SAT cases")
    quick = parser.parse_args().quick
    tables = {
        "scale": scale(),
        "bubbles": bubbles(),
        "merged_chimera": merged_chimera(),
        "search_small": against_oracle(4 if quick else 12, 4, 8, 10.0),
        "search_large": against_oracle(1 if quick else 3, 8, 24, 5.0 if quick else 30.0),
        "gains": gains(),
    }
    for title, rows in tables.items():
        show(title, rows)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps({**setting("ortools", "torch"), **tables}, indent=1) + "\n")


if __name__ == "__main__":
    main()
