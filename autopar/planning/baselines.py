"""Baselines: the known strategies at the plan's own prices.

In: the graph priced on every candidate mesh. Out: the step time of each known strategy on its best
mesh, or the reason why it does not apply.

A strategy forces one kind of parallelism (`autopar.planning.known`) on every mesh axis; the search
optimizes the rest, so each baseline is at its best. Data parallelism and its ZeRO variants take the
outer axes, tensor parallelism the last, which uses the fastest links:

=======================  =========================================================================
data parallel            parameters, gradients and optimizer state whole on every device
ZeRO-1, ZeRO-2           parameters gathered once per step, kept until their last use, updated by
                         shards. A gradient is reduce-scattered as soon as it is complete, so the
                         two differ only over micro-batches: ZeRO-2 reduces it in each, and
                         accumulates shards, while ZeRO-1 accumulates whole gradients
ZeRO-3                   as ZeRO-2, with parameters released after the forward pass, and gathered
                         again for the backward pass
data x ZeRO-3            hybrid (HSDP): ZeRO-3 over the inner axes, data parallelism over the
                         outermost one; with tensor parallelism on a mesh of three axes
one weird trick          see `autopar.planning.known`
FlexFlow's Markov chain  FlexFlow's search on the plan's own mesh and prices, starting from data
                         parallelism, with as many proposals as planning has time for
=======================  =========================================================================

All of them are plans that the runtime can run. None of the baselines is a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.base.errors import ConstraintError
from autopar.ir.mesh import Mesh
from autopar.planning.constraints import narrowed
from autopar.planning.known import Forces, Mask, Masks, Parallelism
from autopar.plans.strategy_names import (
    ALONG_DATA,
    ALONG_TENSORS,
    DATA,
    HYBRID,
    MARKOV_CHAIN,
    MEGATRON,
    MEGATRON_SEQUENCE,
    ONE_WEIRD_TRICK,
    TENSOR,
    ZERO1,
    ZERO2,
    ZERO3,
    name_of,
)
from autopar.pricing.candidate import Candidate
from autopar.pricing.moves import Array
from autopar.pricing.problem import PricedGraph
from autopar.pricing.step_time import time_parts
from autopar.search import Solution, solve, solve_each

TENSOR_FORMS: Mapping[str, Parallelism] = {
    TENSOR: Parallelism.TENSOR_PARALLEL,
    MEGATRON: Parallelism.MEGATRON,
    MEGATRON_SEQUENCE: Parallelism.MEGATRON_SEQUENCE,
}

MARKOV_STEPS_PER_NODE, MARKOV_LEAST_STEPS, MARKOV_MOST_STEPS = 30, 20_000, 60_000
LIMIT_S = 10.0
"""Time limit of the search for one strategy on one mesh, which has little left to choose."""


Key = tuple[str, str]
"""Names of what a strategy does along the data-parallel axes and along the tensor-parallel axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A known strategy on a mesh: its step time and its memory per device (estimated node by node).

    ``candidate`` is the strategy itself.
    """

    mesh: Mesh
    time_s: float
    memory_bytes: float
    candidate: Candidate
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    """The known strategies that apply, by name, and the reasons against the others.

    ``fitting_bytes``: see `autopar.plans.parts.SearchReport`.
    """

    found: Mapping[str, Baseline]
    missing: Mapping[str, str]
    fitting_bytes: float | None = None

    def executable(self) -> list[Candidate]:
        """The strategies, fastest first."""
        found = sorted(self.found.values(), key=lambda baseline: baseline.time_s)
        return [each.candidate for each in found]


KEYS: tuple[Key, ...] = (
    *((data, tensor) for tensor in ("", *ALONG_TENSORS) for data in ALONG_DATA),
    *(("", tensor) for tensor in ALONG_TENSORS),
    (ONE_WEIRD_TRICK, ""),
    (MARKOV_CHAIN, ""),
)
"""All known strategies, in the order of the report."""


def price_baselines(
    priced: Sequence[PricedGraph],
    best: Candidate | None = None,
    *,
    steps_per_node: int = MARKOV_STEPS_PER_NODE,
) -> Baselines:
    """Price every known strategy on its best mesh.

    ``best`` is the plan's strategy: the Markov chain searches on its mesh, with ``steps_per_node``
    proposals per node within limits, and is omitted without it.
    """
    table = _Table()
    has_line = any(graph.pricing.mesh.num_axes == 1 for graph in priced)
    for graph in dict.fromkeys(priced):  # one priced graph may have been searched several times
        _price_on(graph, table, pure=graph.pricing.mesh.num_axes == 1 or not has_line)
    if best is not None:
        table.take((MARKOV_CHAIN, ""), _markov_chain(best, steps_per_node))
    wanted = [key for key in KEYS if best is not None or key[0] != MARKOV_CHAIN]
    return Baselines(
        found={name_of(*key): table.found[key] for key in wanted if key in table.found},
        missing={name_of(*key): table.why(key) for key in wanted if key not in table.found},
    )


class _Table:
    """The best result of each strategy so far, or the first reason against it."""

    def __init__(self) -> None:
        self.found: dict[Key, Baseline] = {}
        self.reasons: dict[Key, str] = {}

    def take(self, key: Key, baseline: Baseline) -> None:
        known = self.found.get(key)
        if known is None or baseline.time_s < known.time_s:
            self.found[key] = baseline

    def refuse(self, key: Key, reason: str) -> None:
        """Record a reason, also for the strategies that share this one's sharding."""
        data, tensor = key
        for follower in (data, *_FOLLOWERS.get(data, ())):
            self.reasons.setdefault((follower, tensor), reason)

    def why(self, key: Key) -> str:
        needed = "it needs a mesh of 2 axes, which the devices do not form"
        if key[0] == HYBRID and key[1]:
            mesh = dict.fromkeys(("replicate", "shard", "tensor"))
            needed = f"it needs a mesh of 3 axes: plan with mesh={mesh}"
        return self.reasons.get(key, needed)


