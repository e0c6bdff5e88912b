"""The search's count of memory, node by node, against the program's, by liveness."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from autopar.cost_models import Cluster, CommunicationModel, RooflineModel
from autopar.cost_models.update import FUSED_ADAMW
from autopar.frontend.capture import capture
from autopar.ir.mesh import Mesh
from autopar.lowering.program import lower
from autopar.memory.program import program_memory
from autopar.planning.baselines import price_baselines
from autopar.planning.staging import residence_of
from autopar.pricing.node_memory import late_share
from autopar.pricing.problem import NodeKind, price_graph
from autopar.pricing.tables import Pricing
from autopar.schedules import build as schedule
from autopar.sharding.strategy import Analysis
from tests.models.zoo import build


def priced_on(name: str, *sizes: int):
    model, make_batch = build(name)
    return priced_graph(capture(model, make_batch(0)), *sizes)


def priced_graph(captured, *sizes: int):
    cluster = Cluster.preset("a100-80", nodes=1, devices_per_node=math.prod(sizes))
    pricing = Pricing(
        Analysis(captured.graph),
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
    hidden, logits, loss = 32 * 4, 8 * 4, 4  # one example a device
    # Used, gradient and two states; two hidden layers; three copies of the logits at the loss, and
    # the loss itself, a partial sum.
    kept = 2 * hidden + 3 * logits + loss
    assert found.memory_bytes == pytest.approx(4 * parameters + inputs + kept)


@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_the_count_by_node_is_near_the_count_by_liveness(sizes):
    """Within a quarter for every known strategy, so that one search finds a plan that fits."""
    executable = price_baselines([priced_on("gpt2", *sizes)]).executable()
    device = Cluster.preset("a100-80", nodes=1, devices_per_node=1).device
    assert len(executable) >= 5
    for candidate in executable:
        program = lower(candidate.strategy())
        memory = program_memory(program, device, optimizer=FUSED_ADAMW)
        assert candidate.estimated_bytes() == pytest.approx(memory.peak_bytes, rel=0.25)


def test_weight_gradients_read_the_operands_and_the_gradients_of_the_results():
    """Three layers; the logits count three times where the passes meet."""
    analysis = priced_on("mlp", 1).pricing.analysis
    hidden, logits, loss = 4 * 32 * 4, 4 * 8 * 4, 4
    operands, results = 2 * hidden, 2 * hidden + logits
    kept = 2 * hidden + 3 * logits
    assert late_share(analysis) == pytest.approx((operands + results) / kept, rel=loss / kept)


def test_what_waits_for_its_weight_gradients_is_held():
    """Under 1F1B nothing waits for W. ZB-H1's last device has one micro-batch before I and seven
    that wait for W, which here hold more; no device has more than eight of both kinds."""
    analysis = priced_on("mlp", 1).pricing.analysis
    late = late_share(analysis)
    assert late > 1
    kept = {
        name: residence_of(schedule(name, num_stages=8, num_microbatches=64), analysis).activations
        for name in ("1f1b", "zb_h1")
    }
    assert kept["1f1b"] == pytest.approx(1)
    assert (1 + 7 * late) / 8 <= kept["zb_h1"] <= late


class Fork(nn.Module):
    """Two layers that read one hidden value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        return (self.left(hidden) + self.right(hidden)).sum()


def test_a_value_with_many_readers_is_kept_once():
    priced = priced_graph(capture(Fork(), (torch.randn(4, 8),)), 2)
    whole = 0.0
    for decision, table, memory in zip(priced.nodes, priced.tables, priced.memory()):
        if decision.kind == NodeKind.RELAY:
            assert not memory.any()
        else:
            whole += memory[0]  # the first choice of an op, and of a stored value, is whole
            if decision.kind == NodeKind.OP:
                assert table.choices[0].is_redundant
    parameters, x, hidden = 3 * 8 * 8 * 4, 4 * 8 * 4, 4 * 8 * 4
    assert whole == pytest.approx(4 * parameters + x + hidden)


def test_views_and_sums_keep_nothing():
    priced = priced_on("gpt2", 4)
    ops = priced.pricing.graph.ops
    seen = 0
    for decision, memory in zip(priced.nodes, priced.memory()):
        if decision.kind == NodeKind.OP and ops[decision.index].target_name in (
            "aten.view.default",
            "aten.transpose.int",
            "aten.add.Tensor",
        ):
            seen += 1
            assert not memory.any()
    assert seen > 10
