"""Which steps a movement plan covers; others are refused by name."""

from __future__ import annotations

from autopar.base.errors import MovementError
from autopar.lowering.pipeline import has_side_stream
from autopar.lowering.route import Route
from autopar.lowering.types import EarlyUpdate, RankProgram


def check_coverable(program: RankProgram, route: Route) -> None:
    """Raise MovementError for early updates by rows or behind scheduled reductions, for updates by
    the gradients of the step before, and for a second compute stream."""
    if has_side_stream(program):
        raise MovementError(
            f"schedule {program.pipeline.schedule.name!r} computes on a second stream, which no "
            "movement plan covers; choose another schedule"
        )
    if route.late_updates:
        raise MovementError(
            f"schedule {program.pipeline.schedule.name!r} updates weights with the gradients of "
            "the step before: they stay on the device into the next step, which takes the memory "
            "that offloading would save. Choose another schedule"
        )
    if program.early is not None:
        _check_early(program, program.early)


def _check_early(program: RankProgram, early: EarlyUpdate) -> None:
    if any(kernel.weight_steps for kernel in program.kernels):
        raise MovementError(
            "the program computes gradients one by one and by rows, which no movement plan covers; "
            "lower it with in_steps=False"
        )
    if program.pipeline.shape.reduces:
        raise MovementError(
            f"schedule {program.pipeline.schedule.name!r} delays reductions of gradients, which "
            "stay whole on the device until then: early updates behind them take the memory that "
            "offloading would save. Choose another schedule, or update at the end"
        )
