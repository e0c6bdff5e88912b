"""Out-of-order backprop on one device: weight gradients on a second stream, placed in regions.

Oh et al., EuroSys 2022. The main stream runs the forwards and the input gradients; it is divided
into regions of ``region_size`` layers: those of the backward, then those of the *next* iteration's
forward. The placement maps each W to the region in which it co-runs; a W without one stays on the
main stream directly after its I. A W may only be placed where its output gradient exists, and must
end before its layer's next forward. ``out_of_order.place_weights`` chooses the regions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from autopar.schedules.action import Action, Kind
from autopar.schedules.generators.conventional import accumulation_steps, layers_shape
from autopar.schedules.generators.shapes import require
from autopar.schedules.schedule import Resource, Schedule, Step, step


class Phase(StrEnum):
    """The part of the main stream that a region belongs to."""

    BACKWARD = "backward"
    NEXT_FORWARD = "next_forward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Adjacent layers ``first_layer`` .. ``last_layer`` of one phase of the main stream."""

    phase: Phase
    first_layer: int
    last_layer: int


def regions_of(num_stages: int, region_size: int) -> tuple[Region, ...]:
    """All regions in the order of the main stream."""
    require(
        type(region_size) is int and region_size >= 1,
        f"region_size={region_size!r} is not a number of layers",
        "use region_size=1",
    )
    starts = range(0, num_stages, region_size)
    spans = [(start, min(start + region_size, num_stages) - 1) for start in starts]
    backward = [
        Region(phase=Phase.BACKWARD, first_layer=first, last_layer=last)
        for first, last in reversed(spans)
    ]
    forward = [
        Region(phase=Phase.NEXT_FORWARD, first_layer=first, last_layer=last)
        for first, last in spans
    ]
    return (*backward, *forward)


def allowed(layer: int, region: Region) -> bool:
    """Whether the layer's W may run in the region.

    In the backward its gradient exists once the main stream is below the layer; in the next forward
    its weights are not used while the main stream is still below it: the same condition.
    """
    return region.last_layer < layer


def multi_stream(
    *,
    num_stages: int,
    num_microbatches: int = 1,
    placement: Mapping[int, int] | None = None,
    region_size: int = 1,
) -> Schedule:
    """Weight gradients on the side stream; ``placement`` maps layers to indices into `regions_of`.

    Without it, every W co-runs as soon as its gradient exists, in the backward region below its
    layer (that of layer 0 stays on the main stream).
    """
    regions = regions_of(num_stages, region_size)
    if placement is None:
        placement = {
            layer: next(number for number, item in enumerate(regions) if allowed(layer, item))
            for layer in range(num_stages)
            if any(allowed(layer, item) for item in regions)
        }
    for layer, number in placement.items():
        whole = type(layer) is int and type(number) is int
        require(
            whole and 0 <= layer < num_stages and 0 <= number < len(regions),
            f"placement {layer!r}: {number!r} names a layer or a region that does not exist",
            f"layers are 0..{num_stages - 1}, regions 0..{len(regions) - 1}",
        )
        require(
            allowed(layer, regions[number]),
            f"W of layer {layer} cannot run in region {number}, {regions[number]}",
            "a region must be below the layer in the backward, or before it in the forward",
        )
    shape = layers_shape(num_stages, num_microbatches, reduces=False)
    steps = _main_and_side(shape.num_stages, num_microbatches - 1, placement, regions)
    return Schedule(
        name="multi_stream", shape=shape, devices=((*accumulation_steps(shape), *steps),)
    )


def _main_and_side(
    num_stages: int,
    microbatch: int,
    placement: Mapping[int, int],
    regions: tuple[Region, ...],
) -> list[Step]:
    """The forward with the placed W's of the last iteration, then the backward with this one's.

    A placed W waits for the main action before its region, so that it does not start earlier.
    """
    placed: dict[int, list[int]] = {}
    for layer in sorted(placement, reverse=True):
        placed.setdefault(placement[layer], []).append(layer)
    steps: list[Step] = []
    previous: Action | None = None
    half = len(regions) // 2
    for number in (*range(half, len(regions)), *range(half)):
        region = regions[number]
        forward = region.phase is Phase.NEXT_FORWARD
        for layer in placed.get(number, ()):
            weight = Action(layer, Kind.W, microbatch)
            steps.append(Step(weight, Resource.SIDE, int(forward), previous))
        layers = range(region.first_layer, region.last_layer + 1)
        for layer in layers if forward else reversed(layers):
            previous = Action(layer, Kind.F if forward else Kind.I, microbatch)
            steps.append(step(previous))
            if not forward and layer not in placement:
                steps.append(step(Action(layer, Kind.W, microbatch)))
    return steps
