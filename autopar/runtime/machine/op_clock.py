"""A clock for every op: a `Probe` that runs the graphs of blocks node by node and times each.

In: the graphs that a machine runs in a step. Out: the seconds of each node by block and graph. On a
GPU a pair of CUDA events around each node times its kernels; they are read once the step has ended.
A graph that Inductor compiled has no ops and is not timed, nor are moves between blocks.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx

from autopar.base.accelerators import is_accelerator, module_of
from autopar.lowering.types import RankProgram
from autopar.runtime.machine.protocols import Phase


class OpSeconds(NamedTuple):
    """Seconds of the node at a place in one graph of a block, over all micro-batches."""

    block: int
    phase: Phase
    node: int
    time_s: float


class Moment(Protocol):
    """A moment on a device's stream, as a CUDA event is one."""

    def elapsed_time(self, later: Any) -> float:
        """Milliseconds until a later moment."""
        ...


class HostMoment:
    """A moment on the host, where ops have ended when their call returns."""

    def __init__(self) -> None:
        self.at_s = time.perf_counter()

    def elapsed_time(self, later: HostMoment) -> float:
        return 1e3 * (later.at_s - self.at_s)


def moments_of(device: torch.device) -> Callable[[], Moment]:
    """A function that notes the present moment of a device: on a GPU a recorded event."""
    if not is_accelerator(device):
        return HostMoment
    module = module_of(device.type)

    def record() -> Moment:
        event: Moment = module.Event(enable_timing=True)
        event.record()  # type: ignore[attr-defined]
        return event

    return record


class OpClock:
    """Times ops while it is a machine's probe; ``moment`` notes when one begins and ends."""

    def __init__(self, program: RankProgram, moment: Callable[[], Moment]) -> None:
        self.program = program
        self.moment = moment
        self._at = 0, Phase.FORWARD
        self._spans: list[tuple[int, Phase, int, Moment, Moment]] = []

    def begin(self, microbatch: int, block: int, phase: Phase) -> None:
        del microbatch
        self._at = block, phase

    def run(
        self,
        module: fx.GraphModule,
        bound: fx.GraphModule,
        compiled: fx.GraphModule | None,
        arguments: Sequence[Tensor],
    ) -> Sequence[Tensor]:
        """Run ``bound``, a copy of ``module`` with bound collectives, op by op."""
        block, phase = self._at
        kernel = self.program.kernels[self.program.blocks[block].kernel]
        graphs = kernel.forward, kernel.backward_input, kernel.backward_weight
        if compiled is not None or module is not graphs[phase]:
            result: Sequence[Tensor] = (compiled or bound).forward(*arguments)
            return result
        return _Walk(bound, self).walk(arguments)

    def note(self, node: int, start: Moment, end: Moment) -> None:
        self._spans.append((*self._at, node, start, end))

    def seconds(self, device: torch.device) -> list[OpSeconds]:
        """The seconds of all nodes since the last call, which waits for the device."""
        if is_accelerator(device):
            module_of(device.type).synchronize()
        totals: defaultdict[tuple[int, Phase, int], float] = defaultdict(float)
        for block, phase, node, start, end in self._spans:
            totals[block, phase, node] += 1e-3 * start.elapsed_time(end)
        self._spans.clear()
        return [OpSeconds(*key, time_s) for key, time_s in totals.items()]


class _Walk(fx.Interpreter):
    """One graph, node by node."""

    def __init__(self, module: fx.GraphModule, clock: OpClock) -> None:
        super().__init__(module)
        self.clock = clock
        self.places = {node: place for place, node in enumerate(module.graph.nodes)}

    def walk(self, arguments: Sequence[Tensor]) -> Sequence[Tensor]:
        result: Sequence[Tensor] = self.run(*arguments, enable_io_processing=False)
        return result

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        start = self.clock.moment()
        result = super().run_node(n)
        self.clock.note(self.places[n], start, self.clock.moment())
        return result
