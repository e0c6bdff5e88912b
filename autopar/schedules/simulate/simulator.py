"""Event-driven simulation of a schedule: every resource of every device.

In: a ``Schedule``, ``Durations`` and optionally ``Links``, ``Memory`` and ``CoRun``. Out: a
``Timeline``. It compares schedules before anything runs. Each queue (device, resource, peer)
processes its steps in order; a step starts when it is first in its queue, the queue is free, and
all its dependencies have ended or arrived. A value that crosses devices is a message on the
sender's link to that peer, first come first served, unless the schedule's sends are explicit. A
reduction starts on all replicas at once. While both compute streams of a device run, ``CoRun``
slows them down.
"""

import functools
import heapq
from math import inf

from autopar.base.errors import ScheduleError
from autopar.schedules.action import RECV_KINDS, SEND_KINDS, Action, Kind
from autopar.schedules.dependencies import ABSENT, ActionGraph, action_graph
from autopar.schedules.schedule import Resource, Schedule
from autopar.schedules.simulate.durations import CoRun, Durations, Links, Memory
from autopar.schedules.simulate.timeline import Interval, Timeline

_BACKWARD = (Kind.I, Kind.B)


def simulate(
    schedule: Schedule,
    durations: Durations,
    links: Links | None = None,
    *,
    memory: Memory | None = None,
    co_run: CoRun | None = None,
    num_iterations: int = 1,
) -> Timeline:
    """The timeline of ``num_iterations`` consecutive iterations of the schedule.

    Raises ScheduleError if a cost has the wrong length, or if the schedule deadlocks; ``verify``
    says why.
    """
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"{schedule!r} is not a Schedule: make one with build(name, ...)")
    if not isinstance(durations, Durations):
        raise ScheduleError(f"durations={durations!r}: pass Durations(F=1.0, I=1.0, W=1.0)")
    if type(num_iterations) is not int or num_iterations < 1:
        raise ScheduleError(f"num_iterations={num_iterations!r}: a whole number, at least 1")
    run = _Run(action_graph(schedule), durations, links, co_run, num_iterations)
    run.play()
    return Timeline(
        schedule=schedule,
        intervals=tuple(run.intervals),
        memory=memory or Memory(),
        num_iterations=num_iterations,
    )


