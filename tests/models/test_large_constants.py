"""Masks that depend on constants alone are made in each step, in parts, where they are large."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.cost_models import Cluster
from autopar.frontend import reader as exported
from autopar.frontend.capture import capture
from autopar.frontend.reader import MAX_FIXED_BYTES
from autopar.ir.mesh import Mesh
from autopar.sharding.strategy import Analysis, Strategy
from tests.models.test_more_models import prepared
from tests.models.zoo import optimizer_of
from tests.oracles import (
    assert_same,
    lockstep_steps,
    random_assignment,
    reference_steps,
    state_of,
)

MESHES = [Mesh(("a",), (2,)), Mesh(("a", "b"), (2, 2))]


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_what_is_made_in_each_step_equals_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, usual, batches = prepared(name)
    monkeypatch.setattr(exported, "MAX_FIXED_BYTES", 0)
    captured = capture(model, batches[0])
    num_fixed, num_usual = (
        sum(value.fixed for value in graph.values) for graph in (captured.graph, usual.graph)
    )
    assert num_fixed < num_usual
    analysis = Analysis(captured.graph)
    expected = reference_steps(model, batches, optimizer_of(name))
    for seed, mesh in enumerate(MESHES):
        strategy = Strategy(analysis, random_assignment(analysis, mesh, seed))
        got = lockstep_steps(strategy, captured, state_of(model), batches, optimizer_of(name))
        assert_same(got, expected, tolerance=5e-6)  # losses are computed in single precision


def test_a_whole_batch_of_masks_lies_on_no_device() -> None:
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=512, max_position_embeddings=4096, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        ids = torch.zeros(128, 4096, dtype=torch.int64)
    mask_bytes = 128 * 4096 * 4096
    assert mask_bytes > MAX_FIXED_BYTES
    cluster = Cluster.preset("a100-80", nodes=1, devices_per_node=8)
    plan = autopar.plan(model, cluster, {"input_ids": ids, "labels": ids})
    assert plan.prediction.memory_bytes.get("buffers", 0) < MAX_FIXED_BYTES
