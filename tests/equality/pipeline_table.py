"""The table of pipelines that must equal eager: model x ranks x mesh inside stages x schedule.

Each row either runs or has a reason why it does not fit.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.base.errors import ScheduleError
from autopar.planning.constraints import Constraint, Force
from autopar.schedules import (
    Durations,
    Memory,
    Schedule,
    build,
    simulate,
    with_recomputation,
    with_reductions,
)
from autopar.schedules.generators.refine import Costs, refine
from tests.models import families, zoo

NUM_ROWS = 16
"""Rows of a batch: enough for 16 micro-batches, or 4 of them on 4 data-parallel processes."""
# Models with enough blocks for the stages of 2 and 4 devices, and of 8.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "gpt2": (lambda: zoo.gpt2(6), lambda: zoo.gpt2(14)),
    "bert": (lambda: zoo.bert(6), lambda: zoo.bert(14)),
    "llama": (lambda: families.llama(6), lambda: families.llama(14)),
    "t5": (lambda: families.t5(1), lambda: families.t5(3)),
    "resnet": (lambda: zoo.resnet((3, 3)), lambda: zoo.resnet((7, 7))),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """A mesh inside stages, and the strategy on its axes."""

    sizes: tuple[int, ...] = ()
    constraints: tuple[Constraint, ...] = ()

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes)

    @property
    def splits_batch(self) -> bool:
        return any(c.parallelism == "data_parallel" for c in self.constraints)  # type: ignore[union-attr]


DATA, TENSOR = Force("data_parallel", axis="x"), Force("tensor_parallel", axis="x")
INSIDE = {
    "alone": Inside(),
    "data 2": Inside(sizes=(2,), constraints=(DATA,)),
    "tensor 2": Inside(sizes=(2,), constraints=(TENSOR,)),
    "data 4": Inside(sizes=(4,), constraints=(DATA,)),
    "tensor 4": Inside(sizes=(4,), constraints=(TENSOR,)),
    "data 2 x tensor 2": Inside(
        sizes=(2, 2), constraints=(DATA, Force("tensor_parallel", axis="y"))
    ),
    "data 8": Inside(sizes=(8,), constraints=(DATA,)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A schedule: stages and micro-batches of each pipeline device, and the generator's options."""

    name: str
    stages: int = 1
    microbatches: int = 1
    options: tuple[tuple[str, Any], ...] = ()
    num_devices: bool = False
    change: Callable[[Schedule], Schedule] | None = None
    on_one_device: bool = False

    @functools.cache  # noqa: B019  (rows live as long as the module)
    def build(self, num_devices: int, num_microbatches: int) -> Schedule:
        options = dict(self.options)
        if self.num_devices:
            options["num_devices"] = num_devices
        num_stages = 4 if self.on_one_device else self.stages * num_devices
        made = build(self.name, num_stages=num_stages, num_microbatches=num_microbatches, **options)
        return made if self.change is None else self.change(made)


def _recomputing(schedule: Schedule) -> Schedule:
    return with_recomputation(schedule, range(schedule.shape.num_stages))


def _reducing(schedule: Schedule) -> Schedule:
    return with_reductions(schedule, Durations(F=1.0, I=1.0, W=1.0, G=0.5))


def _searched(schedule: Schedule) -> Schedule:
    """Another order, found for uneven stages."""
    times = tuple(1.0 + 0.5 * (stage % 3) for stage in range(schedule.shape.num_stages))
    durations = Durations(F=times, I=times[::-1], W=times)
    peaks = simulate(schedule, durations).peak_memory_bytes
    costs = Costs(durations=durations, links=None, memory=Memory(), max_bytes=peaks)
    return refine(schedule, costs, num_moves=300).schedule


ROWS = {
    "gpipe": Row(name="gpipe"),
    "1f1b": Row(name="1f1b"),
    "1f1b, recomputed": Row(name="1f1b", change=_recomputing),
    "1f1b, reductions": Row(name="1f1b", change=_reducing),
    "interleaved": Row(name="interleaved", stages=2, num_devices=True),
    "zb_h1": Row(name="zb_h1"),
    "zb_h2": Row(name="zb_h2"),
    "zb_v": Row(name="zb_v", stages=2),
    "v_half": Row(name="v_half", stages=2),
    "v_min": Row(name="v_min", stages=2),
    "dualpipe": Row(name="dualpipe", microbatches=2),
    "chimera": Row(name="chimera"),
    "chimera, 4 pipelines": Row(name="chimera", options=(("num_pipelines", 4),)),
    "chimera, doubled": Row(
        name="chimera", microbatches=2, options=(("concatenation", "forward_doubling"),)
    ),
    "chimera, halved": Row(name="chimera", options=(("concatenation", "backward_halving"),)),
    "chimera, merged": Row(
        name="chimera", microbatches=2, options=(("concatenation", "merged"),)
    ),
    "chimera, 4 pipelines, merged": Row(
        name="chimera", microbatches=2,
        options=(("num_pipelines", 4), ("concatenation", "merged")),
    ),
    "gems": Row(name="gems"),
    "fast_forward": Row(name="fast_forward", stages=2, num_devices=True),
    "searched, from 1f1b": Row(name="1f1b", microbatches=2, change=_searched),
    "searched, from zb_v": Row(name="zb_v", stages=2, change=_searched),
    "searched, from chimera": Row(name="chimera", change=_searched),
    "conventional": Row(name="conventional", on_one_device=True),
    "reverse_first_k": Row(
        name="reverse_first_k", on_one_device=True, options=(("k", 2), ("reduces", False))
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Combination:
    """One entry of the table."""

    model: str
    num_processes: int
    inside: str
    row: str

    @property
    def num_devices(self) -> int:
        """Number of devices of the pipeline."""
        return self.num_processes // INSIDE[self.inside].num_devices

    @property
    def is_large(self) -> bool:
        """Whether it takes the model of more blocks."""
        return self.num_devices == 8

    def __str__(self) -> str:
        return f"{self.model} on {self.num_processes}, {self.inside}, {self.row}"

    @property
    def schedule(self) -> Schedule:
        """Raises ScheduleError where there is none for these numbers."""
        row = ROWS[self.row]
        num = row.microbatches * self.num_devices
        if self._whole_batch:
            num = 1
        return row.build(self.num_devices, num)

    @property
    def _whole_batch(self) -> bool:
        """Batch norm over a split batch has the statistics of all of it: no micro-batches."""
        return self.model == "resnet" and INSIDE[self.inside].splits_batch

    def misfit(self) -> str | None:
        """The reason that it does not fit; None if it does."""
        try:
            made = self.schedule
        except ScheduleError as error:
            return f"{error}" + (" (the whole batch for batch norm)" * self._whole_batch)
        num_parts = made.shape.num_microbatches
        if self._whole_batch and num_parts > 1:
            return f"{num_parts} micro-batches (the whole batch for batch norm)"
        if INSIDE[self.inside].splits_batch:
            num_parts *= INSIDE[self.inside].sizes[0]
        if NUM_ROWS % num_parts:
            return f"{NUM_ROWS} rows are not split into {num_parts} parts"
        return None


def combinations() -> Iterator[Combination]:
    """All entries, those of equal processes and mesh together."""
    for num, inside, model, row in itertools.product((2, 4, 8), INSIDE, MODELS, ROWS):
        num_devices, odd = divmod(num, INSIDE[inside].num_devices)
        if odd or not num_devices or (num_devices == 1) != ROWS[row].on_one_device:
            continue
        yield Combination(model=model, num_processes=num, inside=inside, row=row)
