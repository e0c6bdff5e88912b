"""The dependencies between actions, shared by verify and simulate.

In: a ``Schedule``. Out: an ``ActionGraph`` of numbered nodes. Within a training iteration (s stage,
m micro-batch):

- F(s,m) after F(s-1,m); I(s,m) and B(s,m) after F(s,m) and the I or B of (s+1,m);
  W(s,m) after I(s,m)
- R(s,m) after F(s,m); O(s,m) after F(s,m); L(s,m) after O(s,m); the backward waits for R and L, and
  R for L, where they exist
- G(s) after every W and B of stage s in all its replicas; U(s) after G(s), or after its own
  replica's W and B if nothing is reduced
- a SEND after the action that produces the value, a RECV after its SEND, and, if sends are
  explicit, the consumer on another device after its RECV

Across iterations: F(s,m) after U(s) (else G(s), else the W and B of s) of the previous iteration.
"""

from dataclasses import dataclass

from autopar.base.errors import ScheduleError
from autopar.schedules.action import Action, Kind
from autopar.schedules.schedule import Resource, Schedule, Step

ABSENT = -1
_FEW = 4096
_TO_NEXT = (Kind.SEND_F, Kind.RECV_B)  # exchanged with the next stage
_TO_PREVIOUS = (Kind.SEND_B, Kind.RECV_F)


