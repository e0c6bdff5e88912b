"""Times of ops on this machine's devices: each measured once, then read.

In: the calls that a plan may make and the store of measured times. Out: a `ComputeModel` that
answers from them. CPU processes that train concurrently also measure concurrently, the same call at
the same time: they share the host's memory and perhaps its cores, so that large element-wise ops
take longer than alone. Each sample starts on all of them at once.
"""

from __future__ import annotations

import contextlib
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import torch
import torch.distributed as dist

from autopar.base.errors import WorkerError
from autopar.cost_models import (
    Cluster,
    ComputeModel,
    CostError,
    DeviceSpec,
    OpCall,
    OpEstimate,
    Profiler,
    ProfileStore,
    RooflineModel,
)
from autopar.cost_models.calls import resolve
from autopar.cost_models.detect import num_side_by_side
from autopar.cost_models.measure import MeasureLimits, measure_call, measuring_s
from autopar.cost_models.others import watched
from autopar.cost_models.pace import Pace, slow_ones
from autopar.cost_models.patterns import Thinned
from autopar.cost_models.store import OpTime
from autopar.runtime.state.wire import pack, unpack
from autopar.runtime.workers.group import WorkerGroup

LONGEST = 0.02
"""A call that would take more of the limit than this is priced from shorter ones of its op."""
APART, BUDGET = (1.0, 1.001, 1.05, 1.1, 1.2, 1.5, 2.0, 3.0), 0.45
"""If measuring every call is expected to take more than this part of the limit (it takes up to
twice as long), no two calls of one kind are measured whose operations and bytes are within the next
of these factors of each other."""
CALL_LIMIT_S = 120.0
"""If measuring one call takes longer than this, it and all remaining ones are given up."""
DISTURBED, MAX_REPEATS = 0.15, 3
"""A measurement is repeated, so often, if other programs used such a share of the host."""
ALIKE = 1.2
"""Two times of one call that differ by more are followed by a third."""
AGAIN = 0.25
"""Calls that were measured while the processors were slow, and then the costliest, are measured
again, for this part of the time that all measurements took."""


_total_s = attrgetter("total_s")
_DIRECTIONS = ("forward_s", "input_grad_s", "weight_grad_s")


class OpService:
    """The workers' side of a measurement."""

    def __init__(self, rank: int, world_size: int) -> None:
        del rank, world_size
        self.pace = Pace()

    def learn(self, operators: bytes) -> None:
        """Register ops that are not torch's own, sent by `autopar.runtime.state.wire`."""
        unpack(operators)

    def measure(self, call: OpCall, device: DeviceSpec) -> _Reply:
        dist.barrier()
        start_s = time.process_time()
        pace_s = self.pace()
        try:
            limits = MeasureLimits()
            found: OpTime | CostError = measure_call(call, device, limits, self._together)
        except CostError as error:
            found = type(error)(str(error))  # without its cause, which may not be picklable
        while not self._all_left():
            pass
        pace_s = max(pace_s, self.pace())
        return _Reply(found=found, cpu_s=time.process_time() - start_s, pace_s=pace_s)

    def _together(self, wish: bool) -> bool:
        return self._met(wish=wish)[0] > 0

    def _all_left(self) -> bool:
        """Join the others, who may still sample this call, until all have left it: one of them may
        have refused the call, and then takes fewer samples."""
        return self._met(left=True)[1] == dist.get_world_size()

    @staticmethod
    def _met(*, wish: bool = False, left: bool = False) -> list[int]:
        """How many of the workers want another sample, and how many have left the call."""
        counts = torch.tensor([wish, left], dtype=torch.int64)
        dist.all_reduce(counts)
        return [int(count) for count in counts]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    """The times of a call, or why it has none; its processor seconds, and the time of a fixed piece
    of arithmetic before or after it."""

    found: OpTime | CostError
    cpu_s: float
    pace_s: float


def op_times(
    calls: Sequence[OpCall],
    cluster: Cluster,
    path: Path,
    *,
    limit_s: float,
    start_timeout_s: float,
    progress: Callable[[str], None],
) -> ComputeModel:
    """Measure times that the store at ``path`` lacks, for up to ``limit_s``; returns all of them.

    The costliest calls are measured first, without those that would use up the limit or that
    similar ones represent; the others are interpolated, or priced by the roofline. ``cluster`` is
    the detected one.
    """
    device = cluster.device
    store = ProfileStore(path, device)
    measured = Profiler(store, device, measuring=False)
    expected = _expected(RooflineModel(device), calls)
    chosen = _chosen(expected, limit_s, num_side_by_side(device) / device.num_processes)
    missing = measured.missing(chosen)
    if missing:
        progress(f"measure up to {len(missing)} op calls, at most {limit_s:.0f} s")
        if device.kind == "cpu":
            _measure_in_workers(missing, device, store, limit_s, start_timeout_s)
        else:
            Profiler(store, device).profile(missing, progress=False, max_s=limit_s)
    return measured


def _expected(model: ComputeModel, calls: Sequence[OpCall]) -> dict[OpCall, OpEstimate]:
    """Each call's estimated time before it is measured, the costliest first."""
    found = {}
    for call in dict.fromkeys(calls):
        with contextlib.suppress(CostError):  # without a price: the profiler says why
            found[call] = model.estimate(call)
    return dict(sorted(found.items(), key=lambda item: -item[1].total_s))


