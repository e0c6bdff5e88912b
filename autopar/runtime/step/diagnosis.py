"""The origin of the first non-finite value, found by running a refused step once more.

In: each call of a block's graph, node by node, with the step's own batch, weights and seed. Out: on
each rank the first infinite value and the first NaN; the error names the earliest over all ranks.
Infinite constants of the model (attention masks) and values computed from them do not count: only a
value that an op computes from finite operands does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.base.errors import NonFiniteError
from autopar.comm.groups import Communicator
from autopar.lowering.op_marks import op_place
from autopar.lowering.printing import operator_name
from autopar.lowering.types import RankProgram
from autopar.runtime.machine.protocols import Phase

_EVERY_MAKER_IS_FINITE = (
    "every block computed finite values when the step was run again: gradients overflow where they "
    "are summed, over micro-batches or ranks, or in their norm"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The first value of a kind (``"inf"`` or ``"nan"``) on one rank, and the node it is from."""

    kind: str
    microbatch: int
    block: int
    phase: Phase
    node: int
    rank: int

    @property
    def order(self) -> tuple[int, ...]:
        """The order of dependence: the backward pass goes through the blocks in reverse."""
        backward = self.phase is not Phase.FORWARD
        block = -self.block if backward else self.block
        return self.microbatch, backward, block, self.phase, self.node


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedStep:
    """A step that was refused. ``given`` are inputs and weights that were not finite before.

    ``is_partial``: an early update had changed weights before.
    """

    number: int
    loss: float
    found: tuple[Found, ...]
    given: tuple[str, ...]
    num_ranks: int
    is_partial: bool = False


PARTLY_UPDATED = (
    "Weights have changed: update='early' updates each as soon as its gradient is complete, and "
    "those of later layers were complete. Load the last checkpoint before training goes on; "
    "update='at_end' updates nothing in such a step"
)


class StepRefused(Exception):
    """Raised on all ranks alike; a runner turns it into an error for the user."""

    def __init__(self, step: Any) -> None:
        super().__init__(step)
        self.step = step


class Probe:
    """Runs the graphs of blocks node by node, and records the first non-finite values."""

    def __init__(self, program: RankProgram, rank: int) -> None:
        self.program = program
        self.rank = rank
        self._first: dict[str, Found] = {}
        self._call: tuple[int, int, Phase] = (0, 0, Phase.FORWARD)

    @property
    def found(self) -> tuple[Found, ...]:
        return tuple(self._first.values())

    def begin(self, microbatch: int, block: int, phase: Phase) -> None:
        self._call = microbatch, block, phase

    def run(
        self,
        module: fx.GraphModule,
        bound: fx.GraphModule,
        compiled: fx.GraphModule | None,
        arguments: Sequence[Tensor],
    ) -> Sequence[Tensor]:
        """Run ``bound``, a copy of ``module`` with bound collectives, op by op."""
        _, block, phase = self._call
        kernel = self.program.kernels[self.program.blocks[block].kernel]
        graphs = kernel.forward, kernel.backward_input, kernel.backward_weight
        if module is not graphs[phase]:  # a move between blocks
            result: Sequence[Tensor] = bound.forward(*arguments)
            return result
        return _Walk(bound, self).walk(arguments)

    def note(self, kind: str, node: int) -> None:
        microbatch, block, phase = self._call
        found = Found(
            kind=kind, microbatch=microbatch, block=block, phase=phase, node=node, rank=self.rank
        )
        known = self._first.get(kind)
        if known is None or found.order < known.order:
            self._first[kind] = found


class _Walk(fx.Interpreter):
    """One graph, node by node; for each value, the kinds that it or its operands contain."""

    def __init__(self, module: fx.GraphModule, probe: Probe) -> None:
        super().__init__(module)
        self.probe = probe
        self.places = {node: place for place, node in enumerate(module.graph.nodes)}
        self.kinds: dict[fx.Node, frozenset[str]] = {}

    def walk(self, arguments: Sequence[Tensor]) -> Sequence[Tensor]:
        result: Sequence[Tensor] = self.run(*arguments, enable_io_processing=False)
        return result

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "output":
            return result
        held = kinds_in(result)
        self.kinds[n] = held
        if n.op == "placeholder" and "nan" in held:
            self.probe.note("nan", self.places[n])
        elif n.op == "placeholder" and "inf" in held and bool((result == torch.inf).any()):
            self.probe.note("inf", self.places[n])  # masks contain -inf alone
        if n.op == "call_function":
            read = frozenset().union(*(self.kinds[a] for a in n.all_input_nodes), _written(n))
            for kind in held:
                if not read or (kind == "nan" and "nan" not in read):  # an inf may become a NaN
                    self.probe.note(kind, self.places[n])
        return result


def kinds_in(value: Any) -> frozenset[str]:
    """Which of ``"inf"`` and ``"nan"`` a tensor, or any of several, contains."""
    if isinstance(value, list | tuple):
        return frozenset().union(*map(kinds_in, value))
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return frozenset()
    tests = {"inf": torch.isinf, "nan": torch.isnan}
    return frozenset(kind for kind, test in tests.items() if bool(test(value).any()))


