"""Models and batches in sizes that keep one data-centre GPU busy, and small ones that do not.

``CUDA_MODELS`` and ``CUDA_HELD_OUT`` are as ``MODELS`` of cpu_models and ``HELD_OUT`` of
held_out_models. Weights are random.
"""

from __future__ import annotations

from collections.abc import Callable

from cpu_models import Made, _images, _tokens, _transformers, _vision

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def gpt2_small() -> Made:
    """GPT-2 of 124 million parameters on 4 sequences of 1,024."""
    return _transformers("GPT2LMHeadModel", _tokens(4, 1024, 50257), use_cache=False, **NO_DROPOUT)


def bert_base() -> Made:
    """BERT-base on 32 sequences of 128, as in pre-training's first phase."""
    return _transformers("BertForMaskedLM", _tokens(32, 128, 30522), hidden_dropout_prob=0.0,
                         attention_probs_dropout_prob=0.0)  # fmt: skip


def resnet50_224() -> Made:
    """ResNet-50 on 32 images of 224 x 224."""
    return _transformers("ResNetForImageClassification", _images(32, 224, 1000), num_labels=1000)


def densenet121() -> Made:
    """DenseNet-121 with growth 24 on 64 images of 32 x 32: kernels too small for a GPU."""
    return _vision("densenet", _images(64, 32), 24)


def roberta_base() -> Made:
    """With its dropout of 0.1, on 16 sequences of 256."""
    return _transformers("RobertaForMaskedLM", _tokens(16, 256, 50265))


def llama_300m() -> Made:
    """Twelve layers of 1,024 with grouped queries, on 8 sequences of 1,024."""
    return _transformers(
        "LlamaForCausalLM", _tokens(8, 1024, 32000), num_hidden_layers=12, hidden_size=1024,
        intermediate_size=2816, num_attention_heads=16, num_key_value_heads=4, vocab_size=32000,
        use_cache=False,
    )  # fmt: skip


def convnext_tiny() -> Made:
    """On 32 images of 224 x 224."""
    return _transformers("ConvNextForImageClassification", _images(32, 224), num_labels=8)


CUDA_MODELS: dict[str, Callable[[], Made]] = {
    "gpt2_small": gpt2_small,
    "bert_base": bert_base,
    "resnet50_224": resnet50_224,
    "densenet121": densenet121,
}
CUDA_HELD_OUT: dict[str, Callable[[], Made]] = {
    "roberta_base": roberta_base,
    "llama_300m": llama_300m,
    "convnext_tiny": convnext_tiny,
}
