"""Measured prices: each distinct call is measured once, kept on disk, and interpolated.

``Profiler`` prices a call by the first of: a time in the store (MEASURED); a measurement now, if
that is allowed and the device is local (MEASURED, and stored); interpolation between measured calls
of the same operation (INTERPOLATED); the roofline (ANALYTICAL).
"""

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import Progress

from autopar.base.errors import ClusterError
from autopar.cost_models.calls import OpCall
from autopar.cost_models.compute import ComputeModel, RooflineModel
from autopar.cost_models.estimate import CostError, NotNowError, OpEstimate, Source
from autopar.cost_models.hardware import DeviceSpec
from autopar.cost_models.measure import MeasureLimits, measure_call
from autopar.cost_models.op_work import work
from autopar.cost_models.patterns import pattern, position_of
from autopar.cost_models.store import OpTime, ProfileStore

# The factor outside the measured range of operations or bytes within which a ratio applies; from
# there to the square of this factor it fades out.
_REACH = 4.0
_NUM_NEIGHBOURS = 4
_LASTING = frozenset(("aten", "prims", "quantized", "torchvision"))
"""Namespaces of operators that only change with their version, unlike a user's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSummary:
    """The result of ``profile``.

    ``num_free`` calls launch no kernels; ``num_left`` are not measured for lack of time, or because
    measuring is off. ``noisy`` were measured with too large a spread, now or before; ``failed``
    could not be measured, with the reason.
    """

    num_measured: int
    num_known: int
    num_free: int
    num_left: int
    noisy: tuple[OpCall, ...]
    failed: tuple[tuple[OpCall, str], ...]


class Profiler:
    """A ``ComputeModel`` based on measurements on ``device``.

    With ``measuring`` False no operation is run: only the store and the roofline are used.
    ``measure`` measures a call outside of this process, or raises CostError. Raises ClusterError if
    measuring is on and the device is not the local one.
    """

    def __init__(
        self,
        store: ProfileStore,
        device: DeviceSpec,
        *,
        measuring: bool = True,
        measure: Callable[[OpCall], OpTime] | None = None,
        fallback: ComputeModel | None = None,
        limits: MeasureLimits | None = None,
    ) -> None:
        if measuring:
            _check_device_is_here(device)
        self.store = store
        self.device = device
        self.measuring = measuring
        self.limits = limits or MeasureLimits()
        self.fallback: ComputeModel = fallback or RooflineModel(device)
        self.num_measurements = 0
        self._measure_call = measure or self._measured_here
        self._known: dict[OpCall, OpEstimate] = {}
        self._tables: dict[str, dict[OpCall, list[_Neighbour]]] = {}

    def estimate(self, call: OpCall) -> OpEstimate:
        """Seconds of ``call`` in each direction; raises CostError if it cannot be priced."""
        known = self._known.get(call)
        if known is None:
            known = self._known[call] = self._estimate(call)
        return known

    def profile(
        self, calls: Iterable[OpCall], *, progress: bool = True, max_s: float = math.inf
    ) -> ProfileSummary:
        """Measure every distinct call that is not in the store, for at most ``max_s``.

        Every time or failure is stored immediately, so that a run that was stopped can be
        continued. With ``measuring`` False it only reports what is missing.
        """
        deadline = time.monotonic() + max_s
        num_left = 0
        distinct = list(dict.fromkeys(calls))
        paid, unpriced = _split(distinct)
        missing = self._not_stored(paid)
        measured_before = self.num_measurements
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not progress) as bar:
            task = bar.add_task("profiling", total=len(missing))
            for index, call in enumerate(missing):
                if not self.measuring or time.monotonic() > deadline:
                    num_left = len(missing) - index
                    break
                bar.update(task, description=f"profiling {call.name}")
                self._measure(call)
                bar.advance(task)
        num_measured = self.num_measurements - measured_before
        known = {call: self.store.get(call) for call in paid}
        failed = self._failed(call for call, times in known.items() if times is None)
        return ProfileSummary(
            num_measured=num_measured,
            num_known=len(paid) - num_measured - num_left - len(failed),
            num_free=len(distinct) - len(paid) - len(unpriced),
            num_left=num_left,
            noisy=tuple(c for c, times in known.items() if times and self._is_noisy(times)),
            failed=(*unpriced, *failed),
        )

    def missing(self, calls: Iterable[OpCall]) -> list[OpCall]:
        """The distinct calls that ``profile`` would measure."""
        return self._not_stored(_split(list(dict.fromkeys(calls)))[0])

    def _not_stored(self, paid: Iterable[OpCall]) -> list[OpCall]:
        return [c for c in paid if self.store.get(c) is None and self.store.failure(c) is None]

    def _failed(self, calls: Iterable[OpCall]) -> list[tuple[OpCall, str]]:
        reasons = ((call, self.store.failure(call)) for call in calls)
        return [(call, reason) for call, reason in reasons if reason is not None]

    def _is_noisy(self, times: OpTime) -> bool:
        return times.spread > self.limits.max_spread

    def _estimate(self, call: OpCall) -> OpEstimate:
        if not _is_paid(call):
            return self.fallback.estimate(call)
        times = self.store.get(call)
        if times is None and self.measuring:
            times = self._measure(call)
        if times is not None:
            return OpEstimate(
                times.forward_s,
                times.input_grad_s,
                times.weight_grad_s,
                Source.MEASURED,
                self._is_noisy(times),
            )
        return self._interpolate(call) or self.fallback.estimate(call)

    def _measure(self, call: OpCall) -> OpTime | None:
        if self.store.failure(call) is not None:
            return None
        try:
            times = self._measure_call(call)
        except CostError as error:
            for_now = isinstance(error, NotNowError) or not _lasts(call)
            self.store.put_failure(call, str(error), for_now=for_now)
            warnings.warn(f"{error}; it is priced by the roofline model", stacklevel=4)
            return None
        self.num_measurements += 1
        self.store.put(call, times)
        self._known.pop(call, None)
        self._tables.pop(call.target, None)
        return times

    def _measured_here(self, call: OpCall) -> OpTime:
        devices = [torch.cuda.current_device()] if self.device.kind == "cuda" else []
        with torch.random.fork_rng(devices), _threads(self.device.num_threads):
            return measure_call(call, self.device, self.limits)

    def _interpolate(self, call: OpCall) -> OpEstimate | None:
        """The roofline scaled by its error at the nearest measured shapes, or None.

        Distances are in logarithms of operations and bytes; ratios are averaged in logarithms too,
        weighted by the inverse square of the distance. Far outside the measured shapes they fade
        out (`_hold`).
        """
        neighbours = self._table(call.target).get(pattern(call), [])
        if not neighbours:
            return None
        position = position_of(call)
        hold = _hold(position, [n.position for n in neighbours])
        if not hold:
            return None
        ranked = sorted(neighbours, key=lambda n: math.dist(n.position, position))
        nearest = ranked[:_NUM_NEIGHBOURS]
        weights = [1 / (math.dist(n.position, position) ** 2 + 1e-6) for n in nearest]
        base = self.fallback.estimate(call)
        scales = [
            math.exp(
                hold * sum(w * n.log_ratios[i] for w, n in zip(weights, nearest)) / sum(weights)
            )
            for i in range(3)
        ]
        return OpEstimate(
            base.forward_s * scales[0],
            base.input_grad_s * scales[1],
            base.weight_grad_s * scales[2],
            Source.INTERPOLATED,
            any(n.is_noisy for n in nearest),
        )

    def _table(self, target: str) -> dict[OpCall, list["_Neighbour"]]:
        if target not in self._tables:
            table: dict[OpCall, list[_Neighbour]] = {}
            for call, times in self.store.of_op(target):
                try:
                    base = self.fallback.estimate(call)
                except CostError:  # the operation is not registered here, or the call is invalid
                    continue
                neighbour = _Neighbour(
                    position=position_of(call),
                    log_ratios=(
                        _log_ratio(times.forward_s, base.forward_s),
                        _log_ratio(times.input_grad_s, base.input_grad_s),
                        _log_ratio(times.weight_grad_s, base.weight_grad_s),
                    ),
                    is_noisy=self._is_noisy(times),
                )
                table.setdefault(pattern(call), []).append(neighbour)
            self._tables[target] = table
        return self._tables[target]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Neighbour:
    position: tuple[float, float]
    log_ratios: tuple[float, float, float]
    is_noisy: bool


def _log_ratio(measured_s: float, base_s: float) -> float:
    if measured_s <= 0 or base_s <= 0:
        return 0.0
    return math.log(measured_s / base_s)


def _split(calls: list[OpCall]) -> tuple[list[OpCall], list[tuple[OpCall, str]]]:
    """The calls worth measuring, and those that cannot be priced, with the reason."""
    paid, unpriced = [], []
    for call in calls:
        try:
            if _is_paid(call):
                paid.append(call)
        except CostError as error:
            unpriced.append((call, str(error)))
    return paid, unpriced


def _lasts(call: OpCall) -> bool:
    """Whether a failure of ``call`` is permanent, as the operator's code does not change."""
    return call.target.split(".")[0] in _LASTING


def _is_paid(call: OpCall) -> bool:
    """Whether any direction launches a kernel; views and assertions are not worth measuring."""
    todo = work(call)
    parts = (todo.forward, todo.input_grad, todo.weight_grad)
    return any(part.num_kernels for part in parts)


def _hold(position: tuple[float, float], measured: list[tuple[float, float]]) -> float:
    """The weight of the measured ratios at ``position``.

    It is 1 up to a factor ``_REACH`` outside the measured range, and falls to 0 at its square.
    """
    beyond = max(
        max(min(point[axis] for point in measured) - position[axis],
            position[axis] - max(point[axis] for point in measured))
        for axis in range(2)
    )  # fmt: skip
    return min(1.0, max(0.0, 2.0 - beyond / math.log(_REACH)))


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_device_is_here(device: DeviceSpec) -> None:
    from autopar.cost_models.detect import cpu_name

    if device.kind == "cuda":
        here = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no CUDA device"
    else:
        here = cpu_name()
    if here != device.name:
        raise ClusterError(
            f"{device.name} cannot be measured here: this machine has {here}. Use "
            "Cluster.detect() for the local machine, or Profiler(..., measuring=False)."
        )
