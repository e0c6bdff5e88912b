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
from autopar.memory.program import ProgramMemory, fullest
from autopar.planning.early import chosen_update, update_plan, updated_early
from autopar.planning.option import Option
from autopar.planning.recomputation import Recomputer
from autopar.planning.recompute_request import Recompute, Request
from autopar.planning.schedule_search import Search
from autopar.planning.setting import Setting
from autopar.planning.staging import pipeline_times
from autopar.plans.parts import UpdatePlan
from autopar.pricing.candidate import Candidate
from autopar.pricing.step_time import time_parts

Lowered = tuple[RankProgram, tuple[ProgramMemory, ...], UpdatePlan]
"""A program as it is updated, its memory on each pipeline device, and the plan of its updates."""


class OptionLowering:
    """Lowers options one after the other; remembers the smallest program so far."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.setting = search.setting
        self.smallest: ProgramMemory | None = None
        self._traces: tuple[tuple[object, ...], Traces] | None = None
        self._ready: tuple[Option, Lowered] | None = None
        """The fastest option whose recomputation was decided, as it was lowered for that."""

    def lower(self, option: Option) -> Lowered:
        if self._ready is not None and self._ready[0] is option:
            program, memories, update = self._ready[1]
        elif option.movement is not None:
            asked = replace(self.setting, update=option.movement.update)
            program, _, update = self.updated(option, asked, in_steps=False)
            memories = option.movement.memories
        else:
            program, memories, update = self.updated(option, self.setting)
        self._noted(fullest(memories))
        return program, memories, update

    def updated(self, option: Option, setting: Setting, *, in_steps: bool = True) -> Lowered:
        """The program as it is updated, its memory, and what the plan says about its updates."""
        asked = setting.update
        program = self.program(option, may_join=asked is None or not asked.is_early)
        memories = setting.counted(program)
        at_end = fullest(memories)
        update = chosen_update(setting, program, at_end)
        if update.is_early:
            if asked is None and option.recomputes:
                program = self.program(option, may_join=False)
            program, memories = updated_early(setting, program, update, in_steps=in_steps)
        return program, memories, update_plan(program, update, memories, at_end)

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
        return self._noted(fullest(self.setting.counted(program)))

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

    def decided(self, option: Option, cutoff_s: float = math.inf) -> Option:
        """The option with what its blocks recompute, and its time.

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
            return self._with(plain, recomputer.fixed(request))
        asked, ready = setting, list[tuple[Recomputation, Lowered]]()

        def tried(recomputation: Recomputation) -> tuple[ProgramMemory, ...] | None:
            """The memory, with early updates once these were necessary."""
            nonlocal asked
            if not recomputation:
                return memories
            other = self._with(plain, recomputation)
            if other.time_s >= cutoff_s:
                return None
            if asked.update is not None and asked.update.is_early:
                program = self.program(other, may_join=False)
                _, found = updated_early(asked, program, asked.update)
            else:
                ready[:] = [(recomputation, self.updated(other, asked))]
                _, found, update = ready[0][1]
                if update.update.is_early:
                    asked = replace(asked, update=update.update)
            self._noted(fullest(found))
            return found

        found = recomputer.within_memory(setting.limit, tried)
        is_last = found is None
        if found is None:
            found = recomputer.fixed(Recompute(request=Request.FULL))
        decided = self._with(plain, found)
        fits = decided.time_s < cutoff_s
        if is_last and fits:
            least = tried(found)
            fits = least is not None and all(map(setting.limit.fits, least))
        decided = replace(decided, trial=max(1, option.trial), is_counted_to_fit=fits)
        if fits and ready and ready[0][0] is found:
            self._ready = decided, ready[0][1]
        return decided

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
