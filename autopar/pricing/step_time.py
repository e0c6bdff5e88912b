"""The time of a step without a pipeline, with exposed and overlapped communication.

In: a priced strategy. Out: the breakdown of a step. As in the runtime, two kinds of communication
overlap with computation: the parameters of the next block are gathered while this one runs, forward
and, where they had been released, backward; and gradients are reduced from their block's backward
pass on. Meanwhile computation is slower by the cluster's ``overlap_slowdown``. All other
communication (of activations) is exposed. A step of several passes takes their time together.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.pricing.block_times import BlockTimes, reading_blocks
from autopar.pricing.candidate import Candidate

ROUNDING = 1e-12


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


def time_parts(candidate: Candidate) -> TimeParts:
    """The breakdown of a strategy's step."""
    times, num = candidate.times, candidate.num_microbatches
    pricing = candidate.priced.pricing
    passes = pricing.num_passes
    scatters, late_s = _moves(candidate, times.scatter_s)
    assert not late_s  # blocks use what is scattered
    moves, late_s = _moves(candidate, times.move_s)
    own_s = sum(moves.values()) + late_s + num * sum(scatters.values())
    for name, scattered_s in scatters.items():
        moves[name] += scattered_s
    named = times.blocks
    blocks = named.values()
    forward_s = num * sum(b.forward_s - b.forward_communication_s for b in blocks)
    backward_s = num * sum(b.backward_s - b.backward_communication_s for b in blocks)
    own_s += num * sum(b.forward_communication_s + b.backward_communication_s for b in blocks)
    every = {name: b.every_fetch_s for name, b in named.items()}
    first = {n: num * b.fetch_s - (num - 1) * b.every_fetch_s for n, b in named.items()}
    passes_s = _forward_s(candidate, named, first) + _backward_s(candidate, named, moves)
    if num > 1:
        each_s = _forward_s(candidate, named, every) + _backward_s(candidate, named, scatters)
        passes_s += (num - 1) * each_s
    passes_s += late_s
    return TimeParts(
        forward_s=passes * forward_s,
        backward_s=passes * backward_s,
        communication_s=passes * _beyond(passes_s, forward_s + backward_s),
        update_s=passes * sum(times.update_s.values()),
        hidden_s=passes * _beyond(forward_s + backward_s + own_s, passes_s),
    )


def _beyond(longer_s: float, shorter_s: float) -> float:
    """The difference of two sums of times; 0 for one that rounding makes, which may be negative."""
    difference_s = longer_s - shorter_s
    return difference_s if abs(difference_s) > ROUNDING * longer_s else 0.0


def _moves(candidate: Candidate, moves_s: Mapping[int, float]) -> tuple[dict[str, float], float]:
    """Seconds of moving gradients by block, and of those that no block completes.

    A gradient is complete after the backward of the first block that reads the parameter.
    """
    analysis = candidate.priced.pricing.analysis
    reading = analysis.derived(reading_blocks)
    moves, late_s = dict.fromkeys(candidate.times.blocks, 0.0), 0.0
    for parameter, moved_s in sorted(moves_s.items()):
        users = reading[parameter]
        if users and users[0] in moves:
            moves[users[0]] += moved_s
        else:
            late_s += moved_s
    return moves, late_s


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
    """Seconds of a backward pass.

    Reductions and the next block's gathers queue up; a block waits for the latter, and so for what
    is before them, and the pass for all at its end.
    """
    communication, names = candidate.priced.pricing.communication, list(blocks)[::-1]
    passed_s = blocks[names[0]].fetch_back_s if names else 0.0
    queued_s = 0.0
    for name, following in itertools.zip_longest(names, names[1:]):
        fetched_s = 0.0 if following is None else blocks[following].fetch_back_s
        queued_s += fetched_s
        computed_s = blocks[name].backward_s - blocks[name].fetch_back_s
        taken_s = communication.slowed_s(computed_s, queued_s)
        queued_s = max(0.0, queued_s - taken_s)
        if fetched_s:
            taken_s, queued_s = taken_s + queued_s, 0.0
        passed_s += taken_s
        queued_s += moves[name]
    return passed_s + queued_s
