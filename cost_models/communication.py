"""Prices of collectives on groups of ranks of a cluster.

In: the kind of collective, the bytes of the full buffer on one device, and the ranks of a group of
a mesh axis. Out: an ``Estimate``. The other groups of that axis run the same collective at the same
time, so groups that share a link share its bandwidth.

On GPUs (NCCL) collectives between nodes are priced by `autopar.cost_models.nccl`. All others take
``launch + steps * latency + bytes / bandwidth``:

- *bytes*: a group spans ``fanout`` units at each level of links. With gloo collectives run
  hierarchically (inside the node, then across), which minimizes the bytes over each unit's link:
  ``S (f - 1) / f`` at each level of fan-out f for an all-gather or reduce-scatter of S bytes, and
  twice that for an all-reduce. The levels process different chunks concurrently, so the slowest
  level determines the time. NCCL's rings are flat: ``S (N - 1) / N`` for N ranks at each level.
- *ramp*: links reach their rate with large buffers only; ``ramp_bytes`` of a level says how large.
- *steps*: rings take ``f - 1`` steps per level, trees ``ceil(log2 f)``; the better one is used.

Times measured on a process group take precedence.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from autopar.cost_models.cluster import Cluster
from autopar.cost_models.estimate import CostError, Estimate, Source
from autopar.cost_models.nccl import AcrossNodes, across_nodes, ramp
from autopar.cost_models.spans import Span, crossing_s, spans_of

# A message's launch over that of a collective, which sets up rings among all: 7 of 27 us on H100,
# 14 of 33 us on A100 (Vidur's measurements, microsoft/vidur).
_SEND_LAUNCH = 1 / 3
# A message between nodes takes 8 us more than the latency of its link (the same source).
_MESSAGE_SETUP_S = 8e-6


def slowed_s(compute_s: float, communication_s: float, slowdown: float) -> float:
    """Seconds of computation beside communication that starts with it.

    It is slower by the cluster's ``overlap_slowdown`` while the collective runs.
    """
    if compute_s * slowdown <= communication_s:
        return compute_s * slowdown
    return compute_s + communication_s * (1 - 1 / slowdown)


class Collective(StrEnum):
    """The kinds of communication that are priced."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    SEND_RECV = "send_recv"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCurve:
    """Measured times of one kind of collective on one shape of group, by size.

    ``sizes_bytes`` ascend; ``times_s`` are the medians at these sizes and never decrease;
    ``noisy_bytes`` are the sizes with noisy measurements.
    """

    sizes_bytes: tuple[int, ...]
    times_s: tuple[float, ...]
    noisy_bytes: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not self.sizes_bytes or len(self.sizes_bytes) != len(self.times_s):
            raise CostError("a measured curve needs one time for each size, and at least one.")
        if any(a >= b for a, b in zip(self.sizes_bytes, self.sizes_bytes[1:])):
            raise CostError("the sizes of a measured curve must ascend.")
        if any(a > b for a, b in zip(self.times_s, self.times_s[1:])):
            raise CostError("the times of a measured curve must not decrease with size.")

    def at(self, size_bytes: int) -> Estimate:
        """The time at ``size_bytes``: linear between sizes and beyond, constant below the first."""
        sizes, times = self.sizes_bytes, self.times_s
        for size, time_s in zip(sizes, times):
            if size == size_bytes:
                return Estimate(time_s, Source.MEASURED, self._is_noisy(size))
        if size_bytes < sizes[0]:
            return Estimate(times[0], Source.INTERPOLATED, self._is_noisy(sizes[0]))
        if size_bytes > sizes[-1]:
            time_s = times[-1] + self._last_slope() * (size_bytes - sizes[-1])
            return Estimate(time_s, Source.INTERPOLATED, self._is_noisy(*sizes[-2:]))
        upper = next(i for i, size in enumerate(sizes) if size > size_bytes)
        lower = upper - 1
        slope = (times[upper] - times[lower]) / (sizes[upper] - sizes[lower])
        time_s = times[lower] + slope * (size_bytes - sizes[lower])
        return Estimate(time_s, Source.INTERPOLATED, self._is_noisy(sizes[lower], sizes[upper]))

    def _is_noisy(self, *sizes_bytes: int) -> bool:
        return not self.noisy_bytes.isdisjoint(sizes_bytes)

    def _last_slope(self) -> float:
        """Seconds per byte beyond the last size: the slope of the last two, at least that of all.

        Noisy times may be equal, though a larger message is never free. If all are equal, the last
        time is divided by its bytes.
        """
        sizes, times = self.sizes_bytes, self.times_s
        if times[0] == times[-1]:
            return times[-1] / sizes[-1]
        mean = (times[-1] - times[0]) / (sizes[-1] - sizes[0])
        return max(mean, (times[-1] - times[-2]) / (sizes[-1] - sizes[-2]))


