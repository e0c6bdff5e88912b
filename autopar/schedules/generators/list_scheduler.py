"""List scheduling: advance time, and give each free device its most urgent ready action.

In: a shape, durations, links, a memory cap per device and a ``Policy``. Out: a ``Schedule`` of F, I
and W (or B). It merges Chimera's units, orders gradient fast-forwarding, and gives the search its
starting points.

Memory. A forward is admitted only if room remains for one activation of each stage of the device
that has none yet and could otherwise starve: later stages of the same pipeline, and stages of other
pipelines. So the oldest micro-batch can always proceed.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from autopar.base.errors import ScheduleError
from autopar.schedules.action import Action, Kind
from autopar.schedules.schedule import PipelineShape, Schedule, schedule_of
from autopar.schedules.simulate.durations import Durations, Links

Priority = Callable[[Action], tuple[float, ...]]
_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The rules by which actions are chosen.

    ``priority``: the ready action with the smallest key runs. ``split``: backwards are I and W,
    else B. ``max_activations``: the cap of each device, in the unit of ``activations``, the size of
    each stage's activation of one micro-batch (default 1). ``extra``: (before, after) pairs in
    addition to the data dependencies. ``patience``: a W waits if a forward or input gradient is due
    on its device within this fraction of the W's time.
    """

    priority: Priority
    split: bool = True
    max_activations: Sequence[float] | None = None
    activations: Sequence[float] | None = None
    extra: tuple[tuple[Action, Action], ...] = ()
    patience: float = 0.0


def kind_priority(order: Sequence[Kind]) -> Priority:
    """Priority by kind in the given order, then older micro-batches, then deeper stages."""
    rank = {kind: float(place) for place, kind in enumerate(order)}

    def key(action: Action) -> tuple[float, ...]:
        return rank[action.kind], float(action.microbatch or 0), float(-action.stage)

    return key


def list_schedule(
    name: str,
    shape: PipelineShape,
    durations: Durations,
    policy: Policy,
    *,
    links: Links | None = None,
) -> Schedule:
    """The list schedule of all forwards and backwards of the shape.

    Raises ScheduleError if the memory cap is below the need of one micro-batch.
    """
    return timed_list_schedule(name, shape, durations, policy, links=links)[1]


def timed_list_schedule(
    name: str,
    shape: PipelineShape,
    durations: Durations,
    policy: Policy,
    *,
    links: Links | None = None,
) -> tuple[float, Schedule]:
    """`list_schedule` with its makespan in seconds, exact if messages do not queue on a link."""
    run = _Run(shape, durations, policy, links)
    run.play()
    orders = [[run.actions[number] for number in order] for order in run.orders]
    if sum(map(len, orders)) < len(run.actions):
        raise ScheduleError(
            f"{name}: max_activations={list(policy.max_activations or ())} blocks every device; "
            "allow at least one activation for each stage of a device"
        )
    return run.end_s, schedule_of(name, shape, orders)


def data_edges(shape: PipelineShape, split: bool) -> Iterable[tuple[Action, Action]]:
    """(before, after) of every data dependency among F, I and W, or F and B."""
    backward = Kind.I if split else Kind.B
    for microbatch in range(shape.num_microbatches):
        for stage in range(shape.num_stages):
            forward = shape.action(stage, Kind.F, microbatch)
            gradient = shape.action(stage, backward, microbatch)
            yield forward, gradient
            if stage + 1 < shape.num_stages:
                yield forward, shape.action(stage + 1, Kind.F, microbatch)
                yield shape.action(stage + 1, backward, microbatch), gradient
            if split:
                yield gradient, shape.action(stage, Kind.W, microbatch)


def transfer_s(shape: PipelineShape, links: Links | None) -> Callable[[Action, int, int], float]:
    """Function for the seconds from an action's end to its value's arrival on another device."""
    if links is None:
        return lambda action, source, target: 0.0
    links.check_devices(shape.num_devices)
    boundary = links.boundary_bytes(shape.num_stages)

    def seconds(action: Action, source: int, target: int) -> float:
        if source == target or action.kind not in (Kind.F, Kind.I, Kind.B):
            return 0.0
        link = links.link(source, target)
        size = boundary[action.stage if action.kind is Kind.F else action.stage - 1]
        return link.latency_s + size / link.bandwidth_bytes_per_s

    return seconds


