"""The roofline model: lower bounds, published rates, known kernels."""

import msgspec
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from op_samples import samples

from autopar.cost_models import (
    Cluster,
    OpCall,
    RooflineModel,
    Source,
    TensorSpec,
    bytes_moved,
    flops,
)
from autopar.cost_models.compute import peak_flops_per_s
from autopar.cost_models.op_work import work
from autopar.cost_models.presets import PRESET_NAMES
from autopar.cost_models.work import Family

H100 = Cluster.preset("h100-sxm").device


def _product(m, n, k, dtype=torch.bfloat16):
    return OpCall("aten.mm.default", (TensorSpec((m, k), dtype), TensorSpec((k, n), dtype)))


def _attention(rows, causal, dropout=0.0, dtype=torch.bfloat16):
    spec = TensorSpec((4, 16, rows, 128), dtype, requires_grad=True)
    return OpCall(
        "aten.scaled_dot_product_attention.default", (spec, spec, spec, None, dropout, causal)
    )


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_every_sample_has_a_price_on_every_device(name):
    device = Cluster.preset(name).device
    model = RooflineModel(device)
    for case in samples():
        call = OpCall.of(*case)
        found = model.estimate(call)
        assert found.source == Source.ANALYTICAL
        todo = work(call)
        if todo.family == Family.VIEW:
            assert found.forward_s == device.dispatch_s
        else:
            assert found.forward_s >= device.kernel_launch_s
        assert (found.input_grad_s > 0) == (todo.input_grad.num_kernels > 0)
        assert (found.weight_grad_s > 0) == (todo.weight_grad.num_kernels > 0)


@given(*(st.integers(1, 8192) for _ in range(3)))
def test_no_product_beats_the_devices_peaks(m, n, k):
    call = _product(m, n, k)
    time_s = RooflineModel(H100).estimate(call).forward_s
    assert time_s >= flops(call) / H100.matrix_flops_per_s(torch.bfloat16)
    assert time_s >= bytes_moved(call) / H100.memory_bandwidth_bytes_per_s


@given(*(st.integers(1, 2048) for _ in range(3)), st.integers(0, 2))
def test_doubling_a_product_never_makes_it_faster(m, n, k, axis):
    sizes = [m, n, k]
    doubled = [size * (2 if i == axis else 1) for i, size in enumerate(sizes)]
    for device in (H100, Cluster.preset("cpu").device):
        model = RooflineModel(device)
        once = model.estimate(_product(*sizes)).forward_s
        assert model.estimate(_product(*doubled)).forward_s >= once * 0.999


@given(
    st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 8192), st.integers(0, 2),
    st.integers(1, 300),
)  # fmt: skip
@example(1, 128, 4096, 1, 1)
def test_a_larger_product_never_takes_less_time(m, n, k, axis, more):
    sizes = [m, n, k]
    larger = [size + (more if i == axis else 0) for i, size in enumerate(sizes)]
    for device in (H100, Cluster.preset("2080ti").device, Cluster.preset("cpu").device):
        model = RooflineModel(device)
        once = model.estimate(_product(*sizes, torch.float32)).forward_s
        assert model.estimate(_product(*larger, torch.float32)).forward_s >= once * (1 - 1e-9)


def test_large_products_reach_what_is_published():
    # cuBLAS on 8192-cubed bfloat16: 600 to 800 TFLOPS on an H100 SXM, 230 to 290 on an A100.
    call = _product(8192, 8192, 8192)
    for name, low, high in (("h100-sxm", 600e12, 800e12), ("a100-80", 200e12, 290e12)):
        time_s = RooflineModel(Cluster.preset(name).device).estimate(call).forward_s
        assert low < flops(call) / time_s < high


def test_a_thin_product_is_bound_by_memory():
    call = _product(1, 8192, 8192)
    time_s = RooflineModel(H100).estimate(call).forward_s
    floor_s = bytes_moved(call) / H100.memory_bandwidth_bytes_per_s
    assert floor_s < time_s < 2 * floor_s + 10 * H100.kernel_launch_s


def test_a_few_tiles_more_than_a_wave_cost_more_than_their_share():
    # 11 x 12 tiles are one wave of 132 multiprocessors, 12 x 12 are one and a bit. Measured waves
    # cost a few percent of it: libraries take smaller tiles where the last wave would be short.
    model = RooflineModel(H100)
    full = model.estimate(_product(128 * 11, 128 * 12, 1 << 14)).forward_s
    more = model.estimate(_product(128 * 12, 128 * 12, 1 << 14)).forward_s
    assert more > 1.04 * 12 / 11 * full


