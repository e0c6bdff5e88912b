"""Chimera (Li and Hoefler, SC 2021): pipelines in both directions share the devices.

f pipelines go down and f go up (f divides D/2). Stage s of down pipeline k is on device (s + k D/f)
mod D, of up pipeline k on device (D-1-s + k D/f) mod D. In a unit of D micro-batches each pipeline
takes D/(2f) of them, and with slots

    F(i,s) at 2i + s        B(i,s) at 2i + D + (D-1-s)

no device has two actions in one slot. More than D micro-batches are concatenated in one of four
ways, see ``Concatenation``. Bubble (D-2f)/(2fN + D-2f) at F = B, activations at most D.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from autopar.base.errors import ScheduleError
from autopar.schedules.action import Action, Kind
from autopar.schedules.generators.chimera_merge import merged_orders
from autopar.schedules.generators.shapes import require, require_even_stages
from autopar.schedules.schedule import PipelineShape, Schedule, schedule_of
from autopar.schedules.simulate.durations import Durations, Links


class Concatenation(StrEnum):
    """How units of D micro-batches are concatenated.

    ``direct``: one unit after the other, as drawn in the paper. ``forward_doubling``: one forward
    over two micro-batches, with recomputed activations. ``backward_halving``: micro-batches are
    counted in halves; a forward takes both halves, a backward one. ``merged``: no units, but the
    list schedule that is fastest for the given durations under the same memory.
    """

    DIRECT = "direct"
    FORWARD_DOUBLING = "forward_doubling"
    BACKWARD_HALVING = "backward_halving"
    MERGED = "merged"


class _Slot(NamedTuple):
    time: int
    action: Action


def _time(slot: _Slot) -> int:
    return slot.time


def chimera_shape(
    num_stages: int, num_microbatches: int, num_pipelines: int, *, name: str = "chimera"
) -> PipelineShape:
    """The placement of 2f pipelines, with micro-batches assigned to them in turn."""
    require_even_stages(name, num_stages)
    pairs, odd = divmod(num_pipelines, 2)
    require(
        pairs >= 1 and not odd and (num_stages // 2) % pairs == 0,
        f"chimera needs num_pipelines = 2f with f dividing num_stages / 2, got {num_pipelines} "
        f"for {num_stages} stages",
        "pass num_pipelines=2",
    )
    shift = num_stages // pairs
    placement = []
    for pipeline in range(pairs):
        down = tuple((stage + pipeline * shift) % num_stages for stage in range(num_stages))
        up = tuple(
            (num_stages - 1 - stage + pipeline * shift) % num_stages for stage in range(num_stages)
        )
        placement += [down, up]
    return PipelineShape(
        num_microbatches=num_microbatches,
        placement=tuple(placement),
        replica_of=tuple(m % num_pipelines for m in range(num_microbatches)),
    )


def chimera(
    *,
    num_stages: int,
    num_microbatches: int,
    num_pipelines: int = 2,
    concatenation: str = Concatenation.DIRECT,
    durations: Durations | None = None,
    links: Links | None = None,
    max_activations: int | None = None,
) -> Schedule:
    """Chimera with any number of pipelines.

    ``durations`` (default F = I = W = 1), ``links`` and ``max_activations`` (per device, default D)
    are used by ``merged`` only. With ``backward_halving`` the schedule's micro-batches are halves,
    twice ``num_microbatches`` of them, and durations are those of a half.
    """
    try:
        way = Concatenation(concatenation)
    except ValueError as error:
        raise ScheduleError(
            f"concatenation={concatenation!r}: use one of {[item.value for item in Concatenation]}"
        ) from error
    if way is Concatenation.MERGED:
        shape = chimera_shape(num_stages, num_microbatches, num_pipelines)
        costs = durations or Durations(F=1.0, I=1.0, W=1.0)
        cap = num_stages if max_activations is None else max_activations
        return merged_orders("chimera", shape, costs, cap, links)
    span = 1 if way is Concatenation.DIRECT else 2
    total = num_microbatches * (2 if way is Concatenation.BACKWARD_HALVING else 1)
    require(
        total % span == 0,
        f"chimera with {way.value} needs an even num_microbatches, got {num_microbatches}",
        f"use num_microbatches={num_microbatches + 1}",
    )
    recompute = way is Concatenation.FORWARD_DOUBLING
    base = chimera_shape(num_stages, total // span, num_pipelines)
    shape = PipelineShape(
        num_microbatches=total,
        placement=base.placement,
        replica_of=tuple(base.replica(m // span) for m in range(total)),
        recomputed=tuple(range(num_stages)) if recompute else (),
    )
    return schedule_of("chimera", shape, _slot_orders(shape, span))


def _slot_orders(shape: PipelineShape, span: int) -> list[list[Action]]:
    """The actions of each device in slot order; slots increase along every dependency."""
    slots: list[list[_Slot]] = [[] for _ in range(shape.num_devices)]
    for item in _slots(shape, span):
        device = shape.placement[item.action.replica][item.action.stage]
        slots[device].append(item)
    return [[item.action for item in sorted(items, key=_time)] for items in slots]


def _slots(shape: PipelineShape, span: int) -> Iterator[_Slot]:
    """The slots of all actions.

    A unit takes 2D slots at span 1; at span 2 the second backwards follow as a unit of their own,
    in slots that the forwards of the next unit leave free.
    """
    num_stages, pipelines = shape.num_stages, shape.num_replicas
    share = num_stages // pipelines
    for group in range(shape.num_microbatches // span):
        unit, place = divmod(group // pipelines, share)
        replica = group % pipelines
        start = unit * num_stages * (1 + span) + 2 * place
        for stage in range(num_stages):
            first = group * span
            yield _Slot(start + stage, Action(stage, Kind.F, first, span, replica))
            for half in range(span):
                time = start + (half + 1) * num_stages + (num_stages - 1 - stage)
                if stage in shape.recomputed:
                    yield _Slot(time, Action(stage, Kind.R, first + half, 1, replica))
                yield _Slot(time, Action(stage, Kind.B, first + half, 1, replica))