# Strategies with the sharding of a forced one, and so missing with it.
_FOLLOWERS = {ZERO3: (ZERO1, ZERO2)}


def _price_on(graph: PricedGraph, table: _Table, *, pure: bool) -> None:
    """Price every strategy on one mesh."""
    combinations = _Combinations(graph)
    variants: list[tuple[Key, tuple[Array, ...]]] = []
    for key, kinds in _forced_strategies(graph.pricing.mesh.num_axes, pure=pure):
        try:
            variants.append((key, combinations.costs(kinds)))
        except ConstraintError as error:
            table.refuse(key, str(error).partition(": ")[2])  # drop the axis's name
    costs = [each for _, each in variants]
    solutions = solve_each(graph.problem(), costs, time_limit_s=LIMIT_S)
    for (key, _), solution in zip(variants, solutions):
        if not solution.assignment:
            table.refuse(key, f"the search found none on {graph.pricing.mesh}: {solution.message}")
            continue
        candidate = Candidate(priced=graph, solution=solution)
        for other, form in _forms(key, candidate):
            table.take(other, _searched(form))


def _forced_strategies(
    num_axes: int, *, pure: bool
) -> Iterator[tuple[Key, tuple[Parallelism, ...]]]:
    """Strategies and the kind of parallelism on each axis, outermost first."""
    data, zero3 = Parallelism.DATA_PARALLEL, Parallelism.ZERO3
    if pure:
        yield (DATA, ""), (data,) * num_axes
        yield (ZERO3, ""), (zero3,) * num_axes
        yield (ONE_WEIRD_TRICK, ""), (Parallelism.ONE_WEIRD_TRICK,) * num_axes
        for tensor, kind in TENSOR_FORMS.items():
            yield ("", tensor), (kind,) * num_axes
    if num_axes > 1:
        yield (HYBRID, ""), (data, *(zero3,) * (num_axes - 1))
        for tensor, kind in TENSOR_FORMS.items():
            yield (DATA, tensor), (*(data,) * (num_axes - 1), kind)
            yield (ZERO3, tensor), (*(zero3,) * (num_axes - 1), kind)
    if num_axes > 2:
        for tensor, kind in TENSOR_FORMS.items():
            yield (HYBRID, tensor), (data, *(zero3,) * (num_axes - 2), kind)


class _Combinations:
    """Node costs with one forced kind per axis; caches the masks of each kind and axis."""

    def __init__(self, graph: PricedGraph) -> None:
        self.graph = graph
        self.forces = Forces(graph)
        self.known: dict[tuple[Parallelism, int], Masks | ConstraintError] = {}

    def costs(self, kinds: Sequence[Parallelism]) -> tuple[Array, ...]:
        """Node costs under ``kinds``; where two of them conflict at a node, the outer axis wins.

        Raises ConstraintError if one of them does not apply on its axis.
        """
        together: Masks = {}
        pairs: dict[tuple[int, int], Mask | None] = {}  # alike nodes share their masks
        for axis, kind in enumerate(kinds):
            for node, mask in self._masks(kind, axis).items():
                outer = together.get(node)
                key = id(outer), id(mask)
                if key not in pairs:
                    both = mask if outer is None else outer & mask
                    pairs[key] = both if both.any() else outer
                if (found := pairs[key]) is not None:
                    together[node] = found
        return narrowed(self.graph, together)

    def _masks(self, kind: Parallelism, axis: int) -> Masks:
        key = (kind, axis)
        if key not in self.known:
            try:
                self.known[key] = self.forces.masks(kind, axis)
            except ConstraintError as error:
                self.known[key] = error
        found = self.known[key]
        if isinstance(found, ConstraintError):
            raise found
        return found


def _searched(candidate: Candidate) -> Baseline:
    return Baseline(
        mesh=candidate.mesh,
        time_s=time_parts(candidate).step_s,
        memory_bytes=candidate.estimated_bytes(),
        candidate=candidate,
    )


def _forms(key: Key, candidate: Candidate) -> Iterator[tuple[Key, Candidate]]:
    """The strategies with one sharding: gathered parameters are kept or released, gradients
    accumulated whole or as shards."""
    data, tensor = key
    every = candidate.priced.parameters()
    scattered = replace(candidate, scattered=every) if candidate.num_microbatches > 1 else candidate
    if data in (ZERO3, HYBRID):
        yield key, replace(scattered, released=every)
    else:
        yield key, candidate
    if data == ZERO3:
        yield (ZERO1, tensor), candidate
        yield (ZERO2, tensor), scattered


def _markov_chain(best: Candidate, steps_per_node: int) -> Baseline:
    """FlexFlow's search on the plan's mesh, starting from data parallelism if that applies."""
    problem = best.priced.problem()
    num_steps = max(MARKOV_LEAST_STEPS, steps_per_node * problem.num_nodes)
    num_steps = min(num_steps, MARKOV_MOST_STEPS)
    found = solve(
        problem, method="mcmc", max_steps=num_steps, warm_start=_data_parallel(best.priced)
    )
    return replace(
        _searched(Candidate(priced=best.priced, solution=found)),
        note=f"{num_steps:,} proposals",
    )


def _data_parallel(graph: PricedGraph) -> Sequence[int] | None:
    kinds = (Parallelism.DATA_PARALLEL,) * graph.pricing.mesh.num_axes
    try:
        costs = _Combinations(graph).costs(kinds)
    except ConstraintError:
        return None
    found: Solution = solve_each(graph.problem(), [costs], time_limit_s=LIMIT_S)[0]
    return found.assignment or None
