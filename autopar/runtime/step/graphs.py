"""Training passes recorded as CUDA graphs: forward and backward of a step in one launch.

In: a bound program, its batches, and the function that runs the pass op by op. Out: the pass's
result. The first passes of a program run op by op; then one is recorded, and later ones are
replayed: the host, which launches slower than a GPU runs small kernels, no longer holds it up. The
ranks' agreement on a step and the updates stay outside, so that a step which is not finite is
undone as ever.

A recorded pass reads its batch and the buffers from memory of its own, into which they are copied,
and the parameters where they are. What it returns is memory of its own too, and overwritten by the
next replay: gradients, and next buffers, which are copied before that. A program is not recorded if
its pass communicates, draws random numbers (each operator is seeded by the step's number), updates
or moves something, or scales its loss; or if the host waits for the device in it, as where it reads
a result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.base.errors import first_line
from autopar.base.torch_private import copy_each
from autopar.lowering.pipeline import has_late_updates
from autopar.runtime.machine.apart import apart
from autopar.runtime.machine.cuda_graphs import NotRecorded, Recorder, Recording
from autopar.runtime.state.optimizers import is_elementwise
from autopar.runtime.step.agreement import Agreement
from autopar.runtime.step.bound import Bound
from autopar.runtime.step.executor import StepResult
from autopar.runtime.step.reductions import Arrived, Gradients
from autopar.runtime.step.updates import Updates

NUM_WARM_UPS = 2
"""Passes of a program that run op by op first: libraries choose kernels, optimizers make states."""
MAX_GRAPHS = 4
"""Programs (shapes of batches) that are recorded; each graph keeps its gradients."""

Batches = Sequence[Mapping[int, Tensor]]


class Settled:
    """Gradients that wait for nothing, in the form of a pass's."""

    def __init__(self, gradients: Mapping[int, Tensor]) -> None:
        self._ready = dict(gradients)

    def take(self, values: Sequence[int]) -> dict[int, Tensor]:
        return {v: self._ready.pop(v) for v in values if v in self._ready}

    def arrivals(self) -> Iterator[dict[int, Tensor]]:
        yield self.take(tuple(self._ready))


