"""Moves of parameters and gradients that can travel joined with others.

In: the graph of a move. Out: its collective and the casts around it, if it has nothing else. Such
moves of one kind, group and dtype share a collective; other graphs run one by one. The runtime
joins by this, and the memory model counts by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.comm.ops import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER

_CAST = torch.ops.aten._to_copy.default


@dataclass(frozen=True, slots=True)
class JoinedMove:
    """A graph that casts, communicates, and casts again, or less of it.

    The collective ``op`` is over the axes of ``label``, ``digit`` what it splits, where it splits;
    ``before`` and ``after`` it are the dtypes of the casts, where there are any.
    """

    op: Any = None
    label: str = ""
    digit: tuple[int, ...] = ()
    before: torch.dtype | None = None
    after: torch.dtype | None = None


def joined_move(module: fx.GraphModule) -> JoinedMove | None:
    """The collective of a graph that consists of it and casts alone; None for other graphs."""
    calls = [n for n in module.graph.nodes if n.op not in ("placeholder", "output")]
    casts = [n.target is _CAST for n in calls]
    dtypes = [n.kwargs["dtype"] if is_cast else None for n, is_cast in zip(calls, casts)]
    if casts == [True]:
        return JoinedMove(after=dtypes[0])
    if casts not in ([False], [True, False], [False, True], [True, False, True]):
        return None
    collective = calls[casts.index(False)]
    if collective.target not in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER):
        return None
    _, label, _, *digit = collective.args
    return JoinedMove(
        op=collective.target, label=str(label), digit=tuple(digit),
        before=dtypes[0], after=dtypes[-1],
    )  # fmt: skip
