"""The conventional order on one device: all forwards, then I and W of each layer in reverse order.

Stages are layers, all on one device. With ``reduces``, a layer's gradients are reduced on the
collective channel as soon as its last W is done, and its weights are updated just before its next
forward: wait-free backpropagation, the baseline of all schedules that overlap reductions.
"""

from collections.abc import Iterator

from autopar.schedules.action import Action, Kind
from autopar.schedules.schedule import PipelineShape, Schedule, Step, step


def layers_shape(num_stages: int, num_microbatches: int, reduces: bool) -> PipelineShape:
    """All layers on device 0; ``reduces``: the schedule reduces gradients and updates weights."""
    return PipelineShape(
        num_microbatches=num_microbatches,
        placement=((0,) * num_stages,),
        reduces=reduces,
        updates=reduces,
    )


def forward_steps(shape: PipelineShape, microbatch: int) -> Iterator[Step]:
    """The forwards; each of the first micro-batch follows its update from the last iteration."""
    for layer in range(shape.num_stages):
        if shape.updates and microbatch == 0:
            yield step(Action(layer, Kind.U), lag=1)
        yield step(shape.action(layer, Kind.F, microbatch))


def accumulation_steps(shape: PipelineShape) -> Iterator[Step]:
    """All micro-batches but the last, in the usual order; their gradients are only accumulated."""
    for microbatch in range(shape.num_microbatches - 1):
        yield from forward_steps(shape, microbatch)
        for layer in reversed(range(shape.num_stages)):
            yield step(shape.action(layer, Kind.I, microbatch))
            yield step(shape.action(layer, Kind.W, microbatch))


def conventional(*, num_stages: int, num_microbatches: int = 1, reduces: bool = False) -> Schedule:
    """One device; W of a layer directly follows its I."""
    shape = layers_shape(num_stages, num_microbatches, reduces)
    last = num_microbatches - 1
    steps = [*accumulation_steps(shape), *forward_steps(shape, last)]
    for layer in reversed(range(num_stages)):
        steps.append(step(shape.action(layer, Kind.I, last)))
        steps.append(step(shape.action(layer, Kind.W, last)))
        if reduces:
            steps.append(step(Action(layer, Kind.G)))
    return Schedule(name="conventional", shape=shape, devices=(tuple(steps),))
