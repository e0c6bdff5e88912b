"""Model FLOPs against closed formulas, and the utilisation that a plan predicts."""

from __future__ import annotations

import re

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


def peak_said(plan: autopar.Plan) -> tuple[float, str]:
    """The peak and the precision that a report says beside its MFU, alike on screen and in full."""
    pattern = r"([\d.]+)% MFU of ([\d.,]+) TFLOP/s (?:on average )?\(([^)]*)\)"
    (screen,) = re.findall(pattern, " ".join(str(plan).split()))
    (full,) = re.findall(pattern, " ".join(plan.report("full").split()))
    assert screen[1:] == full[1:]
    p = plan.prediction
    most = float(full[1].replace(",", "")) * 1e12 * p.step_time_s * plan.cluster.num_devices
    assert 100 * p.model_flops / most == pytest.approx(float(full[0]), abs=0.06)
    return float(screen[1].replace(",", "")), screen[2]


class Convolution(nn.Module):
    """A convolution, in TF32 by PyTorch's default, and a linear layer, which is not."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(64, 64, 3, padding=1)
        self.head = nn.Linear(64 * 32 * 32, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.convolution(x).flatten(1)).square().mean()


def planned(
    model: nn.Module, x: torch.Tensor, cluster: Cluster = CLUSTER, **options: str
) -> autopar.Plan:
    return autopar.plan(model, cluster, (x,), loss_fn=lambda y: y.mean(), **options)  # type: ignore[arg-type]


def test_the_peak_of_an_mfu_is_that_of_the_precision_that_is_computed_in() -> None:
    """An A100's data sheet: 19.5 TFLOP/s in float32, 156 in TF32, 312 in bfloat16."""
    linear, x = nn.Linear(4096, 4096, bias=False), torch.zeros(4096, 4096)
    assert peak_said(planned(linear, x)) == (19.5, "float32")
    assert peak_said(planned(linear, x, precision="bf16")) == (312, "bfloat16")
    images = torch.zeros(8, 64, 32, 32)
    assert peak_said(autopar.plan(Convolution(1), CLUSTER, (images,)))[1] == "nearly all TF32"
    peak, precisions = peak_said(autopar.plan(Convolution(96), CLUSTER, (images,)))
    convolution, head = 2 * 64 * 9 * 64 * 32 * 32, 3 * 64 * 32 * 32 * 96  # no gradient of images
    share = convolution / (convolution + head)
    assert precisions == f"{share:.0%} TF32, {1 - share:.0%} float32"
    assert peak == pytest.approx(1 / (share / 156 + (1 - share) / 19.5), rel=1e-3)


def test_the_peak_of_unequal_islands_is_their_mean() -> None:
    islands = [Cluster.preset(name, devices_per_node=1) for name in ("a100-80", "v100")]
    joined = Cluster.joined(islands, bandwidth_bytes_per_s=1e10, latency_s=1e-5)
    plan = planned(nn.Linear(1024, 1024, bias=False), torch.zeros(1024, 1024), joined)
    assert "TFLOP/s on average (float32)" in str(plan)
    assert peak_said(plan)[0] == pytest.approx((19.5 + 15.7) / 2)
