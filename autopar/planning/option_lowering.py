"""The lowering of options of a search, and the count of their memory.

In: an option of `autopar.planning.schedule_search`. Out: its program, with the memory that it
takes counted by liveness, and the option with what its blocks recompute.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.ir.recomputation import NOTHING, Recomputation
from autopar.lowering.program import Traces
from autopar.lowering.training import lower_training
from autopar.lowering.types import RankProgram
from autopar.memory.program import ProgramMemory, fullest, program_memory
from autopar.planning.early import early_memories, updated_as
from autopar.planning.option import Option
from autopar.planning.recomputation import Recomputer
from autopar.planning.recompute_request import Recompute, Request
from autopar.planning.schedule_search import Search
from autopar.planning.setting import Setting
from autopar.planning.staging import pipeline_times
from autopar.plans.parts import UpdatePlan
from autopar.pricing.candidate import Candidate
from autopar.pricing.step_time import time_parts


class OptionLowering:
    """Lowers options one after the other; remembers the smallest program so far."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.setting = search.setting
        self.smallest: ProgramMemory | None = None
        self._traces: tuple[tuple[object, ...], Traces] | None = None

    def lower(self, option: Option) -> tuple[RankProgram, tuple[ProgramMemory, ...], UpdatePlan]:
        if option.movement is not None:
            asked = replace(self.setting, update=option.movement.update)
            program, _, update = self.updated(option, asked, in_steps=False)
            memories = option.movement.memories
        else:
            program, memories, update = self.updated(option, self.setting)
        self._noted(fullest(memories))
        return program, memories, update

    def updated(
        self, option: Option, setting: Setting, *, in_steps: bool = True
    ) -> tuple[RankProgram, tuple[ProgramMemory, ...], UpdatePlan]:
        """The program as it is updated, its memory, and what the plan says about its updates."""
        is_early = setting.update is not None and setting.update.is_early
        program = self.program(option, may_join=not is_early)
        program, memories, update = updated_as(setting, program, in_steps=in_steps)
        if update.update.is_early and not is_early and option.recomputes:
            return self.updated(option, replace(setting, update=update.update), in_steps=in_steps)
        return program, memories, update

    def program(self, option: Option, *, may_join: bool = True) -> RankProgram:
        staged, best = option.staged, option.best
        return lower_training(
            best.strategy(),
            best.num_microbatches,
            pipeline=None if staged is None else (staged.stages, staged.schedule),
            device_type=self.setting.device_type,
            recomputation=best.recomputation if option.is_decided else NOTHING,
            may_join=may_join,
            traces=self.traces_of(best),
        )

    def count(self, program: RankProgram) -> ProgramMemory:
        setting = self.setting
        return self._noted(
            program_memory(program, setting.cluster.device, optimizer=setting.optimizer)
        )

    def _noted(self, memory: ProgramMemory) -> ProgramMemory:
        """Note the memory if it is the smallest so far."""
        if self.smallest is None or memory.device_bytes < self.smallest.device_bytes:
            self.smallest = memory
        return memory

    def traces_of(self, candidate: Candidate) -> Traces:
        """The traced blocks of a strategy, kept until another one is lowered."""
        key = (candidate.priced, tuple(candidate.solution.assignment))
        if self._traces is None or self._traces[0] != key:
            self._traces = key, Traces()
        return self._traces[1]

    def decided(self, option: Option, cutoff_s: float = math.inf) -> tuple[Option, bool]:
        """The option with what its blocks recompute, and its time; whether it is counted to fit.

        They recompute as much as they can if nothing that fits is found, and no more than shows
        that the step takes ``cutoff_s`` or longer.
        """
        setting, request = self.setting, self.search.space.recompute
        plain = replace(option, best=option.best.recomputing(NOTHING))
        setting.progress(f"choose what {option} recomputes")
        program, memories, _ = self.lower(replace(plain, is_decided=True))
        recomputer = Recomputer(
            plain.best, program, self.traces_of(plain.best), setting.cluster.device
        )
        if request.is_fixed:
            return self._with(plain, recomputer.fixed(request)), False
        asked = setting

        def counted(recomputation: Recomputation) -> tuple[ProgramMemory, ...] | None:
            """Counted with early updates once these were necessary."""
            nonlocal asked
            if not recomputation:
                return memories
            tried = self._with(plain, recomputation)
            if tried.time_s >= cutoff_s:
                return None
            if asked.update is not None and asked.update.is_early:
                return early_memories(asked, self.program(tried, may_join=False), asked.update)
            _, found, update = self.updated(tried, asked)
            if update.update.is_early:
                asked = replace(asked, update=update.update)
            return found

        found = recomputer.within_memory(setting.limit, counted)
        fits = found is not None
        if found is None:
            found = recomputer.fixed(Recompute(request=Request.FULL))
        decided = replace(self._with(plain, found), trial=max(1, option.trial))
        return decided, fits and decided.time_s < cutoff_s

    def _with(self, option: Option, recomputation: Recomputation) -> Option:
        best = option.best.recomputing(recomputation)
        decided = replace(option, best=best, recomputes=True, is_decided=True)
        if option.staged is None:
            return replace(decided, time_s=time_parts(best).step_s)
        staged = option.staged
        times = pipeline_times(
            best, staged.stages, staged.schedule, self.setting.communication,
            self.search.pricing.crossing(best),
        )  # fmt: skip
        return replace(decided, staged=replace(staged, times=times), time_s=times.step_s)
