"""Time to profile a model for eight CPU devices, the first and the second time.

    PYTHONPATH=. python benchmarks/profiling.py [--models resnet50 gpt2]

Every op call that a plan on eight devices may make (all meshes) is measured into an empty store, as
`autopar.compile` does, and then once more. Prints and writes to benchmarks/results/profiling.json
the seconds and the number of measured calls of both runs; calls beyond the time limit are priced
without a measurement.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from cpu_models import fresh
from setting import setting
from torch import nn

from autopar.cost_models import Cluster, ProfileStore
from autopar.frontend.capture import Captured, capture
from autopar.frontend.signature import Arguments
from autopar.planning.meshes import candidate_meshes
from autopar.pricing.local_calls import calls_of
from autopar.runtime.measure.op_times import op_times
from autopar.sharding.strategy import Analysis

RESULT = Path(__file__).parent / "results" / "profiling.json"
NUM_DEVICES, LIMIT_S = 8, 110.0


def gpt2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """GPT-2 with 12 layers: width 768, 50,257 words, 8 sequences of 256."""
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = torch.randint(0, 50257, (8, 256))
    return GPT2LMHeadModel(GPT2Config(use_cache=False)), {"input_ids": ids, "labels": ids}


MODELS = {"resnet50": lambda: fresh("resnet50"), "gpt2": gpt2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    arguments = parser.parse_args()
    cluster = Cluster.detect(NUM_DEVICES)
    rows = []
    for name in arguments.models:
        model, batch = MODELS[name]()
        captured = capture(model, Arguments((), batch))
        with tempfile.TemporaryDirectory() as folder:
            store = Path(folder) / "profile.sqlite3"
            first, second = (profiled(captured, cluster, store) for _ in range(2))
        rows.append({"model": name, "limit_s": LIMIT_S, "first": first, "second": second})
        print(json.dumps(rows[-1], indent=1), flush=True)
        document = {**setting("torch", "transformers"), "devices": NUM_DEVICES, "rows": rows}
        RESULT.write_text(json.dumps(document, indent=1) + "\n")


def profiled(captured: Captured, cluster: Cluster, path: Path) -> dict[str, Any]:
    """One profile, with the calls it added to the store; listing the calls is timed too."""
    before = stored(cluster, path)
    start = time.perf_counter()
    calls = list(calls_of(Analysis(captured.graph), candidate_meshes(cluster, None)))
    listed_s = time.perf_counter() - start
    op_times(calls, cluster, path, limit_s=LIMIT_S, start_timeout_s=60.0, progress=lambda _: None)
    return {
        "seconds": round(time.perf_counter() - start, 3),
        "listing_s": round(listed_s, 3),
        "num_calls": len(calls),
        "num_measured": stored(cluster, path) - before,
    }


def stored(cluster: Cluster, path: Path) -> int:
    return sum(1 for _ in ProfileStore(path, cluster.device).everything()) if path.exists() else 0


if __name__ == "__main__":
    main()
