"""The budget loop: lower the options of a search until one fits the memory.

In: the options of `autopar.planning.schedule_search`. Out: the plan of the fastest one that fits.

The search estimates memory node by node; for a lowered program it is counted by liveness, which is
exact. Options are lowered in order of their time. One that does not fit is queued again with its
gathered parameters released after each pass, or its gradients reduce-scattered in every
micro-batch, as few as necessary; with a sharding searched within a smaller budget, corrected by the
ratio of count to estimate; if recomputation is open, with what it must recompute to fit
(`autopar.planning.recomputation`), priced exactly; and, if tensors may be offloaded, with those
that must be (`autopar.planning.movement`). The ratio is reused for other options with the same
schedule. A known strategy replaces an option that is slower than it, or that was not found
(`autopar.planning.rivals`).

In an open space, lowering stops after `Setting.lower_limit_s`. If there is no plan by then, a few
options are still tried: those whose recomputation is decided, then the fastest with much room, then
those with the least memory. The report lists those not tried.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.base.errors import AutoparError, ConstraintError, MovementError
from autopar.base.units import format_bytes, format_seconds
from autopar.ir.update import Update
from autopar.lowering.types import RankProgram
from autopar.memory.program import fullest
from autopar.planning.deadline import NEVER, Deadline, deadline_in
from autopar.planning.early import may_choose_early
from autopar.planning.movement import Moved, moved_to_fit
from autopar.planning.option import NEARLY, Fitted, Option
from autopar.planning.option_lowering import OptionLowering
from autopar.planning.ranking import rank, ranked
from autopar.planning.releases import (
    released_to_fit,
    scatterable,
    scattered_to_fit,
    with_scattered,
)
from autopar.planning.rivals import KnownStrategies
from autopar.planning.schedule_search import Search
from autopar.planning.sharding_search import least_budget, search_nearby
from autopar.pricing.candidate import Candidate
from autopar.pricing.step_time import time_parts

MAX_NEARLY = 3
"""So many pipelines that are faster than the first option that fits are counted too, if they were
estimated to take up to `NEARLY` times the memory."""
MAX_LATE = 3
"""How many options are lowered after the time limit if none has fit."""
SURELY = 0.5
"""What is estimated to take up to so much of the memory, if all is recomputed that can be, fits as
far as can be said before it is counted."""
POINT_TRIALS, OPEN_TRIALS = 6, 3
"""How often an option is searched again within a smaller budget."""
MOST_OVERLAP = 2.0
"""The most that the cost of a sharding, which counts all communication, exceeds its time: at most
all communication is overlapped, by as much computation."""
CAUTION = 0.98
"""Safety factor on the corrected budget, since the ratio of count to estimate varies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Postponed:
    """An option to be searched within less memory once its recomputing form is counted."""

    option: Option
    target_bytes: float
    is_smaller: bool


