"""Links of known nodes: NVLink, PCI Express, and the networks between nodes.

Each is a `Level` of eight units that a preset resizes. Figures that vendors do not publish
(latencies, the fraction of a link that collectives reach) say what they are derived from.
"""

from msgspec import structs

from autopar.cost_models.hardware import Level

_GIGA = 1e9

# Rounded from the per-step hardware latencies in NCCL's tuning table (src/graph/tuning.cc, LL and
# LL128 protocols): 0.6-1.9 us over NVLink, 1.0-1.9 us over PCIe, 2.7-4 us over a network. Measured
# steps over NVLink take less (Vidur's all-reduces on DGX nodes, microsoft/vidur): 0.2 us, and each
# collective of torch.distributed starts for 27 us (H100) to 34 us (A100).
_NVLINK_STEP_S = 0.2e-6
_PCIE_STEP_S = 1.5e-6
_NETWORK_STEP_S = 4.0e-6
NCCL_LAUNCH_S = 27e-6
A100_LAUNCH_S = 34e-6

# All-reduce bus bandwidth over the link's own: nccl-tests on 8 devices report about 230 of
# 300 GB/s (A100), 360 of 450 GB/s (H100) and 130 of 150 GB/s (V100). Of the A100's links up to
# 64 MiB, fitted to Vidur's all-reduces on 2 to 8 devices: 0.89 with a ramp of 7.7 MB.
_NVLINK_EFFICIENCY = 0.8
_A100_NVLINK_EFFICIENCY = 0.89
_A100_NVLINK_RAMP_BYTES = 7.7e6
_PCIE_EFFICIENCY = 0.8

# Rings of nccl-tests reach 24 of 25 GB/s over each HDR adapter and 46 to 48 of 50 over NDR (the
# project's issues: NVIDIA/nccl-tests 252 and 290); 0.9 leaves room for the shapes of jobs. One
# message, which takes one or two channels, reaches 36 of 50 GB/s (Vidur's sends between DGX H100).
_INFINIBAND_EFFICIENCY = 0.9
_INFINIBAND_MESSAGE_EFFICIENCY = 0.72


def nvlink(gigabytes_per_s: float, source: str) -> Level:
    """NVLink through switches, by its bandwidth of one device and direction."""
    return Level(
        name="nvlink",
        size=8,
        latency_s=_NVLINK_STEP_S,
        bandwidth_bytes_per_s=gigabytes_per_s * _GIGA,
        efficiency=_NVLINK_EFFICIENCY,
        source=f"{source}: half of NVLink's total; efficiency from nccl-tests' bus bandwidth",
    )


def a100_nvlink() -> Level:
    """NVLink of a node of A100s."""
    return structs.replace(
        nvlink(300, "NVIDIA A100 datasheet, 600 GB/s"),
        efficiency=_A100_NVLINK_EFFICIENCY,
        ramp_bytes=_A100_NVLINK_RAMP_BYTES,
    )


def nvlink_bridge(gigabytes_per_s: float, source: str) -> Level:
    """NVLink between the two cards of a pair, by its bandwidth in one direction.

    The efficiency is fitted to Vidur's all-reduces on two H100 of a pair.
    """
    return structs.replace(
        nvlink(gigabytes_per_s, source),
        size=2,
        efficiency=0.645,
        message_efficiency=1.0,
        source=f"{source}; efficiency from Vidur's all-reduces",
    )


def infiniband(adapters: int, gigabits_per_s: float, devices: int, source: str) -> Level:
    """InfiniBand with ``adapters`` in a node of ``devices``."""
    node = adapters * gigabits_per_s / 8 * _GIGA
    return Level(
        name="infiniband",
        size=8,
        latency_s=_NETWORK_STEP_S,
        bandwidth_bytes_per_s=node,
        device_bandwidth_bytes_per_s=max(node / devices, gigabits_per_s / 8 * _GIGA),
        efficiency=_INFINIBAND_EFFICIENCY,
        message_efficiency=_INFINIBAND_MESSAGE_EFFICIENCY,
        is_direct=2 * adapters >= devices,  # DGX nodes; other hosts have one behind the processor
        source=f"{source}: {adapters} adapters of {gigabits_per_s:g} Gb/s",
    )


def ethernet(
    adapters: int, gigabits_per_s: float, efficiency: float, message_efficiency: float, source: str
) -> Level:
    """A network whose quality no specification says; both efficiencies are measured."""
    adapter = gigabits_per_s / 8 * _GIGA
    return Level(
        name="ethernet",
        size=8,
        latency_s=_NETWORK_STEP_S,
        bandwidth_bytes_per_s=adapters * adapter,
        device_bandwidth_bytes_per_s=adapter,
        efficiency=efficiency,
        message_efficiency=message_efficiency,
        source=source,
    )


def pcie_bytes_per_s(generation: int) -> float:
    """Bytes per second that copies over PCI Express with 16 lanes reach, each way."""
    return _pcie_link(generation) * _PCIE_EFFICIENCY


def _pcie_link(generation: int) -> float:
    # 16 lanes at 8 GT/s in generation 3, with 128b/130b coding; each later one doubles the rate.
    return 16 * 8e9 * 2 ** (generation - 3) * 128 / 130 / 8


def pcie(generation: int, source: str) -> Level:
    """PCI Express with 16 lanes a card.

    Consumer cards communicate through the host, whose two sockets have one root port per four
    cards: four links in total.
    """
    link = _pcie_link(generation)
    return Level(
        name=f"pcie{generation}",
        size=8,
        latency_s=_PCIE_STEP_S,
        bandwidth_bytes_per_s=link,
        total_bandwidth_bytes_per_s=4 * link,
        efficiency=_PCIE_EFFICIENCY,
        source=f"PCI Express {generation}.0, 16 lanes; {source}",
    )


def of_efficiency(level: Level, efficiency: float) -> Level:
    """``level`` whose large collectives reach ``efficiency`` of its bandwidth.

    Single messages change in proportion. Raises ClusterError for a value that is no fraction.
    """
    changed = structs.replace(level, efficiency=efficiency)
    message = level.message_efficiency * efficiency / level.efficiency
    return structs.replace(changed, message_efficiency=min(1.0, message))
