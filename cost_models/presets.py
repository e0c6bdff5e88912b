"""Presets: known devices and their typical nodes, with the source of each figure.

Rates are dense (no structured sparsity). NVLink figures are per device and direction: half of the
total that vendors publish. Figures that vendors do not publish (latencies, the fraction of a link
that collectives reach, reserves) say what they are derived from.
"""

from collections.abc import Callable
from dataclasses import dataclass

from msgspec import structs

from autopar.base.errors import ClusterError
from autopar.base.spelling import did_you_mean
from autopar.cost_models.hardware import DeviceSpec, Hardware, Level, PeakFlops, is_count

_TERA = 1e12
_GIGA = 1e9
_GIB = 1 << 30
_MIB = 1 << 20

# Rounded from the per-step hardware latencies in NCCL's tuning table (src/graph/tuning.cc, LL and
# LL128 protocols): 0.6-1.9 us over NVLink, 1.0-1.9 us over PCIe, 2.7-4 us over a network. Measured
# steps over NVLink take less (Vidur's all-reduces on DGX nodes, microsoft/vidur): 0.2 us, and each
# collective of torch.distributed starts for 27 us (H100) to 34 us (A100).
_NVLINK_STEP_S = 0.2e-6
_PCIE_STEP_S = 1.5e-6
_NETWORK_STEP_S = 4.0e-6
_NCCL_LAUNCH_S = 27e-6

# A kernel launched from eager PyTorch takes about 5 us of host time; the launch itself takes about
# 2.5 us. The host runs ahead in a training step, so the lower figure applies.
_CUDA_LAUNCH_S = 2.5e-6

# A CUDA context, the libraries' workspaces and NCCL's buffers, as nvidia-smi shows after one matrix
# product and one all-reduce: about 1 GiB on recent devices.
_CUDA_RESERVE_BYTES = _GIB

# A running NCCL collective occupies 16 to 24 of a device's 80 to 148 multiprocessors and some of
# its memory bandwidth, which costs a tenth to a quarter of the compute rate.
_CUDA_OVERLAP_SLOWDOWN = 1.15

