"""Search for the best schedule at given costs: every generator, list schedules, local search.

In: a ``SearchProblem`` of numbers per block (a layer or a run of layers). Out: a ``SearchResult``
whose schedule is no longer than that of any candidate that fits the memory cap, with all candidates
and a lower bound for any order on that shape. Adjacent blocks are grouped into stages, balanced on
F + I + W, so that schedules with one, two and more stages per device compete on the same model. Its
user is ``benchmarks/schedules.py``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from autopar.base.errors import ScheduleError
from autopar.schedules.action import Kind
from autopar.schedules.generators.build import GENERATORS
from autopar.schedules.generators.forms import forms
from autopar.schedules.generators.lower_bound import lower_bound_s
from autopar.schedules.generators.refine import (
    ROUNDING,
    TOLERANCE,
    Costs,
    exact,
    improved,
    is_plain,
    list_orders,
    split_backwards,
)
from autopar.schedules.generators.shapes import chain_shape, looped_shape, v_shape
from autopar.schedules.schedule import PipelineShape, Schedule
from autopar.schedules.simulate.durations import Durations, Links, Memory, is_number
from autopar.schedules.simulate.simulator import simulate
from autopar.schedules.transforms.reductions import with_reductions
from autopar.schedules.verify import verify

_MOST_WORK = 4_000_000  # moves times actions: a few seconds per restart


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchProblem:
    """A model and a pipeline to schedule: sizes, costs and limits.

    Costs are one number for all blocks or one per block; ``max_memory_bytes`` caps each device.
    ``reduces`` adds gradient reductions of ``durations.G`` seconds per block. ``generators``
    restricts the named candidates (default: all that fit the shape); list schedules always compete.
    Backwards are split, so ``durations`` must give I and W. Raises ScheduleError for costs whose
    length is not ``num_blocks``, and for numbers out of range.
    """

    num_devices: int
    num_microbatches: int
    num_blocks: int
    durations: Durations
    links: Links | None = None
    memory: Memory = field(default_factory=Memory)
    max_memory_bytes: float = float("inf")
    reduces: bool = False
    generators: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("num_devices", "num_microbatches", "num_blocks"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ScheduleError(f"{name}={value!r}: a whole number, at least 1")
        if self.num_devices > self.num_blocks:
            raise ScheduleError(
                f"num_devices={self.num_devices}, num_blocks={self.num_blocks}: give each device "
                "at least one block"
            )
        if not is_number(self.max_memory_bytes) or not self.max_memory_bytes >= 0:
            raise ScheduleError(
                f"max_memory_bytes={self.max_memory_bytes!r}: a number of bytes, inf for no cap"
            )
        if not isinstance(self.durations, Durations):
            raise ScheduleError(
                f"durations={self.durations!r}: pass Durations(F=1.0, I=1.0, W=1.0)"
            )
        self.durations.split_table(self.num_blocks)
        self.memory.grouped((1,) * self.num_blocks)
        if self.links is not None:
            self.links.boundary_bytes(self.num_blocks)
            self.links.check_devices(self.num_devices)
        names = self.generators or ()
        if isinstance(names, str) or any(name not in GENERATORS for name in names):
            raise ScheduleError(
                f"generators={names!r}: a tuple of some of the names {sorted(GENERATORS)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A schedule that was tried; ``sizes`` are the numbers of blocks per stage."""

    name: str
    options: Mapping[str, Any]
    sizes: tuple[int, ...]
    schedule: Schedule
    makespan_s: float
    peak_memory_bytes: float
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best candidate, all candidates, and a lower bound for the best one's shape."""

    best: Candidate
    candidates: tuple[Candidate, ...]
    lower_bound_s: float

    @property
    def gap(self) -> float:
        """The relative distance of the best schedule from the bound."""
        return self.best.makespan_s / self.lower_bound_s - 1.0 if self.lower_bound_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Staged:
    """The problem with its blocks grouped into stages."""

    problem: SearchProblem
    sizes: tuple[int, ...]
    durations: Durations
    links: Links | None
    memory: Memory

    @property
    def costs(self) -> Costs:
        caps = [self.problem.max_memory_bytes] * self.problem.num_devices
        return Costs(durations=self.durations, links=self.links, memory=self.memory, max_bytes=caps)


