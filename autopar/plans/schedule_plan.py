"""The schedule in a plan: its size, its stages, and the text of a pipeline's actions.

In: the fields of an untrusted document. Out: the stages and a verified schedule, or a PlanError
with the JSON path. Sizes are checked against limits before any work depends on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import msgspec

from autopar.base.documents import path_of, shown
from autopar.base.errors import PlanError, ScheduleError
from autopar.ir.stages import Stages
from autopar.plans.refusals import refused
from autopar.schedules import Schedule, format_schedule, parse_schedule, verify
from autopar.schedules.runnable import check_runs

MAX_DEVICES = 1 << 20
MAX_STAGES = 1 << 12
MAX_MICROBATCHES = 1 << 20
MAX_ACTIONS = 1 << 20


class SchedulePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The backward schedule and its size.

    For a pipeline, ``first_blocks`` names the first block of each stage, ``actions`` is the
    schedule's text by line (`autopar.schedules.format_schedule`), and ``num_devices`` is the number
    of pipeline ranks, each with the plan's mesh. ``gap``: relative distance of the order of the
    actions from a lower bound, which no order of these stages on these pipeline ranks goes below in
    this memory (reductions and updates left out); 0 if it is proved optimal, None if no other
    orders were searched.
    """

    name: str = "conventional"
    num_stages: int = 1
    num_devices: int = 1
    num_microbatches: int = 1
    first_blocks: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    gap: float | None = None

    @staticmethod
    def of(stages: Stages, schedule: Schedule, gap: float | None = None) -> SchedulePlan:
        return SchedulePlan(
            name=schedule.name,
            num_stages=stages.num_stages,
            num_devices=schedule.shape.num_devices,
            num_microbatches=schedule.shape.num_microbatches,
            first_blocks=stages.first_blocks,
            actions=tuple(format_schedule(schedule).splitlines()),
            gap=gap,
        )

    def pipeline(self) -> tuple[Stages, Schedule] | None:
        """The stages and the verified schedule that runs them; None without a pipeline.

        Raises PlanError.
        """
        return _pipeline_of(self)


@lru_cache(maxsize=8)
def _pipeline_of(plan: SchedulePlan) -> tuple[Stages, Schedule] | None:
    _check_sizes(plan)
    if not plan.first_blocks and not plan.actions and plan.num_stages == 1:
        if plan.num_devices != 1:
            raise refused(
                f"{plan.num_devices} pipeline ranks, but no first_blocks and no actions",
                "$.schedule.num_devices",
            )
        return None
    if len(plan.first_blocks) != plan.num_stages:
        raise refused(
            f"the plan's first_blocks names {len(plan.first_blocks)} blocks, but its schedule has "
            f"{plan.num_stages} stages; name the first block of each stage",
            "$.schedule.first_blocks",
        )
    schedule = _parsed(plan)
    shape = schedule.shape
    found = (shape.num_stages, shape.num_devices, shape.num_microbatches)
    if found != (plan.num_stages, plan.num_devices, plan.num_microbatches):
        raise refused(
            f"the plan's schedule has {found[0]} stages, {found[1]} devices and {found[2]} "
            f"micro-batches; the plan says {plan.num_stages}, {plan.num_devices} and "
            f"{plan.num_microbatches}",
            "$.schedule",
        )
    if schedule.name != plan.name:
        raise refused(f"it is {plan.name!r}; its text says {schedule.name!r}", "$.schedule.name")
    with _at_action(plan.actions):
        verify(schedule)
        check_runs(schedule)
    return Stages(first_blocks=plan.first_blocks), schedule


def _parsed(plan: SchedulePlan) -> Schedule:
    count = sum(line.count(" ") for line in plan.actions)
    if count > MAX_ACTIONS:
        raise refused(f"more than {MAX_ACTIONS:,} actions", "$.schedule.actions")
    for number, line in enumerate(plan.actions):
        if line.splitlines() != [line]:
            raise refused(
                "each element must be one line of the schedule's text",
                path_of(("schedule", "actions", number)),
            )
    with _at_action(plan.actions):
        return parse_schedule("\n".join(plan.actions) + "\n")


@contextmanager
def _at_action(lines: tuple[str, ...]) -> Iterator[None]:
    """Re-raise errors from inside as PlanErrors, at the line of the schedule that they name."""
    try:
        yield
    except (ScheduleError, PlanError) as error:
        keys: tuple[str | int, ...] = ("schedule", "actions")
        line = getattr(error, "line", None)
        device = getattr(error, "device", None)
        first = next((i for i, text in enumerate(lines) if text.startswith("device 0:")), None)
        if line is not None:
            keys = (*keys, line - 1)
        elif device is not None and first is not None and device < len(lines) - first:
            keys = (*keys, first + device)
        raise refused(f"the plan's schedule cannot be run: {error}", path_of(keys)) from error


def _check_sizes(plan: SchedulePlan) -> None:
    for field, most in (
        ("num_stages", MAX_STAGES),
        ("num_devices", MAX_DEVICES),
        ("num_microbatches", MAX_MICROBATCHES),
    ):
        value = getattr(plan, field)
        if not 1 <= value <= most:
            raise refused(
                f"it must be from 1 to {most:,}, not {shown(value)}", f"$.schedule.{field}"
            )