# All-reduce bus bandwidth over the link's own: nccl-tests on 8 devices report about 230 of
# 300 GB/s (A100), 360 of 450 GB/s (H100) and 130 of 150 GB/s (V100). Of the A100's links up to
# 64 MiB, fitted to Vidur's all-reduces on 2 to 8 devices: 0.89 with a ramp of 7.7 MB.
_NVLINK_EFFICIENCY = 0.8
_A100_NVLINK_EFFICIENCY = 0.89
_A100_NVLINK_RAMP_BYTES = 7.7e6
_A100_LAUNCH_S = 34e-6
_INFINIBAND_EFFICIENCY = 0.9
_PCIE_EFFICIENCY = 0.8
_NO_OVERLAP_SLOWDOWN = 1e3
"""A CPU computes nothing beside a collective on its host, which the thread that computes makes
itself (`autopar.comm.transports.sockets`): a slow-down so large that nothing is hidden."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Preset:
    device: DeviceSpec
    inner: Level
    outer: Level
    memory_reserve_bytes: int = _CUDA_RESERVE_BYTES
    collective_launch_s: float = _NCCL_LAUNCH_S
    overlap_slowdown: float = _CUDA_OVERLAP_SLOWDOWN


def _nvlink(gigabytes_per_s: float, source: str) -> Level:
    return Level(
        name="nvlink",
        size=8,
        latency_s=_NVLINK_STEP_S,
        bandwidth_bytes_per_s=gigabytes_per_s * _GIGA,
        efficiency=_NVLINK_EFFICIENCY,
        source=f"{source}: half of NVLink's total; efficiency from nccl-tests' bus bandwidth",
    )


def _infiniband(adapters: int, gigabits_per_s: float, devices: int, source: str) -> Level:
    node = adapters * gigabits_per_s / 8 * _GIGA
    return Level(
        name="infiniband",
        size=8,
        latency_s=_NETWORK_STEP_S,
        bandwidth_bytes_per_s=node,
        device_bandwidth_bytes_per_s=max(node / devices, gigabits_per_s / 8 * _GIGA),
        efficiency=_INFINIBAND_EFFICIENCY,
        source=f"{source}: {adapters} adapters of {gigabits_per_s:g} Gb/s",
    )


def pcie_bytes_per_s(generation: int) -> float:
    """Bytes per second that copies over PCI Express with 16 lanes reach, each way."""
    return _pcie_link(generation) * _PCIE_EFFICIENCY


def _pcie_link(generation: int) -> float:
    # 16 lanes at 8 GT/s in generation 3, with 128b/130b coding; each later one doubles the rate.
    return 16 * 8e9 * 2 ** (generation - 3) * 128 / 130 / 8


def _pcie3(source: str) -> Level:
    # Consumer cards communicate through the host, whose two sockets have one root port per four
    # cards: four links in total.
    link = _pcie_link(3)
    return Level(
        name="pcie3",
        size=8,
        latency_s=_PCIE_STEP_S,
        bandwidth_bytes_per_s=link,
        total_bandwidth_bytes_per_s=4 * link,
        efficiency=_PCIE_EFFICIENCY,
        source=f"PCI Express 3.0, 16 lanes; {source}",
    )


_DGX1 = "NVIDIA DGX-1 with V100 datasheet"
_DGXA100 = "NVIDIA DGX A100 datasheet"
_DGXH100 = "NVIDIA DGX H100 datasheet"
_DGXH200 = "NVIDIA DGX H200 datasheet"
_DGXB200 = "NVIDIA DGX B200 datasheet"


def _v100() -> _Preset:
    device = DeviceSpec(
        name="Tesla V100-SXM2-32GB",
        kind="cuda",
        peak_flops_per_s=PeakFlops(
            float64=7.8 * _TERA, float32=15.7 * _TERA, float16=125 * _TERA, vector=15.7 * _TERA
        ),
        memory_bandwidth_bytes_per_s=900 * _GIGA,
        memory_bytes=32 * _GIB,
        kernel_launch_s=_CUDA_LAUNCH_S,
        num_units=80,
        cache_bytes=6 * _MIB,
        host_bandwidth_bytes_per_s=pcie_bytes_per_s(3),
        source="NVIDIA V100 datasheet (SXM2, 32 GB); 80 SMs and 6 MB L2 from the Volta whitepaper",
    )
    return _Preset(
        device=device,
        inner=_nvlink(150, "NVIDIA V100 datasheet, 300 GB/s"),
        outer=_infiniband(4, 100, 8, _DGX1),
    )


def _a100(memory_bytes: int, bandwidth: float, name: str) -> _Preset:
    device = DeviceSpec(
        name=name,
        kind="cuda",
        peak_flops_per_s=PeakFlops(
            float64=19.5 * _TERA,
            float32=19.5 * _TERA,
            tensor_float32=156 * _TERA,
            float16=312 * _TERA,
            bfloat16=312 * _TERA,
            vector=19.5 * _TERA,
        ),
        memory_bandwidth_bytes_per_s=bandwidth,
        memory_bytes=memory_bytes,
        kernel_launch_s=_CUDA_LAUNCH_S,
        num_units=108,
        cache_bytes=40 * _MIB,
        host_bandwidth_bytes_per_s=pcie_bytes_per_s(4),
        source="NVIDIA A100 datasheet (SXM4); 108 SMs and 40 MB L2 from the Ampere whitepaper",
    )
    return _Preset(
        device=device,
        inner=structs.replace(
            _nvlink(300, "NVIDIA A100 datasheet, 600 GB/s"),
            efficiency=_A100_NVLINK_EFFICIENCY,
            ramp_bytes=_A100_NVLINK_RAMP_BYTES,
        ),
        outer=_infiniband(8, 200, 8, _DGXA100),
        collective_launch_s=_A100_LAUNCH_S,
    )


def _hopper(name: str, memory_bytes: int, bandwidth: float, node: str, sheet: str) -> _Preset:
    device = DeviceSpec(
        name=name,
        kind="cuda",
        peak_flops_per_s=PeakFlops(
            float64=66.9 * _TERA,
            float32=66.9 * _TERA,
            tensor_float32=494.7 * _TERA,
            float16=989.4 * _TERA,
            bfloat16=989.4 * _TERA,
            float8=1978.9 * _TERA,
            vector=66.9 * _TERA,
        ),
        memory_bandwidth_bytes_per_s=bandwidth,
        memory_bytes=memory_bytes,
        kernel_launch_s=_CUDA_LAUNCH_S,
        num_units=132,
        cache_bytes=50 * _MIB,
        host_bandwidth_bytes_per_s=pcie_bytes_per_s(5),
        source=f"{sheet}; dense rates, 132 SMs and 50 MB L2 from the Hopper whitepaper",
    )
    return _Preset(
        device=device,
        inner=_nvlink(450, f"{sheet}, 900 GB/s"),
        outer=_infiniband(8, 400, 8, node),
    )


def _b200() -> _Preset:
    device = DeviceSpec(
        name="NVIDIA B200",
        kind="cuda",
        peak_flops_per_s=PeakFlops(
            float64=37 * _TERA,
            float32=75 * _TERA,
            tensor_float32=1100 * _TERA,
            float16=2250 * _TERA,
            bfloat16=2250 * _TERA,
            float8=4500 * _TERA,
            vector=75 * _TERA,
        ),
        memory_bandwidth_bytes_per_s=8000 * _GIGA,
        memory_bytes=180 * 10**9,
        kernel_launch_s=_CUDA_LAUNCH_S,
        num_units=148,
        cache_bytes=126 * _MIB,
        host_bandwidth_bytes_per_s=pcie_bytes_per_s(5),
        source=(
            "NVIDIA DGX B200 datasheet (1,440 GB, 64 TB/s and 72 PFLOPS of sparse FP8 for 8) and "
            "HGX B200 specifications; 148 SMs and 126 MB L2 as the driver reports"
        ),
    )
    return _Preset(
        device=device,
        inner=_nvlink(900, "NVIDIA DGX B200 datasheet, 1,800 GB/s"),
        outer=_infiniband(8, 400, 8, _DGXB200),
    )


def _gtx1080ti() -> _Preset:
    device = DeviceSpec(
        name="NVIDIA GeForce GTX 1080 Ti",
        kind="cuda",
        peak_flops_per_s=PeakFlops(float64=0.354 * _TERA, float32=11.34 * _TERA),
        memory_bandwidth_bytes_per_s=484 * _GIGA,
        memory_bytes=11 * _GIB,
        kernel_launch_s=_CUDA_LAUNCH_S,
        num_units=28,
        cache_bytes=2816 << 10,
        source=(
            "NVIDIA GeForce GTX 1080 Ti specifications: 3,584 cores at 1,582 MHz boost, 484 GB/s; "
            "float64 at 1/32 of float32 (CUDA C++ programming guide, compute capability 6.1); "
            "float16 products are computed in float32"
        ),
    )
    return _Preset(
        device=device,
        inner=_pcie3("cards under two root complexes"),
        outer=_infiniband(1, 100, 8, "one EDR adapter a node"),
    )


def _rtx2080ti() -> _Preset:
    device = DeviceSpec(
        name="NVIDIA GeForce RTX 2080 Ti",
        kind="cuda",
        peak_flops_per_s=PeakFlops(
            float64=0.42 * _TERA, float32=13.45 * _TERA, float16=53.8 * _TERA, vector=13.45 * _TERA
        ),
        memory_bandwidth_bytes_per_s=616 * _GIGA,
        memory_bytes=11 * _GIB,
        kernel_launch_s=_CUDA_LAUNCH_S,
        num_units=68,
        cache_bytes=5632 << 10,
        source=(
            "NVIDIA Turing whitepaper, table of the RTX 2080 Ti (reference clocks, float16 with "
            "float32 accumulation)"
        ),
    )
    return _Preset(
        device=device,
        inner=_pcie3("no peer access between cards: exchanged through the host"),
        outer=_infiniband(1, 100, 8, "one EDR adapter a node"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Card:
    """A card by its datasheet: rates in TFLOP/s, GB/s, GiB, multiprocessors, MiB of L2."""

    name: str
    float32: float
    bandwidth: float
    memory: int
    units: int
    cache: int
    source: str
    half: float = 0.0
    bfloat16: float = 0.0
    tensor_float32: float = 0.0
    float64: float = 0.0


def _card(card: _Card, inner: Level) -> _Preset:
    peaks = PeakFlops(
        float64=card.float64 * _TERA,
        float32=card.float32 * _TERA,
        tensor_float32=card.tensor_float32 * _TERA,
        float16=card.half * _TERA,
        bfloat16=card.bfloat16 * _TERA,
        vector=card.float32 * _TERA,
    )
    device = DeviceSpec(
        name=card.name,
        kind="cuda",
        peak_flops_per_s=peaks,
        memory_bandwidth_bytes_per_s=card.bandwidth * _GIGA,
        memory_bytes=card.memory * _GIB,
        kernel_launch_s=_CUDA_LAUNCH_S,
        num_units=card.units,
        cache_bytes=card.cache * _MIB,
        source=card.source,
    )
    return _Preset(device=device, inner=inner, outer=_infiniband(1, 100, 8, "one EDR adapter"))


def _pcie4(source: str) -> Level:
    link = _pcie_link(4)
    return structs.replace(
        _pcie3(source), name="pcie4", bandwidth_bytes_per_s=link,
        total_bandwidth_bytes_per_s=4 * link, source=f"PCI Express 4.0, 16 lanes; {source}",
    )  # fmt: skip


def _pcie_cards() -> dict[str, _Card]:
    """Cards without NVLink between them, all by NVIDIA's datasheets."""
    sheet = "NVIDIA {} datasheet; multiprocessors and L2 from the architecture's whitepaper"
    cards = {
        "p4": _Card(
            name="Tesla P4", float32=5.7, bandwidth=192, memory=8, units=20, cache=2,
            float64=0.178, source=sheet.format("P4"),
        ),
        "p100": _Card(
            name="Tesla P100-PCIE-16GB", float32=9.5, bandwidth=732, memory=16, units=56, cache=4,
            half=0, float64=4.7, source=sheet.format("P100 PCIe"),
        ),
        "v100-pcie": _Card(
            name="Tesla V100-PCIE-32GB", float32=14.0, bandwidth=900, memory=32, units=80,
            cache=6, half=112, float64=7.0, source=sheet.format("V100 PCIe"),
        ),
        "t4": _Card(
            name="Tesla T4", float32=8.1, bandwidth=320, memory=16, units=40, cache=4, half=65,
            float64=0.25, source=sheet.format("T4"),
        ),
        "l4": _Card(
            name="NVIDIA L4", float32=30.3, bandwidth=300, memory=24, units=58, cache=48,
            half=121, bfloat16=121, tensor_float32=60, float64=0.47, source=sheet.format("L4"),
        ),
        "l40s": _Card(
            name="NVIDIA L40S", float32=91.6, bandwidth=864, memory=48, units=142, cache=96,
            half=362, bfloat16=362, tensor_float32=183, float64=1.4, source=sheet.format("L40S"),
        ),
        "a40": _Card(
            name="NVIDIA A40", float32=37.4, bandwidth=696, memory=48, units=84, cache=6,
            half=149.7, bfloat16=149.7, tensor_float32=74.8, float64=0.58,
            source=sheet.format("A40"),
        ),
        "a100-40-pcie": _Card(
            name="NVIDIA A100-PCIE-40GB", float32=19.5, bandwidth=1555, memory=40, units=108,
            cache=40, half=312, bfloat16=312, tensor_float32=156, float64=19.5,
            source=sheet.format("A100 PCIe, 40 GB"),
        ),
        "a100-80-pcie": _Card(
            name="NVIDIA A100 80GB PCIe", float32=19.5, bandwidth=1935, memory=80, units=108,
            cache=40, half=312, bfloat16=312, tensor_float32=156, float64=19.5,
            source=sheet.format("A100 PCIe, 80 GB"),
        ),
    }  # fmt: skip
    return cards


