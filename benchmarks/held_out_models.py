"""Models that nothing in the project was tuned for: benchmarks print them apart from the others.

``HELD_OUT`` is as ``MODELS`` of cpu_models. Weights are random; 16 sequences of 128, or 8 images.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from cpu_models import WORDS, Made

BATCH, LENGTH = 16, 128
TRANSFORMER: dict[str, Any] = {
    "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 8,
    "intermediate_size": 1024, "vocab_size": WORDS,
}  # fmt: skip


def _tokens() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, WORDS, (BATCH, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


def roberta() -> Made:
    """With its dropout of 0.1."""
    config = transformers.RobertaConfig(**TRANSFORMER, max_position_embeddings=LENGTH + 8)
    return transformers.RobertaForMaskedLM(config), _tokens()


def albert() -> Made:
    """Layers that share their weights."""
    config = transformers.AlbertConfig(**TRANSFORMER, embedding_size=128)
    return transformers.AlbertForMaskedLM(config), _tokens()


def mistral() -> Made:
    config = transformers.MistralConfig(**TRANSFORMER, num_key_value_heads=4, use_cache=False)
    return transformers.MistralForCausalLM(config), _tokens()


def convnext() -> Made:
    config = transformers.ConvNextConfig(
        depths=[2, 2, 2, 2], hidden_sizes=[48, 96, 192, 384], num_labels=8
    )
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(8, 3, 96, 96, generator=generator)
    labels = torch.randint(0, 8, (8,), generator=generator)
    return transformers.ConvNextForImageClassification(config), {
        "pixel_values": images,
        "labels": labels,
    }


HELD_OUT: dict[str, Callable[[], Made]] = {
    "roberta": roberta,
    "albert": albert,
    "mistral": mistral,
    "convnext": convnext,
}
