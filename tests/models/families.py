"""Further model families from ``transformers``, small, with random weights and no dropout."""

from __future__ import annotations

from torch import nn

VOCABULARY = 32


def llama(num_layers: int = 2) -> nn.Module:
    """Two key-value heads for four query heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=num_layers, hidden_size=16, intermediate_size=32,
            num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCABULARY,
            max_position_embeddings=16, use_cache=False,
        )
    )  # fmt: skip


def t5(num_layers: int = 1) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            num_layers=num_layers, num_decoder_layers=num_layers, d_model=16, d_kv=4,
            d_ff=32, num_heads=4, vocab_size=VOCABULARY, dropout_rate=0.0, use_cache=False,
            decoder_start_token_id=0, feed_forward_proj="gated-gelu", tie_word_embeddings=False,
        )
    )  # fmt: skip


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            num_hidden_layers=2, hidden_size=16, intermediate_size=32, num_attention_heads=4,
            image_size=16, patch_size=4, num_labels=8, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def mobilenet_v2() -> nn.Module:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    return MobileNetV2ForImageClassification(
        MobileNetV2Config(
            image_size=64, depth_multiplier=0.25, min_depth=4, depth_divisible_by=4, num_labels=8,
            classifier_dropout_prob=0.0,
        )
    )  # fmt: skip


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            num_hidden_layers=1, hidden_size=16, intermediate_size=32, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=16,
            num_local_experts=4, num_experts_per_tok=2, use_cache=False, attention_dropout=0.0,
        )
    )  # fmt: skip
