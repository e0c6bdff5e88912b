"""The options of a plan: the sharding of each combination is searched, each schedule simulated.

In: a setting. Out: options with their times and estimated memory, and the reasons against all
others. A space that is not open has one option, over all its meshes.

- The combinations of an open space (`autopar.planning.combinations`) are searched in the order of a
  guess of their time; those whose lower bound exceeds the best step so far are pruned.
- The sharding of each is searched exactly, then every form of every schedule that its lower bound
  allows (`autopar.planning.pipelines`) is simulated over the stages' prices. If the estimated
  memory is above the limit, parameters are released after each pass, or blocks recompute (by
  `autopar.pricing.recompute_estimate`), or both, and the sharding is searched again within the
  limit. What exactly is recomputed is decided over the lowered program (`autopar.planning.fit`).
- At last, unless a schedule is named, better orders of the fastest pipelines' actions are searched
  (`autopar.planning.refinement`).

The search stops after `Setting.search_limit_s`, but not before it has an option or a plan to beat;
the planner lets it go on if lowering leaves time.
A combination that takes long has fewer schedules simulated, so that others have their turn.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.base.errors import AutoparError, ConstraintError
from autopar.base.units import format_bytes, format_seconds
from autopar.ir.mesh import Mesh
from autopar.lowering.stages import cuts_within_blocks, staged_blocks
from autopar.planning.combinations import Combination, Combinations
from autopar.planning.deadline import NEVER, deadline_in
from autopar.planning.exposed_search import (
    proofs,
    search_exposed,
    search_exposures,
    sharding_bound_s,
)
from autopar.planning.option import Option, dominating
from autopar.planning.option_pricing import OptionPricing
from autopar.planning.pipelines import is_extra, pipelines, without_pipeline
from autopar.planning.ranking import rank
from autopar.planning.refinement import refined, worth_refining
from autopar.planning.setting import Setting
from autopar.planning.sharding_search import search_meshes, unlike_a_node
from autopar.planning.space import PipelineChoice
from autopar.planning.staging import stage_costs
from autopar.planning.within_layers import LEAST_GAIN as LEAST_DIVIDED_GAIN
from autopar.planning.within_layers import even_step_s
from autopar.pricing.candidate import Candidate
from autopar.pricing.exposure import ALL_EXPOSED
from autopar.pricing.problem import PricedGraph, price_graph
from autopar.pricing.step_time import time_parts
from autopar.schedules.generators.forms import Form
from autopar.schedules.generators.lower_bound import lower_bound_s

MARGIN = 0.8
"""Fraction of the memory that a search may fill before memory is counted, which finds more."""
MAX_FEWEST_MESHES = 3
"""The meshes on which the fewest micro-batches are searched that fit."""
AS_FAST = 0.01
"""Meshes on which a step takes so much longer at most count as equally fast."""
PROMISING = 1.25
"""Combinations without a share of the time are searched later if they are guessed to take up to so
many times as long as the plan; guesses know nothing of strategies."""
LEAST_GAIN = 1e-6
"""A better order is worth keeping if it saves at least this share of a step."""


class Search:
    """Searches and prices all options; see the module's docstring.

    ``best_s``: the step of a plan that is known, which an open space has to beat. ``whole`` are the
    candidates for the whole batch at once, if they were searched before. A search that
    ``is_patient`` has no time limit.
    """

    def __init__(
        self,
        setting: Setting,
        best_s: float = math.inf,
        whole: Sequence[Candidate] = (),
        *,
        is_patient: bool = False,
    ) -> None:
        self.setting = setting
        self.space = setting.space
        self.options: list[Option] = []
        self.unrestricted: dict[tuple[int, int], list[Candidate]] = {}
        self.best_s, self.has_plan, self.whole = best_s, math.isfinite(best_s), whole
        self.pricing = OptionPricing(setting)
        self.leaner = self.pricing.leaner
        self.alone_on: dict[Mesh, int] = {}
        self.left_out: dict[Mesh, list[Combination]] = {}
        self.times_s: dict[str, float] = {}
        self.reasons: dict[str, str] = {}
        self.late: list[Combination] = []
        """The combinations that there was no time for."""
        self.bound_s = 0.0
        """A lower bound on the step time of every option of an open space."""
        self.deadline = NEVER if is_patient else deadline_in(setting.search_limit_s)
        self.turn = self.deadline
        """The share of the combination that is searched."""

    def run(self) -> Search:
        """Find all options; raises ConstraintError if the space has none."""
        if not self.space.is_open:
            self._search_point()
            return self
        self.combinations = Combinations(self.setting)
        self.combinations.check()
        self.reasons |= self.combinations.reasons()
        guess_s = self.combinations.guess_s
        order = sorted(self.combinations.all(), key=lambda each: (guess_s(each), str(each)))
        self.bound_s = min(map(self._bound_s, order), default=0.0)
        self.setting.progress.bounded(self.bound_s)
        done = self._fewest_microbatches(order)
        for combination in order:
            if combination not in done:
                self._consider(combination)
        self._refine(self.options)
        return self

    def promising(self, best_s: float) -> list[Combination]:
        """The combinations that there was no time for, and that may beat a plan of ``best_s`` as
        far as can be guessed; see `PROMISING`."""
        guess_s = self.combinations.guess_s
        return [each for each in self.late if guess_s(each) <= PROMISING * best_s]

    def resume(self, limit_s: float, best_s: float) -> list[Option]:
        """Go on in an open space with the combinations that are `promising`, for ``limit_s``
        seconds more; returns the options that may beat a plan of ``best_s``."""
        self.best_s, self.has_plan = best_s, True
        self.deadline = self.turn = deadline_in(limit_s)
        promising, self.late = self.promising(best_s), []
        num_known = len(self.options)
        for combination in promising:
            self.reasons.pop(str(combination), None)
            self._consider(combination)
        self._refine(self.options[num_known:])
        return [option for option in self.options[num_known:] if option.time_s < best_s]

    def _fewest_microbatches(self, order: Sequence[Combination]) -> set[Combination]:
        """Search the fewest micro-batches without a pipeline that are estimated to fit, and more
        while that is faster, on the meshes where the whole batch is fastest, in half the time at
        most: an option to beat, as guesses know nothing of strategies. With a plan, only on the
        first of them, and while that is faster than the plan. Returns what was searched.
        """
        done, deadline = set[Combination](), deadline_in(self.deadline.limit_s / 2)
        num_meshes = 1 if self.has_plan else MAX_FEWEST_MESHES
        meshes = self._fastest_meshes()[:num_meshes]
        alone = [each for each in order if each.num_devices == 1 and each.mesh in meshes]
        for num in sorted({each.num_microbatches for each in alone} - {1}):
            known_s = self.best_s
            same = [each for each in alone if each.num_microbatches == num]
            for combination in sorted(same, key=lambda each: meshes.index(each.mesh)):
                if not deadline.is_over:
                    self._consider(combination)
                    done.add(combination)
            is_found = math.isfinite(known_s)
            if deadline.is_over or (is_found and self.best_s >= known_s):
                break
        return done

    def _fastest_meshes(self) -> list[Mesh]:
        """The meshes of the whole batch at once, the fastest first; of those that are as fast, the
        ones with an axis in a node come first, as they have more to choose from in less memory."""
        found = sorted((each for each in self.whole if each.is_found), key=rank)
        if not found:
            return []
        fast_s = (1 + AS_FAST) * time_parts(found[0]).step_s

        def order(each: Candidate) -> tuple[float, float, bool]:
            mesh, step_s = each.mesh, time_parts(each).step_s
            unlike = unlike_a_node(self.setting.cluster, mesh)
            return max(fast_s, step_s), unlike, mesh.num_axes == 1

        return list(dict.fromkeys(each.mesh for each in sorted(found, key=order)))

    def _refine(self, options: Sequence[Option]) -> None:
        """Add options with better orders of the fastest pipelines among some, and note what is
        proved; none if the schedule is named."""
        if self.space.schedule is not None:
            return
        deadline = deadline_in(self.setting.refine_limit_s)
        for option in worth_refining([each for each in options if self.pricing.fits(each)]):
            if deadline.is_over:
                break
            assert option.staged is not None
            assert option.choice is not None
            self.setting.progress(f"improve the order of {option}")
            shape = option.choice.schedule.shape
            costs = stage_costs(
                option.best, option.staged.stages, shape, self.pricing.crossing(option.best)
            )
            if self.setting.num_passes * lower_bound_s(shape, costs[0]) >= self.best_s:
                continue  # no order is faster than the best so far
            place = next(i for i, each in enumerate(self.options) if each is option)
            least_s = option.time_s
            for choice in refined(
                option, *costs, self.setting.budget_bytes, self.setting.refine_limit_s
            ):
                if choice.schedule is option.choice.schedule:
                    self.options[place] = replace(option, choice=choice)
                    continue
                other = self.pricing.option(
                    option.combination, option.origin, choice, option.searched,
                    recomputes=option.recomputes,
                )  # fmt: skip
                if other.time_s < (1 - LEAST_GAIN) * least_s:
                    least_s = other.time_s
                    self._note(other)

    def _search_point(self) -> None:
        num_devices, num = self.space.point()
        meshes, choice = self.space.meshes(self.setting.cluster), self.space.pipeline
        whole = self.setting.prepared.cut(num)
        combination = Combination(num_devices, num, meshes[0])
        if choice is not None and choice.cuts is not None:
            block_cuts = cuts_within_blocks(whole.analysis.graph, choice.cuts)
            combination = replace(combination, block_cuts=block_cuts)
            self._price_point(combination, meshes)
            return
        self._price_point(combination, meshes)
        self._divide(combination, lambda divided: self._price_point(divided, meshes))

    def _divide(self, combination: Combination, price: Callable[[Combination], None]) -> None:
        """Price a combination with divided blocks too, if it has pipelines that are estimated to
        fit, and such blocks may make one faster than the best."""
        block_cuts = self.setting.prepared.narrow_cuts if combination.num_devices > 1 else ()
        fitting = [
            each
            for each in self.options
            if each.combination == combination and each.staged and self.pricing.fits(each)
        ]
        is_late = self.space.is_open and self.turn.is_over
        if not block_cuts or not fitting or is_late:
            return
        graph = self.setting.prepared.cut(combination.num_microbatches, block_cuts).analysis.graph
        least_s = min(even_step_s(each, graph) for each in fitting)
        if least_s < (1 - LEAST_DIVIDED_GAIN) * self.best_s:
            price(replace(combination, block_cuts=block_cuts))

    def _price_point(self, combination: Combination, meshes: Sequence[Mesh]) -> None:
        num_devices, num = combination.num_devices, combination.num_microbatches
        cut = self.setting.prepared.cut(num, combination.block_cuts)
        has_others = self.space.leaves_microbatches or self.has_plan
        deadline = self.deadline if has_others else NEVER
        known_s = self.best_s / self.setting.num_passes if self.has_plan else math.inf
        candidates = tuple(search_meshes(self.setting, cut, meshes, deadline, known_s))
        if not candidates:
            raise ConstraintError(f"no step is below {format_seconds(self.best_s)}")
        self.unrestricted.setdefault((num_devices, num), []).extend(candidates)
        least_s = sharding_bound_s(candidates)
        if num_devices > 1 and self.setting.cluster.islands:
            least_s = 0.0  # some pipeline ranks are faster than the devices that it is priced by
        self.setting.progress.bounded(self.setting.num_passes * least_s / num_devices)
        recomputes = self.space.recompute.is_fixed
        option = self.pricing.option(
            combination, candidates, self.space.pipeline, recomputes=recomputes
        )
        self.options.append(option)
        if self.pricing.fits(option):
            self.setting.progress.found(option.time_s)

    # --- an open space ------------------------------------------------------------------------
    def with_more_microbatches(self, option: Option) -> list[Option]:
        """The options left out because ``option``, which does not fit, was estimated to fit."""
        mesh, num_known = option.best.mesh, len(self.options)
        self.alone_on.pop(mesh, None)
        for combination in self.left_out.pop(mesh, []):
            self.reasons.pop(str(combination), None)
            self._consider(combination)
        return self.options[num_known:]

    def _consider(self, combination: Combination) -> None:
        """Price a combination, or record the reason against it."""
        mesh = combination.mesh
        reason = self._reason_against(combination)
        fewest = self.alone_on.get(mesh, math.inf) if combination.num_devices == 1 else math.inf
        if reason is None and combination.num_microbatches > fewest:
            reason = "fewer micro-batches fit, and without a pipeline they are no slower"
            self.left_out.setdefault(mesh, []).append(combination)
        if reason is None and (self.options or self.has_plan) and self.deadline.is_over:
            limit_s = self.deadline.limit_s
            reason = f"not tried: the search reached its time limit of {limit_s:.3g} s"
            self.late.append(combination)
        if reason is None:
            self._price(combination)
            self._divide(combination, self._price)
        else:
            self.reasons.setdefault(str(combination), reason)

    def _reason_against(self, combination: Combination) -> str | None:
        bound_s = self._bound_s(combination)
        if bound_s >= self.best_s:
            return f"takes at least {format_seconds(bound_s)}, even without communication"
        return None

    def _bound_s(self, combination: Combination) -> float:
        return self.setting.num_passes * self.combinations.bound_s(combination)

    def _price(self, combination: Combination) -> None:
        """Search the sharding, then simulate every schedule."""
        setting, num = self.setting, combination.num_microbatches
        setting.progress(f"search {combination}, on mesh {combination.mesh}")
        self.turn = deadline_in(setting.combination_limit_s)
        try:
            cut = setting.prepared.cut(num, combination.block_cuts)
        except AutoparError as error:
            self.reasons.setdefault(f"{num} micro-batches", str(error))
            return
        try:
            found = self._known(combination)
            if not found:
                priced = price_graph(setting.pricing(cut, combination.mesh))
                if combination.num_devices == 1:
                    found = self._without_pipeline(priced)
                else:
                    found = (search_exposed(setting, priced, ALL_EXPOSED),)
        except AutoparError as error:
            self.reasons.setdefault(str(combination), str(error))
            return
        key = combination.num_devices, num
        self.unrestricted.setdefault(key, []).extend(found)
        always = self.space.recompute.is_fixed
        num_known = len(self.options)
        options = self._options(combination, found, recompute=always)
        leaner = list[Option]()
        for option in options:
            if not (leaner and self.turn.is_over):
                leaner += self._leaner(option)
        if options and not any(map(self.pricing.fits, options)):
            tight = [min(options, key=lambda option: option.time_s)]
            if leaner and not any(map(self.pricing.fits, leaner)):
                tight.append(min(leaner, key=lambda option: option.time_s))
            if not (self.turn.is_over and any(map(self.pricing.fits, leaner))):
                self._within_memory(combination, tight)
        if options and len(self.options) == num_known and not self.has_plan:
            least = min([*options, *leaner], key=lambda option: option.needed_bytes)
            self._noted(least, least.origin, recomputes=least.recomputes)

    def _known(self, combination: Combination) -> tuple[Candidate, ...]:
        """The candidates on the combination's mesh that an earlier search of the whole batch at
        once found, at the same prices; none for other combinations."""
        if combination.num_devices > 1 or combination.num_microbatches > 1:
            return ()
        return tuple(
            each
            for each in self.whole
            if each.mesh == combination.mesh
            if each.priced.pricing.compute is self.setting.compute
        )

    def _without_pipeline(self, priced: PricedGraph) -> tuple[Candidate, ...]:
        """The best strategies on one mesh, searched as far as they may beat the best option."""
        best_s = self.best_s / self.setting.num_passes
        found = list(search_exposures(self.setting, priced, best_s))
        return *found, *proofs(self.setting, found, self.turn, best_s)

    def _leaner(self, option: Option) -> list[Option]:
        """An option that does not fit with less kept from pass to pass, with blocks that recompute,
        and with both; not those that cannot be the fastest, because these only take longer."""
        found: list[Option] = []
        if self.pricing.fits(option) or option.time_s >= self.best_s:
            return found
        origins = [option.origin]
        for form in self.leaner.of(option):
            origin = tuple(self.pricing.with_form(each, **form) for each in option.origin)
            other = self._noted(option, origin, option.time_s, recomputes=option.recomputes)
            if other.best.estimated_bytes(other.held) < option.best.estimated_bytes(option.held):
                found.append(other)
                origins.append(origin)
        if self.leaner.may_recompute(option):
            found += [
                self._noted(option, origin, option.time_s, recomputes=True) for origin in origins
            ]
        return found

    def _noted(
        self,
        option: Option,
        origin: tuple[Candidate, ...],
        bound_s: float | None = None,
        *,
        recomputes: bool,
    ) -> Option:
        return self._note(
            self.pricing.option(
                option.combination, origin, option.choice, recomputes=recomputes, bound_s=bound_s
            )
        )

    def _within_memory(self, combination: Combination, tight: Sequence[Option]) -> None:
        """Search again within the memory, if the result may still be the fastest."""
        for option in tight:
            if option.time_s >= self.best_s or self.deadline.is_over:
                continue
            cutoff_s = self.most_work_s(self.best_s, combination.num_devices)
            within = functools.partial(
                self.pricing.within, option, MARGIN * self.setting.budget_bytes, cutoff_s,
                deadline=self.deadline,
            )  # fmt: skip
            found = within()
            for smaller in self.leaner.of(option):
                if not any(each.is_found for each in found):
                    found = within(**smaller)
            if any(each.is_found for each in found):
                self._options(combination, found, recompute=option.recomputes)

    def most_work_s(self, step_s: float, num_ranks: int) -> float:
        """The most that a strategy costs in all on pipeline ranks that work for ``step_s``; without
        limit where some are faster than the devices by which it is priced."""
        if self.setting.cluster.islands:
            return math.inf
        return step_s / self.setting.num_passes * num_ranks

    def _options(
        self, combination: Combination, candidates: tuple[Candidate, ...], *, recompute: bool
    ) -> list[Option]:
        """Simulate every schedule over one strategy, and record those worth lowering.

        Schedules that need by far too much memory are returned with lower bounds of their times.
        """
        if combination.num_devices == 1:
            alone = self.pricing.option(combination, candidates, None, recomputes=recompute)
            return [self._note(alone)]
        found: list[Option] = []
        num_blocks = len(staged_blocks(candidates[0].priced.pricing.graph))
        wanted = pipelines(combination, self.space, num_blocks)
        if not wanted:
            why = without_pipeline(combination, self.space, num_blocks)
            self.reasons.setdefault(str(combination), why)
        for form in wanted:
            if found and self.turn.is_over:
                limit_s = self.turn.limit_s
                why = f"not simulated: the combination reached its time limit of {limit_s:.3g} s"
                self.reasons.setdefault(form.text, why)
                continue
            option = self._simulated(combination, candidates, form, recompute)
            if option is not None:
                self._note_time(option)
                found.append(option)
        kept, simulated = [], [option for option in found if option.is_simulated]
        for option in simulated:
            if (better := dominating(option, simulated)) is None:
                kept.append(option)
            elif self.times_s.pop(str(option), None) is not None:
                self.reasons[str(option)] = f"no faster than {better}, and holds no less"
        self.options += kept
        return kept + [option for option in found if not option.is_simulated]

    def _simulated(
        self,
        combination: Combination,
        candidates: tuple[Candidate, ...],
        form: Form,
        recompute: bool,
    ) -> Option | None:
        """A form's fastest option, or None if it is impossible or no faster (see the reasons).

        A list schedule is ordered by equal durations and by those of the stages.
        """
        try:
            durations, links = self.pricing.stage_costs(candidates[0], form)
            bound_s = self.setting.num_passes * lower_bound_s(self.pricing.shape(form), durations)
            is_late = bound_s >= self.best_s or self.deadline.is_over
            if is_extra(form, self.space) and is_late:
                self.reasons.setdefault(form.text, f"takes at least {format_seconds(bound_s)}")
                return None
            made = [self.pricing.built(form)]
            if form.is_listed:
                made.append(form.build(durations, links))
            choices = [PipelineChoice(schedule=each, places_sums=True) for each in made]
            found = [
                self.pricing.option(
                    combination, candidates, each, recomputes=recompute,
                    bound_s=bound_s if self.leaner.has_all else None,
                )
                for each in choices
            ]  # fmt: skip
        except AutoparError as error:
            self.reasons.setdefault(form.text, str(error))
            return None
        return min(found, key=lambda option: (not self.pricing.fits(option), option.time_s))

    def _note(self, option: Option) -> Option:
        self._note_time(option)
        if option.is_simulated:
            self.options.append(option)
        return option

    def _note_time(self, option: Option) -> None:
        """Note the time of an option that is estimated to fit, or the reason against it."""
        name = str(option)
        if self.pricing.fits(option):
            self.best_s = min(self.best_s, option.time_s)
            self.setting.progress.found(option.time_s)
            self.times_s[name] = min(self.times_s.get(name, math.inf), option.time_s)
            best, is_plain = option.best, option.choice is None and not option.recomputes
            if is_plain and not best.released and not best.scattered:
                mesh, num = option.combination.mesh, option.combination.num_microbatches
                self.alone_on[mesh] = min(num, self.alone_on.get(mesh, num))
        else:
            self.reasons.setdefault(
                name,
                f"would take {'' if option.is_simulated else 'at least '}"
                f"{format_seconds(option.time_s)}, but needs about "
                f"{format_bytes(option.needed_bytes)} of "
                f"{format_bytes(self.setting.budget_bytes)}",
            )