def balanced_sizes(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Sizes of ``num_stages`` runs of adjacent blocks that minimize the largest cost."""
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)

    @cache
    def best(count: int, stages: int) -> tuple[float, tuple[int, ...]]:
        if stages == 1:
            return prefix[count], (count,)
        options = []
        for last in range(1, count - stages + 2):
            largest, sizes = best(count - last, stages - 1)
            options.append((max(largest, prefix[count] - prefix[count - last]), (*sizes, last)))
        return min(options)

    return best(len(costs), num_stages)[1]


def search_schedule(
    problem: SearchProblem,
    *,
    num_moves: int = 20_000,
    num_starts: int = 2,
    num_restarts: int = 3,
    exact_time_s: float = 0.0,
    seed: int = 0,
) -> SearchResult:
    """Try every candidate, then improve the best ``num_starts`` of them by local search.

    Each is improved ``num_restarts`` times by ``num_moves`` moves, fewer for schedules of over 200
    actions. Deterministic for a seed if ``exact_time_s`` is 0; otherwise CP-SAT gets that many
    seconds to improve the result and the bound. Set ``Memory.weight_bytes`` to count copies of the
    weights (Chimera, DualPipe). Raises ScheduleError if nothing fits the memory cap, or for a
    negative count.
    """
    _check_limits(num_moves, num_starts, num_restarts, exact_time_s, seed)
    candidates: list[Candidate] = []
    staged: dict[tuple[int, ...], _Staged] = {}
    for view in _views(problem):
        staged[view.sizes] = view
        for name, options, schedule in (*_generated(view), *_listed(view)):
            candidates.append(_candidate(view, name, options, schedule))
    fitting = sorted((item for item in candidates if item.fits), key=_makespan)
    if not fitting:
        least = min((item.peak_memory_bytes for item in candidates), default=float("inf"))
        raise ScheduleError(
            f"no schedule fits max_memory_bytes={problem.max_memory_bytes}; the least that any "
            f"needs is {least}"
        )
    pool = list(fitting)
    for start in _starts(fitting, num_starts):
        for restart in range(num_restarts):
            found = _improved(staged[start.sizes], start, num_moves, seed + restart)
            pool += [found] if found.fits else []
    bounds: dict[PipelineShape, float] = {}
    for start in _starts(sorted(pool, key=_makespan), 1) if exact_time_s > 0 else ():
        found, bounds[start.schedule.shape] = _exact(staged[start.sizes], start, exact_time_s)
        pool += [found] if found.fits else []
    best = min(pool, key=_makespan)
    least = lower_bound_s(best.schedule.shape, staged[best.sizes].durations)
    least = max(least, bounds.get(best.schedule.shape, 0.0))
    if problem.reduces:
        pool = [_reduced(staged[item.sizes], item) for item in pool]
        best = min(pool, key=_makespan)
        least = lower_bound_s(best.schedule.shape, staged[best.sizes].durations)
    verify(best.schedule)
    rejected = [item for item in candidates if not item.fits]
    return SearchResult(best=best, candidates=(*pool, *rejected), lower_bound_s=least)


def _check_limits(
    num_moves: int, num_starts: int, num_restarts: int, exact_time_s: float, seed: int
) -> None:
    for name, count in (
        ("num_moves", num_moves),
        ("num_starts", num_starts),
        ("num_restarts", num_restarts),
    ):
        if type(count) is not int or count < 0:
            raise ScheduleError(f"{name}={count!r}: a whole number, 0 for no local search")
    if not is_number(exact_time_s) or not 0 <= exact_time_s < float("inf"):
        raise ScheduleError(f"exact_time_s={exact_time_s!r}: a finite number of seconds >= 0")
    if type(seed) is not int:
        raise ScheduleError(f"seed={seed!r}: a whole number")


def _makespan(candidate: Candidate) -> float:
    return candidate.makespan_s


def _starts(fitting: Sequence[Candidate], count: int) -> list[Candidate]:
    """The best candidates that differ in shape or in length, without recomputation and spans."""
    chosen: list[Candidate] = []
    for item in fitting:
        if (
            is_plain(item.schedule)
            and len(chosen) < count
            and all(
                (item.sizes, item.schedule.shape) != (other.sizes, other.schedule.shape)
                or item.makespan_s > other.makespan_s * (1 + TOLERANCE)
                for other in chosen
            )
        ):
            chosen.append(item)
    return chosen


def _views(problem: SearchProblem) -> Iterator[_Staged]:
    """The blocks grouped into 1 to 4 stages per device, as far as there are blocks."""
    table = problem.durations.table(problem.num_blocks)
    costs = [sum(parts) for parts in zip(table[Kind.F], table[Kind.I], table[Kind.W])]
    for per_device in (1, 2, 3, 4):
        num_stages = per_device * problem.num_devices
        if num_stages > problem.num_blocks:
            break
        sizes = balanced_sizes(costs, num_stages)
        yield _Staged(
            problem=problem,
            sizes=sizes,
            durations=problem.durations.grouped(sizes),
            links=problem.links.grouped(sizes) if problem.links else None,
            memory=problem.memory.grouped(sizes),
        )


def _generated(view: _Staged) -> Iterator[tuple[str, Mapping[str, Any], Schedule]]:
    problem = view.problem
    for form in forms(problem.num_devices, len(view.sizes), problem.num_microbatches):
        if problem.generators is not None and form.name not in problem.generators:
            continue
        try:
            schedule = form.build(view.durations, view.links)
        except ScheduleError:  # no such schedule for these numbers
            continue
        yield form.name, form.options, schedule


def _shapes(view: _Staged) -> Iterator[PipelineShape]:
    devices, stages = view.problem.num_devices, len(view.sizes)
    batches = view.problem.num_microbatches
    if stages == devices:
        yield chain_shape(stages, batches)
    else:
        yield looped_shape(stages, batches, devices)
    if stages == 2 * devices:
        yield v_shape(stages, batches)


def _listed(view: _Staged) -> Iterator[tuple[str, dict[str, Any], Schedule]]:
    """List schedules under the memory cap, over several priorities and patiences."""
    for shape in _shapes(view):
        for options, schedule in list_orders(shape, view.costs):
            yield "list", options, schedule


def _candidate(
    view: _Staged, name: str, options: Mapping[str, Any], schedule: Schedule
) -> Candidate:
    timeline = simulate(schedule, view.durations, view.links, memory=view.memory)
    peak = max(timeline.peak_memory_bytes)
    return Candidate(
        name=name,
        options=options,
        sizes=view.sizes,
        schedule=schedule,
        makespan_s=timeline.makespan_s,
        peak_memory_bytes=peak,
        fits=peak <= view.problem.max_memory_bytes * (1 + TOLERANCE),
    )


def _exact(view: _Staged, start: Candidate, time_limit_s: float) -> tuple[Candidate, float]:
    """CP-SAT's best schedule on the candidate's shape, hinted with the candidate, and its bound."""
    found, bound_s = exact(start.schedule, view.costs, time_limit_s)
    if found is start.schedule:
        return start, bound_s
    candidate = _candidate(view, "cp_sat", start.options, found)
    proved = candidate.makespan_s <= bound_s * (1 + ROUNDING)
    return replace(candidate, options={**start.options, "proved": proved}), bound_s


def _improved(view: _Staged, start: Candidate, num_moves: int, seed: int) -> Candidate:
    """The candidate after local search, with its B's split."""
    num_moves = min(num_moves, _MOST_WORK // split_backwards(start.schedule).num_actions)
    found = improved(start.schedule, view.costs, num_moves=num_moves, seed=seed)
    return _candidate(view, f"{start.name}+local", start.options, found)


def _reduced(view: _Staged, candidate: Candidate) -> Candidate:
    schedule = with_reductions(candidate.schedule, view.durations, view.links)
    return _candidate(view, candidate.name, candidate.options, schedule)
