"""The planner: finds the fastest plan in a search space that fits the devices.

In: a captured model, a cluster, and a `Space`. Out: a plan with its strategy and program. Options
are searched and simulated (`autopar.planning.schedule_search`), then lowered, fastest first, until
one fits (`autopar.planning.fit`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.base.errors import ConstraintError, InputError, OptimizerError
from autopar.base.gc_pause import collector_paused
from autopar.cost_models import (
    Cluster,
    CommunicationModel,
    ComputeModel,
    RooflineModel,
)
from autopar.cost_models.update import OptimizerSpec, adamw
from autopar.frontend.capture import Captured
from autopar.ir.update import Update
from autopar.lowering.types import RankProgram
from autopar.passes.prepare import Prepared, prepare
from autopar.planning.constraints import Constraint
from autopar.planning.fit import Fit
from autopar.planning.option import Fitted
from autopar.planning.prediction import predict, redundant_ops, search_report
from autopar.planning.schedule_search import Search
from autopar.planning.setting import Progress, Setting, listed
from autopar.planning.space import Space
from autopar.plans.document import Plan, make_plan
from autopar.plans.modules import module_plans, parameter_uses
from autopar.plans.schedule_plan import SchedulePlan
from autopar.pricing.candidate import Candidate
from autopar.sharding.strategy import Strategy

DEFAULT_SPACE = Space()


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan with its strategy and program."""

    plan: Plan
    strategy: Strategy
    program: RankProgram
    best: Candidate


@collector_paused()
def make_planned(
    captured: Captured | Prepared,
    cluster: Cluster,
    space: Space = DEFAULT_SPACE,
    *,
    constraints: Sequence[Constraint] | Constraint = (),
    compute: ComputeModel | None = None,
    communication: CommunicationModel | None = None,
    optimizer: OptimizerSpec | None = None,
    device_type: str = "cpu",
    update: Update | None = None,
    may_update_early: bool = True,
    may_move: bool = True,
    progress: Progress = lambda _: None,
) -> Planned:
    """Search a space, and lower the fastest plan that fits.

    By default ops are priced by roofline, collectives by formula, and the optimizer is AdamW.
    Parameters are updated early if ``update`` says so, or if it is None, the optimizer
    ``may_update_early``, and nothing fits otherwise. On accelerators tensors move to the host if
    the space leaves it open, the runtime ``may_move`` them, and nothing fits otherwise. Raises
    ConstraintError if the constraints or the memory leave no strategy, OptimizerError for an early
    update that the optimizer excludes.
    """
    setting = make_setting(
        captured, cluster, space, constraints=constraints, compute=compute,
        communication=communication, optimizer=optimizer, device_type=device_type,
        update=update, may_update_early=may_update_early, may_move=may_move, progress=progress,
    )  # fmt: skip
    check_trainable(setting.prepared.captured)
    if setting.update is not None and setting.update.is_early and setting.optimizer.is_joint:
        raise OptimizerError(
            "update='early' updates one parameter after the other, and this optimizer is not known "
            "to update each element by itself; use one such as torch.optim.AdamW without hooks, or "
            "update='at_end'"
        )
    setting.check_capacity()
    search = Search(setting).run()
    return _planned(search, _fitted(search))


def make_setting(
    captured: Captured | Prepared,
    cluster: Cluster,
    space: Space = DEFAULT_SPACE,
    *,
    constraints: Sequence[Constraint] | Constraint = (),
    compute: ComputeModel | None = None,
    communication: CommunicationModel | None = None,
    optimizer: OptimizerSpec | None = None,
    device_type: str = "cpu",
    update: Update | None = None,
    may_update_early: bool = True,
    may_move: bool = True,
    progress: Progress = lambda _: None,
) -> Setting:
    """The setting of a search, with the defaults of `make_planned`."""
    return Setting(
        prepared=prepare(captured),
        cluster=cluster,
        space=space,
        constraints=listed(constraints),
        compute=compute or RooflineModel(cluster.device),
        communication=communication or CommunicationModel(cluster),
        optimizer=optimizer or adamw(cluster.device),
        device_type=device_type,
        update=update,
        may_update_early=may_update_early,
        may_move=may_move,
        progress=progress,
    )


