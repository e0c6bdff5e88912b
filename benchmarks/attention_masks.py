"""Steps on batches whose attention mask is all ones, beside eager PyTorch.

    python benchmarks/attention_masks.py [--rounds 7]

In: causal models of ``transformers`` of four layers, random weights, batches of two rows as a
collator of packed text gives them. autopar captures them without a mask and looks at each step's;
where it has one program for all batches (``batch_norm="local"``) it applies the mask. Eager PyTorch
gets the batch as it is, and once without its mask. On one CPU core; steps are interleaved: each
round runs one step of every configuration. Prints, and writes
``benchmarks/results/attention_masks.json``: median seconds, and their ratios to eager PyTorch with
the batch as it is. Held out: nothing was tuned on `HELD_OUT`.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from setting import setting
from torch import Tensor, nn

import autopar

RESULT = Path(__file__).parent / "results" / "attention_masks.json"
WORDS, ROWS, LENGTHS = 512, 2, (512, 1536)
SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1,
}  # fmt: skip
SHOWN = ("Llama",)
HELD_OUT = ("Qwen2", "Mistral", "GPTNeoX", "Olmo2")
OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-4)

Batch = dict[str, Tensor]


def model_of(family: str) -> nn.Module:
    """A causal model of a family."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES)
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
    return model.train()


def eager_step(model: nn.Module, batch: Batch) -> Callable[[], object]:
    """One training step of a copy of the model."""
    own = copy.deepcopy(model)
    optimizer = OPTIMIZER(own.parameters())

    def step() -> None:
        optimizer.zero_grad()
        own(**batch).loss.backward()
        optimizer.step()

    return step


def measured(family: str, length: int, num_rounds: int) -> dict[str, Any]:
    """Median seconds of a step by configuration, and their ratios to eager PyTorch."""
    model = model_of(family)
    ids = torch.randint(1, WORDS, (ROWS, length), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    without = {name: tensor for name, tensor in batch.items() if name != "attention_mask"}
    options: dict[str, Any] = {
        "optimizer": OPTIMIZER, "profile_limit_s": 0, "check_gradients": False,
    }  # fmt: skip
    with (
        autopar.compile(model, 1, example_inputs=batch, **options) as full,
        autopar.compile(model, 1, example_inputs=batch, batch_norm="local", **options) as masked,
    ):
        assert full.plan.graph.full_masks
        assert not masked.plan.graph.full_masks
        steps = {
            "eager": eager_step(model, batch),
            "eager without a mask": eager_step(model, without),
            "autopar": lambda: full.train_step(**batch),
            "autopar, mask applied": lambda: masked.train_step(**batch),
        }
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(num_rounds + 2):
            for name, step in steps.items():
                start = time.perf_counter()
                step()
                times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(found[2:]) for name, found in times.items()}
    return {
        "seconds": {name: round(time_s, 5) for name, time_s in medians.items()},
        "of_eager": {name: round(t / medians["eager"], 4) for name, t in medians.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each configuration")
    num_rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    groups: dict[str, Any] = {}
    for group, families in (("shown", SHOWN), ("held_out", HELD_OUT)):
        groups[group] = {}
        for family in families:
            for length in LENGTHS:
                found = measured(family, length, num_rounds)
                groups[group][f"{family}, {ROWS} x {length} tokens"] = found
                ratios = ", ".join(f"{name} {r:.2f}" for name, r in found["of_eager"].items())
                print(f"{family}, {length} tokens ({group}): {ratios}", flush=True)
    result = setting("torch", "transformers") | {"num_rounds": num_rounds, "groups": groups}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
