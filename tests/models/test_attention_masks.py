"""Masks of ``transformers`` models are captured as eager mode uses them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    masking_utils,
)

from autopar.base.errors import AutoparError
from autopar.frontend.capture import capture

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
IDS = torch.arange(24).reshape(2, 12) % 64
Batch = dict[str, Tensor]


def latent() -> nn.Module:
    config = DeepseekV3Config(
        **SIZES, num_key_value_heads=4, moe_intermediate_size=16, n_routed_experts=4, n_group=2,
        topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1, q_lora_rank=16,
        kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config)


MODELS = {
    "shared keys": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)),
    "all keys": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, bos_token_id=0, eos_token_id=1)
    ),
    "window within the sequence": lambda: MistralForCausalLM(
        MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=4)
    ),
    "window beyond the sequence": lambda: MistralForCausalLM(
        MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=64)
    ),
    "window of both directions": lambda: Gemma3ForCausalLM(  # a mask made under vmap
        Gemma3TextConfig(
            **SIZES, num_key_value_heads=2, head_dim=8, sliding_window=4,
            use_bidirectional_attention=True, layer_types=["sliding_attention"],
        )
    ),
    "latent attention": latent,
    "both directions": lambda: BertForMaskedLM(BertConfig(**SIZES)),
    "position bias": lambda: T5ForConditionalGeneration(
        T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4,
            decoder_start_token_id=0,
        )
    ),
}  # fmt: skip


Noted = list[tuple[bool, bool, bool]]
"""Whether each attention has a mask, is causal, and shares keys."""


def in_eager_mode(model: nn.Module, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> Noted:
    found: Noted = []
    attention = F.scaled_dot_product_attention

    def noted(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        found.append(
            (given["attn_mask"] is not None, given["is_causal"], given.get("enable_gqa", False))
        )
        return attention(q, k, v, **given)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(F, "scaled_dot_product_attention", noted)
        model(**batch)
    return found


def captured(model: nn.Module, batch: Batch, **options: Any) -> Noted:
    found: Noted = []
    for op in capture(model, batch, **options).graph.ops:
        if op.target is torch.ops.aten.scaled_dot_product_attention.default:
            given = dict(op.kwargs)
            args = (*op.args, *(None, 0.0, False)[len(op.args) - 3 :])
            found.append((args[3] is not None, args[5], given.get("enable_gqa", False)))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_attention_has_a_mask_only_where_eager_mode_has_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS[name]()
    batch: dict[str, Any] = {"input_ids": IDS, "labels": IDS}
    for uses_cache in (True, False):  # only without one packed sequences are looked for
        model.config.use_cache = uses_cache
        for masks in ({}, {"attention_mask": torch.ones_like(IDS)}):
            wanted = in_eager_mode(model, batch | masks, monkeypatch)
            assert wanted
            assert captured(model, batch | masks) == wanted


def test_a_mask_stays_unless_it_is_known_to_be_full() -> None:
    model = MODELS["shared keys"]()
    batch = {"input_ids": IDS, "labels": IDS}
    full, padded = torch.ones_like(IDS), (IDS > 3).long()
    masked, causal = [(True, False, False)], [(False, True, True)]
    for mask in (full.bool(), full.float()):
        assert captured(model, batch | {"attention_mask": mask}) == causal
    assert captured(model, batch | {"attention_mask": padded}) == masked
    assert captured(model, batch | {"attention_mask": full}, full_masks=()) == masked
    without_data = {k: x.to("meta") for k, x in (batch | {"attention_mask": full}).items()}
    assert captured(model, without_data) == masked
    assert captured(model, without_data, full_masks=["attention_mask"]) == causal


def test_only_masks_that_a_model_looks_at_must_be_full() -> None:
    batch = {"input_ids": IDS, "labels": IDS, "attention_mask": torch.ones_like(IDS)}
    for name, masks in (
        ("shared keys", ("attention_mask",)),
        ("window within the sequence", ()),
    ):
        assert capture(MODELS[name](), batch).signature.full_masks == masks
    del batch["attention_mask"]
    assert capture(MODELS["shared keys"](), batch).signature.full_masks == ()


def test_packed_sequences_keep_their_mask() -> None:
    """Positions of a batch are an input, whose values no graph can look at."""
    model = MODELS["shared keys"]()
    model.config.use_cache = False
    packed = torch.arange(12) % 6
    for positions in (packed, torch.arange(12)):
        batch = {"input_ids": IDS, "labels": IDS, "position_ids": positions.expand(2, -1)}
        assert captured(model, batch) == [(True, False, False)]


class Packing(nn.Module):
    """Packs two sequences in each row by positions of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MODELS["shared keys"]()
        self.inner.config.use_cache = False

    def forward(self, input_ids: Tensor) -> Any:
        positions = (torch.arange(12) % 6).unsqueeze(0)
        return self.inner(input_ids, labels=input_ids, position_ids=positions)


def test_constant_positions_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Packing()
    wanted = in_eager_mode(model, {"input_ids": IDS}, monkeypatch)
    assert wanted == [(True, False, False)]
    assert captured(model, {"input_ids": IDS}) == wanted


def test_a_capture_leaves_transformers_as_it_was() -> None:
    model, before = MODELS["shared keys"](), dict(vars(masking_utils))
    for batch in ({"input_ids": IDS}, {"unknown": IDS}):
        with contextlib.suppress(AutoparError):
            capture(model, batch)
        assert vars(masking_utils) == before
