"""What the executor runs of a schedule; all else is simulated only."""

from __future__ import annotations

from autopar.base.errors import PlanError
from autopar.schedules.action import Kind
from autopar.schedules.schedule import PipelineShape, Resource, Schedule, Step

COMPUTED = frozenset((Kind.F, Kind.I, Kind.W, Kind.B, Kind.R, Kind.U))
"""The kinds of actions that run on a compute stream, whose ends other actions may wait for."""


def check_runs(schedule: Schedule) -> None:
    """Raise PlanError for the first step of ``schedule`` that the executor does not support."""
    for row in schedule.devices:
        for item in row:
            reason = _why_not_run(item, schedule.shape)
            if reason is not None:
                raise PlanError(
                    f"schedule {schedule.name!r}: {item} {reason}; it is simulated but not run. "
                    "Use a schedule without such steps, such as schedule='1f1b'"
                )


def _why_not_run(item: Step, shape: PipelineShape) -> str | None:
    """The reason that the executor does not support a step; None if it does."""
    kind = item.action.kind
    if kind in (Kind.O, Kind.L):
        return "keeps values on the host"
    if item.lag and kind is not Kind.U:
        return "computes gradients of the last training step beside this one's"
    if item.lag and shape.num_devices > 1:
        return (
            "updates weights with the last training step's gradients, on several pipeline devices"
        )
    if item.resource is Resource.SIDE and kind is not Kind.W:
        return "runs on a second compute stream, where only weight gradients (W) run"
    if item.after is not None and not {kind, item.after.kind} <= COMPUTED:
        return f"waits for {item.after} of another stream"
    return None


def uses_side_stream(schedule: Schedule) -> bool:
    """Whether an action of the schedule runs on the second compute stream."""
    return any(item.resource is Resource.SIDE for row in schedule.devices for item in row)