class _Noting:
    """The updater of a pass that is recorded: it sums the loss and its verdict, and no more."""

    loss_scale = 1.0

    def __init__(self, agreement: Agreement | None) -> None:
        self.agreement = agreement
        self.pair: Tensor | None = None

    def begin(self) -> None:
        if self.agreement is not None:
            self.agreement.begin_step()

    @property
    def agrees(self) -> bool:
        return self.agreement is not None

    def inspect(self, gradients: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> None:
        if self.agreement is not None:
            self.agreement.inspect(gradients, dtypes)

    def total_loss(self, part: Tensor | None) -> Tensor:
        assert self.agreement is not None
        self.pair = self.agreement.summed(part)
        return self.pair[0]

    def may_update(self, arrived: Arrived[Tensor], loss: Tensor | None) -> bool:
        raise AssertionError("a program that updates early is not recorded")

    def update_early(self, arrived: Arrived[Tensor]) -> None:
        raise AssertionError("a program that updates early is not recorded")

    def update(self, values: Sequence[int], gradients: Gradients[Tensor]) -> None:
        pass

    def update_last(self, values: Sequence[int]) -> None:
        raise AssertionError("a program that updates late is not recorded")


class _Results(NamedTuple):
    """The static outputs of a recorded pass, which share no memory with its inputs: the loss, with
    the verdict in ``pair`` if there is an agreement, gradients, and next buffers."""

    pair: Tensor | None
    loss: Tensor
    gradients: Mapping[int, Tensor]
    following: Mapping[int, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    """A recorded pass: what it reads besides parameters, and what it returns.

    ``places`` are the addresses of the parameters, ``fixed`` what was computed from constants.
    """

    recording: Recording
    batches: Sequence[Mapping[int, Tensor]]
    buffers: Mapping[str, Tensor]
    places: tuple[int, ...]
    fixed: Mapping[int, Tensor]
    results: _Results

    def is_valid(self, bound: Bound, buffers: Mapping[str, Tensor]) -> bool:
        """Whether parameters and fixed values are where they were, and buffers as they were."""
        fixed = bound.executor.fixed
        return (
            self.places == _places(bound)
            and all(fixed.get(value) is tensor for value, tensor in self.fixed.items())
            and all(_is_like(own, buffers[name]) for name, own in self.buffers.items())
        )


@dataclass(slots=True, kw_only=True)
class _Entry:
    """A program's count of passes run op by op, and its graph, or the reason that it has none."""

    bound: Bound
    num_runs: int = 0
    recorded: _Recorded | None = None
    reason: str | None = None


@dataclass(slots=True)
class StepGraphs:
    """The graphs of one rank's programs. ``is_alone``: the rank is the only one of its job."""

    recorder: Recorder
    is_alone: bool
    _entries: dict[int, _Entry] = field(default_factory=dict)
    _is_allowed: bool = True
    _failed: str | None = None

    def allow(self, is_allowed: bool) -> None:
        """Whether passes are recorded from now on. If not, graphs are dropped with their memory."""
        self._is_allowed = is_allowed
        if not is_allowed:
            for entry in self._entries.values():
                entry.recorded, entry.num_runs, entry.reason = None, 0, None

    def forget(self, bound: Bound) -> None:
        """Drop what is known of a program that will not run again; others may have its room."""
        self._entries.pop(id(bound), None)
        for entry in self._entries.values():
            entry.reason = None

    def notes(self) -> list[str]:
        """Lines for a report: how many programs are replayed, and the reasons of the others."""
        found = [entry.recorded is not None for entry in self._entries.values()]
        lines = [f"CUDA graphs: {sum(found)} of {len(found)} programs are replayed"]
        reasons = dict.fromkeys(e.reason for e in self._entries.values() if e.reason is not None)
        return lines + [f"CUDA graphs: not used where {reason}" for reason in reasons]

    def run(
        self,
        bound: Bound,
        buffers: dict[str, Tensor],
        batches: Batches,
        updates: Updates,
        launch: Callable[[], StepResult[Tensor]],
    ) -> StepResult[Tensor]:
        """Run a pass: replay it if it is recorded or can be, else ``launch`` it op by op.

        ``buffers`` are the runtime's own, whose tensors are replaced by those that graphs read.
        """
        entry = self._entries.setdefault(id(bound), _Entry(bound=bound))
        if entry.recorded is not None and not entry.recorded.is_valid(bound, buffers):
            entry.recorded, entry.num_runs = None, 0
        if entry.recorded is None and self._is_due(entry, updates):
            self._record(entry, buffers, batches, updates)
        if entry.recorded is None:
            entry.num_runs += 1
            return launch()
        return _replayed(entry.recorded, bound, buffers, batches, updates)

    def _is_due(self, entry: _Entry, updates: Updates) -> bool:
        if not self._is_allowed or entry.reason is not None or entry.num_runs < NUM_WARM_UPS:
            return False
        entry.reason = self._why_not(entry.bound, updates)
        return entry.reason is None

    def _why_not(self, bound: Bound, updates: Updates) -> str | None:
        num_graphs = sum(e.recorded is not None for e in self._entries.values())
        for is_excluded, reason in (
            (self._failed is not None, self._failed),
            (not self.is_alone, "ranks communicate"),
            (bound.is_random, "operators draw random numbers"),
            (bound.program.early is not None, "weights are updated in the backward pass"),
            (has_late_updates(bound.program), "weights are updated in the next forward pass"),
            (updates.mover is not None, "tensors move to the host"),
            (updates.scale is not None, "the loss is scaled by a number that changes"),
            (num_graphs >= MAX_GRAPHS, f"{MAX_GRAPHS} programs have graphs already"),
        ):
            if is_excluded:
                return reason
        try:
            return self.recorder.why_no_room()
        except RuntimeError as error:  # of CUDA
            return f"the memory cannot be told ({first_line(error)})"

    def _record(
        self, entry: _Entry, buffers: Mapping[str, Tensor], batches: Batches, updates: Updates
    ) -> None:
        """Record a pass over copies of a batch and of the buffers."""
        bound = entry.bound
        given = [{value: x.clone() for value, x in batch.items()} for batch in batches]
        own = {name: buffers[name].clone() for name in bound.buffers.values()}
        noting = _Noting(updates.agreement)
        bound.executor.fix(bound.held(own))  # a recording computes nothing that others may read

        def run() -> _Results:
            noting.begin()
            result = bound.executor.step(bound.parameters, bound.held(own), given, noting)
            gradients: dict[int, Tensor] = {}
            for arrived in result.reductions.arrivals():
                gradients.update(arrived)
            read = [*own.values(), *(x for batch in given for x in batch.values())]
            read += [*bound.executor.fixed.values(), *bound.constants.values()]
            following = dict(zip(result.buffers, apart([*result.buffers.values()], read)))
            return _Results(noting.pair, result.loss, gradients, following)

        try:
            recording, results = self.recorder.record(run)
        except NotRecorded as error:
            entry.reason = str(error)
            return
        except Exception as error:  # whatever CUDA and its libraries refuse
            entry.reason = self._failed = f"a pass could not be recorded ({first_line(error)})"
            return
        finally:
            noting.begin()
        entry.recorded = _Recorded(
            recording=recording,
            batches=given,
            buffers=own,
            places=_places(bound),
            fixed=dict(bound.executor.fixed),
            results=results,
        )


def _replayed(
    recorded: _Recorded,
    bound: Bound,
    buffers: dict[str, Tensor],
    batches: Batches,
    updates: Updates,
) -> StepResult[Tensor]:
    into: list[Tensor] = []
    of: list[Tensor] = []
    for own, batch in zip(recorded.batches, batches, strict=True):
        into += [own[value] for value in batch]
        of += batch.values()
    for name, own_buffer in recorded.buffers.items():
        if buffers[name] is not own_buffer:
            into.append(own_buffer)
            of.append(buffers[name])
            buffers[name] = own_buffer
    copy_each(into, of)
    recorded.recording.replay()
    bound.executor.spans.clear()
    results = recorded.results
    if results.pair is not None and updates.agreement is not None:
        updates.agreement.judge(results.pair)
    gradients = dict(results.gradients)
    if updates.optimizer is not None and not is_elementwise(updates.optimizer):
        gradients = {value: x.clone() for value, x in gradients.items()}  # it may keep them
    return StepResult(
        loss=results.loss.clone(),
        gradients={},
        buffers=results.following,
        reductions=Settled(gradients),
    )


def _is_like(own: Tensor, given: Tensor) -> bool:
    return own.shape == given.shape and own.dtype is given.dtype


def _places(bound: Bound) -> tuple[int, ...]:
    return tuple(parameter.data_ptr() for parameter in bound.parameters.values())
