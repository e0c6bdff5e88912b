"""One description of unequal islands: what holds for devices of all of them.

In: the islands' hardware, and the link between them. Out: hardware that is as slow and has as
little memory as that of any island, by which everything is priced that spans several.
"""

import math
from collections.abc import Sequence

from msgspec import structs

from autopar.base.documents import shown
from autopar.base.errors import ClusterError
from autopar.cost_models.hardware import DeviceSpec, Hardware, Level


def joined_hardware(islands: Sequence[Hardware], link: Level) -> Hardware:
    """The hardware of all islands together; ``link`` is that of one island, of any size.

    Levels that all islands have in the same sizes stay; otherwise nodes share their island's link.
    The link is never the first level, which is inside a node.
    Raises ClusterError for fewer than two islands, and for devices that cannot run one program.
    """
    if len(islands) < 2:
        raise ClusterError(f"{len(islands)} islands given; join at least two clusters.")
    kinds = sorted({f"{each.device.kind} with {each.backend}" for each in islands})
    if len(kinds) > 1:
        raise ClusterError(
            f"the islands are {' and '.join(kinds)}, which run no common program; join islands of "
            "one kind and backend."
        )
    device = min((each.device for each in islands), key=_rates)
    return Hardware(
        device=structs.replace(
            device, memory_bytes=min(each.device.memory_bytes for each in islands)
        ),
        levels=_levels(islands, link),
        memory_reserve_bytes=max(each.memory_reserve_bytes for each in islands),
        collective_launch_s=max(each.collective_launch_s for each in islands),
        overlap_slowdown=max(each.overlap_slowdown for each in islands),
        backend=islands[0].backend,
    )


def check_islands(islands: Sequence[Hardware], num_devices: int) -> None:
    """Raise ClusterError unless islands have ``num_devices`` in all."""
    found = sum(each.num_devices for each in islands)
    if islands and found != num_devices:
        raise ClusterError(
            f"the islands have {shown(found)} devices and the levels {shown(num_devices)}; write "
            "Cluster.joined(islands, ...), which makes the levels."
        )


def _rates(device: DeviceSpec) -> tuple[float, float]:
    peaks = device.peak_flops_per_s
    return max(peaks.float16, peaks.bfloat16, peaks.float32), device.memory_bandwidth_bytes_per_s


def _levels(islands: Sequence[Hardware], link: Level) -> tuple[Level, ...]:
    sizes = [tuple(level.size for level in each.levels) for each in islands]
    if len(set(sizes)) == 1:
        inner = [
            structs.replace(_slowest(levels), in_node=all(level.in_node for level in levels))
            for levels in zip(*(each.levels for each in islands))
        ] or [structs.replace(link, size=1)]
        return (*inner, structs.replace(link, size=len(islands)))
    node = math.gcd(*(each.devices_per_node for each in islands))
    most = max(each.num_devices for each in islands) // node
    between = structs.replace(
        link,
        size=sum(each.num_devices for each in islands) // node,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / most,
    )
    inside = [level for each in islands for level in each.levels[: each.num_node_levels]]
    return structs.replace(_slowest(inside), size=node, in_node=False), between


def _slowest(levels: Sequence[Level]) -> Level:
    return min(levels, key=lambda level: level.bandwidth_bytes_per_s * level.efficiency)