def check_trainable(captured: Captured) -> None:
    """Raise InputError for a graph without a loss."""
    if captured.graph.loss is None:
        raise InputError(
            "the model returns no scalar loss, so there is nothing to train on. Pass "
            "loss_fn=..., for example loss_fn=torch.nn.functional.cross_entropy with "
            "example_inputs=(inputs, targets), or labels that make the model return .loss"
        )
    if all(captured.graph.loss not in op.outputs for op in captured.graph.ops):
        raise InputError(
            "the loss is itself an input, a parameter or a constant, so there is nothing to plan. "
            "Return a loss that is computed from the inputs"
        )


def _fitted(search: Search) -> Fitted:
    """The fastest option that fits; where none does, tensors move to the host if they may."""
    setting, found, failed = search.setting, list[Fitted](), None
    try:
        found.append(Fit(search, moves=bool(setting.space.offload)).best())
    except ConstraintError as error:
        failed = error
    found += _without_pipeline(search, found)
    if found:
        return min(found, key=lambda fitted: fitted.option.time_s)
    if failed is not None and not setting.moves_at_last:
        raise failed
    setting.progress("nothing fits: search what moves to the host")
    return Fit(search, moves=True).best()


def _without_pipeline(search: Search, found: Sequence[Fitted]) -> list[Fitted]:
    """The fastest plan without a pipeline that fits; none unless an open space has options without
    one that are faster by estimate than what it ``found``.

    Such options did not fit as they were. The search of an open space shrinks each a few times
    only, that of a single point goes on until a sharding fits.
    """
    setting, space = search.setting, search.space
    time_s = min((fitted.option.time_s for fitted in found), default=math.inf)
    faster = [each for each in search.options if each.choice is None and each.time_s < time_s]
    if not space.is_open or not faster:
        return []
    num = min(faster, key=lambda option: option.time_s).combination.num_microbatches
    setting.progress(f"search without a pipeline, {num} micro-batches")
    point = replace(space, is_open=False, num_microbatches=num)
    try:
        alone = Search(replace(setting, space=point)).run()
        return [Fit(alone, moves=bool(space.offload)).best()]
    except ConstraintError:
        return []


def _planned(search: Search, fitted: Fitted) -> Planned:
    """The plan of an option that fits, with the alternatives considered."""
    option, setting = fitted.option, search.setting
    best, staged = option.best, option.staged
    key = option.combination.num_devices, option.combination.num_microbatches
    moved = fitted.movement
    prediction = predict(
        best, fitted.memory, None if staged is None else staged.times,
        stall_s=0.0 if moved is None else moved.stall_s,
    )  # fmt: skip
    times_s, reasons = {}, {}
    if search.space.is_open:
        times_s = search.times_s | {str(option): prediction.step_time_s}
        reasons = {name: why for name, why in search.reasons.items() if name not in times_s}
    schedule = SchedulePlan(num_microbatches=best.num_microbatches)
    if staged is not None:
        schedule = SchedulePlan.of(staged.stages, staged.schedule)
    strategy = best.strategy()
    strategy.verify()
    plan = make_plan(
        strategy,
        setting.prepared.cut(best.num_microbatches).captured,
        setting.cluster,
        prediction,
        search_report(
            best,
            search.unrestricted[key],
            option.searched,
            fitted.baselines,
            estimated_bytes=option.estimated_bytes,
            pipelines=times_s,
            not_pipelines=reasons,
        ),
        redundant_ops(best),
        schedule,
        fitted.update,
        best.recomputation,
        None if moved is None else moved.plan(),
        uses=parameter_uses(best, strategy),
        modules=module_plans(best, strategy),
    )
    return Planned(plan=plan, strategy=strategy, program=fitted.program, best=best)