def _cpu() -> _Preset:
    device = DeviceSpec(
        name="cpu (one core with 256-bit vectors)",
        kind="cpu",
        peak_flops_per_s=PeakFlops(
            float64=40 * _GIGA, float32=80 * _GIGA, float16=1 * _GIGA, bfloat16=20 * _GIGA
        ),
        memory_bandwidth_bytes_per_s=12 * _GIGA,
        memory_bytes=4 * _GIB,
        kernel_launch_s=2.0e-6,
        dispatch_s=1.0e-6,
        cache_bytes=_MIB,
        cache_bandwidth_bytes_per_s=40 * _GIGA,
        source=(
            "one core at 2.5 GHz with two 256-bit fused multiply-adds a cycle; half a DDR4-3200 "
            "channel's bandwidth a core; times of an eager PyTorch call. Cluster.detect() measures"
        ),
    )
    inner = Level(
        name="loopback",
        size=8,
        latency_s=60e-6,
        bandwidth_bytes_per_s=1.6 * _GIGA,
        total_bandwidth_bytes_per_s=4 * _GIGA,
        source="gloo between processes of one host, order of magnitude; measure() replaces it",
    )
    outer = Level(
        name="ethernet",
        size=8,
        latency_s=100e-6,
        bandwidth_bytes_per_s=10 / 8 * _GIGA,
        efficiency=0.9,
        source="10 Gb/s Ethernet, one port a node",
    )
    return _Preset(
        device=device,
        inner=inner,
        outer=outer,
        memory_reserve_bytes=256 * _MIB,
        collective_launch_s=50e-6,
        # Across hosts gloo sums and copies on the cores that compute: of an all-reduce of 24 MiB
        # that overlaps with products or convolutions, two thirds are exposed (measured on two
        # cores).
        overlap_slowdown=3.0,
    )


