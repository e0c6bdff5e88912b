"""Reverse first-k: the gradients that the next forward needs first are computed and reduced first.

Oh et al., EuroSys 2022, for data parallelism. Layers from k on run I and W together and reduce at
once. The first k layers run only I in the usual order, and then W of layers 0, 1, ..., k-1, each
reduced immediately, so that layer 0's reduction does not queue behind all the others.
"""

from autopar.schedules.action import Action, Kind
from autopar.schedules.generators.conventional import (
    accumulation_steps,
    forward_steps,
    layers_shape,
)
from autopar.schedules.generators.shapes import require
from autopar.schedules.schedule import Schedule, step


def reverse_first_k(
    *, num_stages: int, num_microbatches: int = 1, k: int, reduces: bool = True
) -> Schedule:
    """One device, layers as stages; ``k`` = 0 is the conventional order."""
    require(
        0 <= k <= num_stages,
        f"reverse_first_k needs 0 <= k <= num_stages, got k={k} for {num_stages} layers",
        f"use k={min(max(k, 0), num_stages)}",
    )
    shape = layers_shape(num_stages, num_microbatches, reduces)
    last = num_microbatches - 1
    steps = [*accumulation_steps(shape), *forward_steps(shape, last)]

    def weight(layer: int) -> None:
        steps.append(step(shape.action(layer, Kind.W, last)))
        if reduces:
            steps.append(step(Action(layer, Kind.G)))

    for layer in reversed(range(num_stages)):
        steps.append(step(shape.action(layer, Kind.I, last)))
        if layer >= k:
            weight(layer)
    for layer in range(k):
        weight(layer)
    return Schedule(name="reverse_first_k", shape=shape, devices=(tuple(steps),))