GroupShape = tuple[tuple[int, int, str], ...]
"""The link class of a group: fan-out, sharing and link at each level, innermost first."""


class CommunicationModel:
    """Prices collectives on ``cluster``, and caches the estimates.

    ``measured`` maps a kind and a group's shape to measured times.
    """

    def __init__(
        self,
        cluster: Cluster,
        measured: Mapping[tuple[Collective, GroupShape], MeasuredCurve] | None = None,
    ) -> None:
        self.cluster = cluster
        self._measured = dict(measured or {})
        self._spans: dict[tuple[int, ...], tuple[Span, ...]] = {}
        self._across: dict[tuple[int, ...], AcrossNodes | None] = {}
        self._estimates: dict[tuple[str, int, tuple[int, ...]], Estimate] = {}

    def estimate(self, kind: str, size_bytes: int, ranks: Sequence[int]) -> Estimate:
        """Seconds of ``kind`` on ``ranks``.

        ``size_bytes`` is the full buffer on one device: the input of all-reduce, reduce-scatter and
        all-to-all, the output of all-gather, the message of broadcast and send-recv. A group of one
        costs nothing. Raises CostError for unknown kinds, negative sizes, and ranks that are
        repeated or not in the cluster.
        """
        ranks = tuple(ranks)
        key = (kind, size_bytes, ranks)
        known = self._estimates.get(key)
        if known is None:
            known = self._estimates[key] = self._estimate(kind, size_bytes, ranks)
        return known

    def joined(self, kind: str, size_bytes: int, ranks: Sequence[int], num: int) -> Estimate:
        """A tensor's share of a coalesced collective of ``num`` tensors of its size."""
        whole = self.estimate(kind, size_bytes * num, ranks)
        return Estimate(whole.time_s / num, whole.source, whole.is_noisy)

    def spans(self, ranks: Sequence[int]) -> tuple[Span, ...]:
        """The position of the group ``ranks`` on each level of links, innermost first."""
        ranks = tuple(ranks)
        known = self._spans.get(ranks)
        if known is None:
            known = self._spans[ranks] = spans_of(self.cluster, ranks)
        return known

    def group_shape(self, ranks: Sequence[int]) -> GroupShape:
        """The link class of a group: groups of one shape cost the same."""
        return tuple(
            (span.fanout, span.sharing, f"{level.name}, {level.bandwidth_bytes_per_s:g} B/s")
            for level, span in zip(self.cluster.levels, self.spans(ranks))
        )

    def _estimate(self, kind: str, size_bytes: int, ranks: tuple[int, ...]) -> Estimate:
        try:
            collective = Collective(kind)
        except ValueError:
            raise CostError(
                f"there is no collective {kind!r}; there are {', '.join(Collective)}."
            ) from None
        if size_bytes < 0:
            raise CostError(f"{kind} of {size_bytes} bytes: a size is at least 0.")
        spans = self.spans(ranks)
        if len(ranks) <= 1 or size_bytes == 0:
            # Nothing is communicated.
            return Estimate(0.0, Source.ANALYTICAL)
        curve = self._measured.get((collective, self.group_shape(ranks)))
        if curve is not None:
            return curve.at(size_bytes)
        time_s = self._analytical_s(collective, size_bytes, ranks, spans)
        return Estimate(time_s, Source.ANALYTICAL)

    def _analytical_s(
        self, kind: Collective, size_bytes: int, ranks: tuple[int, ...], spans: tuple[Span, ...]
    ) -> float:
        launch_s = self.cluster.collective_launch_s
        across = self._across_nodes(ranks, spans)
        if across is not None:
            match kind:
                case Collective.ALL_REDUCE:
                    return launch_s + across.all_reduce_s(size_bytes)
                case Collective.ALL_GATHER | Collective.REDUCE_SCATTER:
                    return launch_s + across.gather_s(size_bytes)
                case Collective.BROADCAST:
                    return launch_s + across.broadcast_s(size_bytes)
        is_flat = self.cluster.backend == "nccl"
        if is_flat and kind == Collective.SEND_RECV:
            launch_s *= _SEND_LAUNCH
            if across is not None:
                launch_s += _MESSAGE_SETUP_S
        return launch_s + self._by_levels_s(kind, size_bytes, spans, is_flat)

    def _by_levels_s(
        self, kind: Collective, size_bytes: int, spans: tuple[Span, ...], is_flat: bool
    ) -> float:
        group_size = math.prod(span.fanout for span in spans)
        latency_s = 0.0
        transfer_s = 0.0
        tree_latency_s = 0.0
        for level, span in zip(self.cluster.levels, spans):
            if span.fanout == 1:
                continue
            latency_s += _ring_steps(kind, span.fanout) * level.latency_s
            tree_latency_s += _tree_steps(kind, span.fanout) * level.latency_s
            crossing = _crossing_bytes(kind, size_bytes, span, group_size, is_flat)
            level_s = crossing_s(level, span, crossing)
            if kind == Collective.SEND_RECV:
                level_s /= level.message_efficiency or level.efficiency
            else:
                level_s *= ramp(level.ramp_bytes, size_bytes) / level.efficiency
            transfer_s = max(transfer_s, level_s)
        return min(latency_s, tree_latency_s) + transfer_s

    def _across_nodes(self, ranks: tuple[int, ...], spans: tuple[Span, ...]) -> AcrossNodes | None:
        """How NCCL sees a group in several nodes; None for others."""
        if self.cluster.backend != "nccl":
            return None
        if ranks not in self._across:
            levels, inside = self.cluster.levels, self.cluster.num_node_levels
            self._across[ranks] = across_nodes(levels, inside, spans)
        return self._across[ranks]


