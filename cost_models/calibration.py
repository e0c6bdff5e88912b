"""Calibration of the roofline's efficiencies to measured times, with cross-validated errors.

In: measured calls of one device. Out: an ``EfficiencyTable`` for it, and for each family the error
on held-out calls. The fitted table prices calls that were never measured, and devices of the same
kind that are not present.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.base.documents import shown
from autopar.base.errors import InputError
from autopar.cost_models.calls import OpCall
from autopar.cost_models.compute import peak_flops_per_s
from autopar.cost_models.efficiency import (
    TABLES,
    EfficiencyTable,
    FamilyEfficiency,
    kernel_time_s,
)
from autopar.cost_models.estimate import CostError
from autopar.cost_models.hardware import DeviceSpec
from autopar.cost_models.op_work import work
from autopar.cost_models.store import OpTime
from autopar.cost_models.work import Family, Work

# With fewer samples than this, a family keeps its previous efficiencies.
_MIN_SAMPLES = 6
_NUM_ROUNDS = 4
_SCALES = tuple(2.0**power for power in (-2, -1, -0.5, -0.25, -0.1, 0.1, 0.25, 0.5, 1, 2))
_KERNEL_S = (0.0, 5e-7, 1e-6, 2e-6, 4e-6, 8e-6, 1.6e-5, 3.2e-5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncertainty:
    """The prediction error of a family over held-out calls.

    ``median_factor`` and ``p90_factor`` are the factors by which predictions are off in either
    direction: 1.1 means 10%. ``num_samples`` is the number of measured directions.
    """

    median_factor: float
    p90_factor: float
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A fitted table, and the uncertainty of the families with enough measurements."""

    table: EfficiencyTable
    uncertainty: Mapping[Family, Uncertainty]

    def __repr__(self) -> str:
        names = ", ".join(f"{name} {x.median_factor:.2f}x" for name, x in self.uncertainty.items())
        return f"<Calibration, median error on held-out calls: {names or 'not known'}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    work: Work
    peak_flops_per_s: float
    time_s: float


def calibrate(device: DeviceSpec, measured: Iterable[tuple[OpCall, OpTime]]) -> Calibration:
    """Fit the efficiencies of ``device`` to ``measured`` by least absolute error of logarithms.

    For the uncertainty, each family is fitted to one half of its samples and tested on the other,
    both ways; the returned table is fitted to all samples. Raises InputError for another type of
    either.
    """
    pairs = list(_checked(device, measured))
    start = TABLES[device.kind]
    families = dict(start.families)
    uncertainty = {}
    for family, samples in _by_family(device, pairs).items():
        if len(samples) < _MIN_SAMPLES:
            continue
        unseen = []
        for fitted, judged in ((samples[::2], samples[1::2]), (samples[1::2], samples[::2])):
            curve = _fit(fitted, family, device, start)
            unseen += _errors(judged, family, curve, device, start)
        error_factor = math.exp(statistics.median(unseen))
        curve_of_all = _fit(samples, family, device, start)
        families[family] = replace(curve_of_all, error_factor=error_factor)
        deciles = statistics.quantiles(unseen, n=10, method="inclusive")
        uncertainty[family] = Uncertainty(
            median_factor=error_factor,
            p90_factor=math.exp(deciles[-1]),
            num_samples=len(samples),
        )
    return Calibration(table=replace(start, families=families), uncertainty=uncertainty)


def _checked(
    device: DeviceSpec, measured: Iterable[tuple[OpCall, OpTime]]
) -> Iterator[tuple[OpCall, OpTime]]:
    """The measured pairs; raises InputError for what is no device or no such pair."""
    if not isinstance(device, DeviceSpec):
        raise InputError(f"device is {shown(device)}; pass a DeviceSpec, such as cluster.device")
    for pair in measured if isinstance(measured, Iterable) else (measured,):
        match pair:
            case (OpCall(), OpTime()):
                yield pair
            case _:
                raise InputError(
                    f"measured has {shown(pair)}; pass pairs of OpCall and OpTime, such as the "
                    "measured_call of the ops of compiled.profile(...)"
                )


def _by_family(
    device: DeviceSpec, measured: Iterable[tuple[OpCall, OpTime]]
) -> dict[Family, list[_Sample]]:
    found: dict[Family, list[_Sample]] = {}
    for call, times in measured:
        try:
            todo = work(call)
        except CostError:  # the operation is not registered in this process
            continue
        peak = peak_flops_per_s(todo, device)
        directions = (
            (todo.forward, times.forward_s),
            (todo.input_grad, times.input_grad_s),
            (todo.weight_grad, times.weight_grad_s),
        )
        for direction, time_s in directions:
            if direction.num_kernels and time_s > 0:
                sample = _Sample(work=direction, peak_flops_per_s=peak, time_s=time_s)
                found.setdefault(todo.family, []).append(sample)
    return {
        family: sorted(samples, key=lambda sample: (sample.work.size_bytes, sample.work.flops))
        for family, samples in found.items()
    }


def _errors(
    samples: list[_Sample],
    family: Family,
    curve: FamilyEfficiency,
    device: DeviceSpec,
    table: EfficiencyTable,
) -> list[float]:
    trial = replace(table, families={family: curve})
    return [
        abs(math.log(kernel_time_s(s.work, family, s.peak_flops_per_s, device, trial) / s.time_s))
        for s in samples
    ]


def _fit(
    samples: list[_Sample], family: Family, device: DeviceSpec, table: EfficiencyTable
) -> FamilyEfficiency:
    """Coordinate descent over three numbers, on a geometric grid that is refined each round."""

    def loss(curve: FamilyEfficiency) -> float:
        return sum(_errors(samples, family, curve, device, table))

    best = table.of(family)
    best_loss = loss(best)
    for round_index in range(_NUM_ROUNDS):
        for candidate in _neighbours(best, 1 / 2**round_index):
            candidate_loss = loss(candidate)
            if candidate_loss < best_loss:
                best, best_loss = candidate, candidate_loss
    return best


def _neighbours(curve: FamilyEfficiency, fineness: float) -> list[FamilyEfficiency]:
    scales = [scale**fineness for scale in _SCALES]
    found = [replace(curve, kernel_s=seconds) for seconds in _KERNEL_S]
    found += [
        replace(curve, compute=_part(curve.compute * c), memory=_part(curve.memory * m))
        for c in (1.0, *scales)
        for m in (1.0, *scales)
    ]
    return found


def _part(value: float) -> float:
    """A fraction of a peak, at most 1, so that the fitted roofline stays a bound."""
    return min(max(value, 1e-4), 1.0)
