"""The planner: finds the fastest plan in a search space that fits the devices.

In: a captured model, a cluster, and a `Space`. Out: a plan with its strategy and program. Options
are searched and simulated (`autopar.planning.schedule_search`), then lowered, fastest first, until
one fits (`autopar.planning.fit`). Unless the user fixes them, the whole batch at once comes first.
The search is made again over micro-batches where it does not fit, or only at a loss of time, and on
several nodes over pipelines too where communication is exposed; over both in any case where
``schedule="auto"`` asks for them. A whole batch that is not estimated to fit as it is has a third
of the time limit, and more only where nothing else fits. With a plan, another is begun only if it
can end in time, as far as the longest so far tells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.base.accelerators import cpu_by_default
from autopar.base.errors import AutoparError, ConstraintError, InputError, OptimizerError
from autopar.base.gc_pause import collector_paused
from autopar.cost_models import (
    Cluster,
    CommunicationModel,
    ComputeModel,
    RooflineModel,
)
from autopar.cost_models.update import OptimizerSpec, UpdateScope, adamw
from autopar.frontend.capture import Captured
from autopar.ir.update import Update
from autopar.lowering.program import Traces
from autopar.lowering.types import RankProgram
from autopar.passes.prepare import Prepared, prepare
from autopar.planning.baselines import Baselines
from autopar.planning.constraints import Constraint, narrow
from autopar.planning.deadline import Deadline, deadline_in
from autopar.planning.fit import Fit
from autopar.planning.option import Fitted, Option
from autopar.planning.peers import price_peers
from autopar.planning.prediction import predict, redundant_ops, search_report
from autopar.planning.schedule_search import Search
from autopar.planning.search_log import SearchLog
from autopar.planning.setting import Measure, Progress, Setting, listed
from autopar.planning.space import Space
from autopar.plans.binding import make_plan
from autopar.plans.document import Plan
from autopar.plans.memory_curve import pipeline_curve, step_curve
from autopar.plans.modules import module_plans, parameter_uses
from autopar.plans.parts import ModulePlan
from autopar.plans.predicted import MemoryCurve
from autopar.plans.runner_up import runner_ups
from autopar.plans.schedule_plan import SchedulePlan
from autopar.plans.stage_costs import StageCosts
from autopar.pricing.candidate import Candidate
from autopar.pricing.step_costs import StepCosts
from autopar.pricing.step_time import step_costs, time_parts
from autopar.pricing.step_timeline import step_spans
from autopar.sharding.strategy import Strategy

DEFAULT_SPACE = Space()
MIN_LOSS, MIN_EXPOSED = 0.01, 0.1
"""Micro-batches are searched if the memory costs more than `MIN_LOSS` of a step, and on several
nodes pipelines too if it does, or if `MIN_EXPOSED` of a step is exposed communication; on unequal
islands always."""
TRY_SHARE = 2.0
"""A better plan is begun if so many times as long is left as the longest try of an option took: it
may take as long, and is compared with the known strategies."""
LEAST_AFTER_CAPTURE = 0.5
"""The least share of the time limit that is left after the capture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan with its strategy, its program and the traces of its blocks, to lower it again."""

    plan: Plan
    strategy: Strategy
    program: RankProgram
    traces: Traces
    best: Candidate


@collector_paused()
@cpu_by_default()
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
    measure: Measure | None = None,
    time_limit_s: float | None = None,
    begun_s: float | None = None,
    progress: Progress = lambda _: None,
) -> Planned:
    """Search a space, and lower the fastest plan that fits.

    By default ops are priced by roofline, collectives by formula, and the optimizer is AdamW.
    ``measure`` prices ops in place of ``compute``: it is called with the space, and with a larger
    one where micro-batches or pipelines are searched too: where the space leaves them open, and
    `MIN_LOSS` or `MIN_EXPOSED` is exceeded.
    Parameters are updated early if ``update`` says so, or if it is None, the optimizer
    ``may_update_early``, and nothing fits otherwise. On accelerators tensors move to the host if
    the space leaves it open, the runtime ``may_move`` them, and nothing fits otherwise. The time
    limit counts from ``begun_s`` on, a moment of the process's clock. Raises ConstraintError if the
    constraints or the memory leave no strategy, OptimizerError for an early update or a pipeline
    that the optimizer excludes.
    """
    setting = make_setting(
        captured, cluster, space.at_first(cluster), constraints=constraints, compute=compute,
        communication=communication, optimizer=optimizer, device_type=device_type,
        update=update, may_update_early=may_update_early, may_move=may_move, measure=measure,
        time_limit_s=time_limit_s, begun_s=begun_s, progress=progress,
    )  # fmt: skip
    check_trainable(setting.prepared.captured)
    if setting.update is not None and setting.update.is_early and setting.optimizer.is_joint:
        raise OptimizerError(
            "update='early' updates one parameter after the other, and this optimizer is not known "
            "to update each element by itself; use one such as torch.optim.AdamW without hooks, or "
            "update='at_end'"
        )
    if space.pipeline is not None and setting.optimizer.scope is UpdateScope.MODEL:
        raise OptimizerError(
            "a pipeline has parameters on different devices, and this optimizer is not known to "
            "update each parameter by itself; use one such as torch.optim.AdamW without hooks, or "
            "num_stages=1"
        )
    setting.check_capacity()
    return _planned(*_fitted(setting, space))


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
    measure: Measure | None = None,
    time_limit_s: float | None = None,
    begun_s: float | None = None,
    progress: Progress = lambda _: None,
) -> Setting:
    """The setting of a search, with the defaults of `make_planned`."""
    setting = Setting(
        prepared=prepare(captured),
        cluster=cluster,
        space=space,
        constraints=listed(constraints),
        compute=compute or (measure(space) if measure else RooflineModel(cluster.device)),
        communication=communication or CommunicationModel(cluster),
        optimizer=optimizer or adamw(cluster.device),
        device_type=device_type,
        update=update,
        may_update_early=may_update_early,
        may_move=may_move,
        measure=measure,
        time_limit_s=time_limit_s,
        progress=SearchLog(progress),
    )
    if begun_s is None:
        return setting
    return replace(setting, begun_s=begun_s).with_what_is_left(LEAST_AFTER_CAPTURE)


def check_trainable(captured: Captured) -> None:
    """Raise InputError for an empty batch, and for a graph without a loss."""
    values = [captured.graph.values[index] for index in captured.graph.inputs]
    shaped = [value for value in values if value.shape]
    if shaped and all(0 in value.shape for value in shaped):
        raise InputError(
            f"input {shaped[0].name!r} has shape {shaped[0].shape}: a step on an empty batch has "
            "nothing to plan; pass a batch of at least one row"
        )
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


def _fitted(setting: Setting, asked: Space) -> tuple[Search, Fitted]:
    """The fastest option that fits in the space ``asked`` for, behind its last search.

    Where none does, tensors move to the host if they may.
    """
    search = _begun(setting, asked)
    setting, space = search.setting, search.space
    fits: list[Fit] = []
    found: list[tuple[Search, Fitted]] = []

    def attempt(
        search: Search,
        *,
        moves: bool,
        deadline: Deadline | None = None,
        options: Sequence[Option] | None = None,
    ) -> None:
        fits.append(
            Fit(
                search, moves=moves, cutoff_s=_fastest_s(found), deadline=deadline, options=options
            )
        )  # fmt: skip
        found.extend(_tried(fits[-1]))

    def reserve_s() -> float:
        """Seconds before the end of the time in which no better plan is begun, so that it ends in
        time."""
        return TRY_SHARE * max((fit.longest_try_s for fit in fits), default=0.0)

    def time_left_s() -> float:
        return setting.end.left_s - reserve_s()

    def in_time() -> Deadline | None:
        """The deadline for beating what is found, if anything is."""
        return deadline_in(time_left_s()) if found else None

    is_last = space.leaves_microbatches and not search.pricing.may_fit(search.options[0])
    is_tight = space.leaves_microbatches and not search.pricing.fits(search.options[0])
    if not is_last:
        attempt(search, moves=bool(space.offload), deadline=search.deadline if is_tight else None)
    was_cut = space.leaves_microbatches and search.deadline.is_over
    opened = search if space.is_open else _opened(search, found, asked, reserve_s())
    if opened is not None and opened is not search:
        attempt(opened, moves=bool(space.offload), deadline=in_time())
    if opened is not None and (space.is_open or opened.space.has_pipelines):
        found += _without_pipeline(opened, found, time_left_s(), skips_whole=not space.is_open)
    if is_last and search.options[0].time_s < _fastest_s(found):
        attempt(search, moves=bool(space.offload), deadline=in_time())
    while found and opened is not None and opened.promising(_fastest_s(found)):
        if time_left_s() < 2 * setting.combination_limit_s:
            break
        setting.progress("go on with what there was no time for")
        options = opened.resume(time_left_s() / 3, _fastest_s(found))
        if options:
            attempt(opened, moves=bool(space.offload), deadline=in_time(), options=options)
    if not found and was_cut:
        search = Search(setting, is_patient=True).run()
        attempt(search, moves=bool(space.offload))
    if not found and setting.moves_at_last:
        setting.progress("nothing fits: search what moves to the host")
        attempt(search, moves=True)
        if opened is not None and opened is not search and setting.has_time_left:
            attempt(opened, moves=True)
    if not found:
        raise _failure(fits)
    best, fitted = min(found, key=lambda each: each[1].option.time_s)
    return opened or best, fitted


def _begun(setting: Setting, asked: Space) -> Search:
    """The first search: that of the space ``asked`` for if the whole batch at once has no plan."""
    try:
        return Search(setting).run()
    except ConstraintError:
        if setting.space == asked:
            raise
    return Search(setting.opened(asked, has_plan=False)).run()


def _fastest_s(found: Sequence[tuple[Search, Fitted]]) -> float:
    return min((fitted.option.time_s for _, fitted in found), default=math.inf)


def _tried(fit: Fit) -> list[tuple[Search, Fitted]]:
    try:
        found = fit.best()
    except ConstraintError:
        return []
    fit.setting.progress.fitted(found.option.time_s)
    return [(fit.search, found)]


def _failure(fits: Sequence[Fit]) -> ConstraintError:
    """The error where nothing fits, with the smallest program of all that were lowered."""
    counted = [each for fit in fits if (each := fit.lowering.smallest) is not None]
    asked = min(fits, key=lambda fit: fit.is_open)
    if asked.is_open or not counted:
        return asked.failure()
    moved = [fit.least_moved_bytes for fit in fits if fit.least_moved_bytes is not None]
    smallest = min(counted, key=lambda memory: memory.device_bytes)
    return asked.setting.limit.too_small(smallest, min(moved, default=None))


def _without_pipeline(
    search: Search,
    found: Sequence[tuple[Search, Fitted]],
    time_left_s: float,
    *,
    skips_whole: bool,
) -> list[tuple[Search, Fitted]]:
    """The fastest plan without a pipeline that fits; none unless an open space has options without
    one that are faster by estimate than what it ``found``.

    Such options did not fit as they were. The search of an open space shrinks each a few times
    only, that of a single point goes on until a sharding fits. ``skips_whole``: the whole batch at
    once has such a search of its own. With a plan, a better one is begun in ``time_left_s``.
    """
    setting, space = search.setting, search.space
    time_s = _fastest_s(found)
    if found and time_left_s <= 0:
        return []
    faster = [
        each.combination
        for each in sorted(search.options, key=lambda option: option.time_s)
        if each.choice is None and each.time_s < time_s
        if not (skips_whole and each.combination.num_microbatches == 1)
    ]
    if not faster:
        return []
    num = faster[0].num_microbatches
    setting.progress(f"search without a pipeline, {num} micro-batches")
    point = replace(setting, space=replace(space, is_open=False, num_microbatches=num))
    try:
        alone = Search(point.with_time(time_left_s) if found else point, time_s).run()
        deadline = alone.setting.end if found else None
        fitted = Fit(alone, moves=bool(space.offload), cutoff_s=time_s, deadline=deadline).best()
    except AutoparError:
        return []
    search.unrestricted.setdefault((1, num), alone.unrestricted[1, num])
    return [(search, fitted)]


def _opened(
    search: Search, found: Sequence[tuple[Search, Fitted]], asked: Space, reserve_s: float
) -> Search | None:
    """A search over micro-batches, and perhaps pipelines, if they were ``asked`` for, or what was
    ``found`` for the whole batch at once leaves something to win by them; see `MIN_LOSS`. None too
    if the user fixed them."""
    setting, space = search.setting, search.space
    if not space.leaves_microbatches:
        return None
    plain = search.options[0]
    best = min((each.option for _, each in found), key=lambda each: each.time_s, default=None)
    costs_memory = best is None or best.time_s > (1 + MIN_LOSS) * plain.time_s
    parts = time_parts((best or plain).best)
    is_exposed = parts.communication_s >= MIN_EXPOSED * parts.step_s
    cluster = setting.cluster
    pipes = bool(cluster.islands) or (cluster.num_nodes > 1 and (costs_memory or is_exposed))
    opened = asked
    if not asked.is_open:
        opened = replace(space, is_open=True, num_stages=None if pipes else 1)
        counts = opened.microbatch_counts(setting.prepared.analysis.batch_size)
        if len(counts) == 1 or not (costs_memory or pipes):
            return None
    setting.progress(f"search micro-batches{' and pipelines' * pipes}")
    try:
        several = Search(
            setting.opened(opened, has_plan=bool(found), reserve_s=reserve_s), _fastest_s(found),
            search.unrestricted[1, 1],
        ).run()  # fmt: skip
    except ConstraintError:
        return None
    several.unrestricted.setdefault((1, 1), search.unrestricted[1, 1])  # it need not try that again
    return several


def _baselines(search: Search, fitted: Fitted) -> Baselines:
    """The strategies that a plan is compared with; for a pipeline other systems' schedules."""
    option = fitted.option
    if option.combination.num_devices == 1:
        return fitted.baselines
    return price_peers(option, search.setting.communication, search.pricing.crossing(option.best))


