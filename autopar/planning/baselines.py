"""Baselines: the known strategies at the plan's own prices.

In: the graph priced on every candidate mesh. Out: the step time of each known strategy on its best
mesh, or the reason why it does not apply.

A strategy forces one kind of parallelism (`autopar.planning.known`) on every mesh axis; the search
optimizes the rest, so each baseline is at its best. Data parallelism and its ZeRO variants take the
outer axes, tensor parallelism the last, which uses the fastest links:

=======================  =========================================================================
data parallel            forced and searched
ZeRO-1, ZeRO-2           by formula, from data parallelism: every gradient is reduce-scattered
                         instead of all-reduced, a device updates its shard of every parameter,
                         and the parameters are all-gathered. Equal in time; ZeRO-2 keeps a shard
                         of the gradients, ZeRO-1 all of them
ZeRO-3                   forced and searched: gathered for the forward pass and kept until the
                         backward pass is done
ZeRO-3, gathered twice   by formula, from ZeRO-3: released after the forward pass and gathered
                         again for the backward pass
data x ZeRO-3            hybrid: parameters sharded over a subgroup of the data-parallel devices.
                         Forced and searched; with tensor parallelism (three axes) by formula if
                         the mesh has two
one weird trick          forced and searched
FlexFlow's Markov chain  FlexFlow's search on the plan's own mesh and prices, starting from data
                         parallelism, with as many proposals as planning has time for
=======================  =========================================================================

The runtime cannot run those priced by formula (it updates a parameter as it is stored, and gathers
it once per step), or only on a mesh that the planner does not try by default. None of the baselines
is a pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from autopar.base.errors import ConstraintError
from autopar.ir.graph import Value, ValueKind
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placements, R, State, local_shape
from autopar.planning.constraints import narrowed
from autopar.planning.known import Forces, Masks, Parallelism
from autopar.plans.strategy_names import (
    ALONG_DATA,
    ALONG_TENSORS,
    DATA,
    GATHERED_TWICE,
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
from autopar.pricing.moves import Array, slowest_groups
from autopar.pricing.problem import NodeKind, PricedGraph
from autopar.pricing.step_time import Change, time_parts
from autopar.pricing.tables import OpTable
from autopar.search import Solution, solve, solve_each

TENSOR_FORMS: Mapping[str, Parallelism] = {
    TENSOR: Parallelism.TENSOR_PARALLEL,
    MEGATRON: Parallelism.MEGATRON,
    MEGATRON_SEQUENCE: Parallelism.MEGATRON_SEQUENCE,
}

MARKOV_STEPS_PER_NODE, MARKOV_LEAST_STEPS = 30, 20_000
LIMIT_S = 10.0
"""Time limit of the search for one strategy on one mesh, which has little left to choose."""


Key = tuple[str, str]
"""Names of what a strategy does along the data-parallel axes and along the tensor-parallel axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A known strategy on a mesh: its step time and its memory per device (estimated node by node).

    ``candidate`` is the strategy itself, None if the runtime cannot run it on this mesh.
    """

    mesh: Mesh
    time_s: float
    memory_bytes: float
    note: str = ""
    candidate: Candidate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    """The known strategies that apply, by name, and the reasons against the others."""

    found: Mapping[str, Baseline]
    missing: Mapping[str, str]

    def executable(self) -> list[Candidate]:
        """The strategies that the runtime can run, fastest first."""
        found = sorted(self.found.values(), key=lambda baseline: baseline.time_s)
        return [each.candidate for each in found if each.candidate is not None]


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
    proposals per node, and is omitted without it.
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
        """Record a reason, also for the strategies derived from this one by formula."""
        data, tensor = key
        for follower in (data, *_FOLLOWERS.get(data, ())):
            self.reasons.setdefault((follower, tensor), reason)

    def why(self, key: Key) -> str:
        num_axes = 3 if key[0] == HYBRID and key[1] else 2
        return self.reasons.get(
            key, f"it needs a mesh of {num_axes} axes, which the devices do not form"
        )


# Strategies derived by formula from a forced one, and so missing with it.
_FOLLOWERS = {DATA: (ZERO1, ZERO2, HYBRID), ZERO3: (GATHERED_TWICE,)}


def _price_on(graph: PricedGraph, table: _Table, *, pure: bool) -> None:
    """Price every strategy on one mesh: forced ones by search, the others by formula."""
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
        table.take(key, _searched(candidate))
        for other, baseline in _by_formula(key, candidate):
            table.take(other, baseline)


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
        for axis, kind in enumerate(kinds):
            for node, mask in self._masks(kind, axis).items():
                both = together[node] & mask if node in together else mask
                if both.any():
                    together[node] = both
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


def _by_formula(key: Key, candidate: Candidate) -> Iterator[tuple[Key, Baseline]]:
    """Strategies that differ from a searched one only in the collectives of its parameters."""
    data, tensor = key
    num_axes = candidate.mesh.num_axes
    axes = tuple(range(num_axes - 1 if tensor else num_axes))
    if data == DATA:
        zero1, zero2 = _zero_1_and_2(candidate, axes)
        yield (ZERO1, tensor), zero1
        yield (ZERO2, tensor), zero2
        if tensor and num_axes == 2:
            for hybrid in _hybrids(candidate):
                yield (HYBRID, tensor), hybrid
    if data == ZERO3:
        yield (GATHERED_TWICE, tensor), _gathered_twice(candidate, axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parameter:
    """A trained parameter in a strategy: its stored and needed placements, and its update time."""

    value: Value
    stored: Placements
    needed: Placements
    update_s: float


def _parameters(candidate: Candidate) -> Iterator[_Parameter]:
    """Every trained parameter that is used, with the one move from its stored placement."""
    priced, picks = candidate.priced, candidate.solution.assignment
    graph = priced.pricing.graph
    stored = {
        node: graph.values[decision.index]
        for node, decision in enumerate(priced.nodes)
        if decision.kind == NodeKind.STORED
    }
    for i, j in priced.edges:
        node, user = (i, j) if i in stored else (j, i)
        value = stored.get(node)
        if value is None or value.kind is not ValueKind.PARAMETER or not value.differentiable:
            continue
        yield _Parameter(
            value=value,
            stored=_placement(priced, node, picks[node]),
            needed=_needed(priced, user, picks[user], value),
            update_s=float(priced.tables[node].cost_s[picks[node]]),
        )


def _placement(priced: PricedGraph, node: int, pick: int) -> Placements:
    table = priced.tables[node]
    assert not isinstance(table, OpTable)
    return table.placements.at(pick)


def _needed(priced: PricedGraph, user: int, pick: int, value: Value) -> Placements:
    table = priced.tables[user]
    if not isinstance(table, OpTable):
        return _placement(priced, user, pick)
    op = priced.pricing.graph.ops[priced.nodes[user].index]
    return table.needs[op.inputs.index(value.index)].at(pick)


def _bytes(value: Value, placements: Placements, mesh: Mesh, dtype: torch.dtype) -> int:
    return math.prod(local_shape(value.shape, placements, mesh)) * dtype.itemsize


def _sizes(parameter: _Parameter, mesh: Mesh) -> tuple[int, int, int]:
    """Bytes of its part as it is stored, is gathered, and has its gradients summed."""
    value, stored = parameter.value, parameter.stored
    dtypes = value.stored_dtype, value.dtype, value.reduced_dtype
    of_stored, of_gathered, of_reduced = (_bytes(value, stored, mesh, d) for d in dtypes)
    return of_stored, of_gathered, of_reduced


def _whole(placements: Placements, axes: Sequence[int]) -> Placements:
    return tuple(R if axis in axes else p for axis, p in enumerate(placements))


def _varying(parameter: _Parameter, axes: Sequence[int]) -> tuple[int, ...]:
    """The axes over which the parameter's gradient is a partial sum."""
    return tuple(axis for axis in axes if parameter.needed[axis].state is State.VARYING)


