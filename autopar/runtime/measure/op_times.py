"""Times of ops on this machine's devices: each measured once, then read.

In: the calls that a plan may make and the store of measured times. Out: a `ComputeModel` that
answers from them. On CPUs every process that trains beside others also measures beside them, the
same call at the same time: they share the host's memory and perhaps its cores, and large
element-wise ops of two processes take up to 1.7 times as long as of one. Each sample begins on all
of them at once: after 100 MB of operands were made, one was done before another had begun.
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
from autopar.cost_models.detect import usable_cores
from autopar.cost_models.measure import MeasureLimits, measure_call, measuring_s
from autopar.cost_models.others import watched
from autopar.cost_models.pace import Pace, slow_ones
from autopar.cost_models.patterns import Thinned
from autopar.cost_models.store import OpTime
from autopar.runtime.state.wire import pack, unpack
from autopar.runtime.workers.group import WorkerGroup

LONGEST = 0.02
"""A call that alone would take more of the limit is priced from shorter ones of the same op."""
APART, BUDGET = (1.0, 1.001, 1.05, 1.1, 1.2, 1.5, 2.0, 3.0), 0.45
"""Where measuring every call is expected to take more than this part of the limit (it takes up to
twice as long), no two of one kind are measured whose operations and bytes are within the next of
these factors of each other."""
CALL_LIMIT_S = 120.0
"""One call that takes longer than this to measure is given up, and with it all that are left."""
DISTURBED, MAX_REPEATS = 0.15, 3
"""A measurement is made again, so often, when other programs had such a share of the host."""
ALIKE = 1.2
"""Times of one call that differ by more are measured once more."""
AGAIN = 0.25
"""What was measured while the processors were slow, and then what takes longest, is measured again
for this part of the time that all measurements took."""


_total_s = attrgetter("total_s")
_DIRECTIONS = ("forward_s", "input_grad_s", "weight_grad_s")


class OpService:
    """The workers' side."""

    def __init__(self, rank: int, world_size: int) -> None:
        del rank, world_size
        self.pace = Pace()

    def learn(self, operators: bytes) -> None:
        """Make known those that are not torch's own, by `autopar.runtime.state.wire`."""
        unpack(operators)

    def measure(self, call: OpCall, device: DeviceSpec) -> _Reply:
        dist.barrier()
        start_s = time.process_time()
        pace_s = self.pace()
        try:
            limits = MeasureLimits()
            found: OpTime | CostError = measure_call(call, device, limits, self._together)
        except CostError as error:
            found = type(error)(str(error))  # without its cause, which may be too much to send
        while not self._all_left():
            pass
        pace_s = max(pace_s, self.pace())
        return _Reply(found=found, cpu_s=time.process_time() - start_s, pace_s=pace_s)

    def _together(self, wish: bool) -> bool:
        return self._met(wish=wish)[0] > 0

    def _all_left(self) -> bool:
        """Meet the others once more, who may not be done with this call: one of them may have
        refused it, and then has fewer samples."""
        return self._met(left=True)[1] == dist.get_world_size()

    @staticmethod
    def _met(*, wish: bool = False, left: bool = False) -> list[int]:
        """How many of the workers wish to sample, and how many have left the call."""
        counts = torch.tensor([wish, left], dtype=torch.int64)
        dist.all_reduce(counts)
        return [int(count) for count in counts]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    """The times of a call, or why it has none; the processor seconds that it took, and how long a
    fixed piece of arithmetic did before or after it."""

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
    """The times in the store at ``path``, after ``limit_s`` of measuring what it lacks.

    The costliest calls come first, but for those that would use up the limit or for which near
    ones stand in; what is left is interpolated, or priced by the roofline. ``cluster`` is the
    detected one.
    """
    device = cluster.device
    store = ProfileStore(path, device)
    measured = Profiler(store, device, measuring=False)
    expected = _expected(RooflineModel(device), calls)
    chosen = _chosen(expected, limit_s, _num_side_by_side(device) / device.num_processes)
    missing = measured.missing(chosen)
    if missing:
        progress(f"measure up to {len(missing)} op calls, at most {limit_s:.0f} s")
        if device.kind == "cpu":
            _measure_in_workers(missing, device, store, limit_s, start_timeout_s)
        else:
            Profiler(store, device).profile(missing, progress=False, max_s=limit_s)
    return measured


def _expected(model: ComputeModel, calls: Sequence[OpCall]) -> dict[OpCall, OpEstimate]:
    """Each call's time as far as it is known before it is measured, the costliest first."""
    found = {}
    for call in dict.fromkeys(calls):
        with contextlib.suppress(CostError):  # without a price: the profiler says why
            found[call] = model.estimate(call)
    return dict(sorted(found.items(), key=lambda item: -item[1].total_s))


def _chosen(expected: Mapping[OpCall, OpEstimate], limit_s: float, share: float) -> list[OpCall]:
    """The calls that are measured: as many as the limit probably suffices for, spread over sizes.

    ``share`` is the part of a core's or device's time that a call takes here of what it will
    take in the job. The choice depends on no time of a call, and rates of a device are kept, so
    that a second run finds its calls in the store.
    """
    limits = MeasureLimits()
    longest_s = LONGEST * limit_s / share
    found: list[OpCall] = []
    for factor in APART:
        found = Thinned(factor).take(c for c, e in expected.items() if e.total_s < longest_s)
        if sum(measuring_s(expected[c], share, limits) for c in found) < BUDGET * limit_s:
            break
    return found


def _num_side_by_side(device: DeviceSpec) -> int:
    return min(device.num_processes, max(1, usable_cores() // device.num_threads))


def _measure_in_workers(
    calls: Sequence[OpCall],
    device: DeviceSpec,
    store: ProfileStore,
    limit_s: float,
    start_timeout_s: float,
) -> None:
    """As many workers as train on this host measure side by side, the slowest one's time counts;
    where they are more than the host has cores for, as many as it has, each with a part of one."""
    count = _num_side_by_side(device)
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
    """Calls that were measured while the processors were slow, by now perhaps at their usual pace.

    ``paces_s`` has each call's seconds of `Pace`, which ``measure`` writes anew; in its order,
    round by round; of these the shorter time of each direction stays in the store. Then once all
    others, the costliest first, and once more where the two times differ by more than `ALIKE`: the
    median counts. What slows a host's memory down for seconds is in no pace: side by side, an
    update of 25 MB took 0.7 ms for 15 s of a minute and 1.2 for the rest.
    """

    def again(call: OpCall) -> OpTime | None:
        """None where there is no time left; what is known stays where it cannot be measured."""
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
    """Of each direction; how far it spread is the worst of all."""
    return OpTime(
        **{name: statistics.median(getattr(t, name) for t in every) for name in _DIRECTIONS},
        spread=max(times.spread for times in every),
        num_samples=min(times.num_samples for times in every),
    )


def _quicker(known: OpTime, times: OpTime) -> OpTime:
    """The least of each direction; how far it spread is the worst of those they are from."""
    kept = {name: min(known, times, key=attrgetter(name)) for name in _DIRECTIONS}
    spreads = [found.spread for name, found in kept.items() if getattr(found, name)]
    return OpTime(
        **{name: getattr(found, name) for name, found in kept.items()},
        spread=max(spreads, default=times.spread),
        num_samples=min(known.num_samples, times.num_samples),
    )
