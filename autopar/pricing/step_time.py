"""The time of a step without a pipeline, with exposed and overlapped communication.

In: a priced strategy. Out: the breakdown of a step. As in the runtime, two kinds of communication
overlap with computation: the parameters of the next block are gathered while this one runs, and
gradients are reduced from their block's backward pass on. Meanwhile computation is slower by the
cluster's ``overlap_slowdown``. All other communication (of activations) is exposed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from autopar.pricing.block_times import BlockTimes, block_of_ops
from autopar.pricing.candidate import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeParts:
    """The breakdown of a training step in seconds.

    ``communication_s`` is exposed communication, ``hidden_s`` overlapped communication.
    """

    forward_s: float
    backward_s: float
    communication_s: float
    update_s: float
    hidden_s: float

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s + self.communication_s + self.update_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Change in a parameter's seconds: ``fetch_s`` per micro-batch, the others per step."""

    fetch_s: float = 0.0
    move_s: float = 0.0
    update_s: float = 0.0


_NONE: Mapping[int, Change] = MappingProxyType({})


def time_parts(candidate: Candidate, changes: Mapping[int, Change] = _NONE) -> TimeParts:
    """The breakdown of a strategy's step, with ``changes`` by parameter."""
    times, num = candidate.times, candidate.num_microbatches
    pricing = candidate.priced.pricing
    block_of = block_of_ops(pricing.graph)
    fetches = {name: block.fetch_s for name, block in times.blocks.items()}
    moves = dict.fromkeys(times.blocks, 0.0)
    # A gradient is complete after the backward of the first block that reads the parameter.
    late_s = 0.0
    for parameter in sorted({*times.move_s, *changes}):
        change = changes.get(parameter, Change())
        moved_s = times.move_s.get(parameter, 0.0) + change.move_s
        users = [block_of[op] for op, _ in pricing.analysis.consumers.get(parameter, ())]
        if users and users[0] in moves:
            moves[users[0]] += moved_s
            fetches[users[0]] += change.fetch_s
        else:
            late_s += moved_s + num * change.fetch_s
    blocks = times.blocks.values()
    forward_s = num * sum(b.forward_s - b.forward_communication_s for b in blocks)
    backward_s = num * sum(b.backward_s - b.backward_communication_s for b in blocks)
    inside_s = num * sum(b.forward_communication_s - b.fetch_s for b in blocks)
    inside_s += num * sum(b.backward_communication_s for b in blocks)
    own_s = num * sum(fetches.values()) + sum(moves.values()) + late_s
    passes_s = num * _forward_s(candidate, times.blocks, fetches) + late_s
    passes_s += _backward_s(candidate, times.blocks, moves)
    passes_s += (num - 1) * sum(b.backward_s for b in blocks)
    return TimeParts(
        forward_s=forward_s,
        backward_s=backward_s,
        communication_s=passes_s - forward_s - backward_s,
        update_s=sum(times.update_s.values()) + sum(c.update_s for c in changes.values()),
        hidden_s=forward_s + backward_s + inside_s + own_s - passes_s,
    )


def _forward_s(
    candidate: Candidate, blocks: Mapping[str, BlockTimes], fetches: Mapping[str, float]
) -> float:
    """Seconds of a forward pass; a block's parameters are gathered during the block before."""
    communication, names = candidate.priced.pricing.communication, list(blocks)
    passed_s = fetches[names[0]] if names else 0.0
    for name, following in itertools.zip_longest(names, names[1:]):
        computed_s = blocks[name].forward_s - blocks[name].fetch_s
        passed_s += communication.overlapped_s(computed_s, fetches.get(following, 0.0))
    return passed_s


def _backward_s(
    candidate: Candidate, blocks: Mapping[str, BlockTimes], moves: Mapping[str, float]
) -> float:
    """Seconds of the last backward pass; reductions queue up, and are waited for at the end."""
    communication = candidate.priced.pricing.communication
    passed_s = queued_s = 0.0
    for name, block in reversed(list(blocks.items())):
        taken_s = communication.slowed_s(block.backward_s, queued_s)
        passed_s += taken_s
        queued_s = max(0.0, queued_s - taken_s) + moves[name]
    return passed_s + queued_s
