"""Joint planning: pipeline devices x micro-batches x mesh x schedule x recomputation.

In: a captured model, a cluster, and what the user fixed. Out: the fastest plan that fits, which
may have no pipeline, and what every other combination would take or why it is none.

- Combinations of devices, micro-batches and mesh (`autopar.combinations`) are searched in the order
  of a guess; those whose lower bound is above the best step so far are left out.
- The sharding of each is searched exactly, then every schedule is simulated over the stages'
  prices. Where the search's own count of memory is above the limit, the stages are recomputed, and
  the sharding is searched again within the limit.
- The options are lowered from the fastest on, and the first whose counted memory fits wins. One
  that does not comes back with less memory to search in, or recomputed.

Nothing is searched after `SEARCH_LIMIT_S`, and nothing lowered `LOWER_LIMIT_S` later (but for the
few most frugal ones, where none has fit); what was not tried is said.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from msgspec import structs

from autopar.baselines import Baselines, price_baselines
from autopar.capture import Captured
from autopar.collector import collector_paused
from autopar.combinations import Combination, Combinations, Fixed
from autopar.constraints import Constraint
from autopar.cost_models import (
    Cluster,
    CommunicationModel,
    ComputeModel,
    OpCall,
    RooflineModel,
)
from autopar.errors import AutoparError, ConstraintError, InputError, PlanError
from autopar.mesh import Mesh
from autopar.microbatches import Microbatches, analysed, with_totals
from autopar.pipelines import (
    PipelineChoice,
    choose_stages,
    pipeline_times,
    recomputed,
    residence_of,
)
from autopar.planner import (
    Lowering,
    Planned,
    Progress,
    candidate_meshes,
    cheapest,
    check_trainable,
    finish,
    listed,
    make_planned,
    memory_budget,
    planned,
    search_priced,
)
from autopar.prediction import search_report, time_parts
from autopar.pricing import Pricing, calls_of
from autopar.problem import WHOLE, Candidate, price_graph
from autopar.report.text import format_bytes, format_seconds
from autopar.schedules import Schedule, build
from autopar.strategy import Analysis

AUTO = "auto"
SEARCH_LIMIT_S = 20.0
LOWER_LIMIT_S = 40.0
MARGIN, BUDGET_LIMIT_S = 0.8, 3.0
"""Searches within the memory leave a margin, as more is counted than they see, and take so long."""
MAX_LATE = 3
"""How many options are lowered after the time is up, where none has fit."""
MAX_TRIALS = 3
"""How often the sharding of one option is searched within less memory."""
CHAINS = ("1f1b", "zb_h1", "chimera")
"""Schedules of one stage a device; gpipe holds more than 1f1b and ends no sooner."""
TWICE = ("interleaved", "zb_v", "v_half", "v_min")
"""Schedules of two stages a device."""
INSTEAD_OF = {"v_half": "zb_v", "v_min": "zb_v"}
"""Schedules that give up time to hold less than another: tried where that one does not fit."""


def fixed_parts(
    num_stages: int | None,
    num_microbatches: int,
    cuts: Sequence[str] | None,
    mesh: Mapping[str, int] | None,
    recompute: bool | None,
) -> Fixed:
    """The arguments of `autopar.plan` beside ``schedule="auto"``; raises InputError."""
    if cuts is not None:
        raise InputError(
            f"cuts={list(cuts)!r} with schedule='auto': the search cuts the stages itself; leave "
            "cuts out, or name the schedule"
        )
    is_whole = isinstance(num_stages, int) and not isinstance(num_stages, bool)
    if num_stages is not None and (not is_whole or num_stages < 1):
        raise InputError(f"num_stages is {num_stages!r}; stages are a whole number, at least 1")
    return Fixed(
        num_stages=num_stages,
        num_microbatches=None if num_microbatches == 1 else num_microbatches,
        mesh=mesh,
        recompute=recompute,
    )


def plan_with(
    captured: Captured,
    cluster: Cluster,
    pipeline: PipelineChoice | Fixed | None,
    *,
    mesh: Mapping[str, int] | None,
    num_microbatches: int,
    **options: Any,
) -> Planned:
    """A plan with the pipeline that was asked for: a fixed one, a searched one, or none."""
    if isinstance(pipeline, Fixed):
        return plan_jointly(captured, cluster, pipeline, **options)
    return make_planned(
        captured,
        cluster,
        mesh=mesh,
        num_microbatches=num_microbatches,
        pipeline=pipeline,
        **options,
    )


def searched_calls(
    captured: Captured,
    cluster: Cluster,
    mesh: Mapping[str, int] | None,
    num_microbatches: int,
    pipeline: PipelineChoice | Fixed | None,
) -> tuple[OpCall, ...]:
    """Every distinct call of an op that a search with these arguments may price."""
    meshes = _meshes_of(cluster, mesh, pipeline)
    counts = [num_microbatches]
    if isinstance(pipeline, PipelineChoice):
        counts = [pipeline.schedule.shape.num_microbatches]
    elif isinstance(pipeline, Fixed) and pipeline.num_microbatches is None:
        batch = Analysis(captured.graph).batch_size
        counts = [num for num in range(1, batch + 1) if batch % num == 0] or [1]
    found: dict[OpCall, None] = {}
    for num in counts:
        try:
            _, analysis, microbatches = analysed(captured, num)
        except PlanError:
            if len(counts) == 1:
                raise
            continue  # the search says why there are none
        found.update(dict.fromkeys(calls_of(analysis, meshes, microbatches)))
    return tuple(found)


def _meshes_of(
    cluster: Cluster, mesh: Mapping[str, int] | None, pipeline: PipelineChoice | Fixed | None
) -> tuple[Mesh, ...]:
    """Every mesh that a plan may be searched on."""
    if isinstance(pipeline, PipelineChoice):
        return candidate_meshes(cluster, mesh, num_pipeline_devices=pipeline.num_devices)
    if pipeline is None:
        return candidate_meshes(cluster, mesh)
    if mesh is not None:
        size = math.prod(mesh.values())
        return candidate_meshes(
            cluster, mesh, num_pipeline_devices=max(cluster.num_devices // size, 1)
        )
    total = cluster.num_devices
    counts = [n for n in range(1, total + 1) if total % n == 0]
    return tuple(
        mesh for n in counts for mesh in candidate_meshes(cluster, None, num_pipeline_devices=n)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to train, priced; without a pipeline it has no ``choice``.

    ``candidate`` has the residence of its schedule. ``trial``: how often it was searched again
    within less memory, because the memory counted was too much.
    """

    combination: Combination
    candidate: Candidate
    choice: PipelineChoice | None
    time_s: float
    trial: int = 0

    @property
    def is_recomputed(self) -> bool:
        return self.choice is not None and bool(self.choice.schedule.shape.recomputed)

    @property
    def estimated_bytes(self) -> float:
        return self.candidate.estimated_bytes

    def __str__(self) -> str:
        if self.choice is None:
            return str(self.combination)
        schedule, shape = self.choice.schedule.name, self.choice.schedule.shape
        return (
            f"{schedule}, {shape.num_stages} stages on {shape.num_devices}, "
            f"{shape.num_microbatches} micro-batches" + ", recomputed" * self.is_recomputed
        )