def _crossing_bytes(
    kind: Collective, size_bytes: int, span: Span, group_size: int, is_flat: bool
) -> float:
    """Bytes that a group sends over a unit's link at this level.

    ``is_flat``: by one ring over the whole group, not by one for each level.
    """
    num = group_size if is_flat else span.fanout
    match kind:
        case Collective.ALL_REDUCE:
            return 2 * size_bytes * (num - 1) / num
        case Collective.ALL_GATHER | Collective.REDUCE_SCATTER:
            return size_bytes * (num - 1) / num
        case Collective.ALL_TO_ALL:
            # Each member sends an equal share to each member of the level's other units.
            return span.members * size_bytes * span.members * (span.fanout - 1) / group_size
        case Collective.BROADCAST | Collective.SEND_RECV:
            return float(size_bytes)


def _ring_steps(kind: Collective, fanout: int) -> int:
    match kind:
        case Collective.ALL_REDUCE:
            return 2 * (fanout - 1)
        case Collective.SEND_RECV:
            return 1
        case _:
            return fanout - 1


def _tree_steps(kind: Collective, fanout: int) -> int:
    depth = math.ceil(math.log2(fanout))
    match kind:
        case Collective.ALL_REDUCE:
            return 2 * depth
        case Collective.BROADCAST:
            return depth
        case _:
            # No tree of these collectives moves as few bytes as the ring.
            return _ring_steps(kind, fanout)
