"""Prices of fused attention on GPUs, held against published measurements."""

from __future__ import annotations

import pytest
import torch

from autopar.cost_models import Cluster, OpCall, RooflineModel
from autopar.cost_models.calls import TensorSpec
from autopar.cost_models.efficiency import table_of
from autopar.cost_models.gpu_attention import attention_file, kernel_of
from autopar.cost_models.hardware import DeviceSpec
from autopar.cost_models.work import Family

OPERATOR = "aten.scaled_dot_product_attention.default"


def device(preset: str) -> DeviceSpec:
    return Cluster.preset(preset, nodes=1, devices_per_node=1).device


def seconds(
    preset: str,
    shape: tuple[int, int, int, int],
    *,
    is_causal: bool = False,
    is_masked: bool = False,
    dtype: torch.dtype = torch.float16,
) -> tuple[float, float]:
    """Seconds of the forward and of the backward pass."""
    one = TensorSpec(shape, dtype, requires_grad=True)
    mask = TensorSpec((shape[2], shape[2]), torch.bool) if is_masked else None
    call = OpCall(OPERATOR, (one, one, one, mask, 0.0, is_causal))
    found = RooflineModel(device(preset)).estimate(call)
    return found.forward_s, found.input_grad_s


# TFLOP/s for 16,384 tokens of 2,048 channels: Shah et al., FlashAttention-3, NeurIPS 2024, figures
# 5 and 6 (cuDNN on an H100 SXM5); and the most that Dao, FlashAttention-2, ICLR 2024, section 4.1
# reports for an A100.
@pytest.mark.parametrize(
    ("preset", "width", "columns", "is_causal", "forward", "backward"),
    [
        ("h100-sxm", 64, 1024, False, 373, 348),
        ("h100-sxm", 128, 1024, False, 574, 408),
        ("h100-sxm", 128, 8192, False, 600, 518),
        ("h100-sxm", 64, 512, True, 225, None),
        ("h100-sxm", 128, 4096, True, 518, None),
        ("h100-sxm", 256, 16384, True, 509, None),
        ("a100-80", 128, 16384, False, 230, 0.63 * 312),
    ],
)
def test_published_rates(
    preset: str, width: int, columns: int, is_causal: bool, forward: float, backward: float | None
) -> None:
    rows, heads = 16384 // columns, 2048 // width
    found = seconds(preset, (rows, heads, columns, width), is_causal=is_causal)
    operations = 4 * rows * heads * columns**2 * width / (2 if is_causal else 1)
    assert operations / found[0] == pytest.approx(forward * 1e12, rel=0.08)
    if backward is not None:
        assert 2.5 * operations / found[1] == pytest.approx(backward * 1e12, rel=0.08)


def test_a_mask_costs_where_no_flash_kernel_takes_it() -> None:
    shape = (4, 16, 4096, 128)
    full, masked = seconds("a100-80", shape), seconds("a100-80", shape, is_masked=True)
    causal = seconds("a100-80", shape, is_causal=True)
    for one, other, half in zip(full, masked, causal):
        assert 1.2 * one < other < 3 * one
        assert 0.5 * one < half < 0.65 * one


def test_the_kernel_of_each_device() -> None:
    assert kernel_of(device("h100-sxm")) == kernel_of(device("b200")) == "cudnn"
    assert kernel_of(device("a100-80")) == kernel_of(device("l4")) == "flash"
    assert kernel_of(device("v100")) == kernel_of(device("a100-80"), is_masked=True) == "efficient"


@pytest.mark.parametrize("preset", ["h100-sxm", "a100-80", "v100", "l4", "b200"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_more_of_anything_takes_longer(preset: str, is_causal: bool) -> None:
    for change in range(4):
        before = (0.0, 0.0)
        for more in (0, 1, 31, 32, 33, 64, 160, 161, 700, 5000):
            sizes = [3, 16, 32, 24]
            sizes[change] += more
            found = seconds(preset, tuple(sizes), is_causal=is_causal)  # type: ignore[arg-type]
            assert all(a <= b * (1 + 1e-9) for a, b in zip(before, found)), (change, more)
            before = found
            if is_causal:
                full = seconds(preset, tuple(sizes))  # type: ignore[arg-type]
                assert all(a <= b * (1 + 1e-9) for a, b in zip(found, full)), (change, more)


def test_the_error_is_that_of_calls_and_devices_that_the_fit_did_not_see() -> None:
    spread = attention_file().spread
    known = table_of(device("h100-sxm")).of(Family.ATTENTION).error_factor
    assert known == pytest.approx(1 + spread["cudnn"].median)
    for preset in ("a100-80", "b200", "v100"):
        error = table_of(device(preset)).of(Family.ATTENTION).error_factor
        assert error >= 1 + spread["flash"].left_out_median > known
