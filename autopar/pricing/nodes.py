"""The decisions of a search problem, and where the times of each belong.

A home is the name of a block, or the index of a parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from autopar.ir.graph import ValueKind
from autopar.pricing.readers import block_of_ops
from autopar.sharding.strategy import Analysis

Home = str | int


class NodeKind(StrEnum):
    """The kinds of decision."""

    OP = "op"
    STORED = "stored"
    RELAY = "relay"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One decision: an op's choice, or a value's stored or relay placement."""

    kind: NodeKind
    index: int
    name: str


def homes_of(analysis: Analysis, nodes: Sequence[Node]) -> list[Home]:
    """The homes of decisions: an op's block, or the block that makes or first reads a value; a
    parameter for its own placements."""
    block_of = block_of_ops(analysis.graph)
    return [
        block_of[node.index]
        if node.kind is NodeKind.OP
        else _home_of_value(analysis, node.index, block_of)
        for node in nodes
    ]


def _home_of_value(analysis: Analysis, index: int, block_of: Mapping[int, str]) -> Home:
    if analysis.graph.values[index].kind is ValueKind.PARAMETER:
        return index
    uses = (analysis.producers.get(index, (0, 0)), *analysis.consumers.get(index, ()))
    return block_of[uses[0][0] if index in analysis.producers else uses[-1][0]]


def home_of_edge(homes: Sequence[Home], kinds: Sequence[NodeKind]) -> Home:
    """The end of a redistribution that pays for it: a parameter where it is stored, else the op
    that needs it."""
    each = list(zip(homes, kinds))
    stored: list[Home] = [
        home for home, kind in each if kind is NodeKind.STORED and isinstance(home, int)
    ]
    return (stored or [home for home, kind in each if kind is NodeKind.OP] or homes)[-1]
