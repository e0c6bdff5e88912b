"""Models whose sizes do not divide by the devices: padded splits give eager's results.

Vocabularies, batches, sequences and widths are mostly prime. Random valid assignments run in
lockstep and are compared with eager PyTorch in double precision.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.mesh import Mesh
from autopar.rules.base import padded_dims
from autopar.strategy import Analysis, Strategy
from tests.models.zoo import token_batch
from tests.oracles import (
    assert_same,
    lockstep_steps,
    random_assignment,
    reference_steps,
    state_of,
    to_double,
)

VOCABULARY = 37
MESHES = {
    "2": Mesh(("a",), (2,)),
    "3": Mesh(("a",), (3,)),
    "4": Mesh(("a",), (4,)),
    "2x2": Mesh(("a", "b"), (2, 2)),
}


def odd_tokens(seed: int) -> dict[str, Tensor]:
    batch = token_batch(seed, batch=3, sequence=7)
    batch["labels"][1, 4:] = -100
    return batch


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


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Tensor]]]] = {
    "gpt2": (gpt2, odd_tokens),
    "llama": (llama, odd_tokens),
    "vit": (vit, odd_images),
    "odd": (Odd, odd_vectors),
}
# transformers computes losses, and Llama its norms, in float32 whatever the model's dtype.
TOLERANCE = {"gpt2": 2e-6, "llama": 5e-6, "vit": 1e-7, "odd": 1e-9}


@lru_cache
def prepared(name: str) -> Any:
    torch.manual_seed(0)
    make, make_batch = CASES[name]
    model = make().double()
    batches = [to_double(make_batch(seed)) for seed in range(2)]
    captured = capture(model, batches[0])
    return captured, state_of(model), batches, reference_steps(model, batches)


def count_padded(strategy: Strategy) -> int:
    """Ops that a strategy splits into parts that do not divide."""
    choices, spaces = strategy.assignment.choices, strategy.analysis.spaces
    return sum(
        bool(padded_dims(s, c, strategy.mesh)) for s, c in zip(spaces, choices) if s is not None
    )


@pytest.mark.parametrize("mesh", list(MESHES))
@pytest.mark.parametrize("name", list(CASES))
def test_random_assignments_equal_eager(name, mesh):
    captured, state, batches, expected = prepared(name)
    analysis = Analysis(captured.graph)
    for seed in range(3):
        strategy = Strategy(analysis, random_assignment(analysis, MESHES[mesh], seed))
        strategy.verify()
        assert count_padded(strategy) > 0
        got = lockstep_steps(strategy, captured, state, batches)
        assert_same(got, expected, tolerance=TOLERANCE[name])
