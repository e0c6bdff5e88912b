"""The tests' model families in sizes whose training step takes a CPU 0.05 to 1 s, and their data.

``MODELS`` maps a name to a function that returns a module (which returns its loss) and one global
batch, random but fixed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parent.parent))

Batch = dict[str, Tensor]
Made = tuple[nn.Module, Batch]
WORDS = 4096


def fresh(name: str) -> Made:
    """One of ``MODELS`` in train mode, with the same weights and batch each time."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    return model.train(), batch


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _ids(batch: int, length: int, words: int) -> Tensor:
    return torch.randint(0, words, (batch, length), generator=_generator())


def _tokens(batch: int, length: int, words: int = WORDS) -> Batch:
    ids = _ids(batch, length, words)
    return {"input_ids": ids, "labels": ids}


def _images(batch: int, size: int, classes: int = 8) -> Batch:
    generator = _generator()
    return {
        "pixel_values": torch.randn(batch, 3, size, size, generator=generator),
        "labels": torch.randint(0, classes, (batch,), generator=generator),
    }


def _transformers(kind: str, batch: Batch, **config: Any) -> Made:
    """A class of ``transformers``, by the name of its head, with a configuration of its own."""
    import transformers

    prefix = kind.partition("For")[0].removesuffix("LMHeadModel")
    made = getattr(transformers, f"{prefix}Config")(**config)
    return getattr(transformers, kind)(made), batch


def mlp() -> Made:
    layers: list[nn.Module] = [nn.Linear(512, 2048)]
    for _ in range(3):
        layers += [nn.ReLU(), nn.Linear(2048, 2048)]

    class Perceptron(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*layers, nn.ReLU(), nn.Linear(2048, 8))

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.layers(x), labels)

    labels = torch.randint(0, 8, (512,), generator=_generator())
    return Perceptron(), {"x": torch.randn(512, 512, generator=_generator()), "labels": labels}


def lstm() -> Made:
    from networks import RecurrentLanguageModel

    return RecurrentLanguageModel(WORDS, 256), _tokens(16, 64)


def gpt2() -> Made:
    """GPT-2 with six layers of 512, 8,192 words, 4 sequences of 256, and no dropout."""
    return _transformers(
        "GPT2LMHeadModel", _tokens(4, 256, 8192), n_layer=6, n_embd=512, n_head=8, vocab_size=8192,
        n_positions=256, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip


def bert() -> Made:
    return _transformers(
        "BertForMaskedLM", _tokens(8, 128), num_hidden_layers=4, hidden_size=384,
        num_attention_heads=6, intermediate_size=1536, vocab_size=WORDS, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def llama() -> Made:
    return _transformers(
        "LlamaForCausalLM", _tokens(8, 128), num_hidden_layers=4, hidden_size=384,
        intermediate_size=1024, num_attention_heads=6, num_key_value_heads=2, vocab_size=WORDS,
        use_cache=False,
    )  # fmt: skip


def t5() -> Made:
    return _transformers(
        "T5ForConditionalGeneration", _tokens(8, 128), num_layers=3, num_decoder_layers=3,
        d_model=256, d_kv=32, d_ff=1024, num_heads=8, vocab_size=WORDS, dropout_rate=0.0,
        use_cache=False, decoder_start_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip


def mixtral() -> Made:
    return _transformers(
        "MixtralForCausalLM", _tokens(8, 128), num_hidden_layers=2, hidden_size=256,
        intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, vocab_size=WORDS,
        num_local_experts=4, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip


def vit() -> Made:
    return _transformers(
        "ViTForImageClassification", _images(16, 64), num_hidden_layers=4, hidden_size=384,
        intermediate_size=1536, num_attention_heads=6, image_size=64, patch_size=8, num_labels=8,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def resnet50() -> Made:
    """ResNet-50 on 16 images of 96 x 96, with 100 classes."""
    return _transformers("ResNetForImageClassification", _images(16, 96, 100), num_labels=100)


def mobilenet_v2() -> Made:
    return _transformers(
        "MobileNetV2ForImageClassification", _images(16, 96), image_size=96, num_labels=8,
        classifier_dropout_prob=0.0,
    )  # fmt: skip


def _vision(make: str, batch: Batch, *args: Any) -> Made:
    from tests.models import vision

    return getattr(vision, make)(*args), batch


def alexnet() -> Made:
    return _vision("alexnet", _images(64, 32), 64)


def vgg16() -> Made:
    return _vision("vgg16", _images(32, 32), 32)


def inception_v3() -> Made:
    return _vision("inception_v3", _images(32, 32), 24)


def densenet() -> Made:
    return _vision("densenet", _images(32, 32), 24)


def transformer_encoder() -> Made:
    from tests.models.others import TransformerLanguageModel

    return TransformerLanguageModel(WORDS, 512, length=128), _tokens(8, 128)


def pointnet() -> Made:
    from tests.models.others import PointNet

    points = torch.randn(32, 3, 1024, generator=_generator())
    labels = torch.randint(0, 8, (32,), generator=_generator())
    return PointNet(64), {"points": points, "labels": labels}


def dcgan() -> Made:
    from tests.models.vision import DCGAN

    noise = torch.randn(32, 8, 1, 1, generator=_generator())
    return DCGAN(32), {"pixel_values": _images(32, 32)["pixel_values"], "noise": noise}


def dlrm() -> Made:
    from tests.models.others import DLRM

    generator = _generator()
    batch = {
        "dense": torch.randn(2048, 12, generator=generator),
        "sparse": torch.randint(0, 50_000, (2048, 4, 3), generator=generator),
        "clicked": torch.randint(0, 2, (2048,), generator=generator).float(),
    }
    return DLRM(rows=50_000, width=64), batch


MODELS: dict[str, Callable[[], Made]] = {
    "mlp": mlp,
    "lstm": lstm,
    "gpt2": gpt2,
    "bert": bert,
    "resnet50": resnet50,
    "llama": llama,
    "t5": t5,
    "vit": vit,
    "mobilenet_v2": mobilenet_v2,
    "mixtral": mixtral,
    "alexnet": alexnet,
    "vgg16": vgg16,
    "inception_v3": inception_v3,
    "densenet": densenet,
    "transformer_encoder": transformer_encoder,
    "pointnet": pointnet,
    "dcgan": dcgan,
    "dlrm": dlrm,
}
