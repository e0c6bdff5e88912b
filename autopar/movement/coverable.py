"""Which steps a movement plan covers; others are refused by name."""

from __future__ import annotations

from autopar.base.errors import MovementError
from autopar.ir.update import Clipping
from autopar.lowering.pipeline import has_side_stream
from autopar.lowering.route import Route
from autopar.lowering.types import EarlyUpdate, RankProgram


def check_coverable(program: RankProgram, route: Route) -> None:
    """Raise MovementError for early updates by rows of gradients, in two passes or behind scheduled
    reductions, for parameters that are released after forward or whose gradients are reduced in
    every micro-batch, for updates with the gradients of the step before, and for a second compute
    stream."""
    if has_side_stream(program):
        raise MovementError(
            f"schedule {program.pipeline.schedule.name!r} computes on a second stream, which no "
            "movement plan covers; choose another schedule"
        )
    if route.late_updates:
        raise MovementError(
            f"schedule {program.pipeline.schedule.name!r} updates weights with the gradients of "
            "the step before, which no movement plan covers; choose another schedule"
        )
    if program.early is not None:
        _check_early(program, program.early)
    if any(p.released for p in program.parameters):
        raise MovementError(
            "the program releases gathered parameters after forward and gathers them again, which "
            "no movement plan covers; plan it with reshard_after_forward=False"
        )
    if any(p.scattered for p in program.parameters):
        raise MovementError(
            "the program reduces gradients in every micro-batch, which no movement plan covers; "
            "plan it with reduce_every_microbatch=False"
        )


def _check_early(program: RankProgram, early: EarlyUpdate) -> None:
    if any(kernel.weight_steps for kernel in program.kernels):
        raise MovementError(
            "the program computes gradients one by one and by rows, which no movement plan covers; "
            "lower it with in_steps=False"
        )
    if early.clipping is Clipping.SECOND_PASS:
        raise MovementError(
            "the program runs each step twice to clip its gradients, which no movement plan "
            "covers; clip by the norm of the step before (clipping='last_norm'), or update at the "
            "end"
        )
    if program.pipeline.shape.reduces:
        raise MovementError(
            f"schedule {program.pipeline.schedule.name!r} has its own reductions of gradients, "
            "behind which no movement plan covers early updates; choose another schedule, or "
            "update at the end"
        )
