"""A step in n micro-batches costs n times a model captured with one micro-batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.cost_models import Cluster, CommunicationModel, RooflineModel
from autopar.frontend.capture import capture
from autopar.ir.graph import ValueKind
from autopar.ir.mesh import Mesh
from autopar.ir.placement import R, S, V
from autopar.passes.prepare import prepare
from autopar.pricing.problem import PricedGraph, price_graph
from autopar.pricing.tables import OpTable, Pricing

CLUSTER = Cluster.preset("a100-80", nodes=1, devices_per_node=4)
ROWS, NUM = 8, 4


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(64)
        self.first = torch.nn.Linear(64, 256)
        self.second = torch.nn.Linear(256, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.second(torch.relu(self.first(self.norm(x))))).pow(2).sum()


def priced(rows: int, num_microbatches: int) -> PricedGraph:
    captured = capture(Net(), (torch.zeros(rows, 16, 64),))
    _, analysis, microbatches = prepare(captured).cut(num_microbatches)
    return price_graph(
        Pricing(
            analysis, Mesh(("x", "y"), (2, 2)), CLUSTER, RooflineModel(CLUSTER.device),
            CommunicationModel(CLUSTER), microbatches,
        )
    )  # fmt: skip


def sums_s(graph: PricedGraph, op: Any, placement: Any) -> float:
    """Seconds to add one micro-batch's gradients of an op's parameters to the sum."""
    values, pricing = graph.pricing.graph.values, graph.pricing
    device = CLUSTER.device
    sizes = [
        pricing.local_bytes(values[i], need)
        for i, need in zip(op.inputs, placement)
        if values[i].kind is ValueKind.PARAMETER
    ]
    return sum(
        device.kernel_launch_s + 3 * size / device.memory_bandwidth_bytes_per_s for size in sizes
    )


def test_every_choice_of_every_op() -> None:
    cut, part = priced(ROWS * NUM, NUM), priced(ROWS, 1)
    num_ops = 0
    for node, table, alone in zip(cut.nodes, cut.tables, part.tables):
        if not isinstance(table, OpTable):
            continue
        assert isinstance(alone, OpTable)
        op = cut.pricing.graph.ops[node.index]
        by_choice = {str(choice): k for k, choice in enumerate(alone.choices)}
        for k, choice in enumerate(table.choices):
            if (other := by_choice.get(str(choice))) is None:
                continue  # a digit that only the whole batch has
            needs = cut.pricing.analysis.needs(op, choice, cut.pricing.mesh)
            expected = NUM * alone.cost_s[other] + (NUM - 1) * sums_s(cut, op, needs)
            assert table.cost_s[k] == pytest.approx(expected), (op.name, str(choice))
            num_ops += 1
    assert num_ops > 30


def test_moves_of_activations_and_of_parameters() -> None:
    cut, part = priced(ROWS * NUM, NUM), priced(ROWS, 1)
    activation = next(
        v for v in cut.pricing.graph.values if v.shape == (ROWS * NUM, 16, 256) and v.differentiable
    )
    same = part.pricing.graph.values[activation.index]
    for source, target in [((S(0), R), (R, R)), ((R, S(2)), (R, S(1))), ((S(0), R), (V, R))]:
        assert cut.pricing.moves.seconds(activation, source, target) == pytest.approx(
            NUM * part.pricing.moves.seconds(same, source, target)
        )
    weight = next(v for v in cut.pricing.graph.parameters if v.shape == (256, 64))
    stored, used = (S(0), R), (V, R)
    joined = part.pricing.moves.price(weight, stored, used, stored=True)
    alone = part.pricing.moves.price(weight, stored, used)
    assert 0 < joined.forward_s < alone.forward_s  # it travels with the parameters of its block
    assert 0 < joined.backward_s < alone.backward_s
    for num in (1, 2 * NUM):  # kept for all micro-batches, or gathered in each of their passes
        assert cut.pricing.moves.seconds(
            weight, stored, used, stored=True, num_gathers=num
        ) == pytest.approx(num * joined.forward_s + joined.backward_s)


def test_small_parts_cost_more_than_their_share() -> None:
    whole, cut = priced(ROWS * NUM, 1), priced(ROWS * NUM, NUM)
    for one, many in zip(whole.tables, cut.tables):
        if isinstance(one, OpTable) and isinstance(many, OpTable):
            assert many.cost_s.min() >= one.cost_s.min() * (1 - 1e-9)


def test_memory_is_that_of_one_microbatch() -> None:
    cut, part = priced(ROWS * NUM, NUM), priced(ROWS, 1)
    for node, held, alone in zip(cut.nodes, cut.held, part.held):
        if node.kind == "op" and len(held.activations) == len(alone.activations):
            assert held.activations == pytest.approx(alone.activations), node.name
