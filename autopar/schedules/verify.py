"""Verification of schedules: errors name device, step and action.

In: any ``Schedule``, from a generator, a search, a file or written by hand. Out: nothing, or a
``ScheduleError`` with the schedule's grid and the bad cell marked. The simulator and the runtime
rely on it.

The rules are two tables, run in order; the first violation is raised. ``STEP_RULES`` check single
steps, ``GRAPH_RULES`` the dependencies between them, and may rely on the former.
"""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

from autopar.base.errors import ScheduleError
from autopar.schedules.action import RECV_KINDS, SEND_KINDS, Kind
from autopar.schedules.dependencies import (
    ABSENT,
    ActionGraph,
    action_graph,
    check_action_count,
    check_device_count,
    peer_of,
)
from autopar.schedules.schedule import PipelineShape, Resource, Schedule, Step

_COMPUTE = (Resource.MAIN, Resource.SIDE)
ALLOWED_RESOURCES: dict[Kind, tuple[Resource, ...]] = {
    **dict.fromkeys((Kind.F, Kind.I, Kind.W, Kind.B, Kind.R, Kind.U), _COMPUTE),
    Kind.G: (Resource.COLLECTIVE,),
    Kind.O: (Resource.TO_HOST,),
    Kind.L: (Resource.FROM_HOST,),
    **dict.fromkeys(SEND_KINDS, (Resource.SEND,)),
    **dict.fromkeys(RECV_KINDS, (Resource.RECV,)),
}


class Violation(NamedTuple):
    """A broken rule at a step of a device; step -1 if something is missing from the list."""

    device: int
    step: int
    message: str


def verify(schedule: Schedule) -> None:
    """Raise ScheduleError for the first rule that the schedule breaks."""
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"{schedule!r} is not a Schedule: make one with build(name, ...)")
    check_device_count(schedule)
    check_action_count(schedule)
    for step_rule in STEP_RULES:
        _raise_first(schedule, step_rule(schedule))
    graph = action_graph(schedule)
    for graph_rule in GRAPH_RULES:
        _raise_first(schedule, graph_rule(graph))


def _raise_first(schedule: Schedule, violations: Iterator[Violation]) -> None:
    found = next(violations, None)
    if found is None:
        return
    where = f"device {found.device}"
    if found.step >= 0:
        where += f", step {found.step}, {schedule.devices[found.device][found.step].action}"
    raise ScheduleError(
        f"schedule {schedule.name!r}, {where}: {found.message}\n"
        f"{format_grid(schedule, found.device, found.step)}",
        device=found.device,
    )


