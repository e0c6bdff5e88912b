"""The options that results of a sharding search make, with their times and estimated memory.

In: candidates, and a schedule over their stages or none. Out: an `Option`. What costs time to find
out about a candidate or a schedule is kept for the whole search.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from autopar.planning.combinations import Combination
from autopar.planning.deadline import NEVER, Deadline
from autopar.planning.leaner import LeanerForm, LeanerForms
from autopar.planning.option import NEARLY, Option, needed_bytes, with_form
from autopar.planning.ranking import cheapest, ranked
from autopar.planning.setting import Setting
from autopar.planning.sharding_search import search_within
from autopar.planning.space import PipelineChoice
from autopar.planning.stage_prices import Placement
from autopar.planning.staging import (
    Staged,
    choose_stages,
    crossing_bytes,
    recomputed_residence,
    residence_of,
    stage,
    stage_costs,
)
from autopar.pricing.candidate import Candidate
from autopar.pricing.problem import WHOLE, PricedGraph, Residence
from autopar.pricing.recompute_estimate import all_recomputed, droppable, recomputed_to_fit
from autopar.pricing.step_time import time_parts
from autopar.schedules import Durations, Links, PipelineShape
from autopar.schedules.generators.forms import Form
from autopar.search import Solution


class OptionPricing:
    """Makes and prices the options of one search."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.leaner = LeanerForms(setting.space)
        self.built = functools.cache(Form.build)
        self.with_form = functools.cache(with_form)
        self._droppable = functools.cache(droppable)
        self._costs: dict[tuple[Candidate, Placement], tuple[Durations, Links]] = {}
        self._crossings: dict[tuple[PricedGraph, Solution], list[int]] = {}

    def option(
        self,
        combination: Combination,
        origin: tuple[Candidate, ...],
        choice: PipelineChoice | None,
        searched: tuple[Candidate, ...] | None = None,
        trial: int = 0,
        *,
        recomputes: bool = False,
        bound_s: float | None = None,
    ) -> Option:
        """The option of some search results; raises AutoparError if they cannot be staged.

        With ``bound_s``, a lower bound of its time, a pipeline that by far does not fit is not
        simulated.
        """
        searched = origin if searched is None else searched
        found = [candidate for candidate in searched if candidate.is_found]
        residence = WHOLE
        if choice is not None:
            residence = residence_of(choice.schedule, found[0].priced.pricing.analysis)
        held = residence
        saved: dict[Candidate, float | None] = dict.fromkeys(found)
        if recomputes:
            saved = dict(self._recomputed(each, residence) for each in found)
            found = list(saved)
            residence = recomputed_residence(residence, found[0].priced.pricing.graph)
        staged: dict[Candidate, Staged] = {}
        is_bounded = bound_s is not None and all(
            needed_bytes(each, held, residence, saved[each]) > NEARLY * self.setting.budget_bytes
            for each in found
        )
        if choice is None or is_bounded:
            best = cheapest(found)
        else:
            staged = {
                each: stage(each, choice, self.setting.communication, self.crossing(each))
                for each in found
            }
            best = min(found, key=lambda each: ranked(staged[each].times.step_s, each.mesh))
        if staged:
            time_s = staged[best].times.step_s
        else:
            time_s = time_parts(best).step_s if choice is None or bound_s is None else bound_s
        return Option(
            combination=combination, origin=origin, searched=searched, best=best, choice=choice,
            staged=staged.get(best), trial=trial, held=held, residence=residence,
            recomputes=recomputes, time_s=time_s, saved_bytes=saved[best],
        )  # fmt: skip

    def crossing(self, candidate: Candidate) -> Sequence[int]:
        """The candidate's `crossing_bytes`, which depend on its solution alone."""
        key = candidate.priced, candidate.solution
        if key not in self._crossings:
            self._crossings[key] = crossing_bytes(candidate)
        return self._crossings[key]

    def _recomputed(
        self, candidate: Candidate, residence: Residence
    ) -> tuple[Candidate, float | None]:
        """A candidate with an estimate of what it recomputes, and of the bytes that this saves.

        If the user fixes what is recomputed, as if each block ran its forward pass again.
        """
        if self.setting.space.recompute.is_fixed:
            return all_recomputed(candidate), None
        excess = candidate.estimated_bytes(residence) - self.setting.budget_bytes
        recomputation, saved = recomputed_to_fit(self._droppable(candidate), excess, residence)
        return candidate.recomputing(recomputation), saved

    def within(
        self,
        option: Option,
        target_bytes: float,
        cutoff_s: float = math.inf,
        *,
        released: bool | None = None,
        scattered: bool | None = None,
        deadline: Deadline = NEVER,
    ) -> tuple[Candidate, ...]:
        """Search the shardings of an option again within ``target_bytes`` of estimated memory.

        A search ends without a result if the total work of the pipeline ranks exceeds ``cutoff_s``;
        meshes are left out after the ``deadline``.
        ``released``: gathered parameters are released after each pass, ``scattered``: gradients are
        reduce-scattered in every micro-batch; by default as in the option.
        """
        return tuple(
            search_within(
                self.setting, option.origin, target_bytes, option.residence, cutoff_s,
                released=bool(option.best.released) if released is None else released,
                scattered=bool(option.best.scattered) if scattered is None else scattered,
                deadline=deadline,
            )
        )  # fmt: skip

    def may_fit(self, option: Option) -> bool:
        """Whether some candidate of an option is estimated to fit, at least if it keeps as little
        from pass to pass, and recomputes as much, as the space allows."""
        forms: list[LeanerForm] = [{}, *self.leaner.of(option)]
        for candidate in option.origin:
            for form in forms if candidate.is_found else ():
                leaner = self.with_form(candidate, **form)
                needed = leaner.estimated_bytes(option.residence)
                if self.leaner.may_recompute(option):
                    needed -= self._recomputed(leaner, option.held)[1] or 0.0
                if needed <= NEARLY * self.setting.budget_bytes:
                    return True
        return False

    def fits(self, option: Option, ratio: float = 1.0) -> bool:
        """Whether an option is estimated to fit; ``ratio``: counted to estimated memory."""
        if option.saved_bytes is not None:
            ratio = 1.0  # it recomputes more instead
        return option.needed_bytes * ratio <= self.setting.budget_bytes * (1 + 1e-9)

    def stage_costs(self, candidate: Candidate, form: Form) -> tuple[Durations, Links]:
        """The candidate's costs by stage, which depend on where the stages are alone."""
        shape = self.shape(form)
        key = candidate, shape.placement
        if key not in self._costs:
            crossing = self.crossing(candidate)
            stages = choose_stages(candidate, shape, crossing)
            self._costs[key] = stage_costs(candidate, stages, shape, crossing)
        return self._costs[key]

    def shape(self, form: Form) -> PipelineShape:
        """The form's shape; schedules that no list scheduler orders are built for it, once."""
        return form.shape if form.is_listed else self.built(form).shape