class ActionIndex:
    """Node numbers by kind, stage and micro-batch; the first occurrence of each counts."""

    def __init__(self, num_stages: int, num_microbatches: int) -> None:
        self.num_microbatches = num_microbatches
        size = num_stages * num_microbatches
        self._tables: dict[Kind, list[int]] = {kind: [] for kind in Kind if not kind.per_stage}
        self._size = size
        self._whole: dict[tuple[Kind, int, int], int] = {}

    def add(self, action: Action, node: int) -> int:
        """Register a node; returns an earlier node that does the same work, or ABSENT."""
        if action.kind.per_stage:
            return self._whole.setdefault((action.kind, action.stage, action.replica), node)
        table = self._tables[action.kind]
        if not table:
            table.extend([ABSENT] * self._size)
        base = action.stage * self.num_microbatches
        earlier = ABSENT
        for microbatch in action.microbatches:
            if table[base + microbatch] != ABSENT:
                earlier = table[base + microbatch]
            else:
                table[base + microbatch] = node
        return earlier

    def find(self, kind: Kind, stage: int, microbatch: int) -> int:
        table = self._tables[kind]
        return table[stage * self.num_microbatches + microbatch] if table else ABSENT

    def find_whole(self, kind: Kind, stage: int, replica: int) -> int:
        return self._whole.get((kind, stage, replica), ABSENT)

    def backward(self, stage: int, microbatch: int) -> int:
        """The node that computes the stage's input gradient: I or B."""
        node = self.find(Kind.I, stage, microbatch)
        return node if node != ABSENT else self.find(Kind.B, stage, microbatch)

    def weight(self, stage: int, microbatch: int) -> int:
        """The node that computes the stage's weight gradient: W or B."""
        node = self.find(Kind.W, stage, microbatch)
        return node if node != ABSENT else self.find(Kind.B, stage, microbatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionGraph:
    """The steps of a schedule as numbered nodes with their dependencies.

    ``needs[node]`` are nodes of the same iteration. ``carried`` holds (source, target, back): the
    target in iteration t waits for the source in iteration t - back. ``queues`` are the nodes of
    each (device, resource, peer) in order; peer is -1 except on links.
    """

    schedule: Schedule
    steps: tuple[Step, ...]
    device: tuple[int, ...]
    position: tuple[int, ...]
    needs: tuple[tuple[int, ...], ...]
    carried: tuple[tuple[int, int, int], ...]
    queues: dict[tuple[int, Resource, int], tuple[int, ...]]
    index: ActionIndex


def peer_of(schedule: Schedule, action: Action) -> int:
    """The other device of a send or a receive; -1 for other actions."""
    kind, shape = action.kind, schedule.shape
    if kind in _TO_NEXT:
        stage = action.stage + 1
    elif kind in _TO_PREVIOUS:
        stage = action.stage - 1
    else:
        return -1
    return shape.placement[action.replica][stage]


def _needs_of(action: Action, index: ActionIndex, schedule: Schedule) -> list[int]:
    """Nodes of the same iteration that the action waits for; ABSENT for a missing one."""
    kind, stage = action.kind, action.stage
    shape = schedule.shape
    found: list[int] = []
    if kind is Kind.G or (kind is Kind.U and not shape.reduces):
        for microbatch in range(shape.num_microbatches):
            if kind is Kind.G or shape.replica(microbatch) == action.replica:
                found.append(index.weight(stage, microbatch))
        return list(dict.fromkeys(found))
    if kind is Kind.U:
        return [index.find_whole(Kind.G, stage, action.replica)]
    for microbatch in action.microbatches:
        if kind is Kind.F:
            if stage > 0:
                received = index.find(Kind.RECV_F, stage, microbatch)
                found.append(
                    received if received != ABSENT else index.find(Kind.F, stage - 1, microbatch)
                )
        elif kind is Kind.W:
            found.append(index.find(Kind.I, stage, microbatch))
        elif kind is Kind.I or kind is Kind.B:
            _backward_needs(stage, microbatch, index, shape.num_stages, found)
        elif kind is Kind.L:
            found.append(index.find(Kind.O, stage, microbatch))
        elif kind is Kind.R:
            loaded = index.find(Kind.L, stage, microbatch)
            found.append(loaded if loaded != ABSENT else index.find(Kind.F, stage, microbatch))
        elif kind is Kind.O or kind is Kind.SEND_F:
            found.append(index.find(Kind.F, stage, microbatch))
        elif kind is Kind.SEND_B:
            found.append(index.backward(stage, microbatch))
        elif kind is Kind.RECV_F:
            found.append(index.find(Kind.SEND_F, stage - 1, microbatch))
        elif kind is Kind.RECV_B:
            found.append(index.find(Kind.SEND_B, stage + 1, microbatch))
    return found if action.span == 1 else list(dict.fromkeys(found))


def _backward_needs(
    stage: int, microbatch: int, index: ActionIndex, num_stages: int, found: list[int]
) -> None:
    for kind in (Kind.R, Kind.L, Kind.F):
        node = index.find(kind, stage, microbatch)
        if node != ABSENT or kind is Kind.F:
            found.append(node)
            break
    if stage + 1 < num_stages:
        received = index.find(Kind.RECV_B, stage, microbatch)
        found.append(received if received != ABSENT else index.backward(stage + 1, microbatch))


def _weights_ready(index: ActionIndex, schedule: Schedule, stage: int, replica: int) -> list[int]:
    """Nodes after which the next iteration may use the stage's weights."""
    for kind in (Kind.U, Kind.G):
        node = index.find_whole(kind, stage, replica)
        if node != ABSENT:
            return [node]
    shape = schedule.shape
    nodes = [
        index.weight(stage, microbatch)
        for microbatch in range(shape.num_microbatches)
        if shape.replica(microbatch) == replica
    ]
    return [node for node in dict.fromkeys(nodes) if node != ABSENT]


def _carried(
    schedule: Schedule, steps: list[Step], device: list[int], index: ActionIndex
) -> list[tuple[int, int, int]]:
    """Edges between iterations, without those that the order of a resource implies."""
    edges: list[tuple[int, int, int]] = []
    ready: dict[tuple[int, int, Resource], list[int]] = {}
    places: dict[tuple[int, Action], int] = {}
    if any(item.after is not None for item in steps):
        places = {(device[node], item.action): node for node, item in enumerate(steps)}
    for node, item in enumerate(steps):
        action = item.action
        if action.kind is Kind.F:
            key = (action.stage, action.replica, item.resource)
            if key not in ready:
                ready[key] = [
                    source
                    for source in _weights_ready(index, schedule, action.stage, action.replica)
                    if steps[source].lag or steps[source].resource is not item.resource
                ]
            edges.extend((source, node, 1) for source in ready[key])
        if item.after is not None:
            source = places.get((device[node], item.after), ABSENT)
            if source != ABSENT:
                edges.append((source, node, steps[source].lag - item.lag))
    return edges


def check_device_count(schedule: Schedule) -> None:
    """Raise ScheduleError unless there is a list of steps for each device of the placement."""
    if len(schedule.devices) != schedule.shape.num_devices:
        raise ScheduleError(
            f"schedule {schedule.name!r} lists {len(schedule.devices)} devices, its placement "
            f"uses {schedule.shape.num_devices}"
        )


def check_action_count(schedule: Schedule) -> None:
    """Raise ScheduleError if a large shape has fewer actions than backward passes.

    This avoids a search for missing actions, of which there may be any number.
    """
    shape = schedule.shape
    needed = shape.num_stages * shape.num_microbatches
    if needed > max(schedule.num_actions, _FEW):
        raise ScheduleError(
            f"schedule {schedule.name!r} lists {schedule.num_actions} actions; "
            f"{shape.num_stages} stages and {shape.num_microbatches} micro-batches have {needed} "
            "backward passes alone"
        )


def _check_actions(schedule: Schedule) -> None:
    """Raise ScheduleError for actions out of range; ``verify`` reports them better."""
    shape = schedule.shape
    stages, replicas, batches = shape.num_stages, shape.num_replicas, shape.num_microbatches
    check_device_count(schedule)
    for device, items in enumerate(schedule.devices):
        for action, *_ in items:
            first = action.microbatch or 0
            last = stages - 1 if action.kind in _TO_NEXT else stages
            inside = (action.kind in _TO_PREVIOUS) <= action.stage < last
            inside = inside and 0 <= action.replica < replicas
            if not inside or first < 0 or first + action.span > batches:
                raise ScheduleError(
                    f"schedule {schedule.name!r}, device {device}: there is no {action} among "
                    f"{stages} stages, {replicas} replicas and {batches} micro-batches; call "
                    "verify(schedule)"
                )


def action_graph(schedule: Schedule) -> ActionGraph:
    """Number the steps of a schedule and find their dependencies, without missing ones.

    Raises ScheduleError for an action that the shape does not have; ``verify`` shows where it is.
    """
    shape = schedule.shape
    _check_actions(schedule)
    index = ActionIndex(shape.num_stages, shape.num_microbatches)
    steps: list[Step] = []
    device: list[int] = []
    position: list[int] = []
    queues: dict[tuple[int, Resource, int], list[int]] = {}
    for number, items in enumerate(schedule.devices):
        for place, item in enumerate(items):
            node = len(steps)
            steps.append(item)
            device.append(number)
            position.append(place)
            index.add(item.action, node)
            peer = peer_of(schedule, item.action)
            queues.setdefault((number, item.resource, peer), []).append(node)
    needs = tuple(
        [
            tuple([node for node in _needs_of(item.action, index, schedule) if node != ABSENT])
            for item in steps
        ]
    )
    return ActionGraph(
        schedule=schedule,
        steps=tuple(steps),
        device=tuple(device),
        position=tuple(position),
        needs=needs,
        carried=tuple(_carried(schedule, steps, device, index)),
        queues={key: tuple(nodes) for key, nodes in queues.items()},
        index=index,
    )
