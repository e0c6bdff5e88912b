"""The models that most tests run on: (model, batch) pairs, small enough for two cores.

Three come from ``transformers`` with random weights, two are plain torch. Dropout is off, so
that eager PyTorch is an exact reference; sizes divide by 4 where the tests split them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import families, others, uneven, vision

Batch = dict[str, Tensor]
BATCH, SEQUENCE, VOCABULARY = 4, 8, 32


def token_batch(seed: int, batch: int = BATCH, sequence: int = SEQUENCE) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (batch, sequence), generator=generator)
    labels = torch.randint(0, VOCABULARY, (batch, sequence), generator=generator)
    labels[0, 2] = -100
    return {"input_ids": ids, "labels": labels}


def image_batch(seed: int, batch: int = BATCH) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(batch, 3, 32, 32, generator=generator),
        "labels": torch.randint(0, 8, (batch,), generator=generator),
    }


def vector_batch(seed: int, batch: int = BATCH) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(batch, 16, generator=generator),
        "y": torch.randint(0, 8, (batch,), generator=generator),
    }


def gpt2(num_layers: int = 2) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=num_layers, n_embd=32, n_head=4, vocab_size=VOCABULARY, n_positions=16,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def bert(num_layers: int = 2) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            num_hidden_layers=num_layers, hidden_size=32, num_attention_heads=4,
            vocab_size=VOCABULARY,
            intermediate_size=64, max_position_embeddings=16,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def resnet(depths: tuple[int, int] = (2, 1)) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(
            embedding_size=8, hidden_sizes=[16, 32], depths=list(depths), num_labels=8,
            layer_type="bottleneck",
        )
    )  # fmt: skip


class MLP(nn.Module):
    """Two hidden layers; returns logits, so it needs a loss_fn or its own ``y``."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()
        )
        self.head = nn.Linear(hidden, 8)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        logits = self.head(self.layers(x))
        return logits if y is None else F.cross_entropy(logits, y)


class LSTMLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.lstm = nn.LSTM(16, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(input_ids))
        logits = self.head(hidden)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "mlp": (MLP, vector_batch),
    "lstm": (LSTMLanguageModel, token_batch),
    "gpt2": (gpt2, token_batch),
    "bert": (bert, token_batch),
    "resnet": (resnet, image_batch),
}


def large_image_batch(seed: int) -> Batch:
    """Images whose last maps, five halvings later, still have four points to take a variance of."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(BATCH, 3, 64, 64, generator=generator)
    return {**image_batch(seed), "pixel_values": pixels}


def small_image_batch(seed: int) -> Batch:
    batch = image_batch(seed)
    return {**batch, "pixel_values": batch["pixel_values"][..., :16, :16].contiguous()}


def noise_batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(BATCH, 8, 1, 1, generator=generator)
    return {"pixel_values": image_batch(seed)["pixel_values"], "noise": noise}


def point_batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        "points": torch.randn(BATCH, 3, 8, generator=generator),
        "labels": torch.randint(0, 8, (BATCH,), generator=generator),
    }


def click_batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        "dense": torch.randn(BATCH, 12, generator=generator),
        "sparse": torch.randint(0, 32, (BATCH, 4, 3), generator=generator),
        "clicked": torch.randint(0, 2, (BATCH,), generator=generator).float(),
    }


MORE_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "llama": (families.llama, token_batch),
    "t5": (families.t5, token_batch),
    "vit": (families.vit, small_image_batch),
    "mobilenet_v2": (families.mobilenet_v2, large_image_batch),
    "mixtral": (families.mixtral, token_batch),
    "alexnet": (vision.alexnet, image_batch),
    "vgg16": (vision.vgg16, image_batch),
    "inception_v3": (vision.inception_v3, image_batch),
    "densenet": (vision.densenet, image_batch),
    "transformer_encoder": (
        lambda: others.TransformerLanguageModel(VOCABULARY, length=SEQUENCE), token_batch
    ),
    "pointnet": (others.PointNet, point_batch),
    "dcgan": (vision.DCGAN, noise_batch),
    "dlrm": (others.DLRM, click_batch),
}  # fmt: skip


UNEVEN_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "odd_gpt2": (uneven.gpt2, uneven.odd_tokens),
    "odd_llama": (uneven.llama, uneven.odd_tokens),
    "odd_vit": (uneven.vit, uneven.odd_images),
    "odd_layers": (uneven.Odd, uneven.odd_vectors),
}


# Normalised by few samples, these would diverge, and rounding errors with them, at 0.1.
LEARNING_RATE = {"mobilenet_v2": 0.01, "pointnet": 0.01}


def optimizer_of(name: str) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    """The optimizer in tests of a model of the zoo."""
    return functools.partial(torch.optim.SGD, lr=LEARNING_RATE.get(name, 0.1), momentum=0.9)


def build(name: str) -> tuple[nn.Module, Callable[[int], Any]]:
    """A freshly seeded model of the zoo in train mode, and its batch maker (seed to batch)."""
    make, batch = {**MODELS, **MORE_MODELS, **UNEVEN_MODELS}[name]
    torch.manual_seed(0)
    return make().train(), batch