def _written(node: fx.Node) -> frozenset[str]:
    """The kinds among the constants of the graph."""
    numbers: list[float] = []

    def look(argument: Any) -> None:
        if isinstance(argument, float):
            numbers.append(argument)
        elif isinstance(argument, list | tuple):
            for item in argument:
                look(item)

    look((*node.args, *node.kwargs.values()))
    return kinds_in(torch.tensor(numbers, dtype=torch.float64))


def refused_step(
    probe: Probe,
    communicator: Communicator,
    given: Mapping[str, Tensor],
    *,
    number: int,
    loss: float,
) -> RefusedStep:
    """The findings of all ranks. Collective. ``given`` are the step's operands by name."""
    named = [
        f"{name} has {' and '.join(sorted(kinds))}"
        for name, value in given.items()
        if (kinds := kinds_in(value))
    ]
    by_rank = communicator.from_all_ranks((probe.found, named))
    given_on: dict[str, list[int]] = {}
    for rank, (_, texts) in enumerate(by_rank):
        for text in dict.fromkeys(texts):
            given_on.setdefault(text, []).append(rank)
    return RefusedStep(
        number=number,
        loss=loss,
        found=tuple(found for all_found, _ in by_rank for found in all_found),
        given=tuple(text + _on(ranks, len(by_rank)) for text, ranks in given_on.items()),
        num_ranks=len(by_rank),
    )


def error_of(step: RefusedStep, program: RankProgram) -> NonFiniteError:
    """The error for a refused step; ``program`` as it was lowered in this process."""
    isfinite = torch.tensor(step.loss).isfinite()
    what = f"a gradient is not finite (the loss is {step.loss:.6g})" if isfinite else (
        f"the loss is {step.loss}"
    )  # fmt: skip
    ordered = sorted(step.found, key=lambda found: (found.order, found.rank))
    lines = [f"in training step {step.number} {what}"]
    lines += [f"given to it: {given}" for given in step.given]
    seen: set[str] = set()
    for found in ordered:
        if found.kind not in seen:
            seen.add(found.kind)
            ranks = [f.rank for f in ordered if (f.kind, f.order) == (found.kind, found.order)]
            lines.append(_line(found, sorted(ranks), step.num_ranks, program))
    if step.is_partial:
        return NonFiniteError("\n".join([*lines, PARTLY_UPDATED]))
    if not ordered and not step.given:
        lines.append(_EVERY_MAKER_IS_FINITE)
    lines.append(
        "Nothing has changed: weights, optimizer state, buffers and counters are those before the "
        "step, and training can go on with the next batch. autopar.compile(..., nonfinite='skip') "
        "skips such batches, nonfinite='ignore' trains on them"
    )
    text = "\n".join(lines)
    if not ordered:
        return NonFiniteError(text)
    first = ordered[0]
    return NonFiniteError(
        text,
        block=program.blocks[first.block].name,
        phase=_phase(first),
        microbatch=first.microbatch,
        location=_location(first, program) or None,
    )


def _line(found: Found, ranks: Sequence[int], num_ranks: int, program: RankProgram) -> str:
    where = _where(found, program) + _on(ranks, num_ranks)
    node, location = _node(found, program), _location(found, program)
    at = f" at {location}" if location else ""
    maker = "read" if node.op == "placeholder" else f"made by {operator_name(node)}{at}"
    return f"first {found.kind}: {maker} ({where})"


def _where(found: Found, program: RankProgram) -> str:
    where = f"block {program.blocks[found.block].name!r}, {_phase(found)}"
    if program.num_microbatches > 1:
        where += f", micro-batch {found.microbatch}"
    return where


def maker_of(found: Found, program: RankProgram) -> str:
    """The op at a node, its line in the user's code if known, and its block."""
    node, location = _node(found, program), _location(found, program)
    at = f" at {location}" if location else ""
    return f"{operator_name(node)}{at} ({_where(found, program)})"


def _on(ranks: Sequence[int], num_ranks: int) -> str:
    """The ranks concerned, unless all are."""
    if len(ranks) == num_ranks:
        return ""
    return f" on rank {', '.join(map(str, ranks))} of {num_ranks}"


def _phase(found: Found) -> str:
    return "forward" if found.phase is Phase.FORWARD else "backward"


def _node(found: Found, program: RankProgram) -> fx.Node:
    kernel = program.kernels[program.blocks[found.block].kernel]
    graphs = kernel.forward, kernel.backward_input, kernel.backward_weight
    module = graphs[found.phase]
    assert module is not None
    return list(module.graph.nodes)[found.node]


def _location(found: Found, program: RankProgram) -> str:
    """File and line of the op that the node belongs to; empty if not known."""
    place = op_place(_node(found, program))
    return "" if place is None else program.blocks[found.block].locations[place]
