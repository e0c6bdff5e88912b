"""Communication that a program repeats in every pass of a step, so that it fits the memory.

In: a lowered program that keeps its gathered parameters from their first use in a step to the last,
and accumulates whole gradients over the micro-batches, and a test of its memory. Out: the
parameters to release after each pass, or whose gradients to reduce-scatter in every micro-batch, as
few as possible, because each costs communication. Released are those of the first blocks: those of
the last are read again soonest, so that releasing them saves least. Scattered are the gradients of
the last blocks, which overlap with the backward pass of those before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.ir.placement import is_reduce_scattered
from autopar.lowering.types import RankProgram

Fits = Callable[[RankProgram], bool]


def with_released(program: RankProgram, released: frozenset[int]) -> RankProgram:
    """The program with these parameters released after each pass, where they are gathered."""
    return replace(
        program,
        parameters=tuple(
            replace(p, released=p.kernel is not None and p.value in released)
            for p in program.parameters
        ),
    )


def with_scattered(program: RankProgram, scattered: frozenset[int]) -> RankProgram:
    """The program with these gradients reduce-scattered in every micro-batch."""
    return replace(
        program,
        parameters=tuple(replace(p, scattered=p.value in scattered) for p in program.parameters),
    )


def scatterable(program: RankProgram) -> frozenset[int]:
    """The parameters whose gradients can be reduce-scattered in every micro-batch."""
    if program.num_microbatches == 1 or program.pipeline.shape.num_stages > 1:
        return frozenset()
    return frozenset(
        p.value for p in program.parameters if p.trainable and is_reduce_scattered(p.stored, p.used)
    )


def released_to_fit(program: RankProgram, fits: Fits) -> frozenset[int] | None:
    """The parameters to release, those of the first blocks; None if it does not fit with all."""
    gathered = frozenset(p.value for p in program.parameters if p.kernel is not None)
    order = range(len(program.blocks))
    return _fewest(program, gathered, order, lambda some: fits(with_released(program, some)))


def scattered_to_fit(program: RankProgram, fits: Fits) -> frozenset[int] | None:
    """The gradients to scatter, those of the last blocks; None if it does not fit with all."""
    order = range(len(program.blocks))[::-1]
    return _fewest(
        program, scatterable(program), order, lambda some: fits(with_scattered(program, some))
    )


def _fewest(
    program: RankProgram,
    parameters: frozenset[int],
    order: Sequence[int],
    fits: Callable[[frozenset[int]], bool],
) -> frozenset[int] | None:
    """The parameters of as few blocks as possible, in this order, with which a program fits; one
    that several blocks read counts with the last of them. None if it does not fit with all."""
    block_of: dict[int, int] = {}
    for place, position in enumerate(order):
        read = program.blocks[position].interface.parameters
        block_of.update(dict.fromkeys(parameters.intersection(read), place))

    def of_first(num_blocks: int) -> frozenset[int]:
        return frozenset(value for value, place in block_of.items() if place < num_blocks)

    most = len(order)
    if not block_of or not fits(of_first(most)):
        return None
    least = 0  # does not fit
    while most - least > 1:
        middle = (least + most) // 2
        if fits(of_first(middle)):
            most = middle
        else:
            least = middle
    return of_first(most)
