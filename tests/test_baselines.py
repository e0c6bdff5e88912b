"""The known strategies are what their names say, priced like plans, and never better."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from autopar.base.errors import ConstraintError
from autopar.cost_models import Cluster, CommunicationModel, RooflineModel
from autopar.cost_models.update import FUSED_ADAMW
from autopar.frontend.capture import capture
from autopar.ir.graph import ValueKind
from autopar.ir.mesh import Mesh
from autopar.ir.placement import R, State
from autopar.lowering.program import lower
from autopar.memory.program import program_memory
from autopar.planning import fit
from autopar.planning.baselines import KEYS, price_baselines
from autopar.planning.constraints import Force, MemoryBudget, narrow
from autopar.planning.planner import make_planned
from autopar.planning.space import Space
from autopar.plans.strategy_names import (
    ALONG_DATA,
    ALONG_TENSORS,
    DATA,
    HYBRID,
    MARKOV_CHAIN,
    ONE_WEIRD_TRICK,
    ZERO1,
    ZERO2,
    ZERO3,
    name_of,
)
from autopar.pricing.candidate import Candidate
from autopar.pricing.problem import price_graph
from autopar.pricing.step_time import time_parts
from autopar.pricing.tables import Pricing
from autopar.search import solve
from autopar.sharding.strategy import Analysis
from tests.models.zoo import build

A100 = Cluster.preset("a100-80", nodes=2, devices_per_node=2)
DENSE = {"aten.linear.default", "aten.addmm.default"}


def captured_of(name: str):
    model, make_batch = build(name)
    return capture(model, make_batch(0))


def priced_on(name: str, *sizes: int, cluster: Cluster = A100):
    return priced_of(captured_of(name), *sizes, cluster=cluster)


def priced_of(captured, *sizes: int, cluster: Cluster = A100):
    pricing = Pricing(
        Analysis(captured.graph),
        Mesh(("x", "y", "z")[: len(sizes)], sizes),
        cluster,
        RooflineModel(cluster.device),
        CommunicationModel(cluster),
    )
    return price_graph(pricing)


def forced(priced, *kinds: str) -> Candidate:
    axes = priced.pricing.mesh.axis_names
    costs = narrow(priced, [Force(kind, axis=axis) for kind, axis in zip(kinds, axes)])
    return Candidate(priced=priced, solution=solve(priced.problem(costs)))


@pytest.mark.parametrize("name", ["mlp", "gpt2", "resnet", "lstm", "alexnet"])
def test_every_known_strategy_has_a_price_or_a_reason(name):
    plan = make_planned(captured_of(name), A100).plan
    assert {*plan.search.baselines, *plan.search.missing} == {name_of(*key) for key in KEYS}
    assert not set(plan.search.baselines) & set(plan.search.missing)
    text = " ".join(plan.report("full").split())
    for known in (DATA, ZERO1, ZERO2, ZERO3, HYBRID, "tensor", MARKOV_CHAIN):
        assert known in text
    for reason in plan.search.missing.values():
        assert reason
        assert reason in text


@pytest.mark.parametrize("name", ["mlp", "gpt2", "resnet", "lstm", "alexnet"])
@pytest.mark.parametrize("preset", ["1080ti", "h100-sxm"])
def test_the_plan_is_never_worse_than_what_can_be_run(name, preset):
    cluster = Cluster.preset(preset, nodes=2, devices_per_node=2)
    plan = make_planned(captured_of(name), cluster).plan
    executable = plan.search.baselines
    assert {DATA, ZERO3, HYBRID, "tensor parallel", MARKOV_CHAIN} <= set(executable)
    for known, each in executable.items():
        assert plan.prediction.step_time_s <= each.time_s * (1 + 1e-7), known


@pytest.fixture(scope="module", params=["gpt2", "alexnet"])
def tight(request):
    """A graph, the counted memory of each known strategy, and a budget that few of them fit."""
    captured = captured_of(request.param)
    executable = price_baselines([priced_on(request.param, 4)]).executable()
    known = [(time_parts(candidate).step_s, counted_bytes(candidate)) for candidate in executable]
    budget = int(1.05 * min(size for _, size in known))
    assert any(size > budget for _, size in known)
    return captured, known, budget


def counted_bytes(candidate: Candidate) -> int:
    program = lower(candidate.strategy())
    return program_memory(program, A100.device, optimizer=FUSED_ADAMW).peak_bytes


def test_under_a_budget_the_plan_is_never_worse_than_what_fits(tight):
    captured, known, budget = tight
    plan = make_planned(captured, A100, constraints=[MemoryBudget(budget)]).plan
    assert sum(plan.prediction.memory_bytes.values()) <= budget
    best = min(cost for cost, size in known if size <= budget)
    assert plan.prediction.step_time_s <= best * (1 + 1e-7)
    assert plan.prediction.step_time_s >= plan.search.bound_s * (1 - 1e-7)


def test_a_known_strategy_stands_in_where_the_search_finds_none(tight, monkeypatch):
    captured, known, budget = tight
    monkeypatch.setattr(fit, "POINT_TRIALS", 0)
    whole = Space(num_microbatches=1)
    plan = make_planned(captured, A100, whole, constraints=[MemoryBudget(budget)]).plan
    assert sum(plan.prediction.memory_bytes.values()) <= budget
    best = min(cost for cost, size in known if size <= budget)
    assert plan.prediction.step_time_s <= best * (1 + 1e-7)
    times = [each.time_s for each in plan.search.baselines.values()]
    assert any(plan.prediction.step_time_s == pytest.approx(t, rel=1e-7) for t in times)
    assert plan.search.status == "FEASIBLE"


def test_a_known_strategy_does_not_stand_in_for_other_constraints(tight, monkeypatch):
    captured, _, budget = tight
    monkeypatch.setattr(fit, "POINT_TRIALS", 0)
    constraints = [MemoryBudget(budget), Force("data_parallel")]
    space = Space(offload=False, num_microbatches=1)
    with pytest.raises(ConstraintError, match="no strategy found that fits"):
        make_planned(captured, A100, space, constraints=constraints)


def test_data_parallelism_splits_the_batch_and_nothing_else():
    candidate = forced(priced_on("gpt2", 4), "data_parallel")
    strategy = candidate.strategy()
    for value in strategy.graph.parameters:
        assert strategy.supply(value) == (R,)
    for op in strategy.graph.ops:
        for index, need in zip(op.inputs, strategy.needs(op)):
            if strategy.graph.values[index].kind is ValueKind.PARAMETER:
                assert need[0].state is not State.SHARD
    for index in strategy.graph.inputs:
        assert str(strategy.supply(strategy.graph.values[index])[0]) == "S0"


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
def test_data_parallelism_moves_no_activation_forward(name):
    """Nor a mask or a bias, which has no batch dimension and is broadcast over it."""
    program = lower(forced(priced_on(name, 4), "data_parallel").strategy())
    calls = program.collectives()
    assert {c.kind for c in calls if c.phase == "G"} == {"all_reduce"}
    assert [(c.kind, c.size_bytes) for c in calls if c.phase == "F"] == [("all_reduce", 4)]  # loss


def test_megatron_communicates_twice_a_layer_and_direction():
    """Shoeybi et al. 2019, figure 4: two all-reduces forward and two backward."""
    program = lower(forced(priced_on("gpt2", 4), "megatron").strategy())
    counts = layer_collectives(program)
    assert counts == {("F", "all_reduce"): 2, ("I", "all_reduce"): 2}


def test_megatron_with_sequence_parallelism_gathers_and_scatters_instead():
    """Korthikanti et al. 2022, figure 5: each all-reduce becomes a gather and a scatter.

    Backward the gathered inputs are kept, so nothing is gathered again for the weights; what the
    norms' weights sum over the sequence comes besides.
    """
    program = lower(forced(priced_on("gpt2", 4), "megatron_sequence").strategy())
    counts = layer_collectives(program)
    assert counts == {
        ("F", "all_gather"): 2,
        ("F", "reduce_scatter"): 2,
        ("I", "all_gather"): 2,
        ("I", "reduce_scatter"): 2,
    }


def layer_collectives(program) -> Counter[tuple[str, str]]:
    """The collectives of one transformer layer, by pass."""
    calls = [c for c in program.collectives() if c.phase != "G"]
    layers = sorted({c.where for c in calls if "h.0" in c.where or "h.1" in c.where})
    assert layers
    return Counter((c.phase, c.kind) for c in calls if c.where == layers[0])


def test_one_weird_trick_splits_convolutions_on_the_batch_and_dense_layers_by_weight():
    candidate = forced(priced_on("alexnet", 4), "one_weird_trick")
    strategy = candidate.strategy()
    seen = Counter()
    for op in strategy.graph.ops:
        if len(op.inputs) < 2:
            continue
        weights = [
            need[0].state
            for index, need in zip(op.inputs, strategy.needs(op))
            if len(strategy.graph.values[index].shape) >= 2
            and strategy.graph.values[index].kind is ValueKind.PARAMETER
        ]
        if "conv" in op.target_name:
            seen["convolution"] += 1
            assert str(strategy.needs(op)[0][0]) == "S0"
            assert weights == [State.VARYING]
        elif op.target_name in DENSE:
            seen["dense"] += 1
            assert weights == [State.SHARD]
    assert seen == {"convolution": 5, "dense": 3}


@pytest.mark.parametrize("name", ["gpt2", "alexnet"])
def test_zero_1_and_2_are_one_plan_without_micro_batches(name):
    """A parameter is gathered once a step, and its gradient reduce-scattered at most once."""
    found = price_baselines([priced_on(name, 4)]).found
    assert found[ZERO2].candidate is found[ZERO1].candidate
    program = lower(found[ZERO1].candidate.strategy())
    counts = Counter((c.where, c.phase, c.kind) for c in program.collectives())
    gathered = {p.name for p in program.parameters if p.kernel is not None}
    assert gathered
    for parameter in gathered:
        assert counts[parameter, "F", "all_gather"] == 1
        assert counts[parameter, "I", "all_gather"] == 0
        assert counts[parameter, "G", "reduce_scatter"] <= 1
    assert any(counts[parameter, "G", "reduce_scatter"] for parameter in gathered)
    assert found[ZERO3].time_s >= found[ZERO2].time_s


def test_over_micro_batches_zero_2_reduces_in_each_what_zero_1_reduces_once():
    cluster = Cluster.preset("a100-80", nodes=1, devices_per_node=2)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(16)))
    batch = (torch.randn(8, 64), torch.randn(8, 64))
    captured = capture(model, batch, loss_fn=torch.nn.functional.mse_loss)
    plan = make_planned(captured, cluster, Space(num_microbatches=2)).plan
    once, each = plan.search.baselines[ZERO1], plan.search.baselines[ZERO2]
    assert once.time_s < each.time_s
    assert once.memory_bytes > each.memory_bytes


def layers_of(num: int):
    batch = (torch.randn(8, 64), torch.randn(8, 64))
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(num)))
    return priced_of(capture(model, batch, loss_fn=torch.nn.functional.mse_loss), 4)


def test_the_stages_of_zero_keep_what_their_paper_says():
    """Rajbhandari et al. 2020: state and gradients, then parameters are sharded over N devices."""
    priced = layers_of(16)
    found = price_baselines([priced]).found
    size = sum(v.size_bytes for v in priced.pricing.graph.parameters)
    saved = [found[DATA].memory_bytes - found[each].memory_bytes for each in (ZERO2, ZERO3)]
    assert saved[0] == pytest.approx(3 * size * 3 / 4)
    assert 3 * size * 3 / 4 < saved[1] < 4 * size * 3 / 4


def test_a_release_costs_one_gather_of_what_the_backward_pass_reads():
    """Every weight but the first layer's, whose input needs no gradient, and no bias."""
    priced = layers_of(4)
    found = price_baselines([priced]).found[ZERO3].candidate
    again_s = math.fsum(block.fetch_back_s for block in found.times.blocks.values())
    moves = priced.pricing.moves
    size = 64 * 64 * 4
    gathered_s = CommunicationModel(A100).estimate("all_gather", moves.num_joined * size, range(4))
    copies_s = 2 * (size + size // 4) / A100.device.memory_bandwidth_bytes_per_s
    each_s = gathered_s.time_s / moves.num_joined + copies_s * (moves.num_joined > 1)
    assert again_s == pytest.approx(3 * each_s, rel=1e-9)


def test_hybrid_with_tensor_parallelism_is_a_plan_on_three_axes():
    cluster = Cluster.preset("a100-80", nodes=2, devices_per_node=4)
    name = name_of(HYBRID, "tensor parallel")
    found = price_baselines([priced_on("mlp", 4, 2, cluster=cluster)])
    assert "mesh={'replicate': None, 'shard': None, 'tensor': None}" in found.missing[name]
    hybrid = price_baselines([priced_on("mlp", 2, 2, 2, cluster=cluster)]).found[name]
    strategy = hybrid.candidate.strategy()
    stored = [strategy.supply(value) for value in strategy.graph.parameters]
    assert all(placements[0] == R for placements in stored)
    assert any(placements[1].state is State.SHARD for placements in stored)


def test_the_markov_chain_is_between_data_parallelism_and_the_plan():
    priced = priced_on("gpt2", 4)
    plan = Candidate(priced=priced, solution=solve(priced.problem()))
    found = price_baselines([priced], plan).found
    chain, data = (found[name].candidate for name in (MARKOV_CHAIN, DATA))
    assert plan.solution.cost <= chain.solution.cost <= data.solution.cost


@pytest.mark.parametrize(
    ("name", "size", "missing", "reason"),
    [
        ("mlp", 4, ONE_WEIRD_TRICK, "no convolution"),
        ("gpt2", 8, DATA, "4 is too far from a multiple of 8"),
        ("lstm", 4, "Megatron", "no attention"),
        ("vit", 4, "Megatron + sequence", "no norm has a sequence"),
        ("gpt2", 8, "Megatron", "heads of an attention cannot be split in 8"),
    ],
)
def test_what_a_model_does_not_have_is_said_and_not_faked(name, size, missing, reason):
    cluster = Cluster.preset("v100", nodes=1, devices_per_node=size)
    found = price_baselines([priced_on(name, size, cluster=cluster)])
    assert missing not in found.found
    assert reason in found.missing[missing]
    for data in ALONG_DATA:
        assert name_of(data, missing) not in found.found or missing not in ALONG_TENSORS


def test_a_strategy_that_the_model_lacks_cannot_be_forced_either():
    with pytest.raises(ConstraintError, match="no attention"):
        make_planned(
            captured_of("lstm"), A100, Space(mesh={"x": 4}), constraints=[Force("megatron")]
        )