def _other_moves_s(candidate: Candidate, parameter: _Parameter, axes: Sequence[int]) -> float:
    """Seconds of the parameter's moves without those along ``axes``."""
    needed = _whole(parameter.needed, axes)
    return candidate.priced.pricing.moves.seconds(
        parameter.value, parameter.stored, needed, stored=True
    )


Collectives = Callable[[str, int, tuple[int, ...]], float]


def _collectives(candidate: Candidate, mesh: Mesh) -> Collectives:
    """Function for the seconds of a parameter's share of a coalesced collective on ``mesh``."""
    moves = candidate.priced.pricing.moves
    groups = slowest_groups(moves.communication, mesh)

    def seconds(kind: str, size_bytes: int, axes: tuple[int, ...]) -> float:
        if mesh.size(axes) == 1:
            return 0.0
        return moves.joined(kind, size_bytes, groups[axes], moves.num_joined).time_s

    return seconds


def _zero_1_and_2(candidate: Candidate, axes: tuple[int, ...]) -> tuple[Baseline, Baseline]:
    """Data parallelism with sharded optimizer state (ZeRO-1) and sharded gradients (ZeRO-2)."""
    mesh = candidate.mesh
    seconds, move_s = _collectives(candidate, mesh), candidate.priced.pricing.moves.seconds
    kept = 1 / mesh.size(axes)
    changes, saved_bytes = dict[int, Change](), 0.0
    for p in _parameters(candidate):
        stored, gathered, reduced = _sizes(p, mesh)
        moved_s = seconds("reduce_scatter", reduced, _varying(p, axes))
        moved_s += _other_moves_s(candidate, p, axes)
        changes[p.value.index] = Change(
            fetch_s=seconds("all_gather", gathered, axes) / candidate.num_microbatches,
            move_s=moved_s - move_s(p.value, p.stored, p.needed, stored=True),
            update_s=-p.update_s * (1 - kept),
        )
        saved_bytes += stored * (1 - kept)
    searched = _searched(candidate)
    num_states = candidate.priced.pricing.optimizer.num_states
    zero1 = replace(
        searched,
        time_s=time_parts(candidate, changes).step_s,
        memory_bytes=searched.memory_bytes - num_states * saved_bytes,
        note="by formula; the runtime updates parameters as they are stored",
        candidate=None,
    )
    return zero1, replace(zero1, memory_bytes=zero1.memory_bytes - saved_bytes)


