"""Whole models planned on one GPU, compared with measured steps in float32.

Run: ``python benchmarks/gpu_models.py FOLDER``. The folder holds ``models_float32.csv`` and
``model_configs.json`` (NeuSight, sitar-lab/NeuSight, MIT licence: transformers with eager
attention, forward, or forward with backward, no optimizer). Each model is made on the meta device
and planned with the presets' prices only, which were fitted to kernels, not to models. Rows of
``torch.compile`` and mixtures of experts are left out. Prints and writes
``benchmarks/results/gpu_models.json``.

NeuSight's program empties the allocator's cache before each forward pass, so that of a measured
training also has the driver's allocations where the device does not hide them: on the A100 with
80 GB the forward pass of OPT-1.3B takes 452 ms with one sequence and 1,335 ms with two, the
backward pass 918 and 1,854 ms. A price of a step has no such time, so the ratios of backward
passes are printed apart.
"""

from __future__ import annotations

import argparse
import csv
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from msgspec import structs
from setting import setting

import autopar

RESULT = Path(__file__).parent / "results" / "gpu_models.json"
PRESETS = {
    "NVIDIA_A100-PCIE-40GB": "a100-40-pcie", "NVIDIA_A100_80GB_PCIe": "a100-80-pcie",
    "NVIDIA_L4": "l4", "Tesla_P100-PCIE-16GB": "p100", "Tesla_P4": "p4", "Tesla_T4": "t4",
}  # fmt: skip
ASKED = "median 7, worst 20"
# Enough for every model: capacity is not tested here.
MEMORY_BYTES = 1 << 41


def logits_sum(output: Any, *_: Any) -> torch.Tensor:
    """A loss of negligible cost, for inference, which has none."""
    found: torch.Tensor = output["logits"].sum()
    return found


def token_loss(output: Any, ids: torch.Tensor) -> torch.Tensor:
    """The loss of the measured trainings: the logits of each position against its token."""
    logits = output["prediction_logits" if "prediction_logits" in output else "logits"]
    return torch.nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), ids.view(-1))


def model_of(config: dict[str, Any], sequence: int, mode: str) -> torch.nn.Module:
    """The model that was measured, on the meta device, with eager attention.

    BERT was measured with other heads than its configuration names: a classifier of sequences in
    inference, both heads of its pretraining in training.
    """
    name = config["architectures"][0]
    if name == "BertLMHeadModel":
        name = "BertForPreTraining" if mode == "train" else "BertForSequenceClassification"
    kind = getattr(transformers, name)
    known = {k: v for k, v in config.items() if k not in ("architectures", "model_type")}
    made = kind.config_class(**{**known, "use_cache": False, "attn_implementation": "eager"})
    if name == "GPT2LMHeadModel":
        made.n_positions = max(made.n_positions, sequence)
    with torch.device("meta"):
        model: torch.nn.Module = kind(made)
    return model


@cache
def predicted(
    folder: Path, name: str, preset: str, mode: str, sequence: int, batch: int
) -> tuple[float, float]:
    """Predicted seconds of the forward and the backward pass for the plan on one device."""
    config = json.loads((folder / "model_configs.json").read_text())[name]
    model = model_of(config, sequence, mode).train(mode == "train")
    cluster = autopar.Cluster.preset(preset, devices_per_node=1)
    device = structs.replace(cluster.device, memory_bytes=MEMORY_BYTES)
    ids = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
    inputs: Any = {"input_ids": ids}
    loss_fn: Any = logits_sum
    if mode == "train":
        inputs, loss_fn = (ids, ids.clone()), token_loss
    plan = autopar.plan(model, structs.replace(cluster, device=device), inputs, loss_fn=loss_fn)
    found = plan.prediction
    return found.forward_s, found.backward_s if mode == "train" else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="where the measurements lie")
    parser.add_argument(
        "--only", default="", help="rows whose device or model has this in its name"
    )
    arguments = parser.parse_args()
    with (arguments.folder / "models_float32.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if not row["variant"]]
    found = []
    for row in rows:
        if row["model"].startswith("switch") or arguments.only not in row["device"] + row["model"]:
            continue
        sizes = (int(row["sequence"]), int(row["batch"]))
        forward_s, backward_s = predicted(
            arguments.folder, row["model"], PRESETS[row["device"]], row["mode"], *sizes
        )
        time_ms = 1e3 * (forward_s + backward_s)
        ratio = round(time_ms / float(row["total_ms"]), 3)
        new = {**row, "predicted_ms": round(time_ms, 1), "ratio": ratio}
        if row["mode"] == "train":
            ratio = round(1e3 * backward_s / float(row["backward_ms"]), 3)
            new |= {"predicted_backward_ms": round(1e3 * backward_s, 1), "backward_ratio": ratio}
        found.append(new)
        print(*(found[-1][k] for k in ("device", "model", "mode", "sequence", "batch")), end=" ")
        print(new["total_ms"], new["predicted_ms"], new["ratio"], end=" ")
        print(new.get("backward_ratio", ""), flush=True)
    off = np.abs(np.array([row["ratio"] for row in found]) - 1)
    summary = {
        "asked, in percent": ASKED,
        "median": round(100 * float(np.median(off)), 1),
        "mean": round(100 * float(off.mean()), 1),
        "worst": round(100 * float(off.max()), 1),
    }
    print(summary)
    if not arguments.only:
        document = {**setting("torch", "transformers", "numpy"), **summary, "rows": found}
        RESULT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
