"""The one place where options are lowered, their memory is counted, and the budget is corrected.

In: the options of `autopar.planning.schedule_search`. Out: the plan of the fastest one that fits.

The search counts memory node by node (an estimate), a lowered program by liveness (the truth).
Options are lowered from the fastest on. One that does not fit comes back with a sharding searched
within less memory, by the ratio of both counts, and recomputed where that is open; what the ratio
has taught about a schedule holds for its other options too. Known strategies stand in where they
are faster than what was found, or where nothing was.

In an open space nothing is lowered after `LOWER_LIMIT_S` (of processor time) but for the few most
frugal options, where none has fit; what was not tried is said.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from dataclasses import dataclass, replace

from autopar.base.errors import AutoparError, ConstraintError
from autopar.base.units import format_bytes, format_seconds
from autopar.ir.graph import ValueKind
from autopar.ir.placement import local_shape
from autopar.lowering.training import lower_training
from autopar.lowering.types import RankProgram
from autopar.memory.program import ProgramMemory, program_memory
from autopar.planning.baselines import Baselines, price_baselines
from autopar.planning.schedule_search import Option, Search
from autopar.planning.sharding_search import cheapest, least_budget, rank, ranked
from autopar.planning.space import PipelineChoice, recomputed
from autopar.pricing.candidate import Candidate
from autopar.pricing.problem import NodeKind
from autopar.pricing.step_time import time_parts

LOWER_LIMIT_S = 40.0
MAX_LATE = 3
"""How many options are lowered after the time is up, where none has fit."""
POINT_TRIALS, OPEN_TRIALS = 6, 3
"""How often one option is searched again within less memory."""
CAUTION = 0.98
"""Share of the corrected budget that is searched in: the ratio of the counts is not constant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """An option whose counted memory fits, lowered."""

    option: Option
    program: RankProgram
    memory: ProgramMemory
    baselines: Baselines


