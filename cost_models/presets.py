"""Presets: known devices and their typical nodes, with the source of each figure.

Rates are dense (no structured sparsity). NVLink figures are per device and direction: half of the
total that vendors publish. Figures that vendors do not publish (latencies, the fraction of a link
that collectives reach, reserves) say what they are derived from.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from msgspec import structs

from autopar.base.errors import ClusterError
from autopar.base.spelling import did_you_mean
from autopar.cost_models.hardware import DeviceSpec, Hardware, Level, PeakFlops, is_count
from autopar.cost_models.links import (
    A100_LAUNCH_S,
    NCCL_LAUNCH_S,
    a100_nvlink,
    ethernet,
    infiniband,
    nvlink,
    nvlink_bridge,
    of_efficiency,
    pcie,
    pcie_bytes_per_s,
)

_TERA = 1e12
_GIGA = 1e9
_GIB = 1 << 30
_MIB = 1 << 20

# A kernel launched from eager PyTorch takes about 5 us of host time; the launch itself takes about
# 2.5 us. The host runs ahead in a training step, so the lower figure applies.
_CUDA_LAUNCH_S = 2.5e-6

# A CUDA context, the libraries' workspaces and NCCL's buffers, as nvidia-smi shows after one matrix
# product and one all-reduce: about 1 GiB on recent devices.
_CUDA_RESERVE_BYTES = _GIB

# A running NCCL collective occupies 16 to 24 of a device's 80 to 148 multiprocessors and some of
# its memory bandwidth, which costs a tenth to a quarter of the compute rate.
_CUDA_OVERLAP_SLOWDOWN = 1.15

_NO_OVERLAP_SLOWDOWN = 1e3
"""A CPU computes nothing beside a collective on its host, which the thread that computes makes
itself (`autopar.comm.transports.sockets`): a slow-down so large that nothing is hidden."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Preset:
    """``bridge`` joins neighbouring devices of a node. ``devices_per_adapter`` share an adapter of
    the network (0: a smaller node has as many adapters); where more do, collectives reach
    ``crowded_efficiency``."""

    device: DeviceSpec
    inner: Level
    outer: Level
    bridge: Level | None = None
    devices_per_adapter: int = 0
    crowded_efficiency: float = 0.0
    memory_reserve_bytes: int = _CUDA_RESERVE_BYTES
    collective_launch_s: float = NCCL_LAUNCH_S
    overlap_slowdown: float = _CUDA_OVERLAP_SLOWDOWN


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
        inner=nvlink(150, "NVIDIA V100 datasheet, 300 GB/s"),
        outer=infiniband(4, 100, 8, _DGX1),
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
        inner=a100_nvlink(),
        outer=infiniband(8, 200, 8, _DGXA100),
        collective_launch_s=A100_LAUNCH_S,
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
        inner=nvlink(450, f"{sheet}, 900 GB/s"),
        outer=infiniband(8, 400, 8, node),
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
        inner=nvlink(900, "NVIDIA DGX B200 datasheet, 1,800 GB/s"),
        outer=infiniband(8, 400, 8, _DGXB200),
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
        inner=pcie(3, "cards under two root complexes"),
        outer=infiniband(1, 100, 8, "one EDR adapter a node"),
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
        inner=pcie(3, "no peer access between cards: exchanged through the host"),
        outer=infiniband(1, 100, 8, "one EDR adapter a node"),
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
    return _Preset(device=device, inner=inner, outer=infiniband(1, 100, 8, "one EDR adapter"))


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
    return lambda: _card(card, pcie(3 if old else 4, source))


_PRESETS |= {
    name: _of_card(card, name in ("p4", "p100", "v100-pcie", "t4"))
    for name, card in _pcie_cards().items()
}


# Messages between two A40 without peer access, and between nodes of A40 and of bridged H100, as
# Vidur measured them (microsoft/vidur). The network's adapters and protocol are not stated.
_PAIRS_NETWORK = "one adapter of 100 Gb/s assumed; efficiency from Vidur's sends between such nodes"
_A40_MESSAGE_EFFICIENCY = 0.13


