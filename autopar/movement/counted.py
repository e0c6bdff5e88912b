"""Lifetimes that hold at least what the count of a program's memory says, operation by operation.

In: a step's lifetimes, the place of each operation in the count (`autopar.memory.program`), and the
count's moments. Out: the lifetimes with more workspace. A count has what is in no tensor of the
lifetimes: buffers of collectives and of messages, and operands of those that are still under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.memory.tally import Moment
from autopar.movement.execution import ProgramStep

CountedAt = tuple[int, str]
"""An action, from 1, and a place, such as ``F`` with the name of a block."""


def raised_to_count(
    step: ProgramStep, at: Sequence[CountedAt], moments: Sequence[Moment]
) -> ProgramStep:
    """The step in which every operation holds at least what its place in the count does."""
    counted: dict[CountedAt, int] = {}
    for moment in moments:
        key = moment.action, moment.place
        counted[key] = max(counted.get(key, 0), moment.size_bytes)
    live = step.movable().live_bytes()
    workspace = [
        size + max(0, counted.get(where, 0) - held)
        for where, held, size in zip(at, live, step.step.workspace_bytes)
    ]
    return replace(step, step=replace(step.step, workspace_bytes=tuple(workspace)))