class _Run:
    """A run of the list scheduler. Events are (time, number) for ends, ~number for arrivals."""

    def __init__(
        self,
        shape: PipelineShape,
        durations: Durations,
        policy: Policy,
        links: Links | None,
    ) -> None:
        self.shape, self.policy = shape, policy
        self.transfer = transfer_s(shape, links)
        kinds = (Kind.F, Kind.I, Kind.W) if policy.split else (Kind.F, Kind.B)
        self.actions = [
            shape.action(stage, kind, microbatch)
            for kind in kinds
            for microbatch in range(shape.num_microbatches)
            for stage in range(shape.num_stages)
        ]
        costs = durations.split_table if policy.split else durations.table
        table = costs(shape.num_stages)
        self.cost = [table[action.kind][action.stage] for action in self.actions]
        self.device = [shape.placement[item.replica][item.stage] for item in self.actions]
        self.keys = [policy.priority(action) for action in self.actions]
        self.successors: list[list[int]] = [[] for _ in self.actions]
        self.pending = [0] * len(self.actions)
        numbers = {action: number for number, action in enumerate(self.actions)}
        for source, target in (*data_edges(shape, policy.split), *policy.extra):
            self.successors[numbers[source]].append(numbers[target])
            self.pending[numbers[target]] += 1
        self.ready_at = [0.0] * len(self.actions)
        self.ready: list[list[int]] = [[] for _ in range(shape.num_devices)]
        self.due: list[dict[int, float]] = [{} for _ in range(shape.num_devices)]
        self.orders: list[list[int]] = [[] for _ in range(shape.num_devices)]
        self.running = [-1] * shape.num_devices
        self.clock: list[tuple[float, int]] = []
        self.end_s = 0.0
        self._prepare_memory()

    def _prepare_memory(self) -> None:
        shape, policy = self.shape, self.policy
        self.sizes = list(policy.activations or [1.0] * shape.num_stages)
        self.held = [0.0] * shape.num_devices
        self.stage_held: dict[tuple[int, int], int] = {}
        self.others: dict[tuple[int, int], list[tuple[int, int]]] = {
            (replica, stage): [
                (other, later)
                for other, later in shape.stages_on(device)
                if (other == replica and later > stage) or other != replica
            ]
            for device in range(shape.num_devices)
            for replica, stage in shape.stages_on(device)
        }

    def play(self) -> None:
        for number, pending in enumerate(self.pending):
            if not pending:
                self.ready[self.device[number]].append(number)
        for device in range(self.shape.num_devices):
            self._dispatch(device, 0.0)
        while self.clock:
            time = self.clock[0][0]
            touched: set[int] = set()
            while self.clock and self.clock[0][0] <= time + _TOLERANCE:
                _, event = heapq.heappop(self.clock)
                number = event if event >= 0 else ~event
                touched.add(self.device[number])
                if event >= 0:
                    self._complete(number, time)
                else:
                    self._arrive(number)
            for device in sorted(touched):
                self._dispatch(device, time)

    def _admitted(self, number: int) -> bool:
        """Whether a forward fits under its device's cap, with room reserved for other stages."""
        caps, action = self.policy.max_activations, self.actions[number]
        if caps is None or action.kind is not Kind.F:
            return True
        device = self.device[number]
        needed = self.held[device] + self.sizes[action.stage]
        for replica, stage in self.others[action.replica, action.stage]:
            if not self.stage_held.get((replica, stage)):
                needed += self.sizes[stage]
        return needed <= caps[device] * (1 + _TOLERANCE)

    def _dispatch(self, device: int, time: float) -> None:
        """Start the most urgent admitted action of a free device."""
        if self.running[device] != -1:
            return
        fitting = [number for number in self.ready[device] if self._admitted(number)]
        if not fitting:
            return
        chosen = min(fitting, key=lambda number: (self.keys[number], number))
        action = self.actions[chosen]
        patience = self.policy.patience * self.cost[chosen]
        if action.kind is Kind.W and any(
            due - time < patience for due in self.due[device].values()
        ):
            return
        self.ready[device].remove(chosen)
        self.orders[device].append(chosen)
        self.running[device] = chosen
        if action.kind is Kind.F:
            key = (action.replica, action.stage)
            self.held[device] += self.sizes[action.stage]
            self.stage_held[key] = self.stage_held.get(key, 0) + 1
        end = time + self.cost[chosen]
        self.end_s = max(self.end_s, end)
        heapq.heappush(self.clock, (end, chosen))
        for target in self.successors[chosen]:
            if self.pending[target] == 1 and self.actions[target].kind is not Kind.W:
                where = self.device[target]
                arrival = end + self.transfer(action, device, where)
                self.due[where][target] = max(arrival, self.ready_at[target])

    def _complete(self, number: int, time: float) -> None:
        """Free the device and its memory, and send the value on."""
        action, device = self.actions[number], self.device[number]
        self.running[device] = -1
        if action.kind in (Kind.W, Kind.B):
            self.held[device] -= self.sizes[action.stage]
            self.stage_held[action.replica, action.stage] -= 1
        for target in self.successors[number]:
            arrival = time + self.transfer(action, device, self.device[target])
            self.ready_at[target] = max(self.ready_at[target], arrival)
            self.pending[target] -= 1
            if self.pending[target] == 0:
                heapq.heappush(self.clock, (self.ready_at[target], ~target))

    def _arrive(self, number: int) -> None:
        self.due[self.device[number]].pop(number, None)
        self.ready[self.device[number]].append(number)