_PRESETS: dict[str, Callable[[], _Preset]] = {
    "v100": _v100,
    "a100-40": lambda: _a100(40 * _GIB, 1555 * _GIGA, "NVIDIA A100-SXM4-40GB"),
    "a100-80": lambda: _a100(80 * _GIB, 2039 * _GIGA, "NVIDIA A100-SXM4-80GB"),
    "h100-sxm": lambda: _hopper(
        "NVIDIA H100 80GB HBM3",
        80 * _GIB,
        3350 * _GIGA,
        _DGXH100,
        "NVIDIA H100 datasheet (SXM5)",
    ),
    "h200": lambda: _hopper(
        "NVIDIA H200", 141 * 10**9, 4800 * _GIGA, _DGXH200, "NVIDIA H200 datasheet (SXM)"
    ),
    "b200": _b200,
    "1080ti": _gtx1080ti,
    "2080ti": _rtx2080ti,
    "cpu": _cpu,
}


def _of_card(card: _Card, old: bool) -> Callable[[], _Preset]:
    source = "cards under two root complexes"
    return lambda: _card(card, _pcie3(source) if old else _pcie4(source))


_PRESETS |= {
    name: _of_card(card, name in ("p4", "p100", "v100-pcie", "t4"))
    for name, card in _pcie_cards().items()
}

