"""A searched plan is no slower than what experts would set up by hand; its memory is counted whole
although the rounds of a pipeline that repeat are counted once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar import Force, MemoryBudget
from autopar.cost_models.update import adamw
from autopar.frontend.capture import Captured, capture
from autopar.lowering.types import RankProgram
from autopar.memory import program as memory
from autopar.options import PlanOptions
from autopar.planning.planner import make_planned
from autopar.plans.document import Plan
from autopar.schedules import build

CLUSTER = autopar.Cluster.preset("h100-sxm", nodes=1, devices_per_node=4)


def llama(num_rows: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = LlamaConfig(
        num_hidden_layers=4, hidden_size=1024, num_attention_heads=8, num_key_value_heads=4,
        intermediate_size=2816, vocab_size=2048, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        ids = torch.zeros(num_rows, 1024, dtype=torch.long)
        return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}


def test_a_searched_plan_is_no_slower_than_an_experts_setup() -> None:
    model, batch = llama(16)
    limit = MemoryBudget("700MiB")

    def planned(*forced: Force, **options: Any) -> Plan:
        return autopar.plan(
            model, CLUSTER, batch, precision="bf16", constraints=[limit, *forced], **options
        )

    searched = planned(schedule="auto")
    assert sum(searched.prediction.memory_bytes.values()) <= limit.size_bytes
    fsdp = {"mesh": {"dp": 4}, "reshard_after_forward": True}
    by_hand = [
        planned(Force("zero3"), **fsdp, recompute="full"),
        planned(Force("zero3"), mesh={"dp": 4}),
        planned(
            Force("zero3", axis="dp"), Force("megatron_sequence", axis="tp"),
            mesh={"dp": 2, "tp": 2}, recompute="full",
        ),
    ]  # fmt: skip
    for plan in by_hand:
        assert searched.prediction.step_time_s <= plan.prediction.step_time_s * (1 + 1e-9)


@pytest.fixture(scope="module")
def captured() -> Captured:
    return capture(*llama(32))


@pytest.mark.parametrize("schedule", ["zb_v", "chimera", None])
def test_memory_does_not_depend_on_how_often_a_round_repeats(
    schedule: str | None, captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = PlanOptions(num_microbatches=16)
    if schedule is not None:
        num_stages = 4 if schedule == "zb_v" else 2
        made_by_hand = build(schedule, num_stages=num_stages, num_microbatches=16)
        options = PlanOptions(schedule=made_by_hand)
    made = make_planned(captured, CLUSTER, options.space(4))
    played: list[tuple[int, int]] = []
    shortened = memory.shortened

    def counted(program: RankProgram) -> Any:
        """All but the moments, which are only those of the micro-batches that are played: of these
        the most bytes at each place."""
        found = memory.device_memories(program, CLUSTER.device, optimizer=adamw(CLUSTER.device))
        plain = [replace(each, moments=(), actions=(), num_left_out=0) for each in found]
        most: list[dict[str, int]] = [{} for _ in found]
        for each, at in zip(found, most):
            for moment in each.moments:
                at[moment.place] = max(at.get(moment.place, 0), moment.size_bytes)
        return plain, most

    def noted(route: Any, program: RankProgram) -> Any:
        found = shortened(route, program)
        played.append((len(found.actions), len(route.actions)))
        return found

    monkeypatch.setattr(memory, "shortened", noted)
    short = counted(made.program)
    assert all(few < 0.7 * many for few, many in played)
    monkeypatch.setattr(memory, "shortened", lambda route, program: route)
    assert counted(made.program) == short
