"""Plans for islands of unequal speed, over a fast and a slow link, beside uniform cuts.

Run: ``python benchmarks/islands.py``. A transformer like Llama on two islands: planned freely; by
each schedule of `SCHEDULES` with as many layers in each stage; and split evenly over all devices
without a pipeline. The independent check is a closed formula: with steps of t1 and t2 seconds on
each island alone, no plan for both is faster than ``1 / (1 / t1 + 1 / t2)``, and no pipeline with
equal halves than ``max(t1, t2) / 2``; the ratio of the two is what unequal stages can win. With
``zb_v`` the fast island has the embedding and the head besides half of the layers, so that less is
left to win. Writes ``benchmarks/results/islands.json``.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from setting import setting

RESULT = Path(__file__).parent / "results" / "islands.json"
LAYERS, WIDTH, ROWS, COLUMNS = 12, 2048, 64, 1024
SCHEDULES = {"1f1b": 2, "zb_h1": 2, "zb_v": 4}
"""Their numbers of stages, on two pipeline ranks."""
MICROBATCHES = (4, 8)


def clusters() -> dict[str, tuple[Any, Any]]:
    """The islands and their joined cluster, by name."""
    from autopar import Cluster

    a100, v100 = Cluster.preset("a100-80"), Cluster.preset("v100")
    near: dict[str, float] = {"bandwidth_bytes_per_s": 25e9, "latency_s": 1e-5}
    far: dict[str, float] = {"bandwidth_bytes_per_s": 1.25e9, "latency_s": 1e-3}
    return {
        "8 A100 + 8 V100, 200 Gb/s": ((a100, v100), Cluster.joined([a100, v100], **near)),
        "8 A100 + 8 V100, 10 Gb/s": ((a100, v100), Cluster.joined([a100, v100], **far)),
    }


def model() -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=WIDTH // 128,
        num_key_value_heads=8, intermediate_size=int(3.5 * WIDTH), vocab_size=32000,
        max_position_embeddings=COLUMNS, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        ids = torch.zeros(ROWS, COLUMNS, dtype=torch.long)
        return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}


def step_s(cluster: Any, **options: Any) -> tuple[float, Any]:
    import autopar

    made, batch = model()
    plan = autopar.plan(made, cluster, batch, precision="fp16", **options)
    return plan.prediction.step_time_s, plan


def uniform_step_s(cluster: Any, name: str, num_microbatches: int) -> float:
    stages = SCHEDULES[name]
    cuts = [f"model.layers.{LAYERS * stage // stages}" for stage in range(1, stages)]
    return step_s(cluster, schedule=name, num_microbatches=num_microbatches, cuts=cuts)[0]


def measured(islands: tuple[Any, Any], cluster: Any) -> dict[str, Any]:
    alone_s = [step_s(island)[0] for island in islands]
    ideal_s = 1 / sum(1 / each for each in alone_s)
    begun_s = time.process_time()
    searched_s, plan = step_s(cluster)
    planned_s = time.process_time() - begun_s
    uniform_s = {
        f"{name}, {num} micro-batches": uniform_step_s(cluster, name, num)
        for name in SCHEDULES
        for num in MICROBATCHES
    }
    even_s, _ = step_s(cluster, num_stages=1)
    return {
        "alone_s": alone_s,
        "searched_s": searched_s,
        "planned_s": round(planned_s, 1),
        "first_blocks": plan.schedule.first_blocks,
        "schedule": f"{plan.schedule.name}, {plan.schedule.num_microbatches} micro-batches",
        "placement": next((x for x in plan.schedule.actions if x.startswith("placement")), ""),
        "uniform_s": uniform_s,
        "even_s": even_s,
        "ideal_s": ideal_s,
        "won": min(uniform_s.values()) / searched_s,
        "ratio_allows": max(alone_s) / 2 / ideal_s,
        "of_ideal": ideal_s / searched_s,
    }


def main() -> None:
    document: dict[str, Any] = {"cases": {}}
    for name, (islands, cluster) in clusters().items():
        row = document["cases"][name] = measured(islands, cluster)
        print(
            f"{name}: {row['searched_s']:.4f} s, {row['schedule']}, {row['first_blocks']}; best "
            f"uniform cut {min(row['uniform_s'].values()):.4f} s, evenly {row['even_s']:.4f} s: "
            f"{row['won']:.2f} times as fast; the ratio of speeds allows "
            f"{row['ratio_allows']:.2f}; {row['of_ideal']:.0%} of the ideal"
        )
        document |= setting("torch", "transformers", "numpy")
        RESULT.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
