"""A schedule: for each device the ordered list of its actions, each on a resource.

In: steps from a generator, a search or a file. Out: a frozen ``Schedule`` with its text form, the
one type that is verified, simulated, drawn, saved and run.

Order. A device's list is the order of issue. Each resource of a device (a stream, a channel, a
link) processes its own steps in that order; across resources only data dependencies and a step's
``after`` delay a step. ``lag`` 1 means that the step belongs to the previous training iteration: a
weight gradient overlapped with the next iteration's forward.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

from autopar.base.errors import ScheduleError
from autopar.schedules.action import Action, Kind, parse_action


class Resource(StrEnum):
    """The resource of a device that an action occupies."""

    MAIN = "main"  # the compute stream
    SIDE = "side"  # the second compute stream
    COLLECTIVE = "collective"  # gradient reductions
    SEND = "send"  # point-to-point link out, one per peer
    RECV = "recv"  # point-to-point link in, one per peer
    TO_HOST = "to_host"
    FROM_HOST = "from_host"


DEFAULT_RESOURCE = {
    Kind.F: Resource.MAIN,
    Kind.I: Resource.MAIN,
    Kind.W: Resource.MAIN,
    Kind.B: Resource.MAIN,
    Kind.R: Resource.MAIN,
    Kind.G: Resource.COLLECTIVE,
    Kind.U: Resource.MAIN,
    Kind.O: Resource.TO_HOST,
    Kind.L: Resource.FROM_HOST,
    Kind.SEND_F: Resource.SEND,
    Kind.SEND_B: Resource.SEND,
    Kind.RECV_F: Resource.RECV,
    Kind.RECV_B: Resource.RECV,
}


_T = TypeVar("_T")
_WHOLE = re.compile("0|[1-9][0-9]{0,8}")


class Step(NamedTuple):
    """An action in a device's list, with its resource.

    ``lag``: how many training iterations back the action belongs (0 or 1). ``after``: an action of
    the same device and the same pass of the list that must have ended before this one starts.
    """

    action: Action
    resource: Resource
    lag: int = 0
    after: Action | None = None

    def __str__(self) -> str:
        text = str(self.action)
        if self.resource is not DEFAULT_RESOURCE[self.action.kind]:
            text += f"@{self.resource.value}"
        if self.lag:
            text += f"~{self.lag}"
        if self.after is not None:
            text += f">{self.after}"
        return text


def step(
    action: Action,
    resource: Resource | None = None,
    *,
    lag: int = 0,
    after: Action | None = None,
) -> Step:
    """A step on the given resource, by default that of the action's kind."""
    return Step(action, resource or DEFAULT_RESOURCE[action.kind], lag, after)


def parse_step(text: str) -> Step:
    """Parse the exact text of a step, ``0W0@side~1>2F0``. Raises ScheduleError."""
    if not isinstance(text, str):
        raise ScheduleError(f"{text!r} is not a step: write it as text, for example '2F0'")
    rest, _, after_text = text.partition(">")
    rest, _, lag_text = rest.partition("~")
    action_text, _, resource_text = rest.partition("@")
    action = parse_action(action_text)
    try:
        resource = Resource(resource_text) if resource_text else DEFAULT_RESOURCE[action.kind]
        parsed = Step(
            action,
            resource,
            int(lag_text) if lag_text else 0,
            parse_action(after_text) if after_text else None,
        )
    except ValueError as error:
        raise ScheduleError(f"{text!r} is not a step: {error}") from error
    if str(parsed) != text:
        raise ScheduleError(f"{text!r} is not a step in its canonical form, {str(parsed)!r}")
    return parsed