def _planned(search: Search, fitted: Fitted) -> Planned:
    """The plan of an option that fits, with the alternatives considered."""
    option, setting = fitted.option, search.setting
    best, staged = option.best, option.staged
    key = option.combination.num_devices, option.combination.num_microbatches
    block_cuts = option.combination.block_cuts
    moved = fitted.movement
    stall_s = 0.0 if moved is None else moved.stall_s
    prediction = predict(best, fitted.memory, staged, stall_s=stall_s)
    times_s, reasons = {}, {}
    if search.space.is_open:
        times_s = search.times_s | {str(option): prediction.step_time_s}
        reasons = {name: why for name, why in search.reasons.items() if name not in times_s}
    schedule, costs = SchedulePlan(num_microbatches=best.num_microbatches), None
    if staged is not None:
        times = staged.times
        costs = StageCosts.of(staged.schedule, times.durations, times.links, times.after_s)
        changed = option.trial > 0 or option.recomputes  # since its order was searched
        gap = None if option.choice is None or changed else option.choice.gap
        schedule = SchedulePlan.of(staged.stages, staged.schedule, gap)
    strategy = best.strategy()
    strategy.verify()
    modules = module_plans(best, strategy)
    parts = step_costs(best).rounded() if staged is None else None
    plan = make_plan(
        strategy,
        setting.prepared.cut(best.num_microbatches, block_cuts).captured,
        block_cuts,
        setting.cluster,
        prediction,
        search_report(
            best,
            search.unrestricted[key],
            option.searched,
            _baselines(search, fitted),
            estimated_bytes=option.estimated_bytes,
            is_pipeline=staged is not None,
            pipelines=times_s,
            not_pipelines=reasons,
        ),
        redundant_ops(best),
        schedule,
        fitted.update,
        best.recomputation,
        None if moved is None else moved.plan(),
        uses=parameter_uses(best, strategy),
        modules=modules,
        runner_ups=runner_ups(best, narrow(best.priced, setting.constraints)),
        curve=_memory_curve(fitted, modules, parts, stall_s, prediction.update_s),
        stage_costs=costs,
        step_costs=parts,
    )  # fmt: skip
    plan = plan.with_trace(setting.progress.trace(prediction.step_time_s))
    return Planned(
        plan=plan, strategy=strategy, program=fitted.program, traces=fitted.traces, best=best
    )


def _memory_curve(
    fitted: Fitted,
    modules: tuple[ModulePlan, ...],
    costs: StepCosts | None,
    stall_s: float,
    update_s: float,
) -> MemoryCurve | None:
    """The memory over a step: of a pipeline in the time of its computation, else in the time of its
    timeline, which its ``costs`` give."""
    best, memory = fitted.option.best, fitted.memory
    num, pricing = best.num_microbatches, best.priced.pricing
    if costs is None:
        return pipeline_curve(
            memory, modules, best.recomputation, num_microbatches=num, update_s=update_s
        )
    spans = step_spans(
        costs,
        num_microbatches=num,
        slowdown=pricing.cluster.overlap_slowdown,
        stall_s=stall_s / pricing.num_passes,
    )
    return step_curve(memory, spans, num_microbatches=num, num_passes=pricing.num_passes)
