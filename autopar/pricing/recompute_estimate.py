"""An estimate of what a strategy recomputes to fit a memory, before it is lowered.

In: a candidate and the bytes that it may take. Out: the seconds by block, and the bytes saved.
`autopar.planning.recomputation` decides exactly, over the program; this orders the options of a
search.

A value that a derivative reads is dropped where its own block can compute it again without
communication but all-to-alls: not the operands of a block, the results of other collectives, and
what the block of the loss keeps, which is read at once. Values are dropped from the fewest seconds
a byte on, each at the price of the op that made it and of the all-to-alls behind it, so what that
op reads counts as kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.ir.graph import Value
from autopar.ir.placement import MoveKind, Placements, R
from autopar.ir.recomputation import BlockRecomputation, Recomputation
from autopar.pricing.candidate import Candidate
from autopar.pricing.moves import Moves
from autopar.pricing.node_memory import NodeMemory
from autopar.pricing.problem import Residence
from autopar.pricing.readers import block_of_ops
from autopar.pricing.tables import OpTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Droppable:
    """A value that its block can recompute: bytes and seconds per micro-batch."""

    block: str
    size_bytes: float
    time_s: float


def droppable(candidate: Candidate) -> tuple[Droppable, ...]:
    """The values that a candidate may recompute, from the fewest seconds a byte on."""
    found = (each for each in _all(candidate) if each.size_bytes > 0)
    return tuple(sorted(found, key=lambda each: each.time_s / each.size_bytes))


def recomputed_to_fit(
    values: tuple[Droppable, ...], excess_bytes: float, residence: Residence
) -> tuple[Recomputation, float]:
    """The fastest recomputation that saves ``excess_bytes`` on the fullest device, and its savings.

    If the values do not suffice, all of them are recomputed.
    """
    seconds: dict[str, float] = {}
    saved = 0.0
    for value in values:
        size_bytes = value.size_bytes * residence.activations
        if saved >= excess_bytes or not size_bytes:
            break
        share = min(1.0, (excess_bytes - saved) / size_bytes)
        saved += share * size_bytes
        seconds[value.block] = seconds.get(value.block, 0.0) + share * value.time_s
    return Recomputation(
        blocks={
            block: BlockRecomputation(kept=(), kept_bytes=0, default_bytes=0, time_s=time_s)
            for block, time_s in seconds.items()
        }
    ), saved


def _all(candidate: Candidate) -> Iterator[Droppable]:
    priced, picks = candidate.priced, candidate.solution.assignment
    pricing, num = priced.pricing, candidate.num_microbatches
    graph, analysis = pricing.graph, pricing.analysis
    memory, block_of = NodeMemory(pricing), block_of_ops(pricing.graph)
    chosen = {
        node.index: (table, pick)
        for node, table, pick in zip(priced.nodes, priced.tables, picks)
        if isinstance(table, OpTable)
    }

    def is_local(value: int, block: str) -> bool:
        """Whether only one block reads the value, which is the one that computes it."""
        readers = {block_of[op] for op, _ in analysis.consumers.get(value, ())}
        return value in analysis.producers and readers <= {block}

    for index, (table, pick) in chosen.items():
        op, block, kept = graph.ops[index], block_of[index], memory.reads.kept[index]
        if kept.is_last:
            continue
        for position, share in kept.operands:
            value = graph.values[op.inputs[position]]
            if not is_local(value.index, block):
                continue
            maker, place = analysis.producers[value.index]
            if maker not in chosen or block_of[maker] != block:
                continue
            made, made_pick = chosen[maker]
            needed = table.needs[position].at(pick)
            moved_s = _moved_s(pricing.moves, value, made.supplies[place].at(made_pick), needed)
            inside_s = made.repeated_s[made_pick]
            if inside_s is not None and moved_s is not None:
                made_s = made.estimates[made_pick].forward_s / num + inside_s
                yield Droppable(
                    block=block,
                    size_bytes=share * memory.size_bytes(value, needed),
                    time_s=share * (made_s + moved_s),
                )
        own = sum(
            share * memory.size_bytes(graph.values[output], table.supplies[place].at(pick))
            for place, share in kept.outputs
            if (output := op.outputs[place]) is not None and is_local(output, block)
        )
        inside_s = table.repeated_s[pick]
        if own and inside_s is not None:
            made_s = table.estimates[pick].forward_s / num + inside_s
            yield Droppable(block=block, size_bytes=own, time_s=made_s)


def _moved_s(moves: Moves, value: Value, supplied: Placements, needed: Placements) -> float | None:
    """Seconds in which a value reaches its reader by all-to-alls, or without communication; None
    if it takes other collectives."""
    if all(given in (want, R) for given, want in zip(supplied, needed)):
        return 0.0
    route = moves.routes(supplied, needed, value.shape, moves.mesh)
    if any(move.forward not in (None, MoveKind.ALL_TO_ALL) for move in route):
        return None
    return moves.price(value, supplied, needed).forward_s


def all_recomputed(candidate: Candidate) -> Candidate:
    """A candidate as if each block ran its forward pass again, without communication."""
    blocks = {
        name: BlockRecomputation(
            kept=(), kept_bytes=0, default_bytes=0,
            time_s=max(times.forward_s - times.forward_communication_s, 0.0),
        )
        for name, times in candidate.times.blocks.items()
    }  # fmt: skip
    return candidate.recomputing(Recomputation(blocks=blocks))
