"""Recovery from an op that raises in a training step: all ranks end it alike, and none updates.

If an op raises on one rank alone (a label out of range in its shard of the batch), the other ranks
wait for that rank's messages. So it continues after the op, with zeros as the op's results, through
the rest of the step: every message is sent, every reduction is joined, and the next step can begin.
The rank refuses the step as it would refuse one that is not finite
(`autopar.runtime.step.agreement`), which leaves everything as it was.

In: each call of a graph. Out: its results, and the first `Failure` of the step.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.base.errors import AutoparError, StepError
from autopar.base.torch_private import FakeTensor, FakeTensorMode, pytree
from autopar.comm.groups import Communicator
from autopar.comm.ops import RAW_OPS
from autopar.lowering.types import RankProgram
from autopar.runtime.faults import progress
from autopar.runtime.machine.op_clock import OpClock, TimedWalk, timed_graphs
from autopar.runtime.machine.protocols import Phase
from autopar.runtime.step.diagnosis import PARTLY_UPDATED, Found, RefusedStep, error_of, maker_of
from autopar.runtime.step.updates import Updates

_GO_ON = (
    "nothing has changed on any rank: weights, optimizer state, buffers and counters are those "
    "before the step, and training can go on with the next batch"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The error of one rank: in which action (``doing``) and at which op (``found``)."""

    rank: int
    summary: str
    doing: str
    found: Found | None
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedStep:
    """A step in which some ranks raised; ``is_partial`` as in `RefusedStep`."""

    number: int
    failures: tuple[Failure, ...]
    num_ranks: int
    is_partial: bool = False


class Recovery:
    """Runs the graphs of one rank's steps; with ``is_able`` a step continues after an error.

    While a ``clock`` is set, it times the ops of blocks.
    """

    def __init__(
        self, program: RankProgram, communicator: Communicator, updates: Updates, *, is_able: bool
    ) -> None:
        self.program = program
        self.updates = updates
        self.communicator = communicator
        self.rank = communicator.world_rank
        self.is_able = is_able
        self.failure: Failure | None = None
        self.clock: OpClock | None = None
        self._call: tuple[int, int, Phase] = (0, 0, Phase.FORWARD)

    def begin_step(self) -> None:
        self.failure = None

    def begin(self, microbatch: int, block: int, phase: Phase) -> None:
        self._call = microbatch, block, phase

    def run(
        self,
        module: fx.GraphModule,
        bound: fx.GraphModule,
        compiled: fx.GraphModule | None,
        arguments: Sequence[Tensor],
    ) -> Sequence[Tensor]:
        """Run ``bound``, a copy of ``module`` with bound collectives, or its compiled form.

        If that raises, the graph runs again op by op, which finds the op, unless it communicates.
        """
        results: Sequence[Tensor]
        if compiled is not None:
            try:
                results = compiled.forward(*arguments)
                return results
            except Exception:
                if any(node.target in RAW_OPS for node in module.graph.nodes):
                    raise
        walk = None if self.clock is None else self._timed(self.clock, module, bound)
        try:
            results = bound.forward(*arguments) if walk is None else walk.walk(arguments)
        except Exception as error:
            known = _variables(type(bound).forward, error) if walk is None else walk.values
            rest = _Rest(module, bound, known)
            found = self._found(module, rest.place)
            if found is not None:
                error.add_note(f"rank {self.rank}, {maker_of(found, self.program)}")
            if not self.is_able or not rest.can_go_on or isinstance(error, AutoparError):
                raise
            if self.failure is None:
                self.failure = self._noted(error, found)
                self.updates.is_void = True
            try:
                results = rest.run()
            except Exception as another:
                raise error from another
        return results

    def _timed(
        self, clock: OpClock, module: fx.GraphModule, bound: fx.GraphModule
    ) -> TimedWalk | None:
        """A run of a graph that the clock times; None for moves."""
        _, block, _ = self._call
        kernel = self.program.kernels[self.program.blocks[block].kernel]
        for graph, known in enumerate(timed_graphs(kernel)):
            if known is module:
                return clock.walk(bound, block, graph)
        return None

    def _is_move(self, module: fx.GraphModule) -> bool:
        """Whether it is no graph of the present block, but moves values between blocks."""
        _, block, phase = self._call
        kernel = self.program.kernels[self.program.blocks[block].kernel]
        return module is not (kernel.forward, kernel.backward_input, kernel.backward_weight)[phase]

    def _found(self, module: fx.GraphModule, place: int) -> Found | None:
        """The location of a node of the present block; None for a move between blocks."""
        if self._is_move(module):
            return None
        microbatch, block, phase = self._call
        return Found(
            kind="", microbatch=microbatch, block=block, phase=phase, node=place, rank=self.rank
        )

    def _noted(self, error: Exception, found: Found | None) -> Failure:
        return Failure(
            rank=self.rank,
            summary=traceback.format_exception_only(error)[0].strip(),
            doing=progress.current(),
            found=found,
            traceback="".join(traceback.format_exception(error)),
        )

    def failed_step(self, number: int) -> FailedStep | None:
        """The errors of all ranks in this step; None if there are none. Collective."""
        by_rank = self.communicator.from_all_ranks(self.failure)
        failures = tuple(failure for failure in by_rank if failure is not None)
        if not failures:
            return None
        return FailedStep(number=number, failures=failures, num_ranks=len(by_rank))


