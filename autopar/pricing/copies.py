"""What a device spends on casts, slices and copies of values, without any communication.

In: a candidate. Out: seconds by block. They are part of the candidate's communication everywhere
else (`autopar.pricing.step_time`), where only their sum matters.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.graph import ValueKind
from autopar.ir.placement import is_reduce_scattered
from autopar.pricing.candidate import Candidate
from autopar.pricing.nodes import NodeKind
from autopar.pricing.problem import Moved
from autopar.pricing.readers import block_of_ops
from autopar.pricing.tables import reads_back


def copies_by_block(candidate: Candidate) -> dict[str, float]:
    """Seconds in all micro-batches of a pass, by the block that needs the value.

    Parameters are gathered and their gradients moved as often as in
    `autopar.pricing.block_times.strategy_times`.
    """
    priced, picks = candidate.priced, candidate.solution.assignment
    block_of, moves = block_of_ops(priced.pricing.graph), priced.pricing.moves
    found = dict.fromkeys((block.name for block in priced.pricing.graph.blocks), 0.0)
    values = priced.pricing.graph.values
    for node, table, pick in zip(priced.nodes, priced.tables, picks):
        if node.kind is not NodeKind.OP and values[node.index].kind is not ValueKind.PARAMETER:
            found[_home(candidate, node.index, None, block_of)] += float(table.cost_s[pick])
    for move in priced.moves:
        supply = move.supplies.at(picks[move.source])
        need = move.needs.at(0 if move.target is None else picks[move.target])
        price = moves.price(
            move.value, supply, need, stored=move.stored, num_joined=move.num_joined
        )
        if price.forward_copies_s or price.backward_copies_s:
            is_scattered = is_reduce_scattered(supply, need)
            there, back = _counts(candidate, move, is_scattered=is_scattered)
            copies_s = there * price.forward_copies_s + back * price.backward_copies_s
            found[_home(candidate, move.value.index, move.target, block_of)] += copies_s
    return found


def _counts(candidate: Candidate, move: Moved, *, is_scattered: bool) -> tuple[int, int]:
    """How often in a pass a value is moved there, and its gradient back."""
    num, parameter = candidate.num_microbatches, move.value.index
    if not move.stored:
        return num, num
    there = 1
    if parameter in candidate.released:
        there = num * (1 + reads_back(candidate.priced.pricing.analysis, parameter))
    return there, num if parameter in candidate.scattered and is_scattered else 1


def _home(candidate: Candidate, value: int, target: int | None, block_of: Mapping[int, str]) -> str:
    """The block of the op that needs the value; without one, that makes or first reads it, and the
    first block for a value that nothing reads."""
    priced = candidate.priced
    if target is not None and priced.nodes[target].kind is NodeKind.OP:
        return block_of[priced.nodes[target].index]
    analysis = priced.pricing.analysis
    near = analysis.producers.get(value) or next(iter(analysis.consumers.get(value, ())), None)
    return priced.pricing.graph.blocks[0].name if near is None else block_of[near[0]]
