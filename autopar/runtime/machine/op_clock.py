"""A clock for every op: it runs the graphs of blocks node by node and times each.

In: the graphs that a machine runs in a step. Out: the seconds of each node by block and graph. On a
GPU a pair of CUDA events around each node times its kernels; they are read once the step has ended.
A graph that Inductor compiled has no ops and is not timed, nor are moves between blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from autopar.base.accelerators import is_accelerator, module_of
from autopar.lowering.types import Kernel
from autopar.runtime.machine.moments import Moment


class OpSeconds(NamedTuple):
    """Seconds of the node at a place in one graph of a block, over all micro-batches.

    ``graph``: a `Phase`, or behind these the number of a step of W.
    """

    block: int
    graph: int
    node: int
    time_s: float


def timed_graphs(kernel: Kernel) -> tuple[fx.GraphModule | None, ...]:
    """The graphs of a kernel by their numbers in `OpSeconds`."""
    steps = (step.module for step in kernel.weight_steps)
    return kernel.forward, kernel.backward_input, kernel.backward_weight, *steps


class OpClock:
    """Times the ops of graphs; ``moment`` notes when one begins and ends."""

    def __init__(self, moment: Callable[[], Moment]) -> None:
        self.moment = moment
        self._spans: list[tuple[int, int, int, Moment, Moment]] = []

    def walk(self, module: fx.GraphModule, block: int, graph: int) -> TimedWalk:
        """A run of one graph of a block, by its number, with bound collectives."""
        return TimedWalk(module, self, block, graph)

    def note(self, block: int, graph: int, node: int, start: Moment, end: Moment) -> None:
        self._spans.append((block, graph, node, start, end))

    def seconds(self, device: torch.device) -> list[OpSeconds]:
        """The seconds of all nodes since the last call, which waits for the device."""
        if is_accelerator(device):
            module_of(device.type).synchronize()
        totals: defaultdict[tuple[int, int, int], float] = defaultdict(float)
        for block, graph, node, start, end in self._spans:
            totals[block, graph, node] += 1e-3 * start.elapsed_time(end)
        self._spans.clear()
        return [OpSeconds(*key, time_s) for key, time_s in totals.items()]


class TimedWalk(fx.Interpreter):
    """One graph, node by node."""

    def __init__(self, module: fx.GraphModule, clock: OpClock, block: int, graph: int) -> None:
        super().__init__(module)
        self.extra_traceback = False  # errors as the graph's function raises them
        self._clock = clock
        self._at = block, graph
        self._started: list[fx.Node] = []

    def walk(self, arguments: Sequence[Tensor]) -> Sequence[Tensor]:
        result: Sequence[Tensor] = self.run(*arguments, enable_io_processing=False)
        return result

    @property
    def values(self) -> Mapping[str, Any]:
        """By name, the values of the nodes in front of the one that raised; None for those that are
        no longer needed."""
        return {node.name: self.env.get(node) for node in self._started[:-1]}

    def run_node(self, n: fx.Node) -> Any:
        place = len(self._started)
        self._started.append(n)
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        start = self._clock.moment()
        result = super().run_node(n)
        self._clock.note(*self._at, place, start, self._clock.moment())
        return result
