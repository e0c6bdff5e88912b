"""An option of a plan: one way to train, priced, without or with a schedule of stages.

In: candidates, the results of searching a combination's sharding, and perhaps a schedule over their
stages. Out: one value with its time and its memory, which the search compares and the budget loop
(`autopar.planning.fit`) lowers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from autopar.lowering.program import Traces
from autopar.lowering.types import RankProgram
from autopar.memory.program import ProgramMemory
from autopar.planning.baselines import Baselines
from autopar.planning.combinations import WITHIN_LAYERS, Combination
from autopar.planning.movement import Moved
from autopar.planning.space import PipelineChoice
from autopar.planning.staging import Staged
from autopar.plans.parts import UpdatePlan
from autopar.pricing.candidate import Candidate
from autopar.pricing.problem import WHOLE, Residence

NEARLY = 1.25
"""What is estimated to take up to so many times the memory may turn out to fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to train, priced; without a pipeline it has neither ``choice`` nor ``staged``.

    ``origin`` are the results of the search without a memory limit, on one mesh or several,
    ``searched`` those of the last search, and ``best`` is the fastest of the latter. ``trial``: how
    often it was searched again within less memory because its counted memory did not fit.
    ``recomputes``: blocks recompute, until ``is_decided`` by an estimate that saves
    ``saved_bytes``, or, if the user fixes what is recomputed, as if they ran whole forward passes.
    ``is_counted_to_fit``: whether what was decided is within the memory, None if that was not
    counted. ``movement``: what moves to the host. ``residence``: the fraction of the model that a
    pipeline rank holds, ``held`` the fraction if nothing is recomputed.
    """

    combination: Combination
    origin: tuple[Candidate, ...]
    searched: tuple[Candidate, ...]
    best: Candidate
    time_s: float
    choice: PipelineChoice | None = None
    staged: Staged | None = None
    held: Residence = WHOLE
    residence: Residence = WHOLE
    trial: int = 0
    recomputes: bool = False
    is_decided: bool = False
    is_counted_to_fit: bool | None = None
    saved_bytes: float | None = None
    movement: Moved | None = None

    @property
    def is_simulated(self) -> bool:
        """Whether its time is that of a step, and not a lower bound."""
        return self.choice is None or self.staged is not None

    @property
    def generator(self) -> str:
        """The schedule's name without its options; empty without a pipeline."""
        return "" if self.choice is None else self.choice.schedule.name.split(",")[0]

    @property
    def estimate_key(self) -> tuple[str, bool, bool, bool]:
        """Key of options whose memory estimate is assumed to be off by the same ratio."""
        best = self.best
        return self.generator, self.recomputes, bool(best.released), bool(best.scattered)

    @property
    def is_settled(self) -> bool:
        """Whether its memory is not to be estimated: it has been lowered to make it fit."""
        return self.is_decided or self.movement is not None

    @property
    def estimated_bytes(self) -> float:
        """Estimated memory of the device that holds most, as a search within a budget counts it."""
        return self.best.estimated_bytes(self.residence)

    @property
    def needed_bytes(self) -> float:
        """Estimated memory with what it is estimated to recompute, if that is searched."""
        return needed_bytes(self.best, self.held, self.residence, self.saved_bytes)

    def __str__(self) -> str:
        recomputed = ", recomputed" * self.recomputes
        recomputed += ", offloaded" * (self.movement is not None)
        if self.choice is None:
            return f"{self.combination}{recomputed}"
        within = f", {WITHIN_LAYERS}" * bool(self.combination.block_cuts)
        schedule, shape = self.choice.schedule.name, self.choice.schedule.shape
        return (
            f"{schedule}, {shape.num_stages} stages on {shape.num_devices}, "
            f"{shape.num_microbatches} micro-batches{within}{recomputed}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A lowered option whose counted memory fits, with the traces of its strategy's blocks."""

    option: Option
    program: RankProgram
    traces: Traces
    memory: ProgramMemory
    baselines: Baselines
    update: UpdatePlan
    movement: Moved | None = None


def needed_bytes(
    candidate: Candidate, held: Residence, residence: Residence, saved_bytes: float | None
) -> float:
    """Estimated memory of a candidate of an `Option` with these fields."""
    if saved_bytes is None:
        return candidate.estimated_bytes(residence)
    return candidate.estimated_bytes(held) - saved_bytes


def with_form(
    candidate: Candidate, *, released: bool = False, scattered: bool = False
) -> Candidate:
    """A candidate in a form of `autopar.planning.leaner`."""
    every = candidate.priced.parameters()
    return replace(
        candidate,
        released=every if released else candidate.released,
        scattered=every if scattered else candidate.scattered,
    )


def dominating(option: Option, others: Iterable[Option]) -> Option | None:
    """Another form of the option's generator that is no slower and holds no more, if there is one.

    Of equal ones, the one with the first name. Other generators do not count, as estimates of their
    memory are off by other ratios: ZB-H1's is too low, since its W run later.
    """

    def cost(each: Option) -> tuple[float, float, float, str]:
        held = each.residence
        return each.time_s, held.weights, held.activations, str(each)

    for other in others:
        is_less = all(a <= b for a, b in zip(cost(other)[:3], cost(option)[:3]))
        if is_less and other.generator == option.generator and cost(other) < cost(option):
            return other
    return None
