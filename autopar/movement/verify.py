"""Verification of movement plans: errors name the transfer, the tensor and the operation.

In: a plan, the lifetimes of the step that it is for, and a capacity. Out: nothing, or a
``MovementError``. What is proved holds for any speed of the operations and of the transfers: every
use finds its tensor on the device, every load finds it on the host, and no order in which the
transfers may end exceeds the capacity.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from autopar.base.errors import MovementError
from autopar.base.units import format_bytes
from autopar.movement.lifetimes import Lifetime, StepLifetimes
from autopar.movement.plan import START, MovementPlan, Transfer, Way


def verify(plan: MovementPlan, step: StepLifetimes, capacity_bytes: int) -> None:
    """Raise MovementError for the first rule that the plan breaks."""
    _check_positions(plan, step)
    for tensor, moves in zip(step.tensors, _by_tensor(plan, step)):
        _check_tensor(tensor, moves, tensor.name in plan.starts_on_host)
    worst = worst_case_bytes(plan, step)
    for op, held in enumerate(worst):
        if held > capacity_bytes:
            where = f"operation {op} ({step.ops[op]})" if op < step.num_ops else "the step's end"
            raise MovementError(
                f"{where} may hold {held} bytes ({format_bytes(held)}), "
                f"over the capacity of {capacity_bytes}: move more, or allow {max(worst)} bytes",
                least_bytes=max(worst),
            )


def _check_positions(plan: MovementPlan, step: StepLifetimes) -> None:
    """Operations and tensors exist, and the list is in order of issue."""
    if plan.num_ops != step.num_ops:
        raise MovementError(
            f"the plan is for {plan.num_ops} operations, the step has {step.num_ops}: plan again"
        )
    for transfer in plan.transfers:
        if transfer.tensor not in step.index_of:
            raise MovementError(f"{transfer}: the step has no tensor of this name")
        if transfer.after >= plan.num_ops or (transfer.before or 0) >= plan.num_ops:
            raise MovementError(f"{transfer}: the operations are 0..{plan.num_ops - 1}")
    for former, latter in pairwise(plan.transfers):
        if former.after > latter.after:
            raise MovementError(f"{latter} is listed behind {former}: list transfers by 'after'")
    for name in plan.starts_on_host:
        if name not in step.index_of or not step.tensors[step.index_of[name]].persistent:
            raise MovementError(
                f"starts_on_host: {name!r} is not a persistent tensor of the step, so no step "
                "starts with it"
            )


def _by_tensor(plan: MovementPlan, step: StepLifetimes) -> list[list[Transfer]]:
    found: list[list[Transfer]] = [[] for _ in step.tensors]
    for transfer in plan.transfers:
        found[step.index_of[transfer.tensor]].append(transfer)
    return found


@dataclass(slots=True)
class _Place:
    """Where a tensor is: ``ready`` is the operation that may use it first, None on the host."""

    ready: int | None
    host_is_valid: bool
    why: str


def _check_tensor(tensor: Lifetime, moves: Sequence[Transfer], starts_on_host: bool) -> None:
    """Play one tensor's uses and transfers; those after an operation follow its use."""
    place = _Place(None, True, "it starts on the host") if starts_on_host else _born(tensor)
    events: list[tuple[int, int, Transfer | None]] = [(op, 0, None) for op in tensor.uses]
    events += [(move.after, 1, move) for move in moves]
    for op, _, move in sorted(events, key=lambda event: event[:2]):
        if move is not None:
            _check_move(tensor, move, place)
        elif place.ready is None:
            raise MovementError(
                f"operation {op} uses {tensor.name}, which is on the host: {place.why}"
            )
        elif place.ready > op:
            raise MovementError(f"operation {op} uses {tensor.name} before it is back: {place.why}")
        elif op in tensor.writes:
            place.host_is_valid = False
    if tensor.persistent and (place.ready is None) != starts_on_host:
        raise MovementError(
            f"{tensor.name} starts on the {'host' if starts_on_host else 'device'} but ends on the "
            f"{'device' if starts_on_host else 'host'}: the next step would not find it"
        )


def _born(tensor: Lifetime) -> _Place:
    return _Place(START if tensor.persistent else tensor.first, False, "")


