"""The best option of joint planning that fits: lowered from the fastest on, by counted memory.

In: the options of `autopar.planning.joint_search`. Out: the plan of the fastest one that fits.
"""

from __future__ import annotations

import heapq
import itertools
import time
from dataclasses import replace

from msgspec import structs

from autopar.base.errors import AutoparError, ConstraintError
from autopar.plan.text import format_bytes, format_seconds
from autopar.planning.baselines import Baselines, price_baselines
from autopar.planning.joint_search import Option, Search
from autopar.planning.pipelines import PipelineChoice
from autopar.planning.planner import (
    Lowering,
    Planned,
    cheapest,
    finish,
    planned,
)
from autopar.planning.prediction import search_report

LOWER_LIMIT_S = 40.0
MAX_LATE = 3
"""How many options are lowered after the time is up, where none has fit."""
MAX_TRIALS = 3
"""How often the sharding of one option is searched within less memory."""


class Finalists:
    """Lowers the options from the fastest on, until one fits."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.setting = search.setting
        self.ratios: dict[tuple[str, bool], float] = {}
        self.numbers = itertools.count()
        self.heap: list[tuple[bool, float, int, Option]] = []
        for option in search.options:
            self._push(option)
        self.deadline_s = time.process_time() + LOWER_LIMIT_S
        self.num_late = 0

    def best(self) -> Planned:
        """The fastest that fits; raises ConstraintError where none does."""
        while self.heap:
            *_, option = heapq.heappop(self.heap)
            if time.process_time() > self.deadline_s:
                if self.num_late == MAX_LATE:
                    self._refuse(
                        option, f"not lowered: others took {LOWER_LIMIT_S:.0f} s of computing"
                    )
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
            if option.choice is None:
                for other in self.search.with_more_microbatches(option):
                    self._push(other)
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
        lowering, limit = self._lowering(choice), self.setting.limit
        program, memory = lowering.lowered(option.candidate)
        needed, available = limit.tightest(memory)
        if needed <= available:
            combination = option.combination
            captured, *_ = self.search.analysed(combination.num_microbatches)
            key = combination.num_devices, combination.num_microbatches
            others = self.search.unrestricted[key]
            report = search_report(
                option.candidate, others, [option.candidate], Baselines(found={}, missing={})
            )
            self.search.times_s[str(option)] = option.time_s
            return planned(captured, option.candidate, program, memory, report, lowering)
        within = option.estimated_bytes * available / needed
        self.ratios[_key(option)] = self.setting.budget_bytes / within
        self._refuse(
            option,
            f"would take {format_seconds(option.time_s)}, but needs "
            f"{format_bytes(needed)} of {format_bytes(available)}",
        )
        self._again(option, 0.98 * within)
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
