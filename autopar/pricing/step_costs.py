"""The costs of the blocks of a step without a pipeline, and the order in which they are due.

In: the costs of the blocks. Out: the turns of each pass, with what a block's computation takes
beside communication and waits for afterwards. The time of a step (`autopar.pricing.step_time`) and
its timeline (`autopar.pricing.step_timeline`) are both made from these turns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from autopar.base.units import nine_digits
from autopar.cost_models.communication import slowed_s


class Part(StrEnum):
    """The parts of a step on one device."""

    FORWARD = "forward"
    RECOMPUTATION = "recomputation"
    INPUT_GRADIENTS = "input gradients"
    WEIGHT_GRADIENTS = "weight gradients"
    UPDATE = "update"
    REDISTRIBUTION = "redistribution"
    GATHER = "parameter gather"
    REDUCTION = "gradient reduction"
    STALL = "waiting for copies to the host"


class BlockCosts(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """Seconds of a block, for one micro-batch unless it says otherwise.

    ``forward_s``, ``recompute_s``, ``input_grad_s`` and ``weight_grad_s`` are computation alone;
    ``forward_moves_s`` and ``backward_moves_s`` the redistributions, casts and copies for which it
    waits. ``gather_s`` gathers parameters for the forward pass of every micro-batch but the first,
    which has ``first_gather_s``, and ``gather_back_s`` for each backward pass. ``scatter_s`` is the
    reduction of gradients in each micro-batch, ``reduce_s`` that after the last one, and
    ``update_s`` the update of a step.
    """

    name: str
    forward_s: float = 0.0
    recompute_s: float = 0.0
    input_grad_s: float = 0.0
    weight_grad_s: float = 0.0
    forward_moves_s: float = 0.0
    backward_moves_s: float = 0.0
    first_gather_s: float = 0.0
    gather_s: float = 0.0
    gather_back_s: float = 0.0
    scatter_s: float = 0.0
    reduce_s: float = 0.0
    update_s: float = 0.0

    @property
    def backward_s(self) -> float:
        return self.recompute_s + self.input_grad_s + self.weight_grad_s


BLOCK_TIMES = tuple(each for each in BlockCosts.__struct_fields__ if each != "name")
"""The fields of `BlockCosts` that are seconds."""


class StepCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The costs of all blocks, in the order of the forward pass.

    ``reduce_after_s`` and ``update_after_s``: of parameters that no block reads.
    """

    blocks: tuple[BlockCosts, ...]
    reduce_after_s: float = 0.0
    update_after_s: float = 0.0

    def rounded(self) -> StepCosts:
        """The costs with the digits that plans keep."""
        return StepCosts(
            blocks=tuple(
                BlockCosts(name=b.name, **{f: nine_digits(getattr(b, f)) for f in BLOCK_TIMES})
                for b in self.blocks
            ),
            reduce_after_s=nine_digits(self.reduce_after_s),
            update_after_s=nine_digits(self.update_after_s),
        )

    def forward(self, *, is_first: bool) -> list[Turn]:
        """The turns of a forward pass, of the first micro-batch or another."""
        return [
            Turn(
                b.name,
                ((Part.REDISTRIBUTION, b.forward_moves_s), (Part.FORWARD, b.forward_s)),
                b.first_gather_s if is_first else b.gather_s,
            )
            for b in self.blocks
        ]

    def backward(self, *, is_last: bool) -> list[Turn]:
        """The turns of a backward pass, of the last micro-batch or another."""
        return [
            Turn(
                b.name,
                (
                    (Part.RECOMPUTATION, b.recompute_s),
                    (Part.INPUT_GRADIENTS, b.input_grad_s),
                    (Part.REDISTRIBUTION, b.backward_moves_s),
                    (Part.WEIGHT_GRADIENTS, b.weight_grad_s),
                ),
                b.gather_back_s,
                b.scatter_s + b.reduce_s * is_last,
            )
            for b in self.blocks[::-1]
        ]

    def passes(self, num_microbatches: int) -> Iterator[tuple[list[Turn], int]]:
        """The turns of the different passes of all micro-batches, and how many are equal."""
        yield self.forward(is_first=True), 1
        yield self.backward(is_last=True), 1
        if num_microbatches > 1:
            yield self.forward(is_first=False), num_microbatches - 1
            yield self.backward(is_last=False), num_microbatches - 1


class Turn(NamedTuple):
    """A block's turn in a pass: the ``work`` of the computing stream, part by part, for which its
    parameters are gathered before and after which its gradients are reduced, in seconds."""

    block: str
    work: tuple[tuple[Part, float], ...]
    gather_s: float
    reduce_s: float = 0.0

    @property
    def work_s(self) -> float:
        return sum(time_s for _, time_s in self.work)

    @property
    def communication_s(self) -> float:
        """Seconds of all communication, casts and copies, each by itself."""
        moves_s = sum(time_s for part, time_s in self.work if part is Part.REDISTRIBUTION)
        return moves_s + self.gather_s + self.reduce_s


class Timed(NamedTuple):
    """A turn in time: its work takes ``taken_s`` as communication runs beside its first
    ``beside_s``; then computation waits."""

    taken_s: float
    beside_s: float
    waited_s: float


def timed(turns: Sequence[Turn], slowdown: float) -> Iterator[Timed]:
    """The times of a pass's turns, after the gathers of the first.

    A block's parameters are gathered during the turn before, and its gradients reduced after its
    own; both queue up. A turn waits for its gathers, and so for what is before them, and the pass
    for all at its end. Work is slower by ``slowdown`` while communication runs.
    """
    queued_s = 0.0
    for turn, following in itertools.zip_longest(turns, turns[1:]):
        gather_s = 0.0 if following is None else following.gather_s
        queued_s += gather_s
        taken_s = slowed_s(turn.work_s, queued_s, slowdown)
        beside_s = min(queued_s, taken_s)
        queued_s -= beside_s
        waited_s = queued_s if gather_s else 0.0
        queued_s += turn.reduce_s - waited_s
        if following is None:
            waited_s, queued_s = queued_s, 0.0
        yield Timed(taken_s, beside_s, waited_s)


def pass_s(turns: Sequence[Turn], slowdown: float) -> float:
    """Seconds of a pass."""
    first_s = turns[0].gather_s if turns else 0.0
    return first_s + sum(each.taken_s + each.waited_s for each in timed(turns, slowdown))