class _Run:
    """The state of one simulation. Instance ``iteration * num_nodes + node`` is one execution."""

    def __init__(
        self,
        graph: ActionGraph,
        durations: Durations,
        links: Links | None,
        co_run: CoRun | None,
        num_iterations: int,
    ) -> None:
        self.graph = graph
        self.num_nodes = len(graph.steps)
        self.num_iterations = num_iterations
        self.links = links
        shape = graph.schedule.shape
        if links is not None:
            links.check_devices(shape.num_devices)
        self.boundary = links.boundary_bytes(shape.num_stages) if links else []
        self.message = functools.cache(self._message)
        self.co_run = co_run or CoRun()
        self.co_run.check_stages(shape.num_stages)
        self.intervals: list[Interval] = []
        self.events: list[tuple[float, int, int, int]] = []
        self.sequence = 0
        self.link_free: dict[tuple[int, int], float] = {}
        self._prepare_costs(durations)
        self._prepare_successors()
        self._prepare_queues()
        self.started: list[float] = [0.0] * (self.num_nodes * num_iterations)
        self._prepare_co_run()

    def _prepare_costs(self, durations: Durations) -> None:
        splits = any(item.action.kind is Kind.I for item in self.graph.steps)
        costs = durations.split_table if splits else durations.table
        table = costs(self.graph.schedule.shape.num_stages)
        self.cost = [
            durations.single[item.action]
            if item.action in durations.single
            else table[item.action.kind][item.action.stage] * item.action.span
            if item.action.kind in table
            else self._send_occupancy(item.action, device)
            for item, device in zip(self.graph.steps, self.graph.device)
        ]

    def _send_occupancy(self, action: Action, device: int) -> float:
        """Seconds for which an explicit send occupies its link; a receive only waits."""
        if self.links is None or action.kind not in SEND_KINDS:
            return 0.0
        return self._message_of(action, device, self._peer_device(action))[0]

    def _peer_device(self, action: Action) -> int:
        stage = action.stage + (1 if action.kind is Kind.SEND_F else -1)
        return self.graph.schedule.shape.placement[action.replica][stage]

    def _message_of(self, action: Action, source: int, target: int) -> tuple[float, float]:
        """(seconds on the link, latency) of the value that the action produces or sends."""
        forward = action.kind is Kind.F or action.kind is Kind.SEND_F
        boundary = action.stage if forward else action.stage - 1
        return self.message(boundary, action.span, source, target)

    def _message(self, boundary: int, span: int, source: int, target: int) -> tuple[float, float]:
        """(seconds on the link, latency) of a value that crosses the boundary after a stage."""
        assert self.links is not None
        link, size = self.links.link(source, target), self.boundary[boundary] * span
        occupied = 0.0 if link.bandwidth_bytes_per_s == inf else size / link.bandwidth_bytes_per_s
        return occupied, link.latency_s

    def _prepare_successors(self) -> None:
        """Successors of each node as (target, iterations ahead, message's device or -1)."""
        graph = self.graph
        self.successors: list[list[tuple[int, int, int]]] = [[] for _ in range(self.num_nodes)]
        self.pending: list[int] = [len(needs) for needs in graph.needs] * self.num_iterations
        kinds = [item.action.kind for item in graph.steps]
        timed = self.links is not None
        for node, needs in enumerate(graph.needs):
            kind, device = kinds[node], graph.device[node]
            for source in needs:
                message = -1
                if timed and graph.device[source] != device:
                    crosses = kind is Kind.F or kind in _BACKWARD or kind in RECV_KINDS
                    message = device if crosses else -1
                self.successors[source].append((node, 0, message))
        for source, node, back in graph.carried:
            self.successors[source].append((node, back, -1))
            for iteration in range(self.num_iterations):
                if 0 <= iteration - back < self.num_iterations:
                    self.pending[iteration * self.num_nodes + node] += 1

    def _prepare_queues(self) -> None:
        """The instances of each queue, in the order of the sweeps over the device lists."""
        graph = self.graph
        self.queues: list[list[int]] = []
        self.queue_of = [0] * self.num_nodes
        self.queue_peer: list[int] = []
        for (_, _, peer), nodes in graph.queues.items():
            lag = max(graph.steps[node].lag for node in nodes)
            order = []
            for sweep in range(self.num_iterations + lag):
                for node in nodes:
                    iteration = sweep - graph.steps[node].lag
                    if 0 <= iteration < self.num_iterations:
                        order.append(iteration * self.num_nodes + node)
            for node in nodes:
                self.queue_of[node] = len(self.queues)
            self.queues.append(order)
            self.queue_peer.append(peer)
        self.partners = {
            node: tuple(
                other
                for replica in range(graph.schedule.shape.num_replicas)
                if (other := graph.index.find_whole(Kind.G, item.action.stage, replica)) != ABSENT
            )
            for node, item in enumerate(graph.steps)
            if item.action.kind is Kind.G
        }
        self.head = [0] * len(self.queues)
        self.idle = [True] * len(self.queues)

    def _prepare_co_run(self) -> None:
        """Find the partner queues of devices that use both compute streams."""
        keys = list(self.graph.queues)
        places = {key: number for number, key in enumerate(keys)}
        self.partner: dict[int, int] = {}
        for device, resource, peer in keys:
            other = (device, Resource.SIDE if resource is Resource.MAIN else Resource.MAIN, peer)
            if resource in (Resource.MAIN, Resource.SIDE) and other in places:
                self.partner[places[(device, resource, peer)]] = places[other]
        self.current: dict[int, int] = {}
        self.left: dict[int, float] = {}
        self.rate: dict[int, float] = {}
        self.updated: dict[int, float] = {}
        self.version: dict[int, int] = {}

    def _push(self, time: float, instance: int, version: int = 0) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (time, self.sequence, instance, version))

    def play(self) -> None:
        """Run to the end. Events are ends of instances, or arrivals, encoded as ~target."""
        for queue in range(len(self.queues)):
            self._try_start(queue, 0.0)
        events, num_nodes = self.events, self.num_nodes
        while events:
            time, _, instance, version = heapq.heappop(events)
            if instance < 0:
                self._release(~instance, time)
                continue
            queue = self.queue_of[instance % num_nodes]
            if queue in self.partner and version != self.version[instance]:
                continue
            self._finish(instance, queue, time)
        if any(head < len(queue) for head, queue in zip(self.head, self.queues)):
            self._raise_stuck()

    def _finish(self, instance: int, queue: int, time: float) -> None:
        iteration, node = divmod(instance, self.num_nodes)
        self.idle[queue] = True
        item = self.graph.steps[node]
        self.intervals.append(
            Interval(
                self.graph.device[node],
                item.resource,
                item.action,
                self.started[instance],
                time,
                iteration,
                self.queue_peer[queue],
            )
        )
        if queue in self.partner:
            self.current.pop(queue)
            self._set_rates(queue, time)
        sent: set[int] = set()
        for target, ahead, message in self.successors[node]:
            later = iteration + ahead
            if not 0 <= later < self.num_iterations:
                continue
            reached = later * self.num_nodes + target
            if message < 0:
                self._release(reached, time)
            elif message not in sent:
                sent.add(message)
                self._send(node, iteration, message, reached, time)
            else:
                self._push(self.arrival, ~reached)
        self._try_start(queue, time)

    def _send(self, node: int, iteration: int, target: int, reached: int, time: float) -> None:
        """Send the node's value over the link to the target device."""
        action, source = self.graph.steps[node].action, self.graph.device[node]
        occupied, latency = self._message_of(action, source, target)
        if action.kind in SEND_KINDS:
            self.arrival = time + latency
        else:
            start = max(time, self.link_free.get((source, target), 0.0))
            self.link_free[(source, target)] = start + occupied
            self.arrival = start + occupied + latency
            kind = Kind.SEND_F if action.kind is Kind.F else Kind.SEND_B
            sending = action._replace(kind=kind)
            self.intervals.append(
                Interval(source, Resource.SEND, sending, start, start + occupied, iteration, target)
            )
        self._push(self.arrival, ~reached)

    def _release(self, instance: int, time: float) -> None:
        self.pending[instance] -= 1
        if self.pending[instance] == 0:
            self._try_start(self.queue_of[instance % self.num_nodes], time)

    def _try_start(self, queue: int, time: float) -> None:
        if not self.idle[queue]:
            return
        order, head = self.queues[queue], self.head[queue]
        if head == len(order) or self.pending[order[head]]:
            return
        instance = order[head]
        members = self.partners.get(instance % self.num_nodes)
        if members is None:
            self._start(queue, instance, time)
        elif all(self._at_head(instance, member) for member in members):
            for member in members:
                together = instance + member - instance % self.num_nodes
                self._start(self.queue_of[member], together, time)

    def _at_head(self, instance: int, member: int) -> bool:
        """Whether another replica can start the same reduction now."""
        together = instance + member - instance % self.num_nodes
        queue = self.queue_of[member]
        head = self.head[queue]
        return (
            self.idle[queue]
            and head < len(self.queues[queue])
            and self.queues[queue][head] == together
            and not self.pending[together]
        )

    def _start(self, queue: int, instance: int, time: float) -> None:
        self.idle[queue] = False
        self.head[queue] += 1
        self.started[instance] = time
        cost = self.cost[instance % self.num_nodes]
        if queue in self.partner:
            self.current[queue] = instance
            self.left[instance], self.updated[instance] = cost, time
            self.rate[instance], self.version[instance] = 1.0, 0
            self._set_rates(queue, time)
        else:
            self._push(time + cost, instance)

    def _set_rates(self, queue: int, time: float) -> None:
        """Update the rates and ends of the device's running instances."""
        running = [
            self.current[member]
            for member in (queue, self.partner[queue])
            if member in self.current
        ]
        for instance in running:
            done = (time - self.updated[instance]) * self.rate[instance]
            self.left[instance] = max(0.0, self.left[instance] - done)
            self.updated[instance] = time
        slowdowns = self._slowdowns(running) if len(running) == 2 else [1.0]
        for instance, slowdown in zip(running, slowdowns):
            self.rate[instance] = 1.0 / slowdown
            self.version[instance] += 1
            end = time + self.left[instance] * slowdown
            self._push(end, instance, self.version[instance])

    def _slowdowns(self, pair: list[int]) -> list[float]:
        """The factors by which two co-running instances are slower from now on."""
        both = self.co_run.slowdown(
            *(self.graph.steps[instance % self.num_nodes].action for instance in pair)
        )
        lefts = [self.left[instance] for instance in pair]
        if not self.co_run.end_together or not all(lefts):
            return [both, both]
        end_s = min(lefts) * (both - 1.0) + max(lefts)
        return [end_s / left for left in lefts]

    def _raise_stuck(self) -> None:
        waiting = [
            str(self.graph.steps[order[head] % self.num_nodes])
            for order, head in zip(self.queues, self.head)
            if head < len(order)
        ]
        raise ScheduleError(
            f"schedule {self.graph.schedule.name!r} deadlocks, waiting at "
            f"{', '.join(waiting[:8])}; call verify(schedule) to see the broken rule"
        )