def _all_whole(values: Iterable[object]) -> bool:
    return all(type(value) is int for value in values)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineShape:
    """The work of a schedule and its placement: stages, replicas, micro-batches, and extra actions.

    ``placement[replica][stage]`` is a device; ``replica_of[microbatch]`` is the replica that
    processes the micro-batch (empty: always replica 0). ``reduces`` and ``updates``: the schedule
    itself reduces every stage's gradients (G) and updates its weights (U); ``recomputed`` and
    ``offloaded`` list the stages whose activations are recomputed (R) or kept on the host (O, L).
    """

    num_microbatches: int
    placement: tuple[tuple[int, ...], ...]
    replica_of: tuple[int, ...] = ()
    reduces: bool = False
    updates: bool = False
    recomputed: tuple[int, ...] = ()
    offloaded: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if type(self.num_microbatches) is not int or self.num_microbatches < 1:
            raise ScheduleError(
                f"num_microbatches={self.num_microbatches!r}: a whole number, at least 1"
            )
        rows = self.placement if isinstance(self.placement, tuple) else ()
        if not all(isinstance(row, tuple) and _all_whole(row) for row in (rows or [None])):
            raise ScheduleError(
                f"placement={self.placement!r}: give a tuple of device numbers for each replica, "
                "one per stage, ((0, 1, 2, 3),)"
            )
        if not rows[0]:
            raise ScheduleError("placement is empty: give one device per stage, ((0, 1, 2, 3),)")
        if len({len(row) for row in self.placement}) > 1:
            raise ScheduleError(
                f"placement rows have lengths {[len(row) for row in self.placement]}: "
                "every replica has the same stages"
            )
        devices = {device for row in self.placement for device in row}
        if devices != set(range(len(devices))):
            raise ScheduleError(f"placement uses devices {sorted(devices)}: number them from 0")
        if not isinstance(self.replica_of, tuple) or not _all_whole(self.replica_of):
            raise ScheduleError(f"replica_of={self.replica_of!r}: a tuple of whole numbers")
        if self.replica_of and len(self.replica_of) != self.num_microbatches:
            raise ScheduleError(
                f"replica_of has {len(self.replica_of)} entries for "
                f"{self.num_microbatches} micro-batches: give one each"
            )
        if any(not 0 <= replica < len(self.placement) for replica in self.replica_of):
            raise ScheduleError(f"replica_of names a replica outside 0..{len(self.placement) - 1}")
        for name in ("recomputed", "offloaded"):
            stages = getattr(self, name)
            known = isinstance(stages, tuple) and _all_whole(stages)
            if not known or stages != tuple(
                sorted(set(range(self.num_stages)).intersection(stages))
            ):
                raise ScheduleError(
                    f"{name}={stages!r}: a tuple of stages in ascending order, each once, of "
                    f"0..{self.num_stages - 1}"
                )

    @property
    def num_stages(self) -> int:
        """How many parts the blocks of the model are cut into."""
        return len(self.placement[0])

    @property
    def num_replicas(self) -> int:
        """How many copies of every stage there are, such as two in Chimera."""
        return len(self.placement)

    @property
    def num_devices(self) -> int:
        """How many pipeline ranks the stages are placed on."""
        return 1 + max(device for row in self.placement for device in row)

    def replica(self, microbatch: int) -> int:
        """The replica that processes this micro-batch."""
        return self.replica_of[microbatch] if self.replica_of else 0

    def device(self, stage: int, microbatch: int) -> int:
        """The device that runs this stage for this micro-batch."""
        return self.placement[self.replica(microbatch)][stage]

    def stages_on(self, device: int) -> tuple[tuple[int, int], ...]:
        """The (replica, stage) pairs on the device, in order."""
        return tuple(
            (replica, stage)
            for replica, row in enumerate(self.placement)
            for stage, owner in enumerate(row)
            if owner == device
        )

    def action(self, stage: int, kind: Kind, microbatch: int, span: int = 1) -> Action:
        """The action of this stage on this micro-batch, on the replica that processes it."""
        return Action(stage, kind, microbatch, span, self.replica(microbatch))


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A named schedule: its shape, and the steps of each device in order of issue."""

    name: str
    shape: PipelineShape
    devices: tuple[tuple[Step, ...], ...]
    _derived: dict[Callable[["Schedule"], Any], Any] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        name = self.name
        if not isinstance(name, str) or [name.strip()] != name.splitlines():
            raise ScheduleError(f"name={name!r}: a schedule's name is one line, 'my schedule'")
        rows = self.devices if isinstance(self.devices, tuple) else (None,)
        if not all(isinstance(row, tuple) for row in rows) or not all(
            isinstance(item, Step) for row in self.devices for item in row
        ):
            raise ScheduleError(
                f"schedule {name!r}: devices is a tuple with a tuple of steps for each device, "
                "((step(parse_action('0F0')), step(parse_action('0B0'))),)"
            )

    def derived(self, make: Callable[["Schedule"], _T]) -> _T:
        """The result of ``make`` for this schedule, computed once and kept with it."""
        if make not in self._derived:
            self._derived[make] = make(self)
        found: _T = self._derived[make]
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return _schedule, (self.name, self.shape, self.devices)

    @property
    def num_actions(self) -> int:
        """How many actions all pipeline ranks run in one step."""
        return sum(len(steps) for steps in self.devices)

    @property
    def explicit_communication(self) -> bool:
        """Whether sends and receives are explicit actions; otherwise they are implied."""
        return any(
            item.resource is Resource.SEND or item.resource is Resource.RECV
            for steps in self.devices
            for item in steps
        )

    def __str__(self) -> str:
        return format_schedule(self)


def _schedule(name: str, shape: PipelineShape, devices: tuple[tuple[Step, ...], ...]) -> Schedule:
    """A schedule as it is pickled and copied: without what is derived from it."""
    return Schedule(name=name, shape=shape, devices=devices)


def schedule_of(name: str, shape: PipelineShape, orders: Iterable[Iterable[Action]]) -> Schedule:
    """A schedule from plain actions, each on the default resource of its kind."""
    steps = tuple(
        tuple([Step(action, DEFAULT_RESOURCE[action.kind]) for action in order]) for order in orders
    )
    return Schedule(name=name, shape=shape, devices=steps)


def _numbers(values: Iterable[int]) -> str:
    return " ".join(str(value) for value in values)


def format_schedule(schedule: Schedule) -> str:
    """The schedule's text: a header with the shape, then one line per device."""
    shape = schedule.shape
    lines = [
        f"name: {schedule.name}",
        f"num_microbatches: {shape.num_microbatches}",
        f"placement: {' | '.join(_numbers(row) for row in shape.placement)}",
    ]
    for name in ("replica_of", "recomputed", "offloaded"):
        if getattr(shape, name):
            lines.append(f"{name}: {_numbers(getattr(shape, name))}")
    for name in ("reduces", "updates"):
        if getattr(shape, name):
            lines.append(f"{name}: yes")
    lines += [
        f"device {device}: {' '.join(str(item) for item in steps)}".rstrip()
        for device, steps in enumerate(schedule.devices)
    ]
    return "\n".join(lines) + "\n"


