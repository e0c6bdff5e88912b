"""The known strategies that may replace an option: if they are faster, or where it does not fit.

In: an option of `autopar.planning.schedule_search`, or one that fits. Out: a known strategy in its
place. They are priced when first asked for, since that takes as long as a search on each mesh.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.cost_models.update import OptimizerSpec
from autopar.ir.placement import local_shape
from autopar.memory.program import fullest
from autopar.planning.baselines import Baselines, price_baselines
from autopar.planning.option import NEARLY, Fitted, Option
from autopar.planning.option_lowering import OptionLowering
from autopar.planning.ranking import cheapest, rank
from autopar.planning.schedule_search import Search
from autopar.planning.setting import stored_bytes
from autopar.pricing.candidate import Candidate
from autopar.pricing.nodes import NodeKind
from autopar.pricing.step_time import time_parts


class KnownStrategies:
    """The known strategies for the options of one search, by their number of micro-batches."""

    def __init__(self, search: Search, lowering: OptionLowering) -> None:
        self.search = search
        self.setting = search.setting
        self.lowering = lowering
        self.found: dict[int, Baselines] = {}
        self.tried: set[int] = set()
        self.fitting_bytes: dict[int, float] = {}

    def baselines(self, option: Option) -> Baselines:
        """The known strategies, priced; none for a pipeline, as they have no stages, and on one
        device, where all are one."""
        if option.choice is not None or self.setting.cluster.num_devices == 1:
            return Baselines(found={}, missing={})
        num = option.combination.num_microbatches
        if num not in self.found:
            self.setting.progress("price the known strategies")
            candidates = self.search.unrestricted[1, num]
            self.found[num] = price_baselines([c.priced for c in candidates], cheapest(candidates))
        return replace(self.found[num], fitting_bytes=self.fitting_bytes.get(num))

    def note_refused(self, option: Option, within_bytes: float) -> None:
        """Note that an option needs more than there is, and would fit ``within_bytes`` of estimated
        memory. Known strategies keep what the backward pass needs, and so compare with those that
        do."""
        if option.choice is None and not option.recomputes and option.movement is None:
            num = option.combination.num_microbatches
            self.fitting_bytes[num] = min(within_bytes, self.fitting_bytes.get(num, math.inf))

    def or_faster(self, option: Option) -> Option:
        """The option, or the fastest known strategy if that is faster."""
        best = min([option.best, *self._executable(option)[:1]], key=rank)
        if best is option.best:
            return option
        return replace(option, best=best, time_s=time_parts(best).step_s)

    def fitting(self, option: Option, found: Fitted | None) -> Fitted | None:
        """The fastest known strategy that fits, if it is faster than ``found``."""
        num = option.combination.num_microbatches
        if option.choice is not None or num in self.tried:
            return None
        for rival in self._executable(option):
            if found is not None and time_parts(rival).step_s >= found.option.time_s:
                break
            if _resident_bytes(rival, self.setting.optimizer) > self.setting.limit.tensor_bytes:
                continue
            if rival.estimated_bytes() > NEARLY * self.setting.budget_bytes:
                continue
            other = replace(
                option, best=rival, time_s=time_parts(rival).step_s, recomputes=False,
                is_decided=False, movement=None,
            )  # fmt: skip
            if (fitted := self.lowered_beside(other)) is not None:
                return fitted
        self.tried.add(num)
        return None

    def lowered_beside(self, option: Option) -> Fitted | None:
        """An option without movement, lowered, with the known strategies beside it; None if its
        counted memory does not fit."""
        program, memories, update = self.lowering.lower(option)
        memory = fullest(memories)
        if not self.setting.limit.fits(memory):
            return None
        return Fitted(
            option=option, program=program, traces=self.lowering.traces_of(option.best),
            memory=memory, baselines=self.baselines(option), update=update,
        )  # fmt: skip

    def _executable(self, option: Option) -> list[Candidate]:
        """Known strategies that may replace an option; none where the user fixes what they do.

        They can win if a search ran out of time, or if its memory estimate was too pessimistic.
        """
        space = self.search.space
        is_open = not space.recompute.is_fixed and space.reshard_after_forward is None
        is_open = is_open and space.reduce_every_microbatch is None
        return self.baselines(option).executable() if self.setting.is_free and is_open else []


def _resident_bytes(candidate: Candidate, optimizer: OptimizerSpec) -> int:
    """Bytes of parameters and optimizer state, a lower bound on the peak of a strategy."""
    priced, total = candidate.priced, 0
    graph = priced.pricing.graph
    assignment = priced.assignment(candidate.solution.assignment)
    for decision in priced.nodes:
        if decision.kind == NodeKind.STORED:
            value = graph.values[decision.index]
            shape = local_shape(value.shape, assignment.stored[value.index], candidate.mesh)
            total += stored_bytes(value, shape, optimizer)
    return total