def _check_move(tensor: Lifetime, move: Transfer, place: _Place) -> None:
    alive = tensor.persistent or tensor.first <= move.after < tensor.last
    if not alive:
        raise MovementError(f"{move}: the tensor is alive from {tensor.first} to {tensor.last}")
    if move.way is Way.FROM_HOST:
        if place.ready is not None:
            raise MovementError(f"{move}: it is on the device already")
        place.ready, place.why = move.before, str(move)
        return
    if place.ready is None or place.ready > move.after:
        raise MovementError(f"{move}: it is not on the device: {place.why}")
    if move.way is Way.DROP and not place.host_is_valid:
        raise MovementError(f"{move}: the host has no up-to-date copy; write to_host")
    place.ready, place.host_is_valid, place.why = None, True, str(move)


# --- capacity -------------------------------------------------------------------------------
class Stay(NamedTuple):
    """The operations from ``start`` to before ``stop`` during which a tensor (by its position) is
    on the device for certain. The number of operations stands for the end of the step."""

    tensor: int
    start: int
    stop: int
    arrives: bool
    """Whether operation ``start`` creates it or waits for its load."""


def stays(plan: MovementPlan, step: StepLifetimes) -> Iterator[Stay]:
    """When tensors are on the device, tensor by tensor."""
    for index, (tensor, moves) in enumerate(zip(step.tensors, _by_tensor(plan, step))):
        since = None if tensor.name in plan.starts_on_host else 0
        arrives = not tensor.persistent
        if not tensor.persistent:
            since = tensor.first
        for move in moves:
            if move.way is Way.FROM_HOST:
                since, arrives = move.before, True
            elif since is not None:
                yield Stay(index, since, move.after + 1, arrives)
                since = None
        if since is not None:
            stop = step.num_ops + 1 if tensor.persistent else tensor.last + 1
            yield Stay(index, since, stop, arrives)


def worst_case_bytes(plan: MovementPlan, step: StepLifetimes) -> tuple[int, ...]:
    """The most bytes that the device may hold while each operation runs or waits, at any speeds.

    In-flight transfers count against the device. Offloads listed before a load have ended when it
    starts, so the two are never counted together. The last entry is the end of the step.
    """
    held, arriving = _resident_bytes(plan, step)
    sizes = [step.tensors[step.index_of[t.tensor]].size_bytes for t in plan.transfers]
    worst = []
    for op, (waiting, running) in enumerate(_pending(plan)):
        most = held[op] - arriving[op] + _in_flight(plan, sizes, waiting)
        if op < step.num_ops:
            runs = held[op] + step.workspace_bytes[op] + _in_flight(plan, sizes, running)
            most = max(most, runs)
        worst.append(most)
    return tuple(worst)


def _resident_bytes(plan: MovementPlan, step: StepLifetimes) -> tuple[list[int], list[int]]:
    """Bytes of tensors that are on the device for certain while each operation runs, and those of
    them that it creates or waits for."""
    change, arriving = [0] * (step.num_ops + 2), [0] * (step.num_ops + 1)
    for stay in stays(plan, step):
        size = step.tensors[stay.tensor].size_bytes
        change[stay.start] += size
        change[stay.stop] -= size
        arriving[stay.start] += size if stay.arrives else 0
    return list(accumulate(change[:-1])), arriving


def _pending(plan: MovementPlan) -> Iterator[tuple[list[int], list[int]]]:
    """For each operation, the transfers that may be in flight while it waits, and while it runs.

    An operation that waits for a transfer waits for the offloads listed before it too. A load that
    ends early occupies memory until the operation that needs it counts it as resident. After the
    last operation comes the end of the step.
    """
    transfers = plan.transfers
    issued, started, ended = 0, list[int](), -1
    needed: dict[int, list[int]] = {}
    for index, transfer in enumerate(transfers):
        if transfer.before is not None:
            needed.setdefault(transfer.before, []).append(index)
    for op in range(plan.num_ops + 1):
        while issued < len(transfers) and transfers[issued].after < op:
            if transfers[issued].way is not Way.DROP:
                started.append(issued)
            issued += 1
        waiting = started
        ended = max(ended, *needed.get(op, ()), -1)
        started = [
            index
            for index in started
            if (
                index > ended
                if transfers[index].way is Way.TO_HOST
                else (transfers[index].before or 0) > op
            )
        ]
        yield waiting, started


def _in_flight(plan: MovementPlan, sizes: Sequence[int], pending: Sequence[int]) -> int:
    """The most bytes of pending transfers at once: a prefix of the loads, the offloads behind."""
    out = [plan.transfers[index].way is Way.TO_HOST for index in pending]
    now = worst = sum(sizes[index] for index, is_out in zip(pending, out) if is_out)
    for index, is_out in zip(pending, out):
        now += -sizes[index] if is_out else sizes[index]
        worst = max(worst, now)
    return worst
