"""Model FLOPs against closed formulas, and the utilisation that a plan predicts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.cost_models import Cluster
from autopar.frontend.capture import capture
from autopar.pricing.utilisation import model_work
from autopar.sharding.strategy import Analysis
from tests.models.zoo import build

CLUSTER = Cluster.preset("a100-80", nodes=1, devices_per_node=2)
ROWS, WIDTH, HIDDEN = 6, 32, 64


class Attention(nn.Module):
    """Three projections of one input and causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unsqueeze(1) for p in self.projections)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum()


def test_linear_layers_take_two_flops_a_weight_and_row_in_each_product() -> None:
    """The first layer's input needs no gradient, so it has two products; the second has three."""
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))
    captured = capture(
        model, (torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)), loss_fn=nn.functional.mse_loss
    )
    work = model_work(Analysis(captured.graph), CLUSTER.device)
    assert work.flops == (2 + 3) * 2 * ROWS * WIDTH * HIDDEN
    assert work.peak_s == pytest.approx(
        work.flops / CLUSTER.device.matrix_flops_per_s(torch.float32)
    )
    assert (work.num_samples, work.num_tokens) == (ROWS, 0)


def test_causal_attention_counts_in_full_and_twice_backward() -> None:
    columns = 8
    captured = capture(Attention(), (torch.zeros(ROWS, columns, WIDTH),))
    work = model_work(Analysis(captured.graph), CLUSTER.device)
    projections = 3 * 2 * (2 * ROWS * columns * WIDTH * WIDTH)
    scores = 2 * (2 * ROWS * columns * columns * WIDTH)
    assert work.flops == projections + 3 * scores


def test_a_plan_says_how_much_of_the_peak_it_uses() -> None:
    model, make_batch = build("gpt2")
    batch = make_batch(0)
    prediction = autopar.plan(model, CLUSTER, batch).prediction
    rows, columns = batch["input_ids"].shape
    assert prediction.tokens_per_s == pytest.approx(rows * columns / prediction.step_time_s)
    assert prediction.samples_per_s == pytest.approx(rows / prediction.step_time_s)
    peak = CLUSTER.device.matrix_flops_per_s(torch.float32) * CLUSTER.num_devices
    assert prediction.model_flops_utilisation == pytest.approx(
        prediction.model_flops / (prediction.step_time_s * peak)
    )