@collector_paused()
def plan_jointly(
    captured: Captured,
    cluster: Cluster,
    fixed: Fixed,
    *,
    constraints: Sequence[Constraint] | Constraint = (),
    compute: ComputeModel | None = None,
    communication: CommunicationModel | None = None,
    device_type: str = "cpu",
    progress: Progress = lambda _: None,
) -> Planned:
    """The fastest plan of all combinations; raises ConstraintError where none is one."""
    check_trainable(captured)
    setting = _Setting(
        captured=captured,
        cluster=cluster,
        fixed=fixed,
        constraints=listed(constraints),
        compute=compute or RooflineModel(cluster.device),
        communication=communication or CommunicationModel(cluster),
        device_type=device_type,
        progress=progress,
    )
    return _Finalists(_Search(setting).run()).best()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """What a joint search is given."""

    captured: Captured
    cluster: Cluster
    fixed: Fixed
    constraints: list[Constraint]
    compute: ComputeModel
    communication: CommunicationModel
    device_type: str
    progress: Progress

    @property
    def budget_bytes(self) -> int:
        return memory_budget(self.cluster, self.constraints)


class _Search:
    """Every option there is, priced: see the module's docstring."""

    def __init__(self, setting: _Setting) -> None:
        self.setting = setting
        self.fixed = setting.fixed
        self.with_totals = cache(lambda: with_totals(setting.captured))
        self.analysed = cache(self._analysed)
        self.schedule = cache(self._schedule)
        self.space = Combinations(
            Analysis(setting.captured.graph), setting.cluster, setting.fixed, setting.compute,
            setting.communication, setting.budget_bytes,
        )  # fmt: skip
        self.options: list[Option] = []
        self.unrestricted: dict[tuple[int, int], list[Candidate]] = {}
        self.best_s = math.inf
        self.alone_on: set[Mesh] = set()
        self.times_s: dict[str, float] = {}
        self.reasons: dict[str, str] = {}
        self.deadline_s = time.monotonic() + SEARCH_LIMIT_S

    def run(self) -> _Search:
        """Price the combinations in the order of their guesses."""
        self.space.check()
        order = sorted(self.space.all(), key=lambda each: (self.space.guess_s(each), str(each)))
        for combination in order:
            reason = self._reason_against(combination)
            if reason is None:
                self._price(combination)
            else:
                self.reasons.setdefault(str(combination), reason)
        return self

    def fits(self, option: Option, ratio: float = 1.0) -> bool:
        """Whether it seems to fit; ``ratio`` is counted memory to the search's own count."""
        return option.estimated_bytes * ratio <= self.setting.budget_bytes

    def _analysed(self, num: int) -> tuple[Captured, Analysis, Microbatches | None]:
        if num == 1:
            return analysed(self.setting.captured, 1)
        captured, analysis = self.with_totals()
        return captured, analysis, Microbatches(analysis, num)

    def _reason_against(self, combination: Combination) -> str | None:
        bound_s = self.space.bound_s(combination)
        if bound_s >= self.best_s:
            return f"takes {format_seconds(bound_s)} or more, even without any communication"
        if combination.num_devices == 1 and combination.mesh in self.alone_on:
            return "fewer micro-batches fit, and are no slower without a pipeline"
        if time.monotonic() > self.deadline_s:
            return f"not tried: the search had taken {SEARCH_LIMIT_S:.0f} s"
        return None

    def _price(self, combination: Combination) -> None:
        """Search the sharding, then simulate every schedule that there is."""
        setting, num = self.setting, combination.num_microbatches
        setting.progress(f"search {combination}, on mesh {combination.mesh}")
        try:
            _, analysis, microbatches = self.analysed(num)
        except AutoparError as error:
            self.reasons.setdefault(f"{num} micro-batches", str(error))
            return
        pricing = Pricing(
            analysis, combination.mesh, setting.cluster, setting.compute, setting.communication,
            microbatches,
        )  # fmt: skip
        try:
            found = search_priced(price_graph(pricing), setting.constraints, None)
        except AutoparError as error:
            self.reasons.setdefault(str(combination), str(error))
            return
        key = combination.num_devices, num
        self.unrestricted.setdefault(key, []).append(found)
        always = self.fixed.recompute is True
        if always and combination.num_devices == 1:
            self.reasons.setdefault(str(combination), "has no stages to recompute")
            return
        options = self._options(combination, found, recompute=always)
        if options and not any(map(self.fits, options)):
            self._within_memory(combination, min(options, key=lambda option: option.time_s))

    def _within_memory(self, combination: Combination, fastest: Option) -> None:
        """Recompute, and search again within the memory, where that may still be the best."""
        tight = [fastest]
        if fastest.time_s < self.best_s and self.may_recompute(fastest):
            again = self._options(combination, fastest.candidate, recompute=True)
            if again and not any(map(self.fits, again)):
                tight.append(min(again, key=lambda option: option.time_s))
        for option in tight:
            if option.time_s >= self.best_s or time.monotonic() > self.deadline_s:
                continue
            cutoff_s = self.best_s * combination.num_devices
            found = self.restricted(option, MARGIN * self.setting.budget_bytes, cutoff_s)
            if found.solution.assignment:
                self._options(combination, found, recompute=option.is_recomputed)

    def may_recompute(self, option: Option) -> bool:
        return (
            self.fixed.recompute is None
            and option.choice is not None
            and not option.choice.schedule.shape.recomputed
        )

    def restricted(
        self, option: Option, target_bytes: float, cutoff_s: float = math.inf
    ) -> Candidate:
        """The best sharding of an option within so many bytes by the search's own count, if its
        devices work for less than ``cutoff_s`` together; it may have none."""
        return search_priced(
            option.candidate.priced, self.setting.constraints, target_bytes, cutoff_s,
            BUDGET_LIMIT_S,
        )  # fmt: skip

    # --- options ------------------------------------------------------------------------------
    def _options(
        self, combination: Combination, candidate: Candidate, *, recompute: bool
    ) -> list[Option]:
        """Every schedule over one strategy, simulated and noted."""
        if combination.num_devices == 1:
            return [self._note(self._alone(combination, candidate))]
        found: list[Option] = []
        for name, num_stages in self._schedules(combination.num_devices):
            beside = INSTEAD_OF.get(name)
            if any(self.fits(o) for o in found if o.choice and o.choice.schedule.name == beside):
                continue
            option = self.simulated(combination, candidate, name, num_stages, recompute=recompute)
            if option is not None:
                found.append(self._note(option))
        return found

    def _alone(self, combination: Combination, candidate: Candidate) -> Option:
        candidate = replace(candidate, priced=replace(candidate.priced, residence=WHOLE))
        return Option(
            combination=combination, candidate=candidate, choice=None,
            time_s=time_parts(candidate).step_s,
        )  # fmt: skip

    def simulated(
        self,
        combination: Combination,
        candidate: Candidate,
        name: str,
        num_stages: int,
        *,
        recompute: bool,
        trial: int = 0,
    ) -> Option | None:
        """An option, or None with the reason noted."""
        num_devices, num = combination.num_devices, combination.num_microbatches
        try:
            made = self.schedule(name, num_stages, num, num_devices)
            choice = PipelineChoice(schedule=recomputed(made) if recompute else made)
            priced = replace(candidate.priced, residence=residence_of(choice.schedule))
            candidate = replace(candidate, priced=priced)
            stages = choose_stages(candidate, choice, self.setting.communication)
            times = pipeline_times(candidate, stages, choice.schedule, self.setting.communication)
        except AutoparError as error:
            where = f"{name}, {num_stages} stages on {num_devices}, {num} micro-batches"
            self.reasons.setdefault(where, str(error))
            return None
        return Option(
            combination=combination, candidate=candidate, choice=choice,
            time_s=times.step_s, trial=trial,
        )  # fmt: skip

    def _note(self, option: Option) -> Option:
        name = str(option)
        if self.fits(option):
            self.best_s = min(self.best_s, option.time_s)
            self.times_s[name] = min(self.times_s.get(name, math.inf), option.time_s)
            if option.choice is None:
                self.alone_on.add(option.combination.mesh)
        else:
            self.reasons.setdefault(
                name,
                f"would take {format_seconds(option.time_s)}, but needs about "
                f"{format_bytes(option.estimated_bytes)} of "
                f"{format_bytes(self.setting.budget_bytes)}",
            )
        self.options.append(option)
        return option

    def _schedule(self, name: str, num_stages: int, num: int, num_devices: int) -> Schedule:
        options = {"num_devices": num_devices} if name == "interleaved" else {}
        return build(name, num_stages=num_stages, num_microbatches=num, **options)

    def _schedules(self, num_devices: int) -> list[tuple[str, int]]:
        found = [(name, num_devices) for name in CHAINS]
        found += [(name, 2 * num_devices) for name in TWICE]
        wanted = self.fixed.num_stages
        return [
            (name, stages)
            for name, stages in found
            if stages <= self.space.num_blocks and wanted in (None, stages)
        ]


