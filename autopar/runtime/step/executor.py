"""The executor runs one training step, or one forward pass, of a rank program.

It plays the actions of one pipeline device in the schedule's order (forward, input and weight
gradients, recomputation, reductions, messages between stages); a program without a pipeline has one
stage and the plain order. What a stage computes is in `autopar.runtime.step.computation`, how
messages travel in `autopar.runtime.step.exchange`, and where graphs run in
`autopar.runtime.machine.protocols`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from autopar.lowering.route import Route, route_of
from autopar.lowering.streams import Part, streams_of
from autopar.lowering.types import OutputProgram, RankProgram, Role
from autopar.runtime.faults.progress import encoded, report
from autopar.runtime.machine.moments import HostMoment, Moment, on_host, total_s
from autopar.runtime.machine.protocols import Links, Machine, Phase
from autopar.runtime.machine.shared_buffers import combined
from autopar.runtime.step.computation import Computation
from autopar.runtime.step.exchange import Exchange
from autopar.runtime.step.reductions import Arrived, Gradients, Reductions, Updater
from autopar.runtime.step.tables import StepTables
from autopar.schedules.action import RECV_KINDS, SEND_KINDS, Action, Kind
from autopar.schedules.schedule import DEFAULT_RESOURCE, Resource

T = TypeVar("T")
_SENT = encoded("the last sends of its schedule")
_REDUCED = encoded("the reductions of gradients and of the loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult(Generic[T]):
    """The results of one step: the loss (replicated), gradients in stored placement, next buffers.

    Gradients and buffers are those of this device's stages. With an updater there are no gradients:
    those that no update has used yet are in ``reductions``, perhaps still in flight.
    """

    loss: T
    gradients: Mapping[int, T]
    buffers: Mapping[int, T]
    reductions: Gradients[T]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTime:
    """When an action ran on the device, on the host's monotonic clock.

    It starts with its first work, or when the message that it needs had arrived; copying the
    message is part of it. The reduction of its gradients has an entry of its own where it runs on
    another stream. ``resource``: what it occupies in the schedule, of whose two compute streams one
    may run during the other. ``communication_s``: the waits in collectives in it, where they are
    timed.
    """

    action: Action
    resource: Resource
    start_s: float
    end_s: float
    communication_s: float = 0.0

    @property
    def time_s(self) -> float:
        return self.end_s - self.start_s


class ActionSpan(NamedTuple):
    """The moments at which an action started and ended on its stream, and its waits in collectives
    did."""

    action: Action
    resource: Resource
    start: Moment
    end: Moment
    waits: tuple[tuple[Moment, Moment], ...] = ()


def action_times(spans: Iterable[ActionSpan], now: Moment, now_s: float) -> list[ActionTime]:
    """The times of actions that have ended; ``now`` is a later moment, at ``now_s`` on the host's
    clock."""
    return [
        ActionTime(
            action=span.action, resource=span.resource,
            start_s=on_host(span.start, now, now_s), end_s=on_host(span.end, now, now_s),
            communication_s=total_s(span.waits),
        )
        for span in spans
    ]  # fmt: skip


class Executor(Generic[T]):
    """Runs one program on one machine. Parameters and buffers are passed in, never owned.

    ``spans`` has the actions of the last pass, in the order of issue.
    """

    def __init__(
        self, program: RankProgram, machine: Machine[T], links: Links[T], device: int = 0
    ) -> None:
        self.program = program
        self.machine = machine
        self.links = links
        self.route = route_of(program, device)
        self.tables = StepTables(program, self.route)
        self.issues = {(i.action, i.part): i for i in streams_of(program, self.route)}
        self.labels = tuple(encoded(f"action {action}") for action in self.route.actions)
        self.fixed: dict[int, T] = {}
        self.spans: list[ActionSpan] = []

    def forward(
        self, parameters: Mapping[int, T], buffers: Mapping[int, T], inputs: Mapping[int, T]
    ) -> dict[int, T]:
        """The loss and the outputs of a forward program, whole, by value."""
        self.fix(buffers)
        run = self._computation(parameters, buffers, [inputs])
        _Play(self, run).run()
        wanted = [*self.program.outputs]
        if self.program.loss is not None:
            wanted.append(self.program.loss)
        return {output.value: self._shared(output, run) for output in wanted}

    def _shared(self, output: OutputProgram, run: Computation[T]) -> T:
        if output.devices is None:
            return run.whole(output, run.value(0, output.value))
        own = None
        if self.route.device in output.devices:
            own = run.whole(output, run.value(0, output.value))
        return self.links.share(output.devices, own, output.meta)

    def step(
        self,
        parameters: Mapping[int, T],
        buffers: Mapping[int, T],
        batches: Sequence[Mapping[int, T]],
        updater: Updater[T] | None = None,
    ) -> StepResult[T]:
        """Run forward and backward of all micro-batches, and updates, in the schedule's order.

        Without an ``updater`` nothing is updated, and the result has all gradients.
        """
        assert self.program.loss is not None
        self.fix(buffers)
        agrees = updater is not None and updater.agrees
        scale = 1.0 if updater is None else updater.loss_scale
        run = self._computation(
            parameters, buffers, self._inputs(buffers, batches), agrees, scale, updater is not None
        )
        run.read_copied()
        play = _Play(self, run, updater)
        try:
            play.run()
            report(_REDUCED)
            play.reductions.begin_rest()
            play.update_early(is_last=True)
        finally:
            self.machine.end_updates()
        run.finish()
        device = self.route.device
        run.following.update(
            combined(self.program, device, self.machine, self.links, buffers, run.made)
        )
        if updater is not None and agrees:
            loss = updater.total_loss(run.loss)
        else:
            loss = self._total_loss(self.program.loss, run)
        gradients: dict[int, T] = {}
        if updater is None:
            for arrived in play.reductions.arrivals():
                gradients.update(arrived)
        return StepResult(
            loss=loss, gradients=gradients, buffers=run.following, reductions=play.reductions
        )

    def _total_loss(self, output: OutputProgram, run: Computation[T]) -> T:
        """Sum the loss over the devices of its stage; the same on all devices."""
        num_devices = self.program.pipeline.num_devices
        own = run.whole_loss()
        if own is None:
            own = self.machine.filled(output.meta, 0.0)
        return self.links.start_sum(tuple(range(num_devices)), [own])()[0]

    def _computation(
        self,
        parameters: Mapping[int, T],
        buffers: Mapping[int, T],
        given: Sequence[Mapping[int, T]],
        keeps_loss: bool = False,
        loss_scale: float = 1.0,
        in_steps: bool = False,
    ) -> Computation[T]:
        return Computation(
            self.tables,
            self.machine,
            parameters=parameters,
            buffers=buffers,
            fixed=self.fixed,
            given=given,
            keeps_loss=keeps_loss,
            loss_scale=loss_scale,
            in_steps=in_steps,
        )

    def fix(self, buffers: Mapping[int, T]) -> None:
        """Run the blocks that depend on constants alone, in the first pass only."""
        fixed = self.fixed
        for position, block in enumerate(self.program.blocks):
            if block.role is not Role.FIXED or all(o in fixed for o in block.interface.outputs):
                continue
            kernel = self.program.kernels[block.kernel]
            operands = [fixed[i] if i in fixed else buffers[i] for i in block.interface.inputs]
            self.machine.begin(0, position, Phase.FORWARD)
            fixed.update(zip(block.interface.outputs, self.machine.run(kernel.forward, operands)))

    def _inputs(
        self, buffers: Mapping[int, T], batches: Sequence[Mapping[int, T]]
    ) -> list[dict[int, T]]:
        """Each micro-batch's inputs, and the totals over all of them."""
        given = [dict(batch) for batch in batches]
        for position, block in enumerate(self.program.blocks):
            if block.role is not Role.TOTALS:
                continue
            kernel = self.program.kernels[block.kernel]
            for index, batch in enumerate(given):
                self.machine.begin(index, position, Phase.FORWARD)
                known = {**self.fixed, **buffers, **batch}
                operands = [known[i] for i in block.interface.inputs]
                results = self.machine.run(kernel.forward, operands)
                batch.update(zip(block.interface.outputs, results))
        for total in self.program.totals:
            summed = given[0][total.value]
            for batch in given[1:]:
                summed = self.machine.add(summed, batch[total.value])
            if total.kernel is not None:
                forward = self.program.kernels[total.kernel].forward
                summed = self.machine.run(forward, [summed])[0]
            for batch in given:
                batch[total.value] = summed
        return given


