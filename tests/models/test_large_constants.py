"""Large masks that depend on constants alone are computed in each step, in shards."""

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
from tests.equality.case import Case
from tests.oracles import lockstep_steps, random_assignment, state_of

MESHES = [Mesh(("a",), (2,)), Mesh(("a", "b"), (2, 2))]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_what_is_made_in_each_step_equals_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(name, num_steps=2)
    monkeypatch.setattr(exported, "MAX_FIXED_BYTES", 0)
    captured = capture(case.model, case.batches[0])
    num_fixed, num_usual = (
        sum(value.fixed for value in graph.values)
        for graph in (captured.graph, case.captured.graph)
    )
    assert num_fixed < num_usual
    analysis = Analysis(captured.graph)
    for seed, mesh in enumerate(MESHES):
        strategy = Strategy(analysis, random_assignment(analysis, mesh, seed))
        state = state_of(case.model)
        case.compare(lockstep_steps(strategy, captured, state, case.batches, case.optimizer))


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
