"""The position of a group of ranks on the levels of links of a cluster."""

from collections import Counter
from dataclasses import dataclass

from autopar.cost_models.cluster import Cluster
from autopar.cost_models.estimate import CostError
from autopar.cost_models.hardware import Level


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The position of a group on one level of links.

    The group has ``members`` ranks in each of ``fanout`` units of the level; ``sharing`` groups of
    the same mesh axis use each unit's link at the same time. ``num_units`` is the level's size.
    """

    fanout: int
    members: int
    sharing: int
    num_units: int


def spans_of(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Span, ...]:
    """The position of the group ``ranks`` on each level, innermost first.

    Raises CostError for ranks that are repeated or not in the cluster.
    """
    if len(set(ranks)) != len(ranks) or not ranks:
        raise CostError(f"the ranks {ranks} of a group must be at least one, without repetition.")
    if min(ranks) < 0 or max(ranks) >= cluster.num_devices:
        raise CostError(
            f"the ranks {ranks} are not all in a cluster of {cluster.num_devices} devices."
        )
    spans = []
    unit_devices = 1
    for level in cluster.levels:
        members = Counter(rank // unit_devices for rank in ranks)
        fanouts = Counter(unit // level.size for unit in members)
        spans.append(
            Span(
                fanout=max(fanouts.values()),
                # An uneven group waits for the unit with the fewest members to feed its link.
                members=min(members.values()),
                sharing=max(1, unit_devices // max(members.values())),
                num_units=level.size,
            )
        )
        unit_devices *= level.size
    return tuple(spans)


def crossing_s(level: Level, span: Span, size_bytes: float) -> float:
    """Seconds in which a group sends ``size_bytes`` out of each unit, at the level's full rate.

    The slowest limit holds: the link that groups share, its devices' share of it, and the medium.
    """
    unit_s = span.sharing * size_bytes / level.bandwidth_bytes_per_s
    device_s = medium_s = 0.0
    if level.device_bandwidth_bytes_per_s:
        device_s = size_bytes / (span.members * level.device_bandwidth_bytes_per_s)
    if level.total_bandwidth_bytes_per_s:
        everything = span.sharing * size_bytes * span.num_units
        medium_s = everything / level.total_bandwidth_bytes_per_s
    return max(unit_s, device_s, medium_s)