def _a40() -> _Preset:
    inner = structs.replace(
        pcie(4, "messages between cards pass the host's memory: Vidur's sends"),
        message_efficiency=_A40_MESSAGE_EFFICIENCY,
    )
    return replace(
        _card(_pcie_cards()["a40"], inner), outer=ethernet(1, 100, 0.21, 0.21, _PAIRS_NETWORK)
    )


def _h100_pcie() -> _Preset:
    card = _Card(
        name="NVIDIA H100 PCIe", float32=51.2, bandwidth=2000, memory=80, units=114, cache=50,
        half=756, bfloat16=756, tensor_float32=378, float64=51.2,
        source="NVIDIA H100 datasheet (PCIe); 114 SMs and 50 MB L2 from the Hopper whitepaper",
    )  # fmt: skip
    inner = pcie(5, "pairs of cards under two root complexes")
    # Measured messages exceed the 300 GB/s of the datasheet's three bridges.
    return replace(
        _card(card, inner),
        bridge=nvlink_bridge(335, "Vidur's sends between two H100 of a pair"),
        outer=ethernet(1, 100, 0.2, 0.2, _PAIRS_NETWORK),
    )


def _a100_on_ethernet() -> _Preset:
    # Vidur's DGX A100 nodes: rings carry 5.9 GB/s over an adapter and messages 7.8. Jobs with one
    # or two devices a node use one adapter, those with four or eight two, but eight reach less.
    return replace(
        _a100(80 * _GIB, 2039 * _GIGA, "NVIDIA A100-SXM4-80GB"),
        outer=ethernet(
            2, 100, 0.47, 0.63, "two adapters of 100 Gb/s; efficiency from Vidur's all-reduces"
        ),
        devices_per_adapter=2,
        crowded_efficiency=0.33,
    )


_PRESETS |= {"a40": _a40, "h100-pcie": _h100_pcie, "a100-80-ethernet": _a100_on_ethernet}

PRESET_NAMES = tuple(_PRESETS)


def preset_cluster(
    name: str,
    *,
    nodes: int = 1,
    devices_per_node: int = 8,
    network_efficiency: float | None = None,
) -> Hardware:
    """The cluster of ``nodes`` typical nodes of the device ``name``; see ``Cluster.preset``."""
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
    levels = _node(preset, devices_per_node)
    network = _network(preset, devices_per_node)
    if network_efficiency is not None:
        network = of_efficiency(network, network_efficiency)
    if nodes > 1:
        levels += (structs.replace(network, size=nodes),)
    return Hardware(
        device=preset.device,
        levels=levels,
        memory_reserve_bytes=preset.memory_reserve_bytes,
        collective_launch_s=preset.collective_launch_s,
        overlap_slowdown=slowdown,
        backend="nccl" if preset.device.kind == "cuda" else "gloo",
    )


def _node(preset: _Preset, num_devices: int) -> tuple[Level, ...]:
    """The links inside a node; an odd number of devices has no pairs."""
    if preset.bridge is None or num_devices % 2:
        return (structs.replace(preset.inner, size=num_devices),)
    if num_devices == 2:
        return (preset.bridge,)
    return preset.bridge, structs.replace(preset.inner, size=num_devices // 2, in_node=True)


def _network(preset: _Preset, num_devices: int) -> Level:
    """The network of a node with ``num_devices``, which may have fewer adapters than a full one."""
    if not preset.devices_per_adapter:
        return preset.outer
    network, share = preset.outer, preset.devices_per_adapter
    adapter, whole = network.device_bandwidth_bytes_per_s, network.bandwidth_bytes_per_s
    most = -(-num_devices // share) * adapter
    if most > whole:
        return structs.replace(network, efficiency=preset.crowded_efficiency)
    return structs.replace(network, bandwidth_bytes_per_s=most)
