"""Models whose sizes do not divide by the devices: prime vocabularies, batches and sequences."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 37


def odd_tokens(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(0, VOCABULARY, (2, 3, 7), generator=generator)
    labels[1, 4:] = -100
    return {"input_ids": ids, "labels": labels}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=1, n_embd=20, n_head=5, vocab_size=VOCABULARY, n_positions=11,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=1, hidden_size=24, intermediate_size=35, num_attention_heads=6,
            num_key_value_heads=3, vocab_size=VOCABULARY, max_position_embeddings=16,
            use_cache=False, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            num_hidden_layers=1, hidden_size=20, num_attention_heads=5, intermediate_size=33,
            image_size=12, patch_size=4, num_labels=7, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def odd_images(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(3, 3, 12, 12, generator=generator),
        "labels": torch.randint(0, 7, (3,), generator=generator),
    }


class Odd(nn.Module):
    """Convolutions, pools, sums, means and element-wise ops, all of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 7, 3, padding=1)
        self.hidden = nn.Linear(7 * 9, 11)
        self.scale = nn.Parameter(torch.randn(11))
        self.out = nn.Linear(11, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        images = F.max_pool2d(torch.exp(-self.conv(x)), 2)
        hidden = torch.sigmoid(self.hidden(images.flatten(1))) / (1 + self.scale.abs())
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
        normal = hidden - hidden.mean(0) + torch.log(2 + hidden.sum(0).abs())
        return F.mse_loss(self.out(normal).softmax(-1), y) + normal.cos().mean()


def odd_vectors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"x": (5, 3, 6, 6), "y": (5, 5)}
    return {k: torch.randn(shape, generator=generator) for k, shape in shapes.items()}
