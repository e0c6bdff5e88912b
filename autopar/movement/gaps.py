"""The gaps between a tensor's uses, in which it may be on the host, and the plan of chosen gaps.

A tensor that leaves after operation a and is back before operation b is away from the device at
least while two or more operations in between run: it is written back while a + 1 runs and loaded
while b - 1 does. So a gap is worth a name where b - a >= 3. A persistent tensor also has a gap from
its last use over the end of the step to its first one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autopar.movement.lifetimes import Lifetime, StepLifetimes
from autopar.movement.plan import START, MovementPlan, Transfer, Way

NEAREST = 3
"""The least distance of two uses between which a tensor can be away."""


@dataclass(frozen=True, slots=True, order=True)
class Gap:
    """A tensor (by its position in the step) between two of its uses; ``wraps`` over the end."""

    tensor: int
    after: int
    before: int
    wraps: bool = False

    def absent(self, num_ops: int) -> tuple[list[int], list[int]]:
        """The operations during which the tensor is certainly away: those that may run beside
        offloads of the operation before, and those that may run beside loads for the next."""
        after, before = self.after, self.before
        if self.wraps:
            leaving = [*range(before), *range(after + 2, num_ops)]
            return leaving, [*range(before - 1), *range(after + 1, num_ops)]
        return [*range(after + 2, before)], [*range(after + 1, before - 1)]


def gaps_of(step: StepLifetimes) -> tuple[Gap, ...]:
    """All gaps of all tensors, tensor by tensor."""
    return tuple(gap for gaps in gaps_by_tensor(step) for gap in gaps)


def _of_tensor(index: int, tensor: Lifetime, num_ops: int) -> Iterator[Gap]:
    if not tensor.movable:
        return
    for after, before in pairwise(tensor.uses):
        if before - after >= NEAREST:
            yield Gap(index, after, before)
    if tensor.persistent and (tensor.first >= NEAREST - 1 or num_ops - tensor.last >= NEAREST):
        yield Gap(index, tensor.last, tensor.first, wraps=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """The contents of a tensor between two writes, and the gaps that they may spend on the host.

    They are copied to the host at most once: if any of ``gaps`` is moved, unless one of ``free_if``
    is, which implies that the host has them already.
    """

    gaps: tuple[Gap, ...]
    free_if: tuple[Gap, ...] = ()


def versions_of(tensor: Lifetime, gaps: Sequence[Gap]) -> list[Version]:
    """The versions of one tensor that have gaps. ``gaps`` are the tensor's, in order."""
    wrapping = tuple(gap for gap in gaps if gap.wraps)
    found: dict[int, list[Gap]] = {}
    for gap in gaps:
        written = max((op for op in tensor.writes if op <= gap.after), default=START)
        found.setdefault(written, []).append(gap)
    versions = []
    for written, members in found.items():
        if written == START:
            rest = tuple(gap for gap in members if not gap.wraps)
            versions.append(Version(gaps=rest, free_if=wrapping))
        else:
            versions.append(Version(gaps=tuple(members)))
    return [version for version in versions if version.gaps]


def transfer_bytes(tensor: Lifetime, gaps: Sequence[Gap], moved: Collection[Gap]) -> int:
    """Bytes copied in a step if the tensor is on the host in the ``moved`` ones of its gaps."""
    num_loads = sum(gap in moved for gap in gaps)
    num_copies = sum(
        any(gap in moved for gap in version.gaps)
        and not any(gap in moved for gap in version.free_if)
        for version in versions_of(tensor, gaps)
    )
    return (num_loads + num_copies) * tensor.size_bytes


def gaps_by_tensor(step: StepLifetimes) -> list[list[Gap]]:
    """The gaps of each tensor, in order."""
    return [[*_of_tensor(i, tensor, step.num_ops)] for i, tensor in enumerate(step.tensors)]


def movement_plan(step: StepLifetimes, moved: Collection[Gap]) -> MovementPlan:
    """The plan that moves exactly these gaps.

    An offload starts after the use and must have ended two operations later; a load is issued two
    operations before its use. Within the transfers of one operation, offloads precede loads.
    """
    transfers: list[tuple[int, bool, Transfer]] = []
    on_host = []
    by_tensor: dict[int, list[Gap]] = {}
    for gap in sorted(moved):
        by_tensor.setdefault(gap.tensor, []).append(gap)
    for index, gaps in by_tensor.items():
        tensor = step.tensors[index]
        wraps = any(gap.wraps for gap in gaps)
        if wraps:
            on_host.append(tensor.name)
        for transfer in _transfers(tensor, gaps, wraps, step.num_ops):
            transfers.append((transfer.after, transfer.way is Way.FROM_HOST, transfer))
    ordered = sorted(transfers, key=lambda item: (item[0], item[1], item[2].before or 0))
    return MovementPlan(
        num_ops=step.num_ops,
        starts_on_host=tuple(on_host),
        transfers=tuple(transfer for *_, transfer in ordered),
    )


def _transfers(
    tensor: Lifetime, gaps: Sequence[Gap], starts_on_host: bool, num_ops: int
) -> Iterator[Transfer]:
    copied: int | None = START if starts_on_host else None  # when the host's copy was made
    for gap in sorted(gaps, key=lambda gap: gap.after):
        is_valid = copied is not None and not any(copied < w <= gap.after for w in tensor.writes)
        leaves = gap.after + 2 if gap.after + 2 < num_ops else None
        if is_valid:
            yield Transfer(tensor=tensor.name, way=Way.DROP, after=gap.after)
        else:
            copied = gap.after
            yield Transfer(tensor=tensor.name, way=Way.TO_HOST, after=gap.after, before=leaves)
        yield Transfer(
            tensor=tensor.name,
            way=Way.FROM_HOST,
            after=max(gap.before - 2, START),
            before=gap.before,
        )
