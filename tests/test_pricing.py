"""The cost of moves and their groups, and the error of analytical prices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar.cost_models import Cluster, CommunicationModel, RooflineModel
from autopar.cost_models.efficiency import TABLES, table_of
from autopar.cost_models.work import Family
from autopar.frontend.capture import capture
from autopar.ir.mesh import Mesh
from autopar.ir.placement import P, R, S, V
from autopar.pricing.moves import slowest_groups
from autopar.pricing.tables import Pricing
from autopar.sharding.strategy import Analysis

A100 = Cluster.preset("a100-80", nodes=1, devices_per_node=4)


def priced(mesh: Mesh, cluster: Cluster) -> Pricing:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    captured = capture(model, (torch.zeros(8, 16, 64), torch.zeros(8, 16, 64)), loss_fn=squares)
    compute, communication = RooflineModel(cluster.device), CommunicationModel(cluster)
    return Pricing(Analysis(captured.graph), mesh, cluster, compute, communication)


def squares(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x - y).square().mean()


def test_what_is_split_inside_is_put_in_order() -> None:
    """Rows are sent without a copy; columns are first copied so that each part is contiguous."""
    found = priced(Mesh(("x", "y"), (2, 2)), A100)
    value = next(v for v in found.graph.values if v.shape == (8, 16, 256) and v.differentiable)
    device = A100.device
    # [8, 16, 256] of float32
    copy_s = device.kernel_launch_s + 2 * 8 * 16 * 256 * 4 / device.memory_bandwidth_bytes_per_s
    for rows, columns in (
        [found.moves.price(value, (s, R), (V, R)) for s in (S(0), S(2))],
        [found.moves.price(value, (P, R), (s, R)) for s in (S(0), S(2))],
    ):
        assert columns.forward_s == pytest.approx(rows.forward_s + copy_s)
        assert columns.backward_s == pytest.approx(rows.backward_s + copy_s)


def test_a_step_waits_for_the_slowest_group_of_an_axis() -> None:
    """Of three pairs on two nodes of three devices, the second spans both nodes."""
    cluster = Cluster.preset("v100", nodes=2, devices_per_node=3)
    communication, mesh = CommunicationModel(cluster), Mesh(("dp", "tp"), (3, 2))
    assert mesh.groups((1,)) == ((0, 1), (2, 3), (4, 5))
    assert slowest_groups(communication, mesh)[1,] == (2, 3)
    pricing = priced(mesh, cluster)
    value = next(v for v in pricing.graph.values if v.shape == (8, 16, 256) and v.differentiable)
    size_bytes = 8 * 16 * 256 * 4
    forward_s = pricing.moves.price(value, (R, P), (R, R)).forward_s
    times_s = [
        communication.estimate("all_reduce", size_bytes, group).time_s
        for group in mesh.groups((1,))
    ]
    assert forward_s == max(times_s) > 1.5 * min(times_s)


def test_the_uncertainty_is_that_of_the_roofline_that_was_used() -> None:
    x, table = torch.zeros(32, 256), TABLES["cuda"]
    sure = replace(
        table,
        default=replace(table.default, error_factor=1.1),
        families={k: replace(v, error_factor=1.1) for k, v in table.families.items()},
    )
    factors = [
        autopar.plan(
            nn.Linear(256, 256), A100, (x, x), loss_fn=squares,
            compute=RooflineModel(A100.device, efficiency),
        ).prediction.analytical_factor
        for efficiency in (None, sure)
    ]  # fmt: skip
    # Left out, it is that of the chip's fitted products.
    assert factors == [table_of(A100.device).of(Family.MATMUL).error_factor, 1.1]
    assert 1.0 < factors[0] < 1.3
