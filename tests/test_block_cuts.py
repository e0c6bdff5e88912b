"""Blocks that are divided: where they can be, and pipelines whose stages begin inside a layer."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.base.errors import InputError, PlanError
from autopar.frontend.capture import capture
from autopar.ir.block_cuts import narrow_cuts, with_block_cuts
from autopar.lowering.training import lower_training
from autopar.passes.prepare import prepare
from autopar.plans.binding import strategy_of
from autopar.plans.document import Plan
from tests.equality.case import Case
from tests.models.zoo import gpt2
from tests.test_blocks import Attributes, Twice, graph_of, layers

HALVES = ("transformer.h.0.ln_2", "transformer.h.1.ln_2", "transformer.h.2.ln_2")
"""Where the residual stream alone crosses inside a layer of GPT-2."""


@functools.cache
def case() -> Case:
    return Case("gpt2", lambda: gpt2(3), num_joined=2, num_steps=2)


def planned(**options: Any) -> Plan:
    cluster = autopar.Cluster.preset("v100", nodes=1, devices_per_node=2)
    return autopar.plan(
        case().model, cluster, example_inputs=case().batches[0], num_microbatches=4,
        schedule="1f1b", **options,
    )  # fmt: skip


def check_replayed(plan: Plan) -> None:
    """Train what its JSON replays on another capture, in lockstep, and compare with eager."""
    plan = Plan.from_json(plan.to_json())
    strategy = strategy_of(plan, capture(case().model, case().batches[0]))
    case().check(
        lower_training(
            strategy, plan.schedule.num_microbatches, pipeline=plan.schedule.pipeline(),
            recomputation=plan.recomputed,
        )
    )  # fmt: skip


def test_a_layer_is_cut_between_its_residual_sums() -> None:
    assert narrow_cuts(case().captured.graph) == HALVES


def test_ops_and_other_blocks_stay_as_they_are() -> None:
    graph = case().captured.graph
    divided = with_block_cuts(graph, HALVES[1:2])
    assert divided.ops == graph.ops
    names = [block.name for block in graph.blocks]
    names.insert(names.index("transformer.h.1") + 1, HALVES[1])
    assert [block.name for block in divided.blocks] == names
    assert [op for block in divided.blocks for op in divided.block_ops(block)] == list(graph.ops)
    half = next(block for block in divided.blocks if block.name == HALVES[1])
    assert divided.block_ops(half)[0].module_path == HALVES[1]


@pytest.mark.parametrize(
    ("model", "module", "why"),
    [
        (Attributes(*layers(4)), "l9", "'l9', which is no module that a stage computes"),
        (Attributes(*layers(4)), "l3", "'l3', where block 'l3' begins anyway"),
        (Twice(), "layers.l1.up", "'layers.l1.up', which runs in several blocks"),
    ],
)
def test_other_places_are_refused_with_the_reason(model: nn.Module, module: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        with_block_cuts(graph_of(model), [module])


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_user_cuts_inside_a_layer(recompute: str) -> None:
    plan = planned(cuts=["transformer.h.1.mlp"], recompute=recompute)
    assert plan.graph.block_cuts == ("transformer.h.1.mlp",)
    assert plan.schedule.first_blocks[1] == "transformer.h.1.mlp"
    assert "transformer.h.1.mlp" in plan.report("full")
    check_replayed(plan)


def test_uneven_layers_are_cut_where_the_slowest_stage_is_fastest() -> None:
    """No slower than every pair of stages that whole blocks make."""
    graph = prepare(case().captured).captured.graph
    plan = planned(num_stages=2)
    wholes = [block.name for block in graph.blocks if "transformer.h" in block.name]
    times_s = [planned(cuts=[name]).prediction.step_time_s for name in wholes]
    assert plan.prediction.step_time_s <= min(times_s)
    check_replayed(plan)


class Layers(nn.Module):
    """As many equal layers, and next to nothing before and after."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        layer = functools.partial(nn.TransformerEncoderLayer, 64, 4, 256, dropout=0.0)
        self.layers = nn.ModuleList(layer(batch_first=True) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize(
    ("num_layers", "num_ranks", "is_divided"), [(3, 2, True), (6, 4, True), (4, 2, False)]
)
def test_layers_are_divided_where_that_makes_stages_more_even(
    num_layers: int, num_ranks: int, is_divided: bool
) -> None:
    cluster = autopar.Cluster.preset("v100", nodes=1, devices_per_node=num_ranks)
    with torch.device("meta"):
        model, batch = Layers(num_layers), torch.empty(4 * num_ranks * 32, 512, 64)
    options: dict[str, Any] = {"schedule": "1f1b", "num_microbatches": 4 * num_ranks}
    found = autopar.plan(model, cluster, batch, num_stages=num_ranks, **options)
    assert bool(found.graph.block_cuts) == is_divided
    firsts = [f"layers.{rank * num_layers // num_ranks}" for rank in range(1, num_ranks)]
    whole = autopar.plan(model, cluster, batch, cuts=firsts, **options)
    found_s, whole_s = found.prediction.step_time_s, whole.prediction.step_time_s
    assert found_s < 0.95 * whole_s if is_divided else found_s == pytest.approx(whole_s)


def test_a_plan_with_other_places_is_refused() -> None:
    text = planned(cuts=["transformer.h.1.mlp"]).to_json()
    captured = capture(case().model, case().batches[0])
    plan = Plan.from_json(text.replace('"block_cuts": [', '"block_cuts": ["nowhere", '))
    with pytest.raises(PlanError, match=r"\$\.graph\.block_cuts: .*'nowhere'"):
        strategy_of(plan, captured)