PRESET_NAMES = tuple(_PRESETS)


def preset_cluster(name: str, *, nodes: int = 1, devices_per_node: int = 8) -> Hardware:
    """The cluster of ``nodes`` typical nodes of the device ``name``.

    Raises ClusterError for an unknown name (listing the known ones) or a count below one.
    """
    if not isinstance(name, str) or name not in _PRESETS:
        raise ClusterError(
            f"there is no preset {name!r}; there are {', '.join(PRESET_NAMES)}. Describe other "
            "hardware as JSON: start from Cluster.preset('h100-sxm').to_json('cluster.json')"
            + did_you_mean(str(name), PRESET_NAMES)
        )
    for field, value in (("nodes", nodes), ("devices_per_node", devices_per_node)):
        if not is_count(value):
            raise ClusterError(
                f"{field}={value!r}; it must be a whole number of at least 1. Write {field}=1."
            )
    preset = _PRESETS[name]()
    slowdown = preset.overlap_slowdown
    if preset.device.kind == "cpu" and nodes == 1:
        slowdown = _NO_OVERLAP_SLOWDOWN
    levels: tuple[Level, ...] = (structs.replace(preset.inner, size=devices_per_node),)
    if nodes > 1:
        levels += (structs.replace(preset.outer, size=nodes),)
    return Hardware(
        device=preset.device,
        levels=levels,
        memory_reserve_bytes=preset.memory_reserve_bytes,
        collective_launch_s=preset.collective_launch_s,
        overlap_slowdown=slowdown,
        backend="nccl" if preset.device.kind == "cuda" else "gloo",
    )