def _gathered_twice(candidate: Candidate, axes: tuple[int, ...]) -> Baseline:
    """ZeRO-3 that releases gathered parameters between forward and backward."""
    mesh = candidate.mesh
    seconds, num = _collectives(candidate, mesh), candidate.num_microbatches
    changes, saved_bytes, largest = dict[int, Change](), 0, 0
    for p in _parameters(candidate):
        split = tuple(
            axis
            for axis in axes
            if p.stored[axis].state is State.SHARD and p.needed[axis].state is not State.SHARD
        )
        dtype = p.value.dtype
        size = _bytes(p.value, _whole(p.stored, split), mesh, dtype)
        changes[p.value.index] = Change(move_s=num * seconds("all_gather", size, split))
        saved_bytes += size - _bytes(p.value, p.stored, mesh, dtype)
        largest = max(largest, size)
    searched = _searched(candidate)
    return replace(
        searched,
        time_s=time_parts(candidate, changes).step_s,
        memory_bytes=searched.memory_bytes - max(0, saved_bytes - largest),
        note="by formula; the runtime gathers a parameter once per step",
        candidate=None,
    )


def _hybrids(candidate: Candidate) -> Iterator[Baseline]:
    """Data x ZeRO-3 x tensor parallelism, by splitting the outer axis of data x tensor in two."""
    outer, inner = candidate.mesh.axis_sizes
    for sharded in range(2, outer):
        if outer % sharded:
            continue
        mesh = Mesh(("x", "y", "z"), (outer // sharded, sharded, inner))
        yield _hybrid(candidate, mesh)


def _hybrid(candidate: Candidate, mesh: Mesh) -> Baseline:
    """Gathers parameters and scatters gradients along y, then all-reduces the shards along x."""
    seconds, move_s = _collectives(candidate, mesh), candidate.priced.pricing.moves.seconds
    num_parts = mesh.axis_sizes[1]
    kept = 1 / num_parts
    changes, saved_bytes = dict[int, Change](), 0.0
    for p in _parameters(candidate):
        stored, gathered, reduced = _sizes(p, candidate.mesh)
        moved_s = _other_moves_s(candidate, p, (0,))
        if _varying(p, (0,)):
            moved_s += seconds("reduce_scatter", reduced, (1,))
            moved_s += seconds("all_reduce", -(-reduced // num_parts), (0,))
        changes[p.value.index] = Change(
            fetch_s=seconds("all_gather", gathered, (1,)),
            move_s=moved_s - move_s(p.value, p.stored, p.needed, stored=True),
            update_s=-p.update_s * (1 - kept),
        )
        saved_bytes += stored * (1 - kept)
    searched = _searched(candidate)
    num_states = candidate.priced.pricing.optimizer.num_states
    return replace(
        searched,
        mesh=mesh,
        time_s=time_parts(candidate, changes).step_s,
        memory_bytes=searched.memory_bytes - (1 + num_states) * saved_bytes,
        note=f"by formula; to run it, plan with mesh={dict(zip(mesh.axis_names, mesh.axis_sizes))}",
        candidate=None,
    )


def _markov_chain(best: Candidate, steps_per_node: int) -> Baseline:
    """FlexFlow's search on the plan's mesh, starting from data parallelism if that applies."""
    problem = best.priced.problem()
    num_steps = max(MARKOV_LEAST_STEPS, steps_per_node * problem.num_nodes)
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
