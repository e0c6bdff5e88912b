"""The interface of the solvers, and the state that makes them anytime.

A solver declares what it can do (``Capability``) and, in ``run``, offers assignments and raises the
bound on a ``Progress``. However the run ends (proof, time limit, memory cap), ``Progress`` has the
best assignment so far and a valid bound, which ``Progress.solution`` returns.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from autopar.search.problem import Method, Problem, Solution, Status, relative_gap

OPTIMAL_GAP = 1e-9


class OutOfTimeError(Exception):
    """The time limit was reached inside a computation; ``Progress`` has the best so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a search.

    time_limit_s: seconds of processor time for the whole call, but HiGHS counts what is left for it
    in wall time; None lets a solver finish its proof. gap: stop once the relative gap is at most
    this; 0 asks for the optimum. cutoff: stop once no assignment can cost less than this, for
    example if a better one is already known. table_cap_bytes: total memory of elimination tables.
    warm_start: an assignment to start from. max_steps: proposals of the Markov chain; None for its
    default. seed: for solvers that draw random numbers; equal seeds give equal answers.
    on_incumbent: called with every better ``Solution`` as soon as it is found.
    """

    time_limit_s: float | None = None
    gap: float = 0.0
    cutoff: float = math.inf
    table_cap_bytes: float = 1 << 30
    warm_start: Sequence[int] | None = None
    max_steps: int | None = None
    seed: int = 0
    on_incumbent: Callable[[Solution], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """The capabilities of a solver.

    memory: it respects a memory budget. proves: given time, it proves optimality.
    bounds: it gives a lower bound even when it stops early.
    """

    memory: bool
    proves: bool
    bounds: bool


class Solver(Protocol):
    """The interface of a solver."""

    @property
    def method(self) -> Method:
        """The name of the solver in ``solve``."""

    @property
    def capability(self) -> Capability:
        """The capabilities of the solver."""

    def refuses(self, problem: Problem, options: Options) -> str | None:
        """The reason why the solver cannot handle this problem, in one line, or None."""

    def run(self, problem: Problem, progress: Progress) -> None:
        """Offer assignments and raise the bound on ``progress`` until done or time is up."""


class Progress:
    """The best assignment and bound so far, and the time left."""

    def __init__(self, problem: Problem, options: Options) -> None:
        self.problem = problem
        self.options = options
        self.start_s = time.process_time()
        self.limit_s = math.inf if options.time_limit_s is None else options.time_limit_s
        self.assignment: tuple[int, ...] = ()
        self.cost = math.inf
        self.bound = -math.inf
        self.trail: list[str] = []
        self.note = ""
        self.infeasible: str | None = None
        self.least_feasible_budget: float | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds of processor time since the call started."""
        return time.process_time() - self.start_s

    @property
    def remaining_s(self) -> float:
        """Seconds left, +inf without a limit."""
        return self.limit_s if math.isinf(self.limit_s) else self.limit_s - self.elapsed_s

    @contextlib.contextmanager
    def limited_to(self, time_s: float) -> Iterator[None]:
        """Within the block, ``remaining_s`` is at most this."""
        limit = self.limit_s
        self.limit_s = min(limit, self.elapsed_s + time_s)
        try:
            yield
        finally:
            self.limit_s = limit

    @property
    def gap(self) -> float:
        """The current relative gap."""
        return relative_gap(self.cost, self.bound)

    @property
    def done(self) -> bool:
        """Whether to stop: gap closed, infeasible, above the cutoff, or time is up."""
        closed = self.infeasible is not None or self.gap <= max(self.options.gap, OPTIMAL_GAP)
        return closed or self.bound >= self.options.cutoff or self.remaining_s <= 0

    def check(self) -> None:
        """Raise ``OutOfTimeError`` once the time limit is reached."""
        if self.remaining_s <= 0:
            raise OutOfTimeError

    def enter(self, step: str) -> None:
        """Record a step of the search for ``Solution.method``."""
        if not self.trail or self.trail[-1] != step:
            self.trail.append(step)

    def offer(self, assignment: Sequence[int]) -> bool:
        """Keep the assignment if it is better and within the budget; returns whether it was."""
        cost = self.problem.cost(assignment)
        if not cost < self.cost or not self.problem.fits(assignment):
            return False
        self.cost = cost
        self.assignment = tuple(int(choice) for choice in assignment)
        if self.options.on_incumbent is not None:
            self.options.on_incumbent(self.solution())
        return True

    def raise_bound(self, bound: float) -> None:
        """Record that no assignment costs less than ``bound``; the result caps it at the cost."""
        self.bound = max(self.bound, bound)

    def prove_infeasible(self, message: str, least_feasible_budget: float | None = None) -> None:
        """Record that no assignment is allowed, or none within the budget."""
        self.infeasible = message
        self.least_feasible_budget = least_feasible_budget

    def solution(self) -> Solution:
        """The current answer."""
        method = "+".join(self.trail)
        if self.infeasible is not None:
            return Solution(
                assignment=(),
                cost=math.inf,
                status=Status.INFEASIBLE,
                bound=math.inf,
                gap=0.0,
                time_s=self.elapsed_s,
                method=method,
                least_feasible_budget=self.least_feasible_budget,
                message=self.infeasible,
            )
        bound = min(self.bound, self.cost)
        gap = relative_gap(self.cost, bound)
        status, message = Status.OPTIMAL, "proved optimal"
        if not math.isfinite(self.cost):
            status, message = Status.UNKNOWN, "stopped before any assignment was found"
        elif not math.isfinite(bound):
            status, message = Status.FEASIBLE, "no bound is known"
        elif gap > OPTIMAL_GAP:
            status, message = Status.FEASIBLE, f"within {gap:.3%} of the optimum"
        return Solution(
            assignment=self.assignment,
            cost=self.cost,
            status=status,
            bound=bound,
            gap=0.0 if status is Status.OPTIMAL else gap,
            time_s=self.elapsed_s,
            method=method,
            memory=self.problem.memory(self.assignment) if self.assignment else (),
            message=f"{message}; {self.note}" if self.note else message,
        )
