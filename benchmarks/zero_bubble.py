"""Predicted throughput of 1F1B and zero-bubble pipelines on 8 A100s, compared with the published.

Run: ``python benchmarks/zero_bubble.py``. Captures two GPTs on the meta device, prices every op on
the A100-80 preset, assigns the layers to 8 stages as the authors did (the first and the last stage
have one layer less, for the embedding and the head), simulates the schedules and adds the update of
the slowest stage. Prints samples per GPU and second with those of Qi et al., ICLR 2024, table 4,
and writes ``results/zero_bubble.json``. Nothing is measured.
"""

import json
from pathlib import Path
from typing import Any

import torch
from setting import setting

from autopar.cost_models import Cluster
from autopar.frontend.capture import capture
from autopar.ir.graph import Block, Graph
from autopar.pricing.layer_times import layer_durations, layer_links, layer_times
from autopar.schedules import build, simulate

RESULTS = Path(__file__).parent / "results"
NUM_STAGES, SEQUENCE, VOCABULARY = 8, 1024, 50_304
MICROBATCHES = (24, 32, 64)
MODELS: dict[str, dict[str, int]] = {
    "GPT 1.5 B": {"layers": 22, "hidden": 2304, "heads": 24, "microbatch": 6},
    "GPT 6.2 B": {"layers": 30, "hidden": 4096, "heads": 32, "microbatch": 3},
}
PUBLISHED: dict[str, dict[str, tuple[float, ...]]] = {
    "GPT 1.5 B": {
        "1f1b": (11.8, 12.5, 13.6), "zb_h1": (12.9, 13.4, 14.2), "zb_h2": (14.5, 14.8, 14.9),
    },
    "GPT 6.2 B": {
        "1f1b": (3.50, 3.70, 4.03), "zb_h1": (3.88, 4.00, 4.20), "zb_h2": (4.32, 4.35, 4.39),
    },
}  # fmt: skip
# Adam in float32 with bfloat16 weights: gradient and weight read and written, two moments and
# a float32 copy read and written.
UPDATE_BYTES = 2 + 2 + 3 * 8
Row = dict[str, Any]


def gpt(shape: dict[str, int]) -> Graph:
    """One micro-batch of the language model in bfloat16, without data."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=shape["layers"], n_embd=shape["hidden"], n_head=shape["heads"],
        vocab_size=VOCABULARY, n_positions=SEQUENCE, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = GPT2LMHeadModel(config).to(torch.bfloat16)
    ids = torch.zeros(shape["microbatch"], SEQUENCE, dtype=torch.int64)
    return capture(model, {"input_ids": ids, "labels": ids}).graph


def stages(graph: Graph, num_layers: int) -> list[Block]:
    """The graph's blocks by stage; the first and the last stage have one layer less."""
    blocks = [b for b in graph.blocks if b.name != "fixed"]
    is_layer = [".h." in f".{b.name}." and "#" not in b.name for b in blocks]
    assert sum(is_layer) == num_layers, [b.name for b in blocks]
    share = (num_layers + 2) // NUM_STAGES
    wanted = [share - 1, *[share] * (NUM_STAGES - 2), share - 1]
    found, position = [], 0
    for index, count in enumerate(wanted):
        start = position
        while count or (
            position < len(blocks) and index in (0, NUM_STAGES - 1) and not is_layer[position]
        ):
            count -= is_layer[position]
            position += 1
        found.append(
            Block(
                index=index, name=f"stage {index}",
                start=blocks[start].start, stop=blocks[position - 1].stop,
            )
        )  # fmt: skip
    assert position == len(blocks), (position, len(blocks))
    return found


def predict(name: str, cluster: Cluster) -> list[Row]:
    shape, rows = MODELS[name], []
    graph = gpt(shape)
    layers = layer_times(graph, cluster.device, stages(graph, shape["layers"]))
    parameters = max(layer.gradient_bytes for layer in layers) / 2
    update_s = parameters * UPDATE_BYTES / cluster.device.memory_bandwidth_bytes_per_s
    link = cluster.levels[0]
    links = layer_links(layers, link.latency_s, link.bandwidth_bytes_per_s)
    for schedule, published in PUBLISHED[name].items():
        for count, expected in zip(MICROBATCHES, published):
            built = build(schedule, num_stages=NUM_STAGES, num_microbatches=count)
            timeline = simulate(built, layer_durations(layers), links)
            samples = count * shape["microbatch"] / (timeline.makespan_s + update_s) / NUM_STAGES
            rows.append(
                {
                    "model": name, "schedule": schedule, "num_microbatches": count,
                    "predicted": samples, "published": expected, "ratio": samples / expected,
                    "stage_s": max(layer.total_s for layer in layers), "update_s": update_s,
                    "bubble": timeline.bubble_ratio,
                }
            )  # fmt: skip
    return rows


def main() -> None:
    cluster = Cluster.preset("a100-80", nodes=1, devices_per_node=NUM_STAGES)
    rows = [row for name in MODELS for row in predict(name, cluster)]
    print(f"{'model':10} {'schedule':8} {'N':>4} {'predicted':>10} {'published':>10} {'ratio':>6}")
    for r in rows:
        print(
            f"{r['model']:10} {r['schedule']:8} {r['num_microbatches']:4} {r['predicted']:10.2f} "
            f"{r['published']:10.2f} {r['ratio']:6.2f}"
        )
    result = {
        **setting("torch", "transformers"),
        "note": "predicted and published samples per GPU and second; nothing here is measured",
        "rows": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "zero_bubble.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