class _Finalists:
    """Lowers the options from the fastest on, until one fits."""

    def __init__(self, search: _Search) -> None:
        self.search = search
        self.setting = search.setting
        self.ratios: dict[tuple[str, bool], float] = {}
        self.numbers = itertools.count()
        self.heap: list[tuple[bool, float, int, Option]] = []
        for option in search.options:
            self._push(option)
        self.deadline_s = time.monotonic() + LOWER_LIMIT_S
        self.num_late = 0

    def best(self) -> Planned:
        """The fastest that fits; raises ConstraintError where none does."""
        while self.heap:
            *_, option = heapq.heappop(self.heap)
            if time.monotonic() > self.deadline_s:
                if self.num_late == MAX_LATE:
                    self._refuse(option, f"not lowered: others took {LOWER_LIMIT_S:.0f} s")
                    continue
                option = self._most_frugal(option)
            known = self.ratios.get(_key(option))
            if known is not None and not self._fits(option) and option.trial < MAX_TRIALS:
                self._again(option, 0.98 * self.setting.budget_bytes / known)
                continue
            found = self._lowered(option)
            if found is not None:
                report = structs.replace(
                    found.plan.search,
                    pipelines=self.search.times_s,
                    not_pipelines={
                        name: why
                        for name, why in self.search.reasons.items()
                        if name not in self.search.times_s
                    },
                )
                return replace(found, plan=structs.replace(found.plan, search=report))
        raise ConstraintError(
            "no combination of stages, micro-batches and schedule was found: "
            + "; ".join(f"{name}: {why}" for name, why in self.search.reasons.items())
        )

    def _most_frugal(self, option: Option) -> Option:
        """Of what is left the option that seems to need least, when time is up without a plan."""
        if not self.num_late:
            options = [option, *(entry[-1] for entry in self.heap)]
            options.sort(key=lambda each: (each.estimated_bytes, each.time_s))
            self.heap = [(False, float(n), n, each) for n, each in enumerate(options)]
            *_, option = heapq.heappop(self.heap)
        self.num_late += 1
        return option

    def _fits(self, option: Option) -> bool:
        return self.search.fits(option, self.ratios.get(_key(option), 1.0))

    def _push(self, option: Option) -> None:
        entry = (not self._fits(option), option.time_s, next(self.numbers), option)
        heapq.heappush(self.heap, entry)

    def _refuse(self, option: Option, reason: str) -> None:
        name = str(option)
        self.search.times_s.pop(name, None)
        self.search.reasons[name] = reason

    def _lowered(self, option: Option) -> Planned | None:
        """The plan of an option, or None with the reason noted and smaller ones to come."""
        self.setting.progress(f"lower {option}, on mesh {option.combination.mesh}")
        try:
            if option.choice is None:
                return self._without_pipeline(option)
            return self._pipeline(option, option.choice)
        except AutoparError as error:
            self._refuse(option, str(error))
            return None

    def _without_pipeline(self, option: Option) -> Planned:
        """As a plan for one micro-batch count alone, with the known strategies beside it."""
        num = option.combination.num_microbatches
        candidates = self.search.unrestricted[1, num]
        captured, *_ = self.search.analysed(num)
        self.setting.progress("price the known strategies")
        baselines = price_baselines([c.priced for c in candidates], cheapest(candidates))
        found = finish(
            captured, self.setting.cluster, candidates, self.setting.constraints,
            self._lowering(None), self.setting.progress, baselines,
        )  # fmt: skip
        self.search.times_s[str(option)] = found.plan.prediction.step_time_s
        return found

    def _lowering(self, choice: PipelineChoice | None) -> Lowering:
        return Lowering(
            device_type=self.setting.device_type,
            pipeline=choice,
            communication=self.setting.communication,
        )

    def _pipeline(self, option: Option, choice: PipelineChoice) -> Planned | None:
        lowering, budget = self._lowering(choice), self.setting.budget_bytes
        program, memory = lowering.lowered(option.candidate)
        if memory.peak_bytes <= budget:
            combination = option.combination
            captured, *_ = self.search.analysed(combination.num_microbatches)
            key = combination.num_devices, combination.num_microbatches
            others = self.search.unrestricted[key]
            report = search_report(
                option.candidate, others, [option.candidate], Baselines(found={}, missing={})
            )
            self.search.times_s[str(option)] = option.time_s
            return planned(captured, option.candidate, program, memory, report, lowering)
        self.ratios[_key(option)] = memory.peak_bytes / option.estimated_bytes
        self._refuse(
            option,
            f"would take {format_seconds(option.time_s)}, but needs "
            f"{format_bytes(memory.peak_bytes)} of {format_bytes(budget)}",
        )
        self._again(option, 0.98 * budget * option.estimated_bytes / memory.peak_bytes)
        return None

    def _again(self, option: Option, target_bytes: float) -> None:
        """The same option with a sharding in less memory, and recomputed."""
        choice = option.choice
        assert choice is not None  # plans without a pipeline see to their memory themselves
        search, name = self.search, choice.schedule.name
        shape = choice.schedule.shape
        if option.trial == 0 and search.may_recompute(option):
            other = search.simulated(
                option.combination, option.candidate, name, shape.num_stages, recompute=True,
                trial=1,
            )  # fmt: skip
            if other is not None:
                self._push(other)
        if option.trial >= MAX_TRIALS:
            return
        found = search.restricted(option, target_bytes)
        least = found.solution.least_feasible_budget
        if not found.solution.assignment and least is not None:
            found = search.restricted(option, least * (1 + 1e-9))  # the most frugal of all
            option = replace(option, trial=MAX_TRIALS - 1)
        if not found.solution.assignment:
            self._refuse_memory(option)
            return
        other = search.simulated(
            option.combination, found, name, shape.num_stages, recompute=option.is_recomputed,
            trial=option.trial + 1,
        )  # fmt: skip
        if other is not None:
            self._push(other)

    def _refuse_memory(self, option: Option) -> None:
        self._refuse(
            option,
            f"no sharding was found that fits {format_bytes(self.setting.budget_bytes)}",
        )


def _key(option: Option) -> tuple[str, bool]:
    """Options whose memory, counted, is off the search's own count in the same way."""
    name = "" if option.choice is None else option.choice.schedule.name
    return name, option.is_recomputed