def format_grid(
    schedule: Schedule, device: int = -1, step: int = -1, *, num_rows: int = 9, num_columns: int = 9
) -> str:
    """Steps as rows, devices as columns, around the given cell, which is marked ``>2F0<``."""
    longest = max((len(steps) for steps in schedule.devices), default=0)
    if device >= 0 and step < 0:
        step = len(schedule.devices[device]) if device < len(schedule.devices) else 0
    first_row = max(0, min(step - num_rows // 2, longest - num_rows)) if step >= 0 else 0
    first_column = max(0, min(device - num_columns // 2, len(schedule.devices) - num_columns))
    columns = range(first_column, min(first_column + num_columns, len(schedule.devices)))
    rows = [["", *(f"device {column}" for column in columns)]]
    for row in range(first_row, min(first_row + num_rows, longest + 1)):
        cells = [f"step {row}"]
        for column in columns:
            steps = schedule.devices[column]
            text = str(steps[row]) if row < len(steps) else ""
            cells.append(f">{text or 'missing'}<" if (column, row) == (device, step) else text)
        rows.append(cells)
    widths = [max(len(cells[place]) for cells in rows) for place in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip()
        for cells in rows
    )


def _steps(schedule: Schedule) -> Iterator[tuple[int, int, Step]]:
    for device, steps in enumerate(schedule.devices):
        for place, item in enumerate(steps):
            yield device, place, item


def actions_in_range(schedule: Schedule) -> Iterator[Violation]:
    """Stage, replica and micro-batches exist, and only forwards and their messages span several."""
    shape = schedule.shape
    stages, batches, replicas = shape.num_stages, shape.num_microbatches, shape.num_replicas
    for device, place, (action, _, lag, _) in _steps(schedule):
        if not 0 <= action.stage < stages:
            yield Violation(device, place, f"stage {action.stage} is not one of 0..{stages - 1}")
        elif not 0 <= action.replica < replicas:
            yield Violation(device, place, f"replica is not one of 0..{replicas - 1}")
        elif (action.microbatch is None) != action.kind.per_stage:
            yield Violation(device, place, "G and U take no micro-batch, all others need one")
        elif action.microbatch is not None and not (
            action.microbatch >= 0 and action.microbatch + action.span <= batches
        ):
            yield Violation(device, place, f"micro-batches are 0..{batches - 1}")
        elif action.span < 1 or (
            action.span > 1 and action.kind not in (Kind.F, Kind.SEND_F, Kind.RECV_F)
        ):
            yield Violation(device, place, "only a forward may take several micro-batches")
        elif lag not in (0, 1):
            yield Violation(
                device, place, f"lag {lag}: a step belongs to this iteration (0) or the last (1)"
            )


def links_have_peers(schedule: Schedule) -> Iterator[Violation]:
    """Sends and receives cross an existing stage boundary between two devices."""
    shape = schedule.shape
    for device, place, item in _steps(schedule):
        action = item.action
        if action.kind not in SEND_KINDS and action.kind not in RECV_KINDS:
            continue
        upward = action.kind in (Kind.SEND_F, Kind.RECV_B)
        other = action.stage + (1 if upward else -1)
        if not 0 <= other < shape.num_stages:
            yield Violation(device, place, f"there is no stage {other} to exchange with")
        elif peer_of(schedule, action) == shape.placement[action.replica][action.stage]:
            yield Violation(
                device, place, f"stage {other} is on the same device: no send is needed"
            )


def on_own_device(schedule: Schedule) -> Iterator[Violation]:
    """An action is in the list of the device that has its replica of the stage."""
    shape = schedule.shape
    for device, place, item in _steps(schedule):
        action = item.action
        owner = shape.placement[action.replica][action.stage]
        if owner != device:
            yield Violation(device, place, f"the stage is on device {owner}")
        for microbatch in action.microbatches:
            if shape.replica(microbatch) != action.replica:
                expected = shape.replica(microbatch)
                yield Violation(
                    device, place, f"micro-batch {microbatch} belongs to replica {expected}"
                )


def on_allowed_resource(schedule: Schedule) -> Iterator[Violation]:
    """Compute on a compute stream, reductions on the collective channel, and so on."""
    for device, place, item in _steps(schedule):
        allowed = ALLOWED_RESOURCES[item.action.kind]
        if item.resource not in allowed:
            names = " or ".join(resource.value for resource in allowed)
            yield Violation(device, place, f"runs on {names}, not on {item.resource.value}")


def no_action_twice(schedule: Schedule) -> Iterator[Violation]:
    """No work is done twice; a B does the work of an I and a W."""
    seen: dict[tuple[Kind, int, int], tuple[int, int]] = {}
    for device, place, item in _steps(schedule):
        action = item.action
        kinds = (Kind.I, Kind.W) if action.kind is Kind.B else (action.kind,)
        parts = [action.replica] if action.kind.per_stage else action.microbatches
        for kind in kinds:
            for part in parts:
                key = (kind, action.stage, part)
                if key in seen:
                    where = "device {}, step {}".format(*seen[key])
                    yield Violation(device, place, f"{kind.value} was already done, at {where}")
                seen[key] = (device, place)


def no_unasked_work(schedule: Schedule) -> Iterator[Violation]:
    """G, U, R, O and L only where the shape asks for them."""
    shape = schedule.shape
    asked: dict[Kind, tuple[bool | tuple[int, ...], str]] = {
        Kind.G: (shape.reduces, "reduces"),
        Kind.U: (shape.updates, "updates"),
        Kind.R: (shape.recomputed, "recomputed"),
        Kind.O: (shape.offloaded, "offloaded"),
        Kind.L: (shape.offloaded, "offloaded"),
    }
    for device, place, item in _steps(schedule):
        if item.action.kind in asked:
            wanted, name = asked[item.action.kind]
            if wanted is False or (isinstance(wanted, tuple) and item.action.stage not in wanted):
                yield Violation(device, place, f"the shape does not have it: set {name}")


def nothing_missing(graph: ActionGraph) -> Iterator[Violation]:
    """Every forward and backward, and every G, U, R, O and L of the shape, is present."""
    shape, index = graph.schedule.shape, graph.index
    for stage in range(shape.num_stages):
        kinds = [Kind.F]
        kinds += [Kind.R] if stage in shape.recomputed else []
        kinds += [Kind.O, Kind.L] if stage in shape.offloaded else []
        for microbatch in range(shape.num_microbatches):
            for kind in kinds:
                if index.find(kind, stage, microbatch) == ABSENT:
                    yield _missing(shape, stage, microbatch, kind.value)
            if index.find(Kind.B, stage, microbatch) == ABSENT:
                for kind in (Kind.I, Kind.W):
                    if index.find(kind, stage, microbatch) == ABSENT:
                        yield _missing(shape, stage, microbatch, f"{kind.value} (or B)")
        for kind, wanted in ((Kind.G, shape.reduces), (Kind.U, shape.updates)):
            for replica in range(shape.num_replicas) if wanted else ():
                if index.find_whole(kind, stage, replica) == ABSENT:
                    device = shape.placement[replica][stage]
                    text = f"{kind.value} of stage {stage}, replica {replica}, is missing"
                    yield Violation(device, -1, text)


def _missing(shape: PipelineShape, stage: int, microbatch: int, kind: str) -> Violation:
    text = f"{kind} of stage {stage}, micro-batch {microbatch}, is missing"
    return Violation(shape.device(stage, microbatch), -1, text)


def sends_are_received(graph: ActionGraph) -> Iterator[Violation]:
    """If sends are explicit, every value that crosses devices is sent and received."""
    schedule = graph.schedule
    if not schedule.explicit_communication:
        return
    shape, index = schedule.shape, graph.index
    for stage in range(shape.num_stages - 1):
        for microbatch in range(shape.num_microbatches):
            lower, upper = shape.device(stage, microbatch), shape.device(stage + 1, microbatch)
            if lower == upper:
                continue
            for kind, owner, device in (
                (Kind.SEND_F, stage, lower),
                (Kind.RECV_F, stage + 1, upper),
                (Kind.SEND_B, stage + 1, upper),
                (Kind.RECV_B, stage, lower),
            ):
                if index.find(kind, owner, microbatch) == ABSENT:
                    text = f"{kind.value} of stage {owner}, micro-batch {microbatch}, is missing"
                    yield Violation(device, -1, text)


def links_in_order(graph: ActionGraph) -> Iterator[Violation]:
    """A link delivers in the order of its sends, so receives must have the same order."""
    for (device, resource, peer), nodes in graph.queues.items():
        if resource is not Resource.SEND:
            continue
        received = graph.queues.get((peer, Resource.RECV, device), ())
        for sent, got in zip(nodes, received):
            if sent not in graph.needs[got]:
                yield Violation(
                    peer,
                    graph.position[got],
                    f"the next message from device {device} is {graph.steps[sent].action}",
                )


def _issued_before(graph: ActionGraph, source: int, target: int, back: int) -> bool:
    """Whether the source, ``back`` iterations earlier, is issued before the target."""
    first = (graph.steps[source].lag - back, graph.position[source])
    return first < (graph.steps[target].lag, graph.position[target])


def reductions_in_order(graph: ActionGraph) -> Iterator[Violation]:
    """Devices that share stages reduce them in the same order, as a reduction occupies them all."""
    followers: dict[int, set[int]] = {}
    places: dict[int, int] = {}
    for (_, resource, _), nodes in graph.queues.items():
        if resource is Resource.COLLECTIVE:
            stages = [graph.steps[node].action.stage for node in nodes]
            places.update(zip(stages, nodes))
            for first, second in pairwise(stages):
                if first != second:
                    followers.setdefault(first, set()).add(second)
    before = dict.fromkeys(places, 0)
    for later in followers.values():
        for stage in later:
            before[stage] += 1
    free = [stage for stage, count in before.items() if not count]
    while free:
        for stage in followers.get(free.pop(), ()):
            before[stage] -= 1
            if not before[stage]:
                free.append(stage)
    for stage in sorted(stage for stage, count in before.items() if count):
        node = places[stage]
        yield Violation(
            graph.device[node],
            graph.position[node],
            "deadlock: another device reduces the same stages in a different order",
        )


def needs_come_first(graph: ActionGraph) -> Iterator[Violation]:
    """On a device, an action is issued after its dependencies: no buffer is read unwritten."""
    device = graph.device
    for target, needs in enumerate(graph.needs):
        for source in needs:
            if device[source] == device[target] and not _issued_before(graph, source, target, 0):
                needed = graph.steps[source].action
                yield Violation(device[target], graph.position[target], f"must come after {needed}")


def weights_ready_for_next(graph: ActionGraph) -> Iterator[Violation]:
    """Reductions and updates are issued before the next iteration's forward of the stage."""
    for source, target, back in graph.carried:
        if back == 1 and not _issued_before(graph, source, target, 1):
            late = graph.steps[source].action
            yield Violation(
                graph.device[target],
                graph.position[target],
                f"the last iteration's {late} must be issued before this forward",
            )


def awaited_steps_exist(graph: ActionGraph) -> Iterator[Violation]:
    """The action that a step waits for (``after``) is earlier in the same device's list."""
    places: dict[tuple[int, object], int] = {}
    for node, item in enumerate(graph.steps):
        if item.after is not None and (graph.device[node], item.after) not in places:
            yield Violation(
                graph.device[node],
                graph.position[node],
                f"waits for {item.after}, which is not earlier in this device's list",
            )
        places[graph.device[node], item.action] = node


def no_deadlock(graph: ActionGraph) -> Iterator[Violation]:
    """All queues run to their end: there is no cycle of waiting devices.

    If lists have steps of the last iteration, three consecutive iterations must end.
    """
    count = len(graph.steps)
    iterations = 1 + 2 * max((item.lag for item in graph.steps), default=0)
    successors: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    pending = [0] * (count * iterations)
    for source, target, back in _waits(graph):
        successors[source].append((target, back))
        for iteration in range(max(0, back), min(iterations, iterations + back)):
            pending[iteration * count + target] += 1
    waiting = deque(number for number, needed in enumerate(pending) if not needed)
    ended = bytearray(count * iterations)
    while waiting:
        number = waiting.popleft()
        ended[number] = 1
        iteration, node = divmod(number, count)
        for target, back in successors[node]:
            if 0 <= iteration + back < iterations:
                reached = (iteration + back) * count + target
                pending[reached] -= 1
                if not pending[reached]:
                    waiting.append(reached)
    if not all(ended):
        yield _stuck(graph, {place % count for place, done in enumerate(ended) if not done})


def _waits(graph: ActionGraph) -> Iterator[tuple[int, int, int]]:
    """(source, target, iterations between them) of every dependency, queues included."""
    for target, needs in enumerate(graph.needs):
        for source in needs:
            yield source, target, 0
    yield from graph.carried
    lag = [item.lag for item in graph.steps]
    for nodes in graph.queues.values():
        for first, second in pairwise(nodes):
            yield first, second, lag[first] - lag[second]
        yield nodes[-1], nodes[0], 1 + lag[nodes[-1]] - lag[nodes[0]]


def _stuck(graph: ActionGraph, stuck: set[int]) -> Violation:
    """The earliest step that never starts although all previous ones on its device do."""
    node = min(stuck, key=lambda node: (graph.position[node], graph.device[node]))
    wanted = [str(graph.steps[source].action) for source in graph.needs[node] if source in stuck]
    reason = f"waits for {wanted[0]}" if wanted else "waits for the steps before it"
    message = f"deadlock: {reason}, which in turn waits for this one"
    return Violation(graph.device[node], graph.position[node], message)


STEP_RULES: tuple[Callable[[Schedule], Iterator[Violation]], ...] = (
    actions_in_range,
    links_have_peers,
    on_own_device,
    on_allowed_resource,
    no_action_twice,
    no_unasked_work,
)
GRAPH_RULES: tuple[Callable[[ActionGraph], Iterator[Violation]], ...] = (
    nothing_missing,
    sends_are_received,
    needs_come_first,
    weights_ready_for_next,
    awaited_steps_exist,
    links_in_order,
    reductions_in_order,
    no_deadlock,
)