class _Rest:
    """The remainder of a graph after an op of it raised.

    ``known``: the values computed so far by the names of their nodes, such as the variables in the
    frame of the graph's function; the first node without a value is the one that raised.
    """

    def __init__(
        self, module: fx.GraphModule, bound: fx.GraphModule, known: Mapping[str, Any]
    ) -> None:
        self._bound = bound
        self._pairs = list(zip(bound.graph.nodes, module.graph.nodes, strict=True))
        missing = [
            place
            for place, (node, _) in enumerate(self._pairs)
            if node.op != "output" and node.name not in known
        ]
        self.place = missing[0] if missing else 0
        self.can_go_on = bool(known and missing) and not self._communicates(self.place)
        self._values = {n: known[n.name] for n, _ in self._pairs if n.name in known}

    def _communicates(self, place: int) -> bool:
        return self._pairs[place][1].target in RAW_OPS

    def run(self) -> Sequence[Tensor]:
        for place in range(self.place, len(self._pairs)):
            node, original = self._pairs[place]
            if node.op == "output":
                results: Sequence[Tensor] = self._read(node.args[0])
                return results
            if node.op == "get_attr":
                self._values[node] = getattr(self._bound, str(node.target))
                continue
            args, kwargs = self._read(node.args), self._read(node.kwargs)
            if place == self.place:
                self._values[node] = _zeros(original.target, args, kwargs)
                continue
            try:
                self._values[node] = node.target(*args, **kwargs)
            except Exception:
                if self._communicates(place):
                    raise
                self._values[node] = _zeros(original.target, args, kwargs)
        raise AssertionError("a graph ends with its output")

    def _read(self, arguments: Any) -> Any:
        return fx.map_arg(arguments, lambda node: self._values[node])


def _variables(function: Callable[..., Any], error: Exception) -> Mapping[str, Any]:
    """The local variables of a function in the traceback of an error."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is function.__code__:
            return dict(trace.tb_frame.f_locals)
        trace = trace.tb_next
    return {}


def _zeros(target: Any, args: Any, kwargs: Any) -> Any:
    """Zeros of the shapes that an op returns for such arguments, whatever their values."""
    with FakeTensorMode() as mode:

        def fake(value: Any) -> Any:
            return mode.from_tensor(value) if isinstance(value, Tensor) else value

        made = target(*pytree.tree_map(fake, args), **pytree.tree_map(fake, kwargs))

    def real(value: Any) -> Any:
        if not isinstance(value, FakeTensor):
            return value
        shape, stride = tuple(value.shape), value.stride()
        return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device).zero_()

    return pytree.tree_map(real, made)


def error_of_step(step: RefusedStep | FailedStep, program: RankProgram) -> AutoparError:
    """The error for a step that was undone; ``program`` as it was lowered in this process."""
    if isinstance(step, RefusedStep):
        return error_of(step, program)
    first, *others = step.failures
    lines = [f"rank {first.rank} of {step.num_ranks} {_what(first, step, program)}"]
    lines += [f"rank {other.rank} {_what(other, step, program)}" for other in others]
    lines.append(PARTLY_UPDATED if step.is_partial else _GO_ON)
    lines += [f"traceback of rank {first.rank}:", first.traceback.rstrip()]
    return StepError("\n".join(lines), rank=first.rank, traceback=first.traceback)


def _what(failure: Failure, step: FailedStep, program: RankProgram) -> str:
    text = f"raised {failure.summary}"
    if failure.doing:
        text += f" in {failure.doing}"
    text += f" of training step {step.number}"
    return text if failure.found is None else f"{text}: {maker_of(failure.found, program)}"
