"""Plans for islands of unequal speed, over a fast and a slow link, beside uniform cuts.

Run: ``python benchmarks/islands.py``. A transformer on two islands: planned freely; by
each schedule of `SCHEDULES` with as many layers in each stage; and split evenly over all devices
without a pipeline. The independent check is a closed formula: with steps of t1 and t2 seconds on
each island alone, no plan for both is faster than ``1 / (1 / t1 + 1 / t2)``, and no pipeline with
equal halves than ``max(t1, t2) / 2``; the ratio of the two is what unequal stages can win. With
``zb_v`` the fast island has the embedding and the head besides half of the layers, so that less is
left to win. The planner was written beside a Llama on A100 and V100; a GPT-2 on H100 and A100 is
held out. Writes ``benchmarks/results/islands.json``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from setting import setting

RESULT = Path(__file__).parent / "results" / "islands.json"
LAYERS, WIDTH, ROWS, COLUMNS = 12, 2048, 64, 1024
SCHEDULES = {"1f1b": 2, "zb_h1": 2, "zb_v": 4}
"""Their numbers of stages, on two pipeline ranks."""
MICROBATCHES = (4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on two islands and on their joined cluster; ``layers`` names its list of layers."""

    islands: tuple[Any, Any]
    cluster: Any
    model: Callable[[], tuple[Any, dict[str, Any]]]
    layers: str
    group: str


def cases() -> dict[str, Case]:
    from autopar import Cluster

    h100, a100, v100 = map(Cluster.preset, ("h100-sxm", "a100-80", "v100"))
    near: dict[str, float] = {"bandwidth_bytes_per_s": 25e9, "latency_s": 1e-5}
    far: dict[str, float] = {"bandwidth_bytes_per_s": 1.25e9, "latency_s": 1e-3}
    beside = {"model": llama, "layers": "model.layers", "group": "developed on"}
    held_out = {"model": gpt2, "layers": "transformer.h", "group": "held out"}
    return {
        "Llama, 8 A100 + 8 V100, 200 Gb/s": Case(
            islands=(a100, v100), cluster=Cluster.joined([a100, v100], **near), **beside
        ),
        "Llama, 8 A100 + 8 V100, 10 Gb/s": Case(
            islands=(a100, v100), cluster=Cluster.joined([a100, v100], **far), **beside
        ),
        "GPT-2, 8 H100 + 8 A100, 200 Gb/s": Case(
            islands=(h100, a100), cluster=Cluster.joined([h100, a100], **near), **held_out
        ),
    }


def llama() -> tuple[Any, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=WIDTH // 128,
        num_key_value_heads=8, intermediate_size=int(3.5 * WIDTH), vocab_size=32000,
        max_position_embeddings=COLUMNS, use_cache=False,
    )  # fmt: skip
    return on_meta(lambda: LlamaForCausalLM(config))


def gpt2() -> tuple[Any, dict[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=LAYERS, n_embd=WIDTH, n_head=WIDTH // 64, n_positions=COLUMNS, use_cache=False
    )
    return on_meta(lambda: GPT2LMHeadModel(config))


def on_meta(make: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """A model without data, and its batch."""
    import torch

    with torch.device("meta"):
        ids = torch.zeros(ROWS, COLUMNS, dtype=torch.long)
        return make(), {"input_ids": ids, "labels": ids.clone()}


def step_s(case: Case, cluster: Any, **options: Any) -> tuple[float, Any]:
    import autopar

    made, batch = case.model()
    plan = autopar.plan(made, cluster, batch, precision="fp16", **options)
    return plan.prediction.step_time_s, plan


def uniform_step_s(case: Case, name: str, num_microbatches: int) -> float:
    stages = SCHEDULES[name]
    cuts = [f"{case.layers}.{LAYERS * stage // stages}" for stage in range(1, stages)]
    options = {"schedule": name, "num_microbatches": num_microbatches, "cuts": cuts}
    return step_s(case, case.cluster, **options)[0]


def measured(case: Case) -> dict[str, Any]:
    alone_s = [step_s(case, island)[0] for island in case.islands]
    ideal_s = 1 / sum(1 / each for each in alone_s)
    begun_s = time.process_time()
    searched_s, plan = step_s(case, case.cluster)
    planned_s = time.process_time() - begun_s
    uniform_s = {
        f"{name}, {num} micro-batches": uniform_step_s(case, name, num)
        for name in SCHEDULES
        for num in MICROBATCHES
    }
    even_s, _ = step_s(case, case.cluster, num_stages=1)
    return {
        "group": case.group,
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
    for name, case in cases().items():
        row = document["cases"][name] = measured(case)
        print(
            f"{name} ({case.group}): {row['searched_s']:.4f} s, {row['schedule']}, "
            f"{row['first_blocks']}; best "
            f"uniform cut {min(row['uniform_s'].values()):.4f} s, evenly {row['even_s']:.4f} s: "
            f"{row['won']:.2f} times as fast; the ratio of speeds allows "
            f"{row['ratio_allows']:.2f}; {row['of_ideal']:.0%} of the ideal"
        )
        document |= setting("torch", "transformers", "numpy")
        RESULT.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
