"""What a pipeline's step was predicted from: the seconds of its stages, and its messages.

In: the costs that the search simulated, or the fields of an untrusted document. Out: the same costs
for the simulator, so that the timeline of a plan ends at the predicted step: of one pass, and where
updates are late, of one iteration by itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec

from autopar.base.documents import path_of
from autopar.base.units import nine_digits
from autopar.plans.refusals import refused
from autopar.schedules import Action, Durations, Kind, Links, Resource, Schedule, Timeline, simulate
from autopar.schedules.simulate.durations import Link
from autopar.schedules.simulate.timeline import Interval
from autopar.schedules.transforms.reductions import with_replica_sums


class LinkCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The link from one pipeline rank to another; None is a link without a limit."""

    ranks: tuple[int, int]
    latency_s: float
    bandwidth_bytes_per_s: float | None


class StageCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds by stage for one micro-batch, and bytes that it sends to the next stage.

    Communication inside a stage is part of its passes. ``reduce_s`` and ``update_s`` are those of
    the schedule's actions G and U, for all micro-batches; ``reduce_after_s`` and
    ``update_after_s``, by pipeline rank, follow the schedule. ``links`` are those between pairs of
    ranks that exchange messages.
    """

    forward_s: tuple[float, ...]
    input_grad_s: tuple[float, ...]
    weight_grad_s: tuple[float, ...]
    reduce_s: tuple[float, ...]
    update_s: tuple[float, ...]
    message_bytes: tuple[float, ...]
    links: tuple[LinkCosts, ...]
    reduce_after_s: tuple[float, ...]
    update_after_s: tuple[float, ...]

    @staticmethod
    def of(
        schedule: Schedule, durations: Durations, links: Links,
        after: tuple[Sequence[float], Sequence[float]],
    ) -> StageCosts:  # fmt: skip
        """The costs that ``schedule`` was simulated with; ``after``: reductions and updates by
        pipeline rank that follow it."""
        num_stages, placement = schedule.shape.num_stages, schedule.shape.placement
        table = durations.table(num_stages)
        pairs = {pair for row in placement for pair in itertools.pairwise(row)}
        both = sorted({(a, b) for pair in pairs for a, b in (pair, pair[::-1]) if a != b})
        return StageCosts(
            forward_s=_digits(table[Kind.F]),
            input_grad_s=_digits(table[Kind.I]),
            weight_grad_s=_digits(table[Kind.W]),
            reduce_s=_digits(table[Kind.G]),
            update_s=_digits(table[Kind.U]),
            message_bytes=tuple(links.boundary_bytes(num_stages)),
            links=tuple(_link_costs(pair, links.link(*pair)) for pair in both),
            reduce_after_s=_digits(after[0]),
            update_after_s=_digits(after[1]),
        )

    def check(self) -> None:
        """Raise PlanError with the JSON path unless all are finite, >= 0 and of equal length."""
        num_stages = len(self.forward_s)
        for field in self.__struct_fields__:
            if field == "links":
                continue
            values = getattr(self, field)
            by_rank = field.endswith("after_s")
            if len(values) != (len(self.reduce_after_s) if by_rank else num_stages):
                raise refused(
                    "it must have one entry for each " + ("rank" if by_rank else "stage"),
                    path_of(("stage_costs", field)),
                )
            if not all(0 <= value < math.inf for value in values):
                raise refused("it cannot be negative", path_of(("stage_costs", field)))
        for position, link in enumerate(self.links):
            place = path_of(("stage_costs", "links", position))
            bandwidth = link.bandwidth_bytes_per_s
            if not 0 <= link.latency_s < math.inf or not (bandwidth is None or bandwidth > 0):
                raise refused("a latency is >= 0 and a bandwidth > 0", place)
            if link.ranks[0] == link.ranks[1] or min(link.ranks) < 0:
                raise refused("it must link two different ranks, numbered from 0", place)

    def fit(self, schedule: Schedule) -> bool:
        """Whether the costs are of a schedule with these stages and ranks."""
        shape = schedule.shape
        numbers = len(self.forward_s), len(self.reduce_after_s)
        ranks = {rank for link in self.links for rank in link.ranks}
        return numbers == (shape.num_stages, shape.num_devices) and all(
            rank < shape.num_devices for rank in ranks
        )

    @property
    def durations(self) -> Durations:
        return Durations(
            F=self.forward_s, I=self.input_grad_s, W=self.weight_grad_s, G=self.reduce_s,
            U=self.update_s,
        )  # fmt: skip

    def timeline(self, schedule: Schedule) -> Timeline:
        """A step under the schedule, with what follows it on every pipeline rank."""
        between = {
            link.ranks: Link(
                latency_s=link.latency_s,
                bandwidth_bytes_per_s=link.bandwidth_bytes_per_s or math.inf,
            )
            for link in self.links
        }
        links = Links(message_bytes=self.message_bytes, between=between)
        found = simulate(schedule.derived(with_replica_sums), self.durations, links)
        intervals, end_s = list(found.intervals), found.makespan_s
        for rank, after in enumerate(zip(self.reduce_after_s, self.update_after_s)):
            stages, now_s = schedule.shape.stages_on(rank), end_s
            if not stages:
                continue
            for kind, resource, time_s in zip(
                (Kind.G, Kind.U), (Resource.COLLECTIVE, Resource.MAIN), after
            ):
                if time_s:
                    action = Action(stages[0][1], kind, replica=stages[0][0])
                    intervals.append(Interval(rank, resource, action, now_s, now_s + time_s))
                now_s += time_s
        return Timeline(schedule=found.schedule, intervals=tuple(intervals), memory=found.memory)


def _digits(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(nine_digits(value) for value in values)


def _link_costs(ranks: tuple[int, int], link: Link) -> LinkCosts:
    bandwidth = link.bandwidth_bytes_per_s
    return LinkCosts(
        ranks=ranks, latency_s=link.latency_s,
        bandwidth_bytes_per_s=None if math.isinf(bandwidth) else bandwidth,
    )  # fmt: skip
