"""The prices of stages on their pipeline ranks, and of the messages between these.

In: a priced strategy, and where a schedule places its stages. Out: the times of the blocks on the
rank of each stage, which is on an island of its own where the cluster has unequal ones, and the
links between ranks, which depend on the levels of the cluster that a message crosses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from autopar.cost_models import CommunicationModel
from autopar.cost_models.estimate import Estimate
from autopar.ir.stages import Stages
from autopar.lowering.stages import staged_blocks
from autopar.pricing.block_times import StrategyTimes
from autopar.pricing.candidate import Candidate
from autopar.pricing.islands import on_islands
from autopar.pricing.problem import PricedGraph
from autopar.schedules import Links, PipelineShape
from autopar.schedules.simulate.durations import Link

Placement = tuple[tuple[int, ...], ...]
"""The pipeline rank of every stage of every replica."""
Way = tuple[CommunicationModel, tuple[int, int]]
"""Two devices whose messages cost as much as those between two pipeline ranks, and their prices."""


def times_by_stage(candidate: Candidate, shape: PipelineShape) -> list[StrategyTimes]:
    """The prices on the pipeline rank of each stage; those of the slowest if it has several."""
    if not candidate.priced.pricing.cluster.islands:
        return [candidate.times] * shape.num_stages
    on = [candidate.times_on(rank) for rank in range(shape.num_devices)]
    return [max((on[rank] for rank in ranks), key=_total_s) for ranks in zip(*shape.placement)]


def _total_s(times: StrategyTimes) -> float:
    return sum(block.total_s for block in times.blocks.values())


def message_s_by_border(
    candidate: Candidate, shape: PipelineShape, crossing: Sequence[int]
) -> list[list[float]]:
    """Seconds of a micro-batch's message across each possible cut, for each border between two
    stages; those of the slowest link if the stages have several."""
    ways = candidate.priced.derived(_ways)(shape.placement)

    @cache
    def seconds(way: Way) -> list[float]:
        communication, devices = way
        return [
            communication.estimate("send_recv", size_bytes, devices).time_s
            for size_bytes in crossing
        ]

    rows = []
    for border in range(shape.num_stages - 1):
        pairs = {(row[border], row[border + 1]) for row in shape.placement}
        each = [seconds(ways[pair]) for pair in sorted(pairs) if pair in ways]
        rows.append([max(times) for times in zip(*each)] if each else [0.0] * len(crossing))
    return rows


def links_of(
    candidate: Candidate, stages: Stages, shape: PipelineShape, crossing: Sequence[int]
) -> tuple[Links, Estimate | None]:
    """The links between neighbouring stages with their messages; the price of the largest message
    over the slowest, or None."""
    names = [block.name for block in staged_blocks(candidate.priced.pricing.graph)]
    sizes = [float(crossing[names.index(first) - 1]) for first in stages.first_blocks[1:]]
    largest = int(max(sizes, default=0.0))
    ways = candidate.priced.derived(_ways)(shape.placement)
    if not largest or not ways:
        return Links(message_bytes=(*sizes, 0.0)), None
    whole = {way: way[0].estimate("send_recv", largest, way[1]) for way in set(ways.values())}
    links = {way: _link(way, largest, estimate.time_s) for way, estimate in whole.items()}
    usual = links[next(iter(ways.values()))]
    return Links(
        latency_s=usual.latency_s,
        bandwidth_bytes_per_s=usual.bandwidth_bytes_per_s,
        message_bytes=(*sizes, 0.0),
        between={pair: links[way] for pair, way in ways.items() if links[way] != usual},
    ), max(whole.values(), key=lambda estimate: estimate.time_s)


def _link(way: Way, size_bytes: int, time_s: float) -> Link:
    communication, devices = way
    latency_s = communication.estimate("send_recv", 0, devices).time_s
    return Link(
        latency_s=latency_s, bandwidth_bytes_per_s=size_bytes / max(time_s - latency_s, 1e-12)
    )


def _ways(priced: PricedGraph) -> Callable[[Placement], Mapping[tuple[int, int], Way]]:
    """The way of a message between each pair of pipeline ranks that are neighbours in a placement,
    in both directions; equal links are represented by one."""
    size, cluster = priced.pricing.mesh.num_devices, priced.pricing.cluster

    def way(low: int, high: int) -> Way:
        first, communication = 0, priced.pricing.communication
        found = cluster.island_at(low * size, (high - low + 1) * size)
        if found is not None:
            first, island = found
            communication = priced.derived(on_islands)(island).pricing.communication
        return communication, (low * size - first, high * size - first)

    @cache
    def ways(placement: Placement) -> Mapping[tuple[int, int], Way]:
        pairs = dict.fromkeys(
            (min(pair), max(pair))
            for row in placement
            for pair in itertools.pairwise(row)
            if pair[0] != pair[1]
        )
        alike: dict[object, Way] = {}
        found: dict[tuple[int, int], Way] = {}
        for low, high in pairs:
            communication, devices = way(low, high)
            kind = communication, communication.group_shape(devices)
            found[low, high] = found[high, low] = alike.setdefault(kind, (communication, devices))
        return found

    return ways
