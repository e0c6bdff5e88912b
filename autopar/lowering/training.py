"""The training program of a strategy, with micro-batches and pipeline stages."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from autopar.base.errors import PlanError
from autopar.ir.recomputation import NOTHING, Recomputation
from autopar.ir.stages import Stages
from autopar.ir.update import Update
from autopar.lowering.early import with_early_update
from autopar.lowering.pipeline import with_pipeline
from autopar.lowering.program import Traces, lower
from autopar.lowering.regions import with_compiled
from autopar.lowering.stages import stage_of_blocks
from autopar.lowering.types import RankProgram
from autopar.schedules import Kind, Schedule
from autopar.sharding.microbatches import Microbatches
from autopar.sharding.strategy import Strategy


def lower_training(
    strategy: Strategy,
    num_microbatches: int = 1,
    *,
    pipeline: tuple[Stages, Schedule] | None = None,
    device_type: str = "cpu",
    update: Update | None = None,
    tile_bytes: int | None = None,
    in_steps: bool = True,
    recomputation: Recomputation = NOTHING,
    may_join: bool = True,
    traces: Traces | None = None,
    compiled: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> RankProgram:
    """The training program of a strategy, with micro-batches one after the other.

    An early ``update`` cuts W if ``in_steps``, and gradients larger than ``tile_bytes`` into rows.
    With a ``pipeline``, the strategy applies within each of its devices, and the schedule runs the
    stages that the program is cut into. Unless they ``may_join``, I and W of blocks that recompute
    stay apart, as in any program that updates early. ``traces``: see
    `autopar.lowering.program.lower`; ``compiled``: `autopar.lowering.regions.with_compiled`. Raises
    PlanError and ScheduleError where they do not fit together.
    """
    if pipeline is not None and pipeline[0].num_stages != pipeline[1].shape.num_stages:
        stages, schedule = pipeline
        raise PlanError(
            f"schedule {schedule.name!r} has {schedule.shape.num_stages} stages, but the graph is "
            f"cut into {stages.num_stages}"
        )
    traces = Traces() if traces is None else traces
    if num_microbatches > 1:
        strategy = _over_time(strategy, num_microbatches, traces)
    early = update if update is not None and update.is_early else None
    is_split = pipeline is not None and any(
        entry.action.kind is Kind.W for steps in pipeline[1].devices for entry in steps
    )
    program = lower(
        strategy, device_type=device_type, kept=recomputation.kept,
        may_join=may_join and early is None and not is_split, traces=traces,
    )  # fmt: skip
    if pipeline is not None:
        stages, schedule = pipeline
        program = with_pipeline(program, stage_of_blocks(stages, strategy.graph), schedule)
    if early is not None:
        program = with_early_update(program, early, tile_bytes=tile_bytes, in_steps=in_steps)
    return with_compiled(program, compiled)


def _over_time(strategy: Strategy, num_microbatches: int, traces: Traces) -> Strategy:
    """The strategy with the axis in time; kept in its traces, as what it releases and scatters
    changes no placement."""
    known = traces.over_time
    if known is None or known.analysis is not strategy.analysis:
        known = traces.over_time = Microbatches(strategy.analysis, num_microbatches).cut(strategy)
    asked = strategy.assignment
    return known.keeping(released=asked.released, scattered=asked.scattered)
