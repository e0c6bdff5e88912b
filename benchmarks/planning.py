"""Time and memory of planning, offline, on this machine.

Run: ``python benchmarks/planning.py``. Each case runs in a process of its own: Llama-3-8B shapes
(meta device, bfloat16, batch 64, sequence 2,048) for 8 x 8 H100, with 8 and with 32 layers. Writes
``benchmarks/results/planning.json``, with processor time as well as wall time, which other work on
the machine inflates. The figures of other systems are quoted with their source, not run here.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import resource
import time
from pathlib import Path
from typing import Any

from setting import setting

RESULT = Path(__file__).parent / "results" / "planning.json"
LAYERS = (8, 32)
PEER = {
    "name": "meta-pytorch/autoparallel, the same graph on mesh 8x8, a 2-core machine",
    "seconds": {"8": 121.0, "32": [115.0, 155.0]},
    "peak_bytes": {"32": 4.2e9},
}


def llama_graph(num_layers: int) -> Any:
    """Llama-3-8B shapes with ``num_layers`` layers, captured on the meta device."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from autopar.frontend.capture import capture

    config = LlamaConfig(
        num_hidden_layers=num_layers,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
        ids = torch.zeros(64, 2048, dtype=torch.long)
    return capture(model, {"input_ids": ids, "labels": ids.clone()})


def plan_llama(num_layers: int) -> dict[str, Any]:
    """Plan one model; returns wall seconds of each step of the planner, and peak memory."""
    import transformers  # noqa: F401  (its import is no part of planning)

    import autopar
    from autopar.planning import planner, sharding_search

    cluster = autopar.Cluster.preset("h100-sxm", nodes=8, devices_per_node=8)
    marks = [("capture", time.perf_counter(), time.process_time())]

    def mark(text: str) -> None:
        marks.append((text, time.perf_counter(), time.process_time()))

    solve, searches_s = sharding_search.solve, []

    def timed_solve(*args: Any, **kwargs: Any) -> Any:
        solution = solve(*args, **kwargs)
        searches_s.append(solution.time_s)
        return solution

    sharding_search.solve = timed_solve
    captured = llama_graph(num_layers)
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
        "num_layers": num_layers,
        "num_ops": len(captured.graph.ops),
        "total_s": round(marks[-1][1] - marks[0][1], 2),
        "total_cpu_s": round(marks[-1][2] - marks[0][2], 2),
        "search_alone_s": round(sum(searches_s), 3),
        "parts": parts,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "mesh": str(planned.strategy.mesh),
        "status": planned.plan.search.status,
    }


def main() -> None:
    context = multiprocessing.get_context("spawn")
    rows = []
    for num_layers in LAYERS:
        with context.Pool(1) as pool:
            row = pool.apply(plan_llama, (num_layers,))
        print(
            f"Llama-3-8B, {num_layers} layers, 64 H100: {row['total_s']} s "
            f"({row['total_cpu_s']} s of processor time, search alone {row['search_alone_s']} s), "
            f"{row['peak_bytes'] / 1e9:.2f} GB, {row['mesh']}, {row['status']}"
        )
        rows.append(row)
    document = {
        **setting("torch", "transformers", "numpy"),
        "cases": rows,
        "peer": PEER,
    }
    RESULT.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
