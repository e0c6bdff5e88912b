"""The options of joint planning: every combination searched, every schedule simulated.

In: what `autopar.planning.joint` was given. Out: options with their times and the search's own
count of their memory, and the reasons against all others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from autopar.base.errors import AutoparError
from autopar.cost_models import (
    Cluster,
    CommunicationModel,
    ComputeModel,
)
from autopar.cost_models.memory import allocator_of
from autopar.cost_models.update import OptimizerSpec
from autopar.frontend.capture import Captured
from autopar.ir.mesh import Mesh
from autopar.plan.text import format_bytes, format_seconds
from autopar.planning.combinations import Combination, Combinations, Fixed
from autopar.planning.constraints import Constraint
from autopar.planning.pipelines import (
    DEALT,
    ONCE,
    TWICE,
    PipelineChoice,
    choose_stages,
    pipeline_times,
    recomputed,
    residence_of,
)
from autopar.planning.planner import (
    MemoryLimit,
    Progress,
    memory_limit,
    search_priced,
)
from autopar.pricing.candidate import Candidate
from autopar.pricing.problem import WHOLE, price_graph
from autopar.pricing.step_time import time_parts
from autopar.pricing.tables import Pricing
from autopar.schedules import Schedule, build
from autopar.sharding.microbatches import Microbatches, analysed, with_totals
from autopar.sharding.strategy import Analysis

SEARCH_LIMIT_S = 20.0
MARGIN, BUDGET_LIMIT_S = 0.8, 3.0
"""Searches within the memory leave a margin, as more is counted than they see, and take so long."""
SEARCHED = ("1f1b", "zb_h1", "chimera", "interleaved", "zb_v", "v_half", "v_min")
"""Of all pipelines: gpipe holds more than 1f1b and ends no sooner, zb_h2 and dualpipe hold more
than zb_h1 and chimera, fast_forward deals stages out as interleaved does. A user may name them."""
MAX_DEALT = 4
"""Stages a device that are tried of a schedule that deals them out, where it was named."""
INSTEAD_OF = {"v_half": "zb_v", "v_min": "zb_v"}
"""Schedules that give up time to hold less than another: tried where that one does not fit."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a joint search is given."""

    captured: Captured
    cluster: Cluster
    fixed: Fixed
    constraints: list[Constraint]
    compute: ComputeModel
    communication: CommunicationModel
    optimizer: OptimizerSpec
    device_type: str
    progress: Progress

    @property
    def limit(self) -> MemoryLimit:
        return memory_limit(self.cluster, self.constraints)

    @property
    def budget_bytes(self) -> int:
        """For tensors, by which the search goes: what the allocator loses is known before the
        count, what a CPU's holds back only after it."""
        limit, lost = self.limit, allocator_of(self.cluster.device).fragmentation
        return min(limit.tensor_bytes, int(limit.device_bytes / (1 + lost)))


class Search:
    """Every option there is, priced: see the module's docstring."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.fixed = setting.fixed
        self.with_totals = cache(lambda: with_totals(setting.captured))
        self.analysed = cache(self._analysed)
        self.schedule = cache(self._schedule)
        self.space = Combinations(
            Analysis(setting.captured.graph), setting.cluster, setting.fixed, setting.compute,
            setting.communication, setting.optimizer, setting.budget_bytes,
        )  # fmt: skip
        self.options: list[Option] = []
        self.unrestricted: dict[tuple[int, int], list[Candidate]] = {}
        self.best_s = math.inf
        self.alone_on: set[Mesh] = set()
        self.left_out: dict[Mesh, list[Combination]] = {}
        self.times_s: dict[str, float] = {}
        self.reasons: dict[str, str] = {}
        self.deadline_s = time.process_time() + SEARCH_LIMIT_S

    def run(self) -> Search:
        """Price the combinations in the order of their guesses."""
        self.space.check()
        self.reasons |= self.space.reasons()
        order = sorted(self.space.all(), key=lambda each: (self.space.guess_s(each), str(each)))
        for combination in order:
            self._consider(combination)
        return self

    def with_more_microbatches(self, option: Option) -> list[Option]:
        """What was left out because ``option``, without a pipeline, seemed to fit, and does not."""
        mesh, num_known = option.combination.mesh, len(self.options)
        self.alone_on.discard(mesh)
        for combination in self.left_out.pop(mesh, []):
            self.reasons.pop(str(combination), None)
            self._consider(combination)
        return self.options[num_known:]

    def _consider(self, combination: Combination) -> None:
        """Price a combination, or note why not."""
        mesh = combination.mesh
        reason = self._reason_against(combination)
        if reason is None and combination.num_devices == 1 and mesh in self.alone_on:
            reason = "fewer micro-batches fit, and are no slower without a pipeline"
            self.left_out.setdefault(mesh, []).append(combination)
        if reason is None:
            self._price(combination)
        else:
            self.reasons.setdefault(str(combination), reason)

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
        if time.process_time() > self.deadline_s:
            return f"not tried: the search had taken {SEARCH_LIMIT_S:.0f} s of computing"
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
            microbatches, optimizer=setting.optimizer,
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
            if option.time_s >= self.best_s or time.process_time() > self.deadline_s:
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
        schedules = self._schedules(combination.num_devices)
        if not schedules:
            self.reasons.setdefault(str(combination), self._without_schedule(combination))
        for name, num_stages in schedules:
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
            residence = residence_of(choice.schedule, candidate.priced.pricing.analysis)
            priced = replace(candidate.priced, residence=residence)
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
        options = {"num_devices": num_devices} if name in DEALT else {}
        return build(name, num_stages=num_stages, num_microbatches=num, **options)

    def _schedules(self, num_devices: int) -> list[tuple[str, int]]:
        """Names and numbers of stages that devices, blocks and what is fixed leave."""
        wanted, named = self.fixed.num_stages, self.fixed.schedule
        return [
            (name, count * num_devices)
            for name in ((named,) if named else SEARCHED)
            for count in self._stages_per_device(name, num_devices)
            if count * num_devices <= self.space.num_blocks
            and wanted in (None, count * num_devices)
        ]

    def _stages_per_device(self, name: str, num_devices: int) -> Sequence[int]:
        if name in ONCE:
            return (1,)
        if name in TWICE:
            return (2,)
        if self.fixed.num_stages is not None:
            return (max(2, self.fixed.num_stages // num_devices),)
        return range(2, MAX_DEALT + 1) if self.fixed.schedule else (2,)

    def _without_schedule(self, combination: Combination) -> str:
        fixed, blocks = self.fixed, self.space.num_blocks
        wanted = "" if fixed.num_stages is None else f" of {fixed.num_stages} stages"
        return (
            f"{fixed.schedule or 'no schedule'}{wanted} does not fit {combination.num_devices} "
            f"devices and {blocks} blocks: {', '.join(ONCE)} have one stage a device, "
            f"{', '.join(TWICE)} two, {', '.join(DEALT)} two or more; a stage has a block or more"
        )
