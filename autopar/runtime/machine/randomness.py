"""Random seeds that are equal on replicas and different on shards.

Every random operator is seeded by the run's seed, the step, the micro-batch, the block and its
graph, the operator's position there, and the rank's position along the axes that split the operator
(``split_axes``, written on the node when it was traced). Ranks that hold the same shard draw the
same numbers, others draw their own; a step can be repeated, and its numbers are the same in
whatever order a schedule runs it. A value that is recomputed in the backward pass is drawn as it
was in the forward pass.

Models of an array draw from seeds of their own, those that each would have alone: its run's seed,
its own count of steps, and the position of the operator in its own graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from autopar.ir.mesh import Mesh
from autopar.ir.random_ops import DRAWN_AS, is_random
from autopar.runtime.machine.protocols import Phase

_MASK = (1 << 64) - 1


def mixed(*numbers: int) -> int:
    """Mix several numbers into one 63-bit seed (splitmix64, applied in turn)."""
    state = 0
    for number in numbers:
        state = (state ^ (number & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


def split_axes(node: fx.Node) -> tuple[int, ...]:
    """The mesh axes that split the operator a node was traced from."""
    axes: tuple[int, ...] = tuple((node.meta.get("custom") or {}).get("split_axes", ()))
    return axes


@dataclass(frozen=True, slots=True)
class Draw:
    """The place of a random node in a graph; if it draws what the forward graph drew (``again``),
    that of the node there."""

    place: int
    again: bool


def random_nodes(module: fx.GraphModule) -> dict[fx.Node, Draw]:
    """The random nodes of a graph, numbered."""
    found: dict[fx.Node, Draw] = {}
    own = itertools.count()
    for node in module.graph.nodes:
        if is_random(node):
            place = (node.meta.get("custom") or {}).get(DRAWN_AS)
            found[node] = Draw(next(own), False) if place is None else Draw(place, True)
    return found


class Seeds:
    """The seeds of one step. ``begin_step`` starts a step, ``begin_call`` each run of a block."""

    def __init__(self, mesh: Mesh, seed: int) -> None:
        self.mesh = mesh
        self.seed = seed
        self._step_seed = 0
        self._call = (0, 0, 0)
        self._model_seeds: tuple[int, ...] = ()

    def begin_models(self, seeds: Sequence[int], steps: Sequence[int]) -> None:
        """Start a step of each model of an array."""
        self._model_seeds = tuple(mixed(seed, step) for seed, step in zip(seeds, steps))

    def seed_of_model(self, model: int, block: int, place: int, axes: str, rank: int) -> int:
        """The seed of one model's op, by its block and position in the model's own graph."""
        split = self.mesh.axes_of(axes) if axes else ()
        shard = self.mesh.index(rank, split)
        return mixed(self._model_seeds[model], self._call[0], block, 0, place, shard)

    def begin_step(self, step: int) -> None:
        self._step_seed = mixed(self.seed, step)

    def begin_pass(self, number: int) -> None:
        """Start a further pass of the step, from 1 on, which draws other numbers."""
        self._step_seed = mixed(self._step_seed, number)

    def begin_call(self, microbatch: int, block: int, phase: int) -> None:
        self._call = (microbatch, block, phase)

    def seed_of(self, draw: Draw, axes: tuple[int, ...], rank: int) -> int:
        microbatch, block, phase = self._call
        graph = Phase.FORWARD if draw.again else phase
        shard = self.mesh.index(rank, axes)
        return mixed(self._step_seed, microbatch, block, graph, draw.place, shard)