def _chosen(expected: Mapping[OpCall, OpEstimate], limit_s: float, share: float) -> list[OpCall]:
    """The calls to measure: as many as the limit probably allows, spread over sizes.

    ``share`` is a call's share of a core here, relative to that in the job. The choice depends on
    no measured time of a call, and a device's rates are kept, so that a second run finds its calls
    in the store.
    """
    limits = MeasureLimits()
    longest_s = LONGEST * limit_s / share
    found: list[OpCall] = []
    for factor in APART:
        found = Thinned(factor).take(c for c, e in expected.items() if e.total_s < longest_s)
        if sum(measuring_s(expected[c], share, limits) for c in found) < BUDGET * limit_s:
            break
    return found


def _measure_in_workers(
    calls: Sequence[OpCall],
    device: DeviceSpec,
    store: ProfileStore,
    limit_s: float,
    start_timeout_s: float,
) -> None:
    """Measure on as many workers as train on this host, all at once; the slowest time counts.

    If the host has cores for fewer, as many workers measure, each for a share of those that train.
    """
    count = num_side_by_side(device)
    share = count / device.num_processes
    workers = WorkerGroup(
        count,
        service=OpService,
        threads_per_worker=device.num_threads,
        start_timeout_s=start_timeout_s,
    )

    paces_s: dict[OpCall, float] = {}
    cpu_s = 0.0

    def own_cpu_s() -> float:
        return time.process_time() + cpu_s

    def measure(call: OpCall) -> OpTime:
        nonlocal cpu_s
        best: OpTime | None = None
        for _ in range(1 + MAX_REPEATS):
            with watched(own_cpu_s) as others:
                replies: list[_Reply] = workers.call(
                    "measure", call, device, timeout_s=CALL_LIMIT_S
                )
                cpu_s += sum(reply.cpu_s for reply in replies)
            times = [reply.found for reply in replies if isinstance(reply.found, OpTime)]
            if len(times) < len(replies):
                raise next(r.found for r in replies if isinstance(r.found, CostError))
            slowest = max(times, key=_total_s)
            best = slowest if best is None else _quicker(best, slowest)
            if others.share < DISTURBED:
                break
        assert best is not None
        paces_s[call] = max(reply.pace_s for reply in replies)
        return best.scaled(1 / share)

    with workers:
        start_s = time.monotonic()
        try:
            workers.call("learn", pack([resolve(t) for t in {call.target for call in calls}]))
            profiler = Profiler(store, device, measure=measure)
            profiler.profile(calls, progress=False, max_s=limit_s)
            taken_s = time.monotonic() - start_s
            left_s = min(limit_s - taken_s, AGAIN * taken_s)
            measure_again(measure, paces_s, store, time.monotonic() + left_s)
        except WorkerError as error:
            warnings.warn(f"op calls that were left are not measured: {error}", stacklevel=4)


def measure_again(
    measure: Callable[[OpCall], OpTime],
    paces_s: dict[OpCall, float],
    store: ProfileStore,
    deadline_s: float,
) -> None:
    """Measure calls again that were measured while the processors were slow, and then all others.

    ``paces_s`` has each call's seconds of `Pace`, which ``measure`` updates. Slow calls come in its
    order, round by round, and the shorter time of each direction stays in the store. All others
    follow once, the costliest first, and once more if the two times differ by more than `ALIKE`:
    the median counts. Memory that is slow for seconds does not show in a pace.
    """

    def again(call: OpCall) -> OpTime | None:
        """None if there is no time left; a call that fails now keeps its earlier times."""
        with contextlib.suppress(CostError):
            return measure(call) if time.monotonic() <= deadline_s else None
        return None

    slow: set[OpCall] = set()
    for _ in range(MAX_REPEATS):
        slow.update(found := slow_ones(paces_s))
        for call in found:
            if times := again(call):
                known = store.get(call)
                store.put(call, times if known is None else _quicker(known, times))
    usual = {call: times for call in paces_s if call not in slow and (times := store.get(call))}
    for call in sorted(usual, key=lambda call: -usual[call].total_s):
        every = [usual[call], *filter(None, [again(call)])]
        if any(_are_apart(every, name) for name in _DIRECTIONS):
            every += filter(None, [again(call)])
        if len(every) > 1:
            store.put(call, _median(every))


def _are_apart(every: Sequence[OpTime], direction: str) -> bool:
    seconds = [getattr(times, direction) for times in every]
    return max(seconds) > ALIKE * min(seconds)


def _median(every: Sequence[OpTime]) -> OpTime:
    """The median of each direction; the spread is the worst of all."""
    return OpTime(
        **{name: statistics.median(getattr(t, name) for t in every) for name in _DIRECTIONS},
        spread=max(times.spread for times in every),
        num_samples=min(times.num_samples for times in every),
    )


def _quicker(known: OpTime, times: OpTime) -> OpTime:
    """The minimum of each direction; the spread is the worst of those it is from."""
    kept = {name: min(known, times, key=attrgetter(name)) for name in _DIRECTIONS}
    spreads = [found.spread for name, found in kept.items() if getattr(found, name)]
    return OpTime(
        **{name: getattr(found, name) for name, found in kept.items()},
        spread=max(spreads, default=times.spread),
        num_samples=min(known.num_samples, times.num_samples),
    )
