"""How many micro-batches each block holds values for at the moments of a device's step.

In: the actions of one pipeline device and the moments of its counted memory. Out: one row a moment,
for `autopar.search.recompute`: what depends on the values that blocks keep is linear in these
counts.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from autopar.memory.tally import Moment
from autopar.schedules.action import Action, Kind
from autopar.search.recompute import Moments

PHASES = "FIWG"
"""What runs: a graph of a block, or the reduction of its gradients."""


class StagedBlock(NamedTuple):
    """A block of a device, by its name in the places of moments, and its stage."""

    name: str
    stage: int


def held_at(
    actions: Sequence[Action],
    moments: Sequence[Moment],
    blocks: Sequence[StagedBlock],
    recomputed_stages: Collection[int] = (),
) -> Moments:
    """The micro-batches for which ``blocks``, in the order of the program, hold values by moment.

    ``others_bytes`` are all bytes of each moment. A schedule's ``recomputed_stages`` keep nothing
    in their first forward pass.
    """
    column = {each.name: i for i, each in enumerate(blocks)}
    columns: dict[int, list[int]] = defaultdict(list)
    for i, each in enumerate(blocks):
        columns[each.stage].append(i)
    held = np.zeros((2, len(blocks)), dtype=int)
    rows = np.zeros((len(moments), 2, len(blocks)), dtype=int)
    running, phases = np.full(len(moments), -1), np.zeros(len(moments), dtype=int)
    of_action = {
        number: list(group)
        for number, group in itertools.groupby(range(len(moments)), lambda i: moments[i].action)
    }
    for number, action in enumerate(actions, start=1):
        mine = columns.get(action.stage, []) if action.microbatch is not None else []
        is_kept = action.kind is not Kind.F or action.stage not in recomputed_stages
        change = _CHANGES.get(action.kind, _NOTHING) if is_kept else _NOTHING
        now = held
        for i in of_action.get(number, ()):
            phase, _, name = moments[i].place.partition(" ")
            block = column.get(name, -1)
            if block in mine and phase in PHASES:
                running[i], phases[i] = block, PHASES.index(phase)
                now = held.copy()
                is_forward = action.kind in (Kind.F, Kind.R)
                done = [b for b in mine if (b < block if is_forward else b > block)]
                now[:, done] += change[:, None]
                now[:, block] += _DURING.get((action.kind, phase), _NOTHING)
            rows[i] = now
        if mine:
            held = held.copy()
            held[:, mine] += change[:, None]
    rows[[i for i, moment in enumerate(moments) if moment.action > len(actions)]] = held
    return Moments(
        kept=rows[:, 0], late=rows[:, 1], running=running, phase=phases,
        others_bytes=np.array([float(moment.size_bytes) for moment in moments]),
    )  # fmt: skip


_NOTHING = np.array([0, 0])
_CHANGES = {
    Kind.F: np.array([1, 0]),
    Kind.R: np.array([1, 0]),
    Kind.I: np.array([-1, 1]),
    Kind.B: np.array([-1, 0]),
    Kind.W: np.array([0, -1]),
}
"""What a block keeps, and what of it is late, after an action of its stage."""
_DURING = {
    (Kind.B, "W"): np.array([-1, 1]),
    (Kind.B, "G"): np.array([-1, 0]),
    (Kind.W, "G"): np.array([0, -1]),
}
"""The same while a graph of the block runs, beside what it held before the action."""
