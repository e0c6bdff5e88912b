"""Time and memory of planning, offline, on this machine.

Run: ``python benchmarks/planning.py``. Each case runs in a process of its own. Llama-3-8B shapes
(meta device, bfloat16, batch 64, sequence 2,048) for 8 x 8 H100, with 8 and with 32 layers, beside
the figures of another system, which are quoted with their source, not run here. Then the latter for
8 to 16,384 H100, with one sequence a device above 64 (target: from 64 to 16,384 devices at most
three times the time and the memory). GPT-2 XL is held out: nothing was tuned on it. Writes
``benchmarks/results/planning.json``, with processor time as well as wall time, which other work on
the machine inflates.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import resource
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from setting import setting

RESULT = Path(__file__).parent / "results" / "planning.json"
BESIDE_PEER = (("llama", 8, 64), ("llama", 32, 64))
SIZES = (8, 64, 512, 4096, 16384)
HELD_OUT = tuple(("gpt2-xl", 48, size) for size in SIZES)
MOST_GROWTH = 3.0
PEER = {
    "name": "meta-pytorch/autoparallel, the same graph on mesh 8x8, a 2-core machine",
    "seconds": {"8": 121.0, "32": [115.0, 155.0]},
    "peak_bytes": {"32": 4.2e9},
}


def graph_of(model: str, num_layers: int, num_rows: int) -> Any:
    """The shapes of a model with ``num_layers`` layers, captured on the meta device."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    from autopar.frontend.capture import capture

    with torch.device("meta"):
        if model == "llama":
            made: Any = LlamaForCausalLM(
                LlamaConfig(
                    num_hidden_layers=num_layers, hidden_size=4096, intermediate_size=14336,
                    num_attention_heads=32, num_key_value_heads=8, vocab_size=128256,
                    use_cache=False,
                )
            )  # fmt: skip
            ids = torch.zeros(num_rows, 2048, dtype=torch.long)
        else:
            made = GPT2LMHeadModel(
                GPT2Config(n_layer=num_layers, n_embd=1600, n_head=25, use_cache=False)
            )
            ids = torch.zeros(num_rows, 1024, dtype=torch.long)
    return capture(made.bfloat16(), {"input_ids": ids, "labels": ids.clone()})


def plan_case(model: str, num_layers: int, num_devices: int) -> dict[str, Any]:
    """Plan one model; returns wall seconds of each step of the planner, and peak memory."""
    import transformers  # noqa: F401  (its import is no part of planning)

    import autopar
    from autopar.planning import planner, sharding_search

    cluster = autopar.Cluster.preset("h100-sxm", nodes=num_devices // 8, devices_per_node=8)
    marks = [("capture", time.perf_counter(), time.process_time())]

    def mark(text: str) -> None:
        marks.append((text, time.perf_counter(), time.process_time()))

    solve, searches_s = sharding_search.solve, []

    def timed_solve(*args: Any, **kwargs: Any) -> Any:
        solution = solve(*args, **kwargs)
        searches_s.append(solution.time_s)
        return solution

    sharding_search.solve = timed_solve
    captured = graph_of(model, num_layers, max(64, num_devices))
    planned = planner.make_planned(captured, cluster, progress=mark)
    mark("end")
    parts = {
        before[0]: {
            "wall_s": round(after[1] - before[1], 3),
            "cpu_s": round(after[2] - before[2], 3),
        }
        for before, after in itertools.pairwise(marks)
    }
    return {
        "model": model,
        "num_layers": num_layers,
        "num_devices": num_devices,
        "num_ops": len(captured.graph.ops),
        "total_s": round(marks[-1][1] - marks[0][1], 2),
        "total_cpu_s": round(marks[-1][2] - marks[0][2], 2),
        "search_alone_s": round(sum(searches_s), 3),
        "parts": parts,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "mesh": str(planned.strategy.mesh),
        "status": planned.plan.search.status,
        "plan": repr(planned.plan),
    }


def growth(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The ratios of time and memory between the most devices and 64."""
    first = next(row for row in rows if row["num_devices"] == 64)
    last = max(rows, key=lambda row: row["num_devices"])
    return {
        figure: round(last[figure] / first[figure], 2) for figure in ("total_cpu_s", "peak_bytes")
    }


def main() -> None:
    context = multiprocessing.get_context("spawn")

    def planned(cases: Iterable[tuple[str, int, int]]) -> list[dict[str, Any]]:
        rows = []
        for case in cases:
            with context.Pool(1) as pool:
                row = pool.apply(plan_case, case)
            print(
                f"{row['model']}, {row['num_layers']} layers, {row['num_devices']} H100: "
                f"{row['total_s']} s ({row['total_cpu_s']} s of processor time, search alone "
                f"{row['search_alone_s']} s), {row['peak_bytes'] / 1e9:.2f} GB, {row['plan']}",
                flush=True,
            )
            rows.append(row)
        return rows

    beside_peer = planned(BESIDE_PEER)
    sizes = planned(("llama", 32, size) for size in SIZES)
    held_out = planned(HELD_OUT)
    for name, rows in (("tuned", sizes), ("held out", held_out)):
        print(f"{name}, 16,384 devices by 64: {growth(rows)} (target: {MOST_GROWTH})")
    document = {
        **setting("torch", "transformers", "numpy"),
        "cases": beside_peer,
        "peer": PEER,
        "sizes": {"cases": sizes, "growth": growth(sizes)},
        "held_out": {"cases": held_out, "growth": growth(held_out)},
    }
    RESULT.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
