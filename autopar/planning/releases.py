"""Which gathered parameters are released after each pass, so that a program fits the memory.

In: a lowered program that keeps its gathered parameters from their first use in a step to the last,
and a test of its memory. Out: the parameters to release, as few as possible: each costs another
gather in every pass. Those of the last blocks are kept first, because they are read again soonest,
so that releasing them saves least.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.lowering.types import RankProgram


def with_released(program: RankProgram, released: frozenset[int]) -> RankProgram:
    """The program with these parameters released after each pass, where they are gathered."""
    return replace(
        program,
        parameters=tuple(
            replace(p, released=p.kernel is not None and p.value in released)
            for p in program.parameters
        ),
    )


def released_to_fit(
    program: RankProgram, fits: Callable[[RankProgram], bool]
) -> frozenset[int] | None:
    """The parameters to release, those of the first blocks; None if it does not fit with all."""
    gathered = {p.value for p in program.parameters if p.kernel is not None}
    order: dict[int, int] = {}
    for position, block in enumerate(program.blocks):
        order.update(dict.fromkeys(gathered.intersection(block.interface.parameters), position))

    def of_first(num_blocks: int) -> frozenset[int]:
        return frozenset(value for value, position in order.items() if position < num_blocks)

    most = len(program.blocks)
    if not order or not fits(with_released(program, of_first(most))):
        return None
    least = 0  # does not fit
    while most - least > 1:
        middle = (least + most) // 2
        if fits(with_released(program, of_first(middle))):
            most = middle
        else:
            least = middle
    return of_first(most)
