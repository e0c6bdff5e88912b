"""Time and memory of a fixed order of actions: the inner loop of the local search.

In: a compute-only schedule and its costs. Out: seconds and peak bytes of any order of the same
actions. It computes the simulator's longest path without queueing on links, so the result of a
search is simulated again. Its user is `autopar.schedules.generators.search`.
"""

from collections.abc import Sequence

from autopar.schedules.action import Action, Kind
from autopar.schedules.generators.list_scheduler import data_edges, transfer_s
from autopar.schedules.schedule import PipelineShape, Schedule, schedule_of
from autopar.schedules.simulate.durations import Durations, Links, Memory, per_stage

Orders = list[list[int]]
DEADLOCK = float("inf")


class FixedOrder:
    """Numbered actions; ``orders`` are lists of numbers, one per device."""

    def __init__(
        self, schedule: Schedule, durations: Durations, links: Links | None, memory: Memory
    ) -> None:
        shape = self.shape = schedule.shape
        self.name = schedule.name
        self.actions: list[Action] = [item.action for row in schedule.devices for item in row]
        numbers = {action: number for number, action in enumerate(self.actions)}
        count = len(self.actions)
        self.initial: Orders = [
            [numbers[item.action] for item in steps] for steps in schedule.devices
        ]
        table = durations.table(shape.num_stages)
        self.cost = [table[action.kind][action.stage] for action in self.actions]
        device = [shape.placement[item.replica][item.stage] for item in self.actions]
        transfer = transfer_s(shape, links)
        self.needs: list[list[tuple[int, float]]] = [[] for _ in range(count)]
        self.successors: list[list[int]] = [[] for _ in range(count)]
        split = any(action.kind is Kind.I for action in self.actions)
        for before, after in data_edges(shape, split):
            source, target = numbers[before], numbers[after]
            delay = transfer(before, device[source], device[target])
            self.needs[target].append((source, delay))
            self.successors[source].append(target)
        self._prepare_memory(memory)

    def _prepare_memory(self, memory: Memory) -> None:
        stages = self.shape.num_stages
        full = per_stage(memory.activation_bytes, stages, "Memory.activation_bytes")
        after = memory.after_input_gradient_bytes
        held = full if after is None else per_stage(after, stages, "Memory.held")
        change = {
            Kind.F: full,
            Kind.I: [kept - whole for kept, whole in zip(held, full)],
            Kind.W: [-kept for kept in held],
            Kind.B: [-whole for whole in full],
        }
        self.change = [change[action.kind][action.stage] for action in self.actions]
        self.static = static_bytes(self.shape, memory)

    def finish_times(self, orders: Sequence[Sequence[int]]) -> list[float] | None:
        """The end of each action, or None for a deadlock."""
        cost, needs, successors = self.cost, self.needs, self.successors
        count = len(cost)
        pending = [len(items) for items in needs]
        follower = [-1] * count
        leader = [-1] * count
        for order in orders:
            previous = -1
            for number in order:
                leader[number] = previous
                if previous >= 0:
                    follower[previous] = number
                    pending[number] += 1
                previous = number
        ends = [0.0] * count
        stack = [number for number in range(count) if not pending[number]]
        done = 0
        while stack:
            number = stack.pop()
            done += 1
            start = ends[leader[number]] if leader[number] >= 0 else 0.0
            for source, delay in needs[number]:
                arrival = ends[source] + delay
                if arrival > start:
                    start = arrival
            ends[number] = start + cost[number]
            for target in successors[number]:
                pending[target] -= 1
                if not pending[target]:
                    stack.append(target)
            target = follower[number]
            if target >= 0:
                pending[target] -= 1
                if not pending[target]:
                    stack.append(target)
        return ends if done == count else None

    def seconds(self, orders: Sequence[Sequence[int]]) -> float:
        """The makespan, or DEADLOCK."""
        ends = self.finish_times(orders)
        return DEADLOCK if ends is None else max(ends)

    def peak_bytes(self, device: int, order: Sequence[int]) -> float:
        """Peak bytes of the device under this order."""
        held = peak = self.static[device]
        change = self.change
        for number in order:
            held += change[number]
            if held > peak:
                peak = held
        return peak

    def schedule(self, orders: Sequence[Sequence[int]]) -> Schedule:
        return schedule_of(
            self.name, self.shape, [[self.actions[number] for number in order] for order in orders]
        )


def static_bytes(shape: PipelineShape, memory: Memory) -> list[float]:
    """Weights and gradients of all stages on each device."""
    weight = per_stage(memory.weight_bytes, shape.num_stages, "Memory.weight_bytes")
    gradient = per_stage(memory.gradient_bytes, shape.num_stages, "Memory.gradient_bytes")
    return [
        sum((weight[stage] + gradient[stage] for _, stage in shape.stages_on(device)), 0.0)
        for device in range(shape.num_devices)
    ]
