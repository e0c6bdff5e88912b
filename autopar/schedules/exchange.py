"""Conversion of schedules to and from the compute-only CSV of torch.distributed.pipelining.

In: a ``Schedule`` with each stage on one device, or CSV text with one row per rank. Out: the other
one. Both notations agree on F, I, W and B, so a cell is an action's text.
"""

import csv
import io

from autopar.base.errors import ScheduleError
from autopar.schedules.action import Action, Kind, parse_action
from autopar.schedules.schedule import PipelineShape, Resource, Schedule, schedule_of

_KINDS = (Kind.F, Kind.I, Kind.W, Kind.B)
_OVERLAP = "OVERLAP_F_B"


def to_csv(schedule: Schedule) -> str:
    """The schedule as CSV: one row per device, one cell per action.

    Raises ScheduleError for what the format cannot hold: replicas of a stage, a forward over
    several micro-batches, a second stream, or anything but F, I, W and B.
    """
    if schedule.shape.num_replicas > 1:
        raise ScheduleError(
            f"schedule {schedule.name!r} has {schedule.shape.num_replicas} replicas of each stage; "
            "the CSV format has each stage on one rank"
        )
    for device, steps in enumerate(schedule.devices):
        for place, item in enumerate(steps):
            plain = item.action.kind in _KINDS and item.action.span == 1
            if not plain or item.resource is not Resource.MAIN or item.lag or item.after:
                raise ScheduleError(
                    f"device {device}, step {place}, {item}: the CSV format holds only F, I, W and "
                    "B of one micro-batch on the main stream"
                )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for steps in schedule.devices:
        writer.writerow([str(item.action) for item in steps])
    return text.getvalue()


def from_csv(text: str, *, name: str = "imported") -> Schedule:
    """The schedule of CSV text with one row per rank.

    An overlapped pair becomes its two actions in sequence. Empty cells are idle, and empty lines
    are skipped. Stages, micro-batches and placement are inferred from the actions; call ``verify``
    on the result. Raises ScheduleError naming the rank and cell of anything that is not an action.
    """
    orders = [
        [action for place, cell in enumerate(row) for action in _cell(cell, rank, place)]
        for rank, row in enumerate(_rows(text))
    ]
    owner: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for action in order:
            if owner.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"rank {rank}, {action}: stage {action.stage} is also on rank "
                    f"{owner[action.stage]}; each stage is on one rank"
                )
    if set(owner) != set(range(len(owner))) or not owner:
        raise ScheduleError(f"the CSV names stages {sorted(owner)}: they are numbered from 0")
    batches = {action.microbatch for order in orders for action in order}
    if batches != set(range(len(batches))):
        raise ScheduleError(
            f"the CSV has {len(batches)} micro-batches, up to {max(m or 0 for m in batches)}: they "
            "are numbered from 0, without gaps"
        )
    shape = PipelineShape(
        num_microbatches=len(batches),
        placement=(tuple(owner[stage] for stage in range(len(owner))),),
    )
    return schedule_of(name, shape, orders)


def _rows(text: str) -> list[list[str]]:
    if not isinstance(text, str):
        raise ScheduleError(f"{text!r} is not CSV text: pass the content of the file")
    try:
        return [row for row in csv.reader(io.StringIO(text), strict=True) if row]
    except csv.Error as error:
        raise ScheduleError(f"the text is not CSV: {error}") from error


def _cell(cell: str, rank: int, place: int) -> list[Action]:
    text = cell.strip()
    if not text:
        return []
    parts = [text]
    if text.startswith("(") and text.endswith(")" + _OVERLAP):
        parts = text[1 : -len(_OVERLAP) - 1].split(";")
    try:
        actions = [parse_action(part.strip()) for part in parts]
    except ScheduleError as error:
        raise ScheduleError(f"rank {rank}, cell {place}: {error}") from error
    for action in actions:
        if action.kind not in _KINDS or action.span > 1 or action.replica:
            raise ScheduleError(f"rank {rank}, cell {place}, {text!r}: not a compute action")
    return actions