class _Play(Generic[T]):
    """One pass over a device's actions."""

    def __init__(
        self, executor: Executor[T], run: Computation[T], updater: Updater[T] | None = None
    ) -> None:
        self.program = executor.program
        self.route: Route = executor.route
        self.labels = executor.labels
        self.issues = executor.issues
        self.machine = executor.machine
        self.compute = run
        self.updater = updater
        self.exchange = Exchange(self.program.pipeline, self.route, executor.links)
        self.reductions = Reductions(
            executor.tables,
            executor.machine,
            executor.links,
            run.partial,
            inspect=None if updater is None else updater.inspect,
        )
        self.keep = any(a.kind in (Kind.I, Kind.B) for a in self.route.actions)
        self.spans = executor.spans
        self.spans.clear()
        self.start = self.machine.moment()

    def run(self) -> None:
        for label, action in zip(self.labels, self.route.actions):
            report(label)
            try:
                self._issue(action)
            except Exception as error:
                error.add_note(f"in action {action} of pipeline device {self.route.device}")
                raise
        report(_SENT)
        self.exchange.finish()
        with self._on(None, Part.JOIN):
            pass

    def _on(self, action: Action | None, part: Part) -> contextlib.AbstractContextManager[None]:
        """The stream of an issue, if the schedule has two."""
        issue = self.issues.get((action, part))
        return contextlib.nullcontext() if issue is None else self.machine.on(issue)

    def _issue(self, action: Action) -> None:
        """Run an action, and reduce the gradients that it completes."""
        is_apart = (action, Part.REDUCE) in self.issues
        with self._on(action, Part.RUN):
            num_before = self._begin()
            completed = self._do(action)
            if is_apart:
                completed = list(completed)
            else:
                self._reduce(completed)
            self._end(action, Part.RUN, num_before)
        if is_apart:
            with self._on(action, Part.REDUCE):
                num_before = self._begin()
                self._reduce(completed)
                self._end(action, Part.REDUCE, num_before)

    def _begin(self) -> int:
        """Note when the stream begins what comes; the number of waits so far."""
        self.start = self.machine.moment()
        return len(self.machine.waits)

    def _end(self, action: Action, part: Part, num_before: int) -> None:
        """Note when the stream ends what has come since `_begin`."""
        resource, issue = DEFAULT_RESOURCE[action.kind], self.issues.get((action, part))
        if issue is not None and resource is Resource.MAIN:
            resource = issue.stream
        waits = tuple(self.machine.waits[num_before:])
        self.spans.append(ActionSpan(action, resource, self.start, self.machine.moment(), waits))

    def _do(self, action: Action) -> Iterable[list[int]]:
        """Run an action. Its weight gradients are computed block by block while the result is read:
        the parameters whose gradients are complete."""
        stage, kind, microbatch = action.stage, action.kind, action.microbatch
        if kind is Kind.G:
            self.reductions.start_stage(stage)
            return ()
        if kind is Kind.U:
            self._update(action)
            return ()
        assert microbatch is not None
        if kind in (Kind.F, Kind.I, Kind.B):
            received = Kind.RECV_F if kind is Kind.F else Kind.RECV_B
            self._receive(Action(stage, received, microbatch, 1, action.replica))
        if kind in SEND_KINDS:
            self._send(action, microbatch)
        elif kind in RECV_KINDS:
            self.exchange.post(action)
        else:
            return self._compute(action, microbatch)
        return ()

    def _compute(self, action: Action, microbatch: int) -> Iterable[list[int]]:
        stage, kind = action.stage, action.kind
        if kind is Kind.F:
            self.compute.forward(stage, microbatch, keep=self.keep)
            if self.keep:
                self.compute.finish_forward(stage, microbatch)
        elif kind is Kind.R:
            self.compute.recompute(stage, microbatch)
        elif kind is Kind.W:
            return self.compute.weights(stage, microbatch)
        else:
            assert kind in (Kind.I, Kind.B), action
            return self.compute.backward(stage, microbatch, weights=kind is Kind.B)
        return ()

    def _update(self, action: Action) -> None:
        values = self.route.parameters[action.stage]
        if self.updater is not None and action in self.route.late_updates:
            self.updater.update_last(values)
        elif self.updater is not None:
            self.updater.update(values, self.reductions)

    def _reduce(self, completed: Iterable[list[int]]) -> None:
        for values in completed:
            self.reductions.complete(values)
            self.reductions.reduce_rows(self.compute.rows)
            self.update_early()

    def update_early(self, *, is_last: bool = False) -> None:
        """Update what is complete and read no more, if the program updates early."""
        reads = self.compute.reads
        if self.updater is None or reads is None:
            return
        arrived = self.reductions.arrived(reads, is_last=is_last)
        if arrived and self.updater.may_update(arrived, self.compute.loss):
            with self._updating(arrived):
                self.updater.update_early(arrived)

    def _updating(self, arrived: Arrived[T]) -> contextlib.AbstractContextManager[None]:
        """The stream of an early update, if those of the program overlap with other work."""
        early = self.program.early
        assert early is not None
        return self.machine.updating(arrived.values) if early.overlaps else contextlib.nullcontext()

    def _send(self, action: Action, microbatch: int) -> None:
        flight, carried = self.compute.flights[microbatch], self.exchange.values(action)
        if action.kind is Kind.SEND_B:
            self.exchange.send(action, [flight.cotangents.pop(v) for v in carried])
            return
        self.exchange.send(action, [flight.values[v] for v in carried])
        for value in carried:
            if value not in self.route.handed_out:
                del flight.values[value]

    def _receive(self, action: Action) -> None:
        """Wait for the message to a stage, if there is one."""
        if not self.exchange.expects(action):
            return
        assert action.microbatch is not None
        flight = self.compute.flights[action.microbatch]
        taken = self.exchange.take(action)
        now = self.machine.moment()
        self.start = HostMoment(taken.arrived_s) if isinstance(now, HostMoment) else now
        received = zip(self.exchange.values(action), taken.values)
        if action.kind is Kind.RECV_F:
            flight.values.update(received)
            return
        for value, gradient in received:
            self.compute.accumulate(flight.cotangents, value, gradient)
