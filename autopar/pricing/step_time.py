"""The time of a step without a pipeline, with exposed and overlapped communication.

In: a priced strategy. Out: the costs of its blocks, and the breakdown of a step. As in the runtime,
two kinds of communication overlap with computation: the parameters of the next block are gathered
while this one runs, forward and, where they had been released, backward; and gradients are reduced
from their block's backward pass on. Meanwhile computation is slower by the cluster's
``overlap_slowdown``. All other communication (of activations) is exposed. A step of several passes
takes their time together. `autopar.pricing.step_timeline` draws the same costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.pricing.candidate import Candidate
from autopar.pricing.readers import reading_blocks
from autopar.pricing.step_costs import BlockCosts, StepCosts, pass_s

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
    costs, num = step_costs(candidate), candidate.num_microbatches
    pricing = candidate.priced.pricing
    slowdown, passes = pricing.communication.cluster.overlap_slowdown, pricing.num_passes
    forward_s = num * sum(block.forward_s for block in costs.blocks)
    backward_s = num * sum(block.backward_s for block in costs.blocks)
    passes_s, own_s = costs.reduce_after_s, costs.reduce_after_s
    for turns, count in costs.passes(num):
        passes_s += count * pass_s(turns, slowdown)
        own_s += count * sum(turn.communication_s for turn in turns)
    return TimeParts(
        forward_s=passes * forward_s,
        backward_s=passes * backward_s,
        communication_s=passes * _beyond(passes_s, forward_s + backward_s),
        update_s=passes * (sum(block.update_s for block in costs.blocks) + costs.update_after_s),
        hidden_s=passes * _beyond(forward_s + backward_s + own_s, passes_s),
    )


def step_costs(candidate: Candidate) -> StepCosts:
    """The costs of a strategy's blocks."""
    times, plain, num = candidate.times, candidate.plain_times, candidate.num_microbatches
    scatters, late_s = _of_blocks(candidate, times.scatter_s)
    assert not late_s  # blocks use what is scattered
    reductions, reduce_after_s = _of_blocks(candidate, times.move_s)
    updates, update_after_s = _of_blocks(candidate, times.update_s)
    blocks = tuple(
        BlockCosts(
            name=name,
            forward_s=_beyond(b.forward_s, b.forward_communication_s),
            recompute_s=_beyond(times.blocks[name].input_grad_s, b.input_grad_s),
            input_grad_s=_beyond(b.input_grad_s, b.backward_communication_s),
            weight_grad_s=b.weight_grad_s,
            forward_moves_s=_beyond(b.forward_communication_s, b.fetch_s),
            backward_moves_s=_beyond(b.backward_communication_s, b.fetch_back_s),
            first_gather_s=num * b.fetch_s - (num - 1) * b.every_fetch_s,
            gather_s=b.every_fetch_s,
            gather_back_s=b.fetch_back_s,
            scatter_s=scatters[name],
            reduce_s=reductions[name],
            update_s=updates[name],
        )
        for name, b in plain.blocks.items()
    )
    return StepCosts(blocks=blocks, reduce_after_s=reduce_after_s, update_after_s=update_after_s)


def _beyond(longer_s: float, shorter_s: float) -> float:
    """The difference of two sums of times; 0 for one that rounding makes, which may be negative."""
    difference_s = longer_s - shorter_s
    return difference_s if abs(difference_s) > ROUNDING * longer_s else 0.0


def _of_blocks(
    candidate: Candidate, times_s: Mapping[int, float]
) -> tuple[dict[str, float], float]:
    """Seconds of parameters by the first block that reads them, and of those that none reads.

    A gradient is complete after the backward pass of that block.
    """
    analysis = candidate.priced.pricing.analysis
    reading = analysis.derived(reading_blocks)
    found, rest_s = dict.fromkeys(candidate.times.blocks, 0.0), 0.0
    for parameter, time_s in sorted(times_s.items()):
        users = reading[parameter]
        if users and users[0] in found:
            found[users[0]] += time_s
        else:
            rest_s += time_s
    return found, rest_s
