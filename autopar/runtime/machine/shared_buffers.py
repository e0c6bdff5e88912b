"""Buffers that the replicas of a stage update together, each with its own micro-batches.

In: the result of each micro-batch on this device, computed from the present value. Out: the next
value, on all devices of the replicas, as if one device had run all micro-batches in order. A
micro-batch multiplies such a buffer by a factor a and adds a term that depends on the batch alone
(running statistics: a is 1 - momentum). So the i-th of N micro-batches adds its result minus a
times the present value, with weight a^(N - 1 - i); the present value has weight a^N.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from autopar.lowering.types import BufferProgram, RankProgram, TensorMeta
from autopar.runtime.machine.protocols import Links, Machine

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Made(Generic[T]):
    """The value that one micro-batch computed from the present value of a buffer."""

    buffer: int
    microbatch: int
    value: T


def combined(
    program: RankProgram,
    device: int,
    machine: Machine[T],
    links: Links[T],
    present: Mapping[int, T],
    made: Sequence[Made[T]],
) -> dict[int, T]:
    """The next values of the shared buffers on this device."""
    groups: dict[tuple[int, ...], list[BufferProgram]] = {}
    for buffer in program.buffers:
        if device in buffer.shared:
            groups.setdefault(buffer.shared, []).append(buffer)
    num = program.num_microbatches
    following = {}
    for devices, buffers in sorted(groups.items()):
        own = [_added(b, num, machine, present[b.value], made) for b in buffers]
        for buffer, total in zip(buffers, links.start_sum(devices, own)()):
            assert buffer.factor is not None
            terms = [(buffer.factor**num, present[buffer.value]), (1, total)]
            following[buffer.value] = machine.weighted_sum(terms)
    return following


def _added(
    buffer: BufferProgram, num: int, machine: Machine[T], present: T, made: Sequence[Made[T]]
) -> T:
    """The weighted sum of the terms that this device's micro-batches add."""
    factor = buffer.factor
    assert factor is not None
    meta = TensorMeta.contiguous(buffer.shape, buffer.dtype)
    terms: list[tuple[float, T]] = [(1, machine.filled(meta, 0.0))]
    for item in made:
        if item.buffer == buffer.value:
            weight = factor ** (num - 1 - item.microbatch)
            terms += [(weight, item.value), (-weight * factor, present)]
    return machine.weighted_sum(terms)
