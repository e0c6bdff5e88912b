"""The forms of the pipeline schedules: every generator, with the options that a search may choose.

In: numbers of pipeline ranks, stages and micro-batches. Out: a ``Form`` for each schedule that may
exist for these numbers. The one list of what is searched: by the search for the best schedule at
given costs, and by the plans with an open schedule.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.schedules.generators.build import (
    ANY_STAGES,
    ONE_STAGE,
    TWO_STAGES,
    build,
    described,
)
from autopar.schedules.generators.chimera import Concatenation, chimera_shape
from autopar.schedules.generators.shapes import looped_shape, require
from autopar.schedules.schedule import PipelineShape, Schedule
from autopar.schedules.simulate.durations import Durations, Links


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A generator with its options, for some numbers of pipeline ranks, stages and micro-batches.

    Its text is the name of its schedule: "chimera, 2 pairs, merged".
    """

    name: str
    num_devices: int
    num_stages: int
    num_microbatches: int
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return described(self.name, self.options)

    @property
    def text(self) -> str:
        """Its name and numbers: "chimera, 2 pairs, merged, 8 stages on 8, 16 micro-batches"."""
        return (
            f"{self}, {self.num_stages} stages on {self.num_devices}, "
            f"{self.num_microbatches} micro-batches"
        )

    @property
    def is_listed(self) -> bool:
        """Whether a list scheduler orders its actions, which durations and links determine."""
        return self.name == "fast_forward" or self._concatenation is Concatenation.MERGED

    @property
    def _concatenation(self) -> Concatenation | None:
        if self.name != "chimera":
            return None
        return Concatenation(self.options.get("concatenation", Concatenation.DIRECT))

    @property
    def shape(self) -> PipelineShape:
        """The shape of the schedule; raises ScheduleError where there is none."""
        if self.name == "fast_forward":
            return looped_shape(
                self.num_stages,
                self.num_microbatches,
                self.num_devices,
                self.options.get("group_size", 1),
            )
        if self._concatenation is Concatenation.MERGED:
            pipelines = self.options.get("num_pipelines", 2)
            return chimera_shape(self.num_stages, self.num_microbatches, pipelines)
        return self.build().shape

    def build(self, durations: Durations | None = None, links: Links | None = None) -> Schedule:
        """The schedule; raises ScheduleError where there is none for these numbers.

        ``durations`` and ``links`` are used where a list scheduler orders the actions.
        """
        options = dict(self.options)
        num_microbatches = self.num_microbatches
        if self._concatenation is Concatenation.BACKWARD_HALVING:
            require(
                num_microbatches % 2 == 0,
                f"chimera with backward_halving pairs micro-batches, got {num_microbatches}",
                f"use num_microbatches={num_microbatches + 1}",
            )
            num_microbatches //= 2
        if self.name in ANY_STAGES:
            options["num_devices"] = self.num_devices
        if self.is_listed:
            options |= {"durations": durations, "links": links}
        return build(
            self.name,
            num_stages=self.num_stages,
            num_microbatches=num_microbatches,
            **options,
        )


def forms(num_devices: int, num_stages: int, num_microbatches: int) -> Iterator[Form]:
    """Every generator and set of options for these numbers, the plain form of each first.

    A form may still not exist: its ``build`` then raises ScheduleError.
    """
    for name, options in _options(num_devices, num_stages, num_microbatches):
        yield Form(
            name=name,
            num_devices=num_devices,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            options=options,
        )


def _options(
    num_devices: int, num_stages: int, num_microbatches: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    if num_stages == num_devices:
        for name in ONE_STAGE:
            if name == "chimera":
                yield from ((name, options) for options in _chimera_options(num_stages))
            else:
                yield name, {}
    if num_stages == 2 * num_devices:
        yield from ((name, {}) for name in TWO_STAGES)
    if num_stages > num_devices and num_stages % num_devices == 0:
        yield "interleaved", {}
    for options in _fast_forward_options(num_devices, num_stages, num_microbatches):
        yield "fast_forward", options


def _chimera_options(num_stages: int) -> Iterator[dict[str, Any]]:
    """Pairs of pipelines and ways of concatenation, without the defaults."""
    for pairs in range(1, num_stages // 2 + 1):
        for way in Concatenation:
            if (num_stages // 2) % pairs == 0:
                some = {"num_pipelines": 2 * pairs} if pairs > 1 else {}
                yield some | ({} if way is Concatenation.DIRECT else {"concatenation": way.value})


def _fast_forward_options(
    num_devices: int, num_stages: int, num_microbatches: int
) -> Iterator[dict[str, Any]]:
    """Sizes of groups and caps on the micro-batches in flight, without the defaults."""
    caps = {max(1, num_devices // 2), 2 * num_devices, num_microbatches} - {num_devices}
    for group_size in range(1, num_stages // num_devices + 1):
        some = {"group_size": group_size} if group_size > 1 else {}
        yield some
        for cap in sorted(caps):
            if cap <= num_microbatches:
                yield some | {"in_flight": cap}
