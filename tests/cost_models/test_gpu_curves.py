"""Fitted curves of CUDA kernels: bounds, growth with size, the file, published kernels."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models import Cluster, OpCall, RooflineModel, TensorSpec, bytes_moved, flops
from autopar.cost_models.gpu_curves import (
    ProductCurve,
    chip_of,
    convolution_s,
    curve_file,
    joined_s,
    product_s,
)
from autopar.cost_models.presets import PRESET_NAMES

CUDA_PRESETS = [name for name in PRESET_NAMES if name != "cpu"]
presets = st.sampled_from(CUDA_PRESETS)
dtypes = st.sampled_from([torch.float32, torch.float16])


def _batched(batch, m, n, k, dtype):
    return OpCall(
        "aten.bmm.default", (TensorSpec((batch, m, k), dtype), TensorSpec((batch, k, n), dtype))
    )


def _convolution(batch, channels, out_channels, side):
    x = TensorSpec((batch, channels, side, side))
    weight = TensorSpec((out_channels, channels, 3, 3))
    return OpCall("aten.conv2d.default", (x, weight, None, (1, 1), (1, 1)))


def _rows(name, rows, columns, dtype):
    spec = TensorSpec((rows, columns), dtype)
    arguments = {
        "gelu": (spec,),
        "_softmax": (spec, -1, False),
        "layer_norm": (spec, (columns,)),
    }[name]
    return OpCall(f"aten.{name}.default", arguments)


def _price(preset, call):
    return RooflineModel(Cluster.preset(preset).device).estimate(call).forward_s


@given(presets, dtypes, st.integers(1, 300), *(st.integers(1, 3000) for _ in range(3)))
def test_no_batched_product_beats_the_peaks_of_its_device(preset, dtype, batch, m, n, k):
    call, device = _batched(batch, m, n, k, dtype), Cluster.preset(preset).device
    time_s = _price(preset, call)
    assert time_s >= flops(call) / device.matrix_flops_per_s(dtype)
    assert time_s >= bytes_moved(call) / device.memory_bandwidth_bytes_per_s


@given(
    presets, dtypes, st.tuples(*(st.integers(1, 60) for _ in range(4))), st.integers(0, 3),
    st.integers(1, 30),
)  # fmt: skip
def test_a_larger_batched_product_never_takes_less_time(preset, dtype, sizes, axis, more):
    # Sides in eights: older chips' libraries are measurably slower on others.
    larger = [size + more * (i == axis) for i, size in enumerate(sizes)]
    (batch, m, n, k), (more_batch, more_m, more_n, more_k) = sizes, larger
    once = _price(preset, _batched(batch, 8 * m, 8 * n, 8 * k, dtype))
    then = _price(preset, _batched(more_batch, 8 * more_m, 8 * more_n, 8 * more_k, dtype))
    assert then >= once * (1 - 1e-9)


@given(
    presets, st.tuples(*(st.integers(1, 100) for _ in range(4))), st.integers(0, 3),
    st.integers(1, 60),
)  # fmt: skip
def test_a_larger_convolution_never_takes_less_time(preset, sizes, axis, more):
    larger = [size + more * (i == axis) for i, size in enumerate(sizes)]
    once = _price(preset, _convolution(*sizes))
    assert _price(preset, _convolution(*larger)) >= once * (1 - 1e-9)


@given(
    presets, dtypes, st.sampled_from(["gelu", "_softmax", "layer_norm"]), st.integers(1, 1 << 16),
    st.integers(1, 1 << 13), st.integers(0, 1 << 12),
)  # fmt: skip
def test_kernels_bound_by_memory_grow_with_size_and_stay_under_its_rate(
    preset, dtype, name, rows, columns, more
):
    call = _rows(name, rows, columns, dtype)
    time_s = _price(preset, call)
    rate = Cluster.preset(preset).device.memory_bandwidth_bytes_per_s
    assert time_s >= bytes_moved(call) / rate
    assert _price(preset, _rows(name, rows, columns + more, dtype)) >= time_s * (1 - 1e-9)


@given(st.floats(1e-9, 1), st.floats(0, 1), st.floats(0, 1e-3), st.floats(1, 4))
def test_a_fixed_time_passes_beside_the_rest_in_part(time_s, more_s, fixed_s, overlap):
    once = joined_s(time_s, fixed_s, overlap)
    assert max(time_s, fixed_s) * (1 - 1e-9) <= once <= (time_s + fixed_s) * (1 + 1e-9)
    assert joined_s(time_s + more_s, fixed_s, overlap) >= once * (1 - 1e-9)
    assert joined_s(time_s, 0.0, overlap) == time_s


def test_only_boards_of_little_power_slow_down_under_lasting_work():
    slowed = {name for name, chip in curve_file().chips.items() if chip.float32.linear.slowed > 0}
    assert slowed == {"P4", "T4", "L4"}
    device, curve = Cluster.preset("t4").device, chip_of("Tesla T4").float32.linear
    sizes = [[m, 4096, 4096, 1] for m in (512, 65536)]
    short_s, long_s = (
        product_s(*size, item_bytes=4, peak=8.1e12, device=device, curve=curve, compute=0.5)
        for size in sizes
    )
    assert long_s / short_s > 128


def test_a_convolution_runs_by_the_fastest_algorithm_each_at_its_own_part_of_the_peak():
    device = Cluster.preset("v100-pcie").device
    peak, side, channels = 14e12, 64, 512
    m = 32 * side**2
    flops_needed = 2 * m * channels * 9 * channels

    def seconds(winograd, transformed, tiled=m):
        curve = ProductCurve(
            compute=0.5, memory=1.0, cache=100.0, start_up=0.0, fixed_s=0.0, winograd=winograd,
            transformed=transformed,
        )  # fmt: skip
        sizes = (m, channels, 9 * channels, 1)
        return float(
            convolution_s(
                *sizes, item_bytes=4, peak=peak, device=device, curve=curve, winograd_m=tiled,
                winograd_large_m=tiled,
            )
        )  # fmt: skip

    direct_s = flops_needed / (0.5 * peak)
    assert seconds(0.1, 0.05) == pytest.approx(direct_s, rel=0.02)
    assert seconds(0.5, 0.05) == pytest.approx(direct_s / 2.25, rel=0.02)
    # Products for 6 x 6 places give 4 x 4 outputs; read and written between kernels besides.
    moved = 2 * 4 * 36 * (2 * channels * m / 16 + channels**2)
    parted_s = direct_s / 4 + moved / device.memory_bandwidth_bytes_per_s
    assert seconds(0.1, 0.5) == pytest.approx(parted_s, rel=0.02)
    assert seconds(0.5, 0.5, tiled=0) == pytest.approx(direct_s, rel=0.02)


@pytest.mark.parametrize("name", CUDA_PRESETS)
def test_every_preset_has_the_curves_of_its_chip(name):
    device = Cluster.preset(name).device
    assert device.name in chip_of(device.name).names


def test_devices_that_nobody_measured_are_labelled():
    for name in ("NVIDIA B200", "NVIDIA L40S", "a device of tomorrow"):
        chip = chip_of(name)
        assert {chip.float32.source, chip.float16.source} == {"predicted"}
    assert chip_of("Tesla T4").float32.source == "fitted"
    assert chip_of("NVIDIA A40").float16.source == "fitted"


def test_the_file_names_its_data_and_the_error_of_each_family():
    found = curve_file()
    assert found.provenance["made_by"] == "benchmarks/fit_gpu_prices.py"
    assert found.provenance["kernels_float32.csv"].startswith("sha256:")
    for spreads in found.spread.values():
        for spread in spreads.values():
            assert 0 < spread.median <= spread.p90


@pytest.mark.parametrize(
    ("preset", "call", "milliseconds"),
    [
        # Rows of NeuSight's data set (float32, TF32 off).
        ("l4", _batched(1, 1024, 50272, 4096, torch.float32), 49.37),
        ("v100-pcie", _rows("gelu", 1720, 2972, torch.float32), 0.07043),
        ("t4", _rows("layer_norm", 14656, 2356, torch.float32), 1.808),
        ("p4", _batched(49, 689, 57, 473, torch.float32), 0.7483),
        ("v100-pcie", _convolution(40, 141, 460, 23), 1.237),
        ("t4", _convolution(29, 451, 354, 11), 1.47),
        # Of Vidur's (float16).
        ("a40", _batched(1, 512, 5120, 8192, torch.float16), 0.366),
        ("h100-sxm", _batched(1, 2048, 8192, 14336, torch.float16), 0.6215),
    ],
)
def test_published_kernels_are_priced_within_a_third(preset, call, milliseconds):
    assert 1e3 * _price(preset, call) == pytest.approx(milliseconds, rel=0.33)