class Fit:
    """Lowers the options of a search until one fits; with ``moves``, tensors may be offloaded.

    Options that take ``cutoff_s``, the step of a plan that is known, or longer are of no use. After
    an own ``deadline`` nothing more is tried. ``options``: some of the search's, by default all.
    """

    def __init__(
        self,
        search: Search,
        *,
        moves: bool,
        cutoff_s: float = math.inf,
        deadline: Deadline | None = None,
        options: Sequence[Option] | None = None,
    ) -> None:
        self.search = search
        self.moves = moves
        self.cutoff_s = cutoff_s
        self.setting = search.setting
        self.is_open = search.space.is_open
        self.max_trials = OPEN_TRIALS if self.is_open else POINT_TRIALS
        self.ratios: dict[tuple[str, bool, bool, bool], float] = {}
        self.numbers = itertools.count()
        self.heap: list[tuple[bool, tuple[object, ...], int, Option]] = []
        self.exact: set[str] = set()
        self.decided_s = math.inf
        """The least time of an option whose recomputation was counted to fit."""
        self.lowering = OptionLowering(search)
        self.known = KnownStrategies(search, self.lowering)
        self.longest_try_s = 0.0
        """The most seconds of processor time that one option took."""
        self.least_moved_bytes: int | None = None
        """The least memory with which a program that was lowered runs if everything moves."""
        self.postponed: list[Postponed] = []
        for option in search.options if options is None else options:
            self._push(option)
        limit = deadline_in(self.setting.lower_limit_s) if self.is_open else NEVER
        self.deadline = limit if deadline is None else deadline
        has_plan = math.isfinite(cutoff_s)
        self.num_late, self.max_late = 0, 0 if has_plan or deadline is not None else MAX_LATE

    def best(self) -> Fitted:
        """The fastest option that fits; raises ConstraintError if none does."""
        found: Fitted | None = None
        while self._has_more(found):
            begun_s = time.process_time()
            try:
                fitted = self._next(found)
            except AutoparError:
                if found is None:
                    raise
                continue  # what was found is a plan
            finally:
                self.longest_try_s = max(self.longest_try_s, time.process_time() - begun_s)
            if fitted is not None and fitted.option.time_s < self.cutoff_s:
                found, self.cutoff_s = fitted, fitted.option.time_s
        if found is None:
            raise self.failure()
        return self._or_sharper(self._or_nearly_too_large(found))

    def _has_more(self, found: Fitted | None) -> bool:
        """Whether there is more to try; after the time limit only if nothing is ``found``.

        With a plan that moves tensors, others are tried that fit by moving alone: what recomputes
        or keeps less from pass to pass may move less.
        """
        is_late = self.deadline.is_over
        if found is not None:
            may_move = found.movement is not None and not self.setting.end.is_over
            is_left = bool(self.heap) and (may_move or not self.heap[0][0])
            return not is_late and bool(self.postponed or is_left)
        if is_late and not self.max_late:
            return False
        if is_late and self.postponed and not self.heap:
            self._keep_last_postponed()
        return bool(self.postponed or self.heap)

    def _keep_last_postponed(self) -> None:
        """After the time limit, let the postponed option with the least memory be tried as well;
        none a second time."""
        least = min(self.postponed, key=lambda each: each.option.estimated_bytes)
        self.postponed = [least] if self.max_late == MAX_LATE else []
        self.max_late = 2 * MAX_LATE

    def _next(self, found: Fitted | None) -> Fitted | None:
        """Try what comes next: postponed searches once something is found, or nothing is left that
        may fit, after the time limit nothing at all."""
        is_late = self.deadline.is_over
        may_fit = bool(self.heap) and (is_late or not self.heap[0][0])
        if self.postponed and (found is not None or not may_fit):
            return self._searched(self.postponed.pop(0), found)
        *_, option = heapq.heappop(self.heap)
        return self._tried(option) if option.time_s < self.cutoff_s else None

    def _tried(self, option: Option) -> Fitted | None:
        """Lower an option, or search it within less memory; None if it does not fit."""
        if self.deadline.is_over and self.max_late:
            if self.num_late == self.max_late:
                self._refuse(
                    option,
                    f"not lowered: the time limit of {self.deadline.limit_s:.0f} s was used up by "
                    "other combinations",
                )
                return None
            option = self._most_promising(option)
        known = self.ratios.get(option.estimate_key)
        is_worth_lowering = option.is_settled or option.recomputes or self._fits(option)
        if known is not None and not is_worth_lowering and option.trial < self.max_trials:
            return self._smaller(option, CAUTION * self.setting.budget_bytes / known)
        return self._lowered(option)

    def failure(self) -> ConstraintError:
        """The error where nothing fits."""
        smallest = self.lowering.smallest
        if not self.is_open and smallest is not None:
            return self.setting.limit.too_small(smallest, self.least_moved_bytes)
        return ConstraintError(
            "no combination of stages, micro-batches and schedule was found: "
            + "; ".join(f"{name}: {why}" for name, why in self.search.reasons.items())
        )

    def _or_nearly_too_large(self, fitted: Fitted) -> Fitted:
        """A faster pipeline whose memory was estimated to be a little too large and is not."""
        faster = sorted(
            (
                option
                for *_, option in self.heap
                if option.choice is not None and option.trial == 0 and not option.recomputes
                if option.time_s < fitted.option.time_s
                if option.needed_bytes <= NEARLY * self.setting.budget_bytes
            ),
            key=lambda option: option.time_s,
        )
        for option in faster[:MAX_NEARLY] if self.is_open else ():
            if self.deadline.is_over:
                break
            with contextlib.suppress(AutoparError):  # it cannot be lowered
                if (found := self.known.lowered_beside(option)) is not None:
                    return found
        return fitted

    def _or_sharper(self, fitted: Fitted) -> Fitted:
        """A faster strategy on the mesh of one that the memory limits, as the search within the
        memory counted what another one exposes."""
        option, best = fitted.option, fitted.option.best
        is_plain = option.choice is None and option.movement is None and not option.recomputes
        is_whole = {best.released, best.scattered} <= {frozenset(), best.priced.parameters()}
        key = option.combination.num_devices, option.combination.num_microbatches
        if not (is_plain and is_whole) or best in self.search.unrestricted[key]:
            return fitted
        ratio = self.ratios.get(option.estimate_key, 1.0)
        within = max(option.estimated_bytes, CAUTION * self.setting.budget_bytes / ratio)
        self.setting.progress(f"search within {format_bytes(within)} by what the step exposes")
        nearby = search_nearby(self.setting, best, within, self.deadline)
        found = [each for each in nearby if rank(each) < rank(best)]
        for candidate in sorted(found, key=rank):
            searched = (*option.searched, candidate)
            faster = replace(
                option, searched=searched, best=candidate, time_s=time_parts(candidate).step_s
            )
            with contextlib.suppress(AutoparError):
                if (better := self.known.lowered_beside(faster)) is not None:
                    return better
        return fitted

    def _most_promising(self, option: Option) -> Option:
        """The remaining option that is tried next after the time limit.

        First the fastest whose recomputation was counted to fit, then the others whose
        recomputation is decided, then the fastest that take at most `SURELY` of the memory by
        estimate, then those with the least memory. One try is left for the least of all.
        """

        def order(each: Option) -> tuple[bool, bool, bool, float, float]:
            is_large = each.estimated_bytes > SURELY * self.setting.budget_bytes
            sized = is_large and not each.is_decided
            size_bytes = each.estimated_bytes if sized else 0.0
            return (
                not each.is_counted_to_fit, not each.is_decided, sized, size_bytes, each.time_s
            )  # fmt: skip

        options = sorted([option, *(entry[-1] for entry in self.heap)], key=order)
        self.num_late += 1
        if self.num_late == self.max_late:
            options.sort(key=lambda each: (each.estimated_bytes, each.time_s))
        chosen = options.pop(0)
        self.heap = [(False, (n,), n, each) for n, each in enumerate(options)]
        return chosen

    def _fits(self, option: Option) -> bool:
        return self.search.pricing.fits(option, self.ratios.get(option.estimate_key, 1.0))

    def _push(self, option: Option) -> None:
        order = ranked(option.time_s, option.best.mesh)
        if option.choice is not None:
            order = (option.time_s, 0, ())
        fits = option.is_counted_to_fit
        if fits is None:
            fits = option.is_settled or self._fits(option)
        heapq.heappush(self.heap, (not fits, order, next(self.numbers), option))

    def _note_time(self, decided: Option) -> None:
        """Replace the estimated time of an option by that with what it recomputes."""
        name, times_s = str(decided), self.search.times_s
        known_s = times_s.get(name, math.inf) if name in self.exact else math.inf
        times_s[name] = min(decided.time_s, known_s)
        self.exact.add(name)

    def _refuse(self, option: Option, reason: str) -> None:
        name = str(option)
        self.search.times_s.pop(name, None)
        self.search.reasons[name] = reason

    # --- lowering -------------------------------------------------------------------------------
    def _lowered(self, option: Option) -> Fitted | None:
        """Lower an option; None if it does not fit, in which case smaller ones may be queued."""
        if not self.is_open:
            return self._counted(option)
        try:
            return self._counted(option)
        except AutoparError as error:
            self._refuse(option, str(error))
            self._give_up(option)
            return None

    def _counted(self, option: Option) -> Fitted | None:
        if option.recomputes and not option.is_decided:
            option = self.lowering.decided(option, min(self.cutoff_s, self.decided_s))
            if option.is_counted_to_fit:
                self.decided_s = min(self.decided_s, option.time_s)
            self._note_time(option)
            if not self.deadline.is_over or option.time_s >= self.cutoff_s:
                self._push(option)
                return None
        is_compared = option.trial == 0 and self._fits(option)
        if is_compared:
            option = self.known.or_faster(option)
        self.setting.progress(f"lower {option}, on mesh {option.best.mesh}")
        program, memories, update = self.lowering.lower(option)
        limit, memory = self.setting.limit, fullest(memories)
        needed, available = limit.tightest(memory)
        if needed <= available:
            fitted = Fitted(
                option=option, program=program, traces=self.lowering.traces_of(option.best),
                memory=memory, baselines=self.known.baselines(option), update=update,
                movement=option.movement,
            )  # fmt: skip
            return fitted if is_compared else self._rival(option, fitted) or fitted
        within = option.estimated_bytes * available / needed
        self.ratios[option.estimate_key] = self.setting.budget_bytes / within
        self.known.note_refused(option, within)
        self._refuse(
            option,
            f"would take {format_seconds(option.time_s)}, but needs {format_bytes(needed)} of "
            f"{format_bytes(available)}",
        )
        if self.moves and option.movement is None:
            self._push_moved(option)
        is_smaller = self._push_smaller(option, program)
        return self._smaller(option, CAUTION * within, is_smaller=is_smaller)

    def _push_smaller(self, option: Option, program: RankProgram) -> bool:
        """Queue the option with gathered parameters released, and with gradients scattered, if it
        then fits; with both only if neither alone fits. Whether it is queued."""
        leaner = self.search.leaner
        may_release, may_scatter = leaner.may_release(option), leaner.may_scatter(option)
        if not (may_release or may_scatter) or option.trial >= self.max_trials:
            return False
        self.setting.progress("count the memory with less kept from pass to pass")
        best, found = option.best, list[Candidate]()
        if may_release and (released := released_to_fit(program, self._is_small)) is not None:
            found.append(replace(best, released=released))
        if may_scatter and (scattered := scattered_to_fit(program, self._is_small)) is not None:
            found.append(replace(best, scattered=scattered))
        if not found and may_release and may_scatter:
            every = scatterable(program)
            released = released_to_fit(with_scattered(program, every), self._is_small)
            if released is not None:
                found.append(replace(best, released=released, scattered=every))
        for candidate in found:
            self._push_staged(option, (candidate,), option.trial + 1)
        return bool(found)

    def _is_small(self, program: RankProgram) -> bool:
        return self.setting.limit.fits(self.lowering.count(program))

    def _push_moved(self, option: Option) -> None:
        """Queue the option with what must move to the host to fit, if that is possible.

        Where the planner chooses when to update, it is the way that waits less.
        """
        setting, found = self.setting, list[Moved]()
        setting.progress(f"choose what {option} moves to the host")
        program = self.lowering.program(option)
        for update in self._updates_beside_movement(program):
            try:
                asked = replace(setting, update=update)
                updated, _, _ = self.lowering.updated(option, asked, in_steps=False)
                found.append(
                    moved_to_fit(
                        updated, option.best, setting.cluster.device, setting.optimizer,
                        setting.limit, update,
                    )
                )  # fmt: skip
            except MovementError as error:
                self.search.reasons.setdefault(f"{option}, offloaded", str(error))
                least = [b for b in (error.least_bytes, self.least_moved_bytes) if b is not None]
                self.least_moved_bytes = min(least, default=None)
        if found:
            moved = min(found, key=lambda each: (each.stall_s, each.moved_bytes))
            self._push(
                replace(
                    option, movement=moved, time_s=option.time_s + moved.stall_s,
                    trial=max(1, option.trial),
                )
            )  # fmt: skip

    def _updates_beside_movement(self, program: RankProgram) -> list[Update]:
        """The update that is asked for, or those between which the planner chooses."""
        setting = self.setting
        if setting.update is not None:
            return [setting.update]
        at_end, early = Update(when="at_end"), Update(when="early")
        return [at_end, early] if may_choose_early(setting, program) else [at_end]

    # --- the budget -----------------------------------------------------------------------------
    def _smaller(
        self, option: Option, target_bytes: float, *, is_smaller: bool = False
    ) -> Fitted | None:
        """Queue the option again, recomputed, and with a sharding within less memory.

        The latter is searched at once, unless the former may fit: its time is then a cutoff. Unless
        the option is queued with less kept from pass to pass (``is_smaller``), shardings that keep
        less are searched too. Returns a known strategy that fits if there is no such sharding.
        """
        may_fit = False
        if option.trial == 0 and self.search.leaner.may_recompute(option):
            may_fit = self._push_recomputed(option)
        if option.trial >= self.max_trials:
            return self._rival(option, None)
        postponed = Postponed(option=option, target_bytes=target_bytes, is_smaller=is_smaller)
        if may_fit:
            self.postponed.append(postponed)
            return None
        return self._searched(postponed)

    def _searched(self, postponed: Postponed, found: Fitted | None = None) -> Fitted | None:
        """Search an option within less memory, for a plan that is faster than what is ``found``."""
        search, option, cutoff_s = self.search, postponed.option, math.inf
        target_bytes, trial = postponed.target_bytes, postponed.option.trial + 1
        if found is not None:
            ranks = option.combination.num_devices
            cutoff_s = MOST_OVERLAP * search.most_work_s(self.cutoff_s, ranks)
        self.setting.progress(f"search within {format_bytes(target_bytes)}")
        is_smaller = postponed.is_smaller
        within = functools.partial(search.pricing.within, deadline=self.deadline)
        for form in search.leaner.of(option):
            if not is_smaller:
                smaller = within(option, target_bytes, cutoff_s, **form)
                is_smaller = any(each.is_found for each in smaller)
                if is_smaller:
                    self._push_staged(option, smaller, trial)
        shardings = within(option, target_bytes, cutoff_s)
        is_found = any(each.is_found for each in shardings)
        if not is_found and (is_smaller or found is not None):
            return None
        if not is_found:
            least_bytes = least_budget(shardings)
            if math.isfinite(least_bytes):  # the sharding with the least memory
                shardings, trial = within(option, least_bytes), self.max_trials
        if not any(each.is_found for each in shardings):
            self._refuse(
                option,
                f"no sharding found that fits {format_bytes(self.setting.budget_bytes)}",
            )
            return self._rival(option, None)
        self._push_staged(option, shardings, trial)
        return None

    def _push_recomputed(self, option: Option) -> bool:
        """Queue an option with blocks that recompute, as much and less kept from pass to pass.

        Whether one is estimated to fit.
        """
        best = option.best
        smaller = [
            self.search.pricing.with_form(best, **form) for form in self.search.leaner.of(option)
        ]
        smaller = [each for each in smaller if each.estimated_bytes() < best.estimated_bytes()]
        recomputing = replace(option, recomputes=True)
        pushed = [self._push_staged(recomputing, (each,), 1) for each in (best, *smaller)]
        return any(pushed)

    def _push_staged(self, option: Option, searched: tuple[Candidate, ...], trial: int) -> bool:
        """Queue an option again with other results of the search; whether it may fit."""
        try:
            other = self.search.pricing.option(
                option.combination, option.origin, option.choice, searched, trial,
                recomputes=option.recomputes,
            )  # fmt: skip
        except AutoparError as error:
            if not self.is_open:
                raise
            self.search.reasons.setdefault(str(option), str(error))
            return False
        self._push(other)
        return other.is_settled or self._fits(other)

    # --- known strategies -----------------------------------------------------------------------
    def _rival(self, option: Option, found: Fitted | None) -> Fitted | None:
        """The fastest known strategy that fits, if it is faster than ``found``.

        If there is neither, the options that were left out in favour of this one are queued.
        """
        rival = self.known.fitting(option, found)
        if rival is None and found is None:
            self._give_up(option)
        return rival

    def _give_up(self, option: Option) -> None:
        """Give up an option: queue those that were left out in its favour."""
        if self.is_open and option.choice is None:
            for other in self.search.with_more_microbatches(option):
                self._push(other)