def test_a_causal_kernel_does_half_of_the_work():
    model = RooflineModel(H100)
    full = model.estimate(_attention(8192, causal=False, dtype=torch.float32))
    causal = model.estimate(_attention(8192, causal=True, dtype=torch.float32))
    assert causal.forward_s == pytest.approx(full.forward_s / 2, rel=0.05)
    assert causal.input_grad_s == pytest.approx(full.input_grad_s / 2, rel=0.05)


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("scaled_dot_product_attention", (None, 0.1)),
        ("_scaled_dot_product_efficient_attention", (None, True, 0.1)),
        ("_scaled_dot_product_flash_attention", (0.1,)),
    ],
)
def test_each_attention_is_causal_where_its_own_argument_says_so(name, before):
    spec = TensorSpec((4, 16, 8192, 128), torch.float32, requires_grad=True)
    calls = [OpCall(f"aten.{name}.default", (spec,) * 3 + before + (c,)) for c in (False, True)]
    full, causal = (RooflineModel(H100).estimate(call).forward_s for call in calls)
    assert causal == pytest.approx(full / 2, rel=0.05)


def test_dropout_in_attention_is_dear_on_a_cpu_where_it_is_not_fused():
    cpu = RooflineModel(Cluster.preset("cpu").device)
    plain = cpu.estimate(_attention(256, causal=False, dtype=torch.float32))
    dropped = cpu.estimate(_attention(256, causal=False, dropout=0.1, dtype=torch.float32))
    assert dropped.forward_s > 1.3 * plain.forward_s
    gpu = RooflineModel(H100)
    assert gpu.estimate(_attention(256, False, 0.1)) == gpu.estimate(_attention(256, False))


def test_data_that_fits_the_cache_moves_faster():
    device = msgspec.structs.replace(
        Cluster.preset("cpu").device, cache_bytes=1 << 20, cache_bandwidth_bytes_per_s=1e11
    )
    slow = msgspec.structs.replace(device, cache_bandwidth_bytes_per_s=0.0)
    small = OpCall("aten.neg.default", (TensorSpec((1 << 16,)),))
    large = OpCall("aten.neg.default", (TensorSpec((1 << 20,)),))
    fast, usual = RooflineModel(device), RooflineModel(slow)
    assert fast.estimate(small).forward_s < usual.estimate(small).forward_s
    assert fast.estimate(large) == usual.estimate(large)


def _convolution(channels, groups, dtype=torch.float32):
    x = TensorSpec((64, channels, 28, 28), dtype, requires_grad=True)
    w = TensorSpec((channels, channels // groups, 3, 3), dtype)
    arguments = (x, w, None, [1, 1], [1, 1], [1, 1], groups)
    return OpCall.of(torch.ops.aten.conv2d.default, arguments)


def test_float32_convolutions_use_tensor_cores_as_pytorch_starts():
    # Torch's switch for cuDNN is on by default, that for matrix products off.
    assert torch.backends.cudnn.conv.fp32_precision == "tf32"
    assert torch.backends.cudnn.rnn.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision != "tf32"
    a100 = Cluster.preset("a100-80").device
    without = msgspec.structs.replace(a100, allow_tensor_float32_in_cudnn=False)
    dense, depthwise = work(_convolution(256, 1)), work(_convolution(256, 256))
    product = work(_product(512, 512, 512, torch.float32))
    assert peak_flops_per_s(dense, a100) == 156e12
    assert peak_flops_per_s(dense, without) == 19.5e12
    assert peak_flops_per_s(depthwise, a100) == a100.vector_flops_per_s
    assert peak_flops_per_s(product, a100) == 19.5e12
    assert peak_flops_per_s(work(_convolution(256, 1, torch.bfloat16)), without) == 312e12
    v100 = Cluster.preset("v100").device  # has no such units
    assert peak_flops_per_s(dense, v100) == 15.7e12
    time_s = RooflineModel(a100).estimate(_convolution(256, 1)).forward_s
    assert 2 * 19.5e12 < flops(_convolution(256, 1)) / time_s < 156e12


def test_depthwise_convolution_is_priced_by_what_it_moves():
    # PyTorch's depthwise kernels reach 0.3 to 0.6 of a V100's 900 GB/s on MobileNetV2's layers.
    v100 = Cluster.preset("v100").device
    x, w = TensorSpec((32, 144, 56, 56), torch.float32), TensorSpec((144, 1, 3, 3), torch.float32)
    call = OpCall.of(torch.ops.aten.conv2d.default, (x, w, None, [1, 1], [1, 1], [1, 1], 144))
    moved = 2 * 32 * 144 * 56 * 56 * 4
    part = moved / RooflineModel(v100).estimate(call).forward_s / 900e9
    assert 0.3 < part < 0.6
