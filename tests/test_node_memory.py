"""The search's count of memory, node by node, against the program's, by liveness."""

from __future__ import annotations

import math

import pytest
from autopar.cost_models import Cluster, CommunicationModel, RooflineModel

from autopar.baselines import price_baselines
from autopar.capture import capture
from autopar.lowering import lower
from autopar.lowering.memory import program_memory
from autopar.mesh import Mesh
from autopar.pricing import Pricing
from autopar.problem import NodeKind, price_graph
from autopar.strategy import Analysis
from tests.models.zoo import build


def priced_on(name: str, *sizes: int):
    model, make_batch = build(name)
    cluster = Cluster.preset("a100-80", nodes=1, devices_per_node=math.prod(sizes))
    pricing = Pricing(
        Analysis(capture(model, make_batch(0)).graph),
        Mesh(("x", "y")[: len(sizes)], sizes),
        cluster,
        RooflineModel(cluster.device),
        CommunicationModel(cluster),
    )
    return price_graph(pricing)


def test_a_data_parallel_perceptron_keeps_what_its_derivatives_read():
    """A ReLU's output for the next layer's weights and its own sign (once), and the logits."""
    priced = priced_on("mlp", 4)
    found = price_baselines([priced]).found["data parallel"]
    graph = priced.pricing.graph
    parameters = sum(value.size_bytes for value in graph.parameters)
    inputs = sum(graph.values[i].size_bytes for i in graph.inputs) / 4
    hidden, logits = 32 * 4, 8 * 4  # one example a device
    # Used, gradient and two states; two hidden layers; three copies of the logits at the loss.
    assert found.memory_bytes == pytest.approx(4 * parameters + inputs + 2 * hidden + 3 * logits)


@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_the_count_by_node_is_near_the_count_by_liveness(sizes):
    """Within a quarter for every known strategy, so that one search finds what fits."""
    executable = price_baselines([priced_on("gpt2", *sizes)]).executable()
    assert len(executable) >= 5
    for candidate in executable:
        memory = program_memory(lower(candidate.strategy()), num_optimizer_states=2)
        assert candidate.estimated_bytes == pytest.approx(memory.peak_bytes, rel=0.25)


def test_a_value_with_many_readers_is_kept_once():
    priced = priced_on("bert", 4)
    graph, relayed = priced.pricing.graph, priced.pricing.analysis.relayed
    normed = {
        o
        for op in graph.ops
        if op.target_name == "aten.layer_norm.default"
        for o in op.outputs
        if o in relayed
    }
    kept = {
        decision.index: memory.max()
        for decision, memory in zip(priced.nodes, priced.memory)
        if decision.kind == NodeKind.RELAY and graph.values[decision.index].differentiable
    }
    assert len(normed) == 3  # all but the last go to a residual sum and to products
    for value in normed:
        assert kept[value] == graph.values[value].size_bytes


def test_views_and_sums_keep_nothing():
    priced = priced_on("gpt2", 4)
    ops = priced.pricing.graph.ops
    seen = 0
    for decision, memory in zip(priced.nodes, priced.memory):
        if decision.kind == NodeKind.OP and ops[decision.index].target_name in (
            "aten.view.default",
            "aten.transpose.int",
            "aten.add.Tensor",
        ):
            seen += 1
            assert not memory.any()
    assert seen > 10