class Fit:
    """Lowers the options of a search until one fits."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.setting = search.setting
        self.is_open = search.space.is_open
        self.max_trials = OPEN_TRIALS if self.is_open else POINT_TRIALS
        self.ratios: dict[tuple[str, bool], float] = {}
        self.numbers = itertools.count()
        self.heap: list[tuple[bool, tuple[object, ...], int, Option]] = []
        self.known: dict[int, Baselines] = {}
        self.tried: set[int] = set()
        self.smallest: ProgramMemory | None = None
        for option in search.options:
            self._push(option)
        self.deadline_s = time.process_time() + (LOWER_LIMIT_S if self.is_open else math.inf)
        self.num_late = 0

    def best(self) -> Fitted:
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
            if known is not None and not self._fits(option) and option.trial < self.max_trials:
                fitted = self._corrected(option, CAUTION * self.setting.budget_bytes / known)
            else:
                fitted = self._lowered(option)
            if fitted is not None:
                return fitted
        if not self.is_open and self.smallest is not None:
            raise self.setting.limit.too_small(self.smallest)
        raise ConstraintError(
            "no combination of stages, micro-batches and schedule was found: "
            + "; ".join(f"{name}: {why}" for name, why in self.search.reasons.items())
        )

    def _most_frugal(self, option: Option) -> Option:
        """The option left that seems to need least, when time is up without a plan."""
        if not self.num_late:
            options = [option, *(entry[-1] for entry in self.heap)]
            options.sort(key=lambda each: (each.estimated_bytes, each.time_s))
            self.heap = [(False, (n,), n, each) for n, each in enumerate(options)]
            *_, option = heapq.heappop(self.heap)
        self.num_late += 1
        return option

    def _fits(self, option: Option) -> bool:
        return self.search.fits(option, self.ratios.get(_key(option), 1.0))

    def _push(self, option: Option) -> None:
        order = ranked(option.time_s, option.best.mesh)
        if option.choice is not None:
            order = (option.time_s, 0, ())
        heapq.heappush(self.heap, (not self._fits(option), order, next(self.numbers), option))

    def _refuse(self, option: Option, reason: str) -> None:
        name = str(option)
        self.search.times_s.pop(name, None)
        self.search.reasons[name] = reason

    # --- lowering -------------------------------------------------------------------------------
    def _lowered(self, option: Option) -> Fitted | None:
        """An option lowered, if it fits; otherwise smaller ones may come back."""
        if not self.is_open:
            return self._counted(option)
        try:
            return self._counted(option)
        except AutoparError as error:
            self._refuse(option, str(error))
            self._leave(option)
            return None

    def _counted(self, option: Option) -> Fitted | None:
        baselines = self._baselines(option)
        if option.trial == 0:
            option = self._or_rival(option, baselines)
        self.setting.progress(f"lower {option}, on mesh {option.best.mesh}")
        program, memory = self._lower(option)
        limit = self.setting.limit
        needed, available = limit.tightest(memory)
        if needed <= available:
            fitted = Fitted(option=option, program=program, memory=memory, baselines=baselines)
            return fitted if option.trial == 0 else self._rival(option, fitted) or fitted
        within = option.estimated_bytes * available / needed
        self.ratios[_key(option)] = self.setting.budget_bytes / within
        self._refuse(
            option,
            f"would take {format_seconds(option.time_s)}, but needs {format_bytes(needed)} of "
            f"{format_bytes(available)}",
        )
        return self._corrected(option, CAUTION * within)

    def _lower(self, option: Option) -> tuple[RankProgram, ProgramMemory]:
        staged, best = option.staged, option.best
        program = lower_training(
            best.strategy(),
            best.num_microbatches,
            pipeline=None if staged is None else (staged.stages, staged.schedule),
            device_type=self.setting.device_type,
        )
        memory = program_memory(
            program, self.setting.cluster.device, optimizer=self.setting.optimizer
        )
        if self.smallest is None or memory.device_bytes < self.smallest.device_bytes:
            self.smallest = memory
        return program, memory

    # --- the budget -----------------------------------------------------------------------------
    def _corrected(self, option: Option, target_bytes: float) -> Fitted | None:
        """Let the option come back with a sharding in less memory, and recomputed.

        Where there is none a known strategy may still fit, which is then returned.
        """
        choice, search = option.choice, self.search
        if choice is not None and option.trial == 0 and search.may_recompute(option):
            again = replace(choice, schedule=recomputed(choice.schedule))
            self._push_staged(option, again, option.searched, trial=1)
        if option.trial >= self.max_trials:
            return self._rival(option, None)
        trial = option.trial + 1
        self.setting.progress(f"search within {format_bytes(target_bytes)}")
        found = search.within(option, target_bytes)
        if not any(each.is_found for each in found):
            least_bytes = least_budget(found)
            if math.isfinite(least_bytes):  # the most frugal of all
                found, trial = search.within(option, least_bytes), self.max_trials
        if not any(each.is_found for each in found):
            self._refuse(
                option,
                f"no sharding was found that fits {format_bytes(self.setting.budget_bytes)}",
            )
            return self._rival(option, None)
        self._push_staged(option, choice, found, trial)
        return None

    def _push_staged(
        self,
        option: Option,
        choice: PipelineChoice | None,
        searched: tuple[Candidate, ...],
        trial: int,
    ) -> None:
        try:
            self._push(
                self.search.option(option.combination, option.origin, choice, searched, trial)
            )
        except AutoparError as error:
            if not self.is_open:
                raise
            self.search.reasons.setdefault(str(option), str(error))

    # --- known strategies -----------------------------------------------------------------------
    def _baselines(self, option: Option) -> Baselines:
        """The known strategies, priced; none beside a pipeline: they would have its stages too."""
        if option.choice is not None:
            return Baselines(found={}, missing={})
        num = option.combination.num_microbatches
        if num not in self.known:
            self.setting.progress("price the known strategies")
            candidates = self.search.unrestricted[1, num]
            self.known[num] = price_baselines([c.priced for c in candidates], cheapest(candidates))
        return self.known[num]

    def _or_rival(self, option: Option, baselines: Baselines) -> Option:
        """The option, or the fastest known strategy in its place where that is faster."""
        best = min([option.best, *self._rivals(baselines)[:1]], key=rank)
        if best is option.best:
            return option
        return replace(option, best=best, time_s=time_parts(best).step_s)

    def _rivals(self, baselines: Baselines) -> list[Candidate]:
        """Known strategies that may stand in: the search ran out of time, or within a budget its
        estimate of memory was too cautious."""
        return baselines.executable() if self.setting.is_free else []

    def _rival(self, option: Option, found: Fitted | None) -> Fitted | None:
        """The first known strategy that fits and is faster than what was found, if something was.

        Where there is neither, what was left out for this option comes back.
        """
        num = option.combination.num_microbatches
        baselines = self._baselines(option)
        for rival in self._rivals(baselines) if num not in self.tried else ():
            if found is not None and time_parts(rival).step_s >= found.option.time_s:
                break
            if _resident_bytes(rival) > self.setting.limit.tensor_bytes:
                continue
            other = replace(option, best=rival, time_s=time_parts(rival).step_s)
            program, memory = self._lower(other)
            if self.setting.limit.fits(memory):
                return Fitted(option=other, program=program, memory=memory, baselines=baselines)
        self.tried.add(num)
        if found is None:
            self._leave(option)
        return None

    def _leave(self, option: Option) -> None:
        """Give an option up: what was left out for it comes back."""
        if self.is_open and option.choice is None:
            for other in self.search.with_more_microbatches(option):
                self._push(other)


def _key(option: Option) -> tuple[str, bool]:
    """Options whose memory, counted, is off the search's own count in the same way."""
    name = "" if option.choice is None else option.choice.schedule.name
    return name, option.is_recomputed


def _resident_bytes(candidate: Candidate) -> float:
    """What a strategy holds all the time: parameters and optimizer state. No peak is below it."""
    priced = candidate.priced
    graph, total = priced.pricing.graph, 0.0
    assignment = priced.assignment(candidate.solution.assignment)
    for decision in priced.nodes:
        value = graph.values[decision.index]
        if decision.kind == NodeKind.STORED and value.kind is ValueKind.PARAMETER:
            shape = local_shape(value.shape, assignment.stored[value.index], candidate.mesh)
            copies = 1 + priced.pricing.optimizer.num_states if value.differentiable else 1
            total += copies * math.prod(shape) * value.dtype.itemsize
    return total