def parse_schedule(text: str) -> Schedule:
    """Parse the text of ``format_schedule``. Raises ScheduleError naming the line."""
    if not isinstance(text, str):
        raise ScheduleError(f"{text!r} is not a schedule: pass the text of format_schedule")
    header: dict[str, str] = {}
    devices: list[tuple[Step, ...]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        key, colon, value = line.partition(":")
        if not colon:
            raise ScheduleError(f"line {number}, {line!r}: expected 'key: value'", line=number)
        if key.startswith("device "):
            if key != f"device {len(devices)}":
                raise ScheduleError(
                    f"line {number}: expected 'device {len(devices)}', got {key!r}", line=number
                )
            devices.append(_parse_steps(value, number))
        elif key in header:
            raise ScheduleError(f"line {number}: {key!r} is given twice", line=number)
        else:
            header[key] = value.strip()
    known = {"name", "num_microbatches", "placement", "replica_of", "recomputed", "offloaded"}
    unknown = set(header) - known - {"reduces", "updates"}
    missing = {"name", "num_microbatches", "placement"} - set(header)
    if unknown or missing:
        raise ScheduleError(f"header: unknown keys {sorted(unknown)}, missing {sorted(missing)}")
    for key in ("reduces", "updates"):
        if header.get(key, "yes") != "yes":
            raise ScheduleError(
                f"header, {key}: {header[key]!r}: write 'yes' or leave the line out"
            )
    counts = _parse_numbers(header, "num_microbatches")
    shape = PipelineShape(
        num_microbatches=counts[0] if len(counts) == 1 else 0,
        placement=tuple(
            _parse_numbers({"placement": row}, "placement")
            for row in header["placement"].split("|")
        ),
        replica_of=_parse_numbers(header, "replica_of"),
        reduces="reduces" in header,
        updates="updates" in header,
        recomputed=_parse_numbers(header, "recomputed"),
        offloaded=_parse_numbers(header, "offloaded"),
    )
    return Schedule(name=header["name"], shape=shape, devices=tuple(devices))


def _parse_steps(text: str, line: int) -> tuple[Step, ...]:
    try:
        return tuple(parse_step(item) for item in text.split())
    except ScheduleError as error:
        raise ScheduleError(f"line {line}: {error}", line=line) from error


def _parse_numbers(header: Mapping[str, str], key: str) -> tuple[int, ...]:
    """Whole numbers as ``format_schedule`` writes them; none if the key is absent."""
    words = header.get(key, "").split()
    if not all(_WHOLE.fullmatch(word) for word in words):
        raise ScheduleError(f"header, {key}: {header[key]!r}: write whole numbers, '0 1 2'")
    return tuple(int(word) for word in words)
