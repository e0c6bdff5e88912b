"""Fits the curves of CUDA kernels to published measurements and writes cost_models/gpu_curves.json.

Run: ``python benchmarks/fit_gpu_prices.py FOLDER``; the folder holds ``kernels_float32.csv``,
``kernels_float16.csv`` and ``devices.json``. The rows are from NeuSight (sitar-lab/NeuSight, ASPLOS
2025) and Vidur (microsoft/vidur, MLSys 2024), both under the MIT licence; only fitted parameters
are kept.

Each chip, precision and family has its own few parameters, regularized towards common starting
values. A chip without measurements gets the median parameters of the others; the fraction of peak
that its products reach follows from its power: the energy per operation of its process, times the
rate, must fit in.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from scipy.optimize import least_squares

from autopar.cost_models.gpu_curves import (
    Chip,
    CurveFile,
    Curves,
    ProductCurve,
    Spread,
    TrafficCurve,
    convolution_s,
    joined_s,
    product_s,
    traffic_s,
)
from autopar.cost_models.hardware import DeviceSpec, PeakFlops

OUT = Path(__file__).parents[1] / "cost_models" / "gpu_curves.json"
NUM_FOLDS = 5
MAX_ROWS = 300
MAX_FIXED_S = 1e-4
RAGGED_AT_MOST = 0.95
"""A smaller loss is not worth prices that fall from one size to the next."""
HOLD = 0.1
"""Weight of a parameter's distance from its start, relative to one row's log error."""

Row = dict[str, Any]
Params = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipFacts:
    """Published facts on a chip: its devices' names, process, board power, float32 peak."""

    names: tuple[str, ...]
    nanometres: float
    watts: float
    tera: float


CHIPS = {
    "P4": ChipFacts(names=("Tesla P4",), nanometres=16, watts=75, tera=5.7),
    "P100": ChipFacts(names=("Tesla P100-PCIE-16GB",), nanometres=16, watts=250, tera=9.5),
    "1080 Ti": ChipFacts(
        names=("NVIDIA GeForce GTX 1080 Ti",), nanometres=16, watts=250, tera=11.34
    ),
    "V100": ChipFacts(
        names=("Tesla V100-PCIE-32GB", "Tesla V100-SXM2-32GB"), nanometres=12, watts=250, tera=14
    ),
    "T4": ChipFacts(names=("Tesla T4",), nanometres=12, watts=70, tera=8.1),
    "2080 Ti": ChipFacts(
        names=("NVIDIA GeForce RTX 2080 Ti",), nanometres=12, watts=250, tera=13.45
    ),
    "A100": ChipFacts(
        names=(
            "NVIDIA A100 80GB PCIe", "NVIDIA A100-PCIE-40GB", "NVIDIA A100-SXM4-40GB",
            "NVIDIA A100-SXM4-80GB",
        ),
        nanometres=7, watts=280, tera=19.5,
    ),
    "A40": ChipFacts(names=("NVIDIA A40",), nanometres=8, watts=300, tera=37.4),
    "L4": ChipFacts(names=("NVIDIA L4",), nanometres=5, watts=72, tera=31.3),
    "L40S": ChipFacts(names=("NVIDIA L40S",), nanometres=5, watts=350, tera=91.6),
    "H100": ChipFacts(
        names=("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H200"), nanometres=5,
        watts=700, tera=66.9,
    ),
    "B200": ChipFacts(names=("NVIDIA B200",), nanometres=4.5, watts=1000, tera=75),
    "MI300X": ChipFacts(names=("AMD Instinct MI300X",), nanometres=5, watts=750, tera=163.4),
}  # fmt: skip

HALF_PEAKS = {  # chip of the half-precision rows: dense rate, bytes/s, multiprocessors
    "A100": (312e12, 2039e9, 108),
    "A40": (149.7e12, 696e9, 84),
    "H100": (989.4e12, 3350e9, 132),
}

# Devices whose multiprocessors are counted differently in the list than by their makers.
UNITS = {"Tesla P4": 20, "NVIDIA L4": 58}

# Special functions a second: sixteen a clock and multiprocessor, at the boost clock. The gated
# activation (an exponential and a division in float32) takes 13 of them for each element.
SPECIAL_PER_S = {"A100": 108 * 16 * 1.41e9, "A40": 84 * 16 * 1.74e9, "H100": 132 * 16 * 1.98e9}
GATED_SPECIAL = 13

# How often a kernel reads or writes as many bytes as its result has.
PASSES = {
    **dict.fromkeys(("add", "mul", "div", "pow"), 3),
    **dict.fromkeys(("addu", "mulu", "divu", "powu", "gelu", "relu", "tanh"), 2),
    "gated_activation": 3, "ln": 2, "norm": 2, "softmax": 2,
}  # fmt: skip
_FAMILY = {
    "linear": "linear", "bmm": "batched", "conv": "convolution", "ln": "normalization",
    "norm": "normalization", "softmax": "softmax",
}  # fmt: skip

PRODUCT_START = np.array([1.5, 1.5, 1.0, 3.7, -10.3, 1.0, 0.05, -2.0, 0.1, -2.0, 1.0])
TRAFFIC_START = np.array([1.7, -10.3, 0.0])
SMALL_WATTS = 100
"""Boards with less power than this slow down under lasting work."""


def read(folder: Path, name: str) -> list[Row]:
    """Rows with their sizes as numbers, without times too coarse to fit (under 3 microseconds)."""
    with (folder / name).open() as file:
        rows: list[Row] = [dict(row) for row in csv.DictReader(file)]
    for row in rows:
        row.update((key, int(value)) for key, value in (p.split("=") for p in row["dims"].split()))
        row["time_s"] = float(row["forward_ms"]) / 1e3
        row["family"] = _FAMILY.get(row["op"], "pointwise")
    return [row for row in rows if row["time_s"] >= 3e-6]


def devices(folder: Path) -> dict[str, DeviceSpec]:
    """The devices of the rows; those of half precision are named by their chip, as in the rows."""
    found = {}
    for name, facts in json.loads((folder / "devices.json").read_text()).items():
        if not name.endswith("_TP"):
            units = UNITS.get(facts["Device"], facts["Num_Sm"])
            found[facts["Device"]] = _device(
                facts["Device"], facts["SingleFLOPs"] * 1e9, facts["Mem_Bw"] * 1e9, units
            )
    for chip, figures in HALF_PEAKS.items():
        found[chip] = _device(chip, *figures)
    return found


def _device(name: str, peak: float, bandwidth: float, units: int) -> DeviceSpec:
    return DeviceSpec(
        name=name, kind="cuda", peak_flops_per_s=PeakFlops(float32=peak), memory_bytes=1 << 30,
        memory_bandwidth_bytes_per_s=bandwidth, kernel_launch_s=0.0, num_units=units,
    )  # fmt: skip


def _part(x: float) -> float:
    return float(1 / (1 + np.exp(-x)))


def curve_of(family: str, x: Params, *, slows: bool = False) -> ProductCurve | TrafficCurve:
    """The curve that a fit's unbounded numbers parametrize; ``slows``: see `slows_down`."""
    if family in ("pointwise", "normalization", "softmax"):
        overlap = 1 + float(np.exp(x[2]))
        return TrafficCurve(memory=_part(x[0]), fixed_s=float(np.exp(x[1])), overlap=overlap)
    # Few convolutions are so small that the fixed time shows; it must not absorb other effects.
    fixed_s = min(float(np.exp(x[4])), MAX_FIXED_S)
    convolution = family == "convolution"
    return ProductCurve(
        compute=_part(x[0]), memory=_part(x[1]), cache=float(np.exp(x[2])),
        start_up=float(np.exp(x[3])), fixed_s=fixed_s,
        winograd=_part(x[5]) if convolution else 0.0,
        transformed=_part(x[10]) if convolution else 0.0,
        ragged=1.0 if convolution else min(1.0, float(np.exp(-x[6]))),
        wide=float(np.exp(x[7])) if family == "linear" else 0.0,
        narrow=min(1.0, float(np.exp(-x[8]))) if family == "batched" else 1.0,
        slowed=float(np.exp(x[9])) if slows else 0.0,
    )  # fmt: skip


def predicted_s(rows: Sequence[Row], device: DeviceSpec, family: str, curve: Any) -> Any:
    """Seconds of each row on one device."""
    item_bytes = 2 if rows[0]["dtype"] == "float16" else 4
    peak = device.peak_flops_per_s.float32

    def column(name: str) -> Any:
        return np.array([row.get(name, 1) for row in rows], dtype=float)

    if isinstance(curve, TrafficCurve):
        passes = np.array([PASSES[row["op"]] for row in rows], dtype=float)
        elements = column("B") * column("H")
        time_s = traffic_s(item_bytes * passes * elements, device, curve)
        if device.name in SPECIAL_PER_S:
            gated = np.array([row["op"] == "gated_activation" for row in rows])
            special_s = elements * GATED_SPECIAL / SPECIAL_PER_S[device.name]
            time_s = np.where(gated, np.maximum(time_s, special_s), time_s)
        return joined_s(time_s, curve.fixed_s, curve.overlap)
    common: Any = {"item_bytes": item_bytes, "peak": peak, "device": device, "curve": curve}
    if family == "convolution":
        side = (column("H") + 2 * column("pad") - column("k")) // column("stride") + 1
        sizes = (column("B") * side**2, column("O"), column("C") * column("k") ** 2, 1.0 + 0 * side)
        padded, large = (column("B") * (tile * np.ceil(side / tile)) ** 2 for tile in (2, 4))
        common |= {"winograd_m": padded, "winograd_large_m": large}
        return curve.fixed_s + convolution_s(*sizes, **common)
    sizes = (column("M"), column("N"), column("K"), column("B"))
    return curve.fixed_s + product_s(*sizes, compute=curve.compute, **common)


def predictions(rows: Sequence[Row], family: str, curve: Any, known: dict[str, DeviceSpec]) -> Any:
    """Seconds of each row, each on its own device."""
    found = np.empty(len(rows))
    names = np.array([row["device"] for row in rows])
    for name in dict.fromkeys(names):
        at = np.flatnonzero(names == name)
        found[at] = predicted_s([rows[i] for i in at], known[name], family, curve)
    return found


def times(rows: Sequence[Row]) -> Any:
    return np.array([row["time_s"] for row in rows])


def fit(rows: Sequence[Row], family: str, known: dict[str, DeviceSpec]) -> Params:
    """Parameters by robust least squares of log errors, regularized towards their start."""
    if len(rows) > MAX_ROWS:
        chosen = np.random.default_rng(0).choice(len(rows), MAX_ROWS, replace=False)
        rows = [rows[i] for i in chosen]
    traffic = family in ("pointwise", "normalization", "softmax")
    start = (TRAFFIC_START if traffic else PRODUCT_START).copy()
    if rows[0]["dtype"] == "float16":
        start[1 if traffic else 4] = -12.5
    measured = times(rows)
    slows = slows_down(chip_name(rows[0]["device"]), family)

    free = free_parameters(family, slows=slows)

    def whole(part: Params) -> Params:
        x = start.copy()
        x[free] = part
        return x

    def residuals(part: Params) -> Params:
        curve = curve_of(family, whole(part), slows=slows)
        off = np.log(predictions(rows, family, curve, known) / measured)
        return np.concatenate([off, HOLD * (part - start[free])])

    found = least_squares(
        residuals, start[free], loss="soft_l1", f_scale=0.1, max_nfev=40, diff_step=1e-3
    )
    return whole(found.x)


def free_parameters(family: str, *, slows: bool) -> list[int]:
    """The parameters that a family's curve has."""
    own = {"linear": [6, 7], "batched": [6, 8], "convolution": [5, 10]}
    if family not in own:
        return [0, 1, 2]
    return [0, 1, 2, 3, 4, *own[family], *([9] if slows else [])]


def slows_down(chip: str, family: str) -> bool:
    """Whether the board's power is too little for its clock under lasting work.

    The measured convolutions are too short to show it.
    """
    return family != "convolution" and CHIPS[chip].watts < SMALL_WATTS


def chip_name(device: str) -> str:
    return next(name for name, facts in CHIPS.items() if device == name or device in facts.names)


def energy_part(chip: str, family: str, fits: dict[str, Params]) -> float:
    """The fraction of float32 peak that the board's power allows, by the other chips' energies."""

    def energy(name: str) -> float:  # picojoules per operation at the rate reached
        rate = CHIPS[name].tera * _part(fits[name][0])
        return CHIPS[name].watts / rate * (1 + np.exp(fits[name][9]) * slows_down(name, family))

    others = [name for name in fits if name != chip and name in CHIPS]
    processes = sorted({CHIPS[name].nanometres for name in others})
    middle = [
        float(np.median([energy(n) for n in others if CHIPS[n].nanometres == process]))
        for process in processes
    ]
    here = np.exp(np.interp(np.log(CHIPS[chip].nanometres), np.log(processes), np.log(middle)))
    return float(np.clip(CHIPS[chip].watts / (here * CHIPS[chip].tera), 0.1, 0.92))


def expected(chip: str, family: str, precision: str, fits: dict[str, Params]) -> Params:
    """The parameters of a chip, estimated from those of the others."""
    middle = np.median([x for name, x in fits.items() if name != chip], axis=0)
    if family in ("linear", "batched", "convolution"):
        middle[6] = 0.0  # a property of each library's kernels, not of chips
    if precision == "float32" and family in ("linear", "batched", "convolution"):
        part = energy_part(chip, family, fits)
        slowed = [x[9] for name, x in fits.items() if name != chip and slows_down(name, family)]
        if slows_down(chip, family) and slowed:
            middle[9] = np.median(slowed)
            part = min(0.92, part * (1 + np.exp(middle[9])))
        middle[0] = np.log(part / (1 - part))
    return np.asarray(middle)


def errors(rows: Sequence[Row], predicted: Any) -> Any:
    return np.abs(predicted / times(rows) - 1)


def unseen(rows: list[Row], family: str, known: dict[str, DeviceSpec]) -> Any:
    """Errors over five folds of the shapes, each predicted by a fit to the other four."""
    order = np.random.default_rng(1).permutation(len(rows))
    off = np.empty(len(rows))
    for fold in range(NUM_FOLDS):
        held = order[fold::NUM_FOLDS]
        others = [rows[i] for i in np.setdiff1d(order, held)]
        slows = slows_down(chip_name(rows[0]["device"]), family)
        curve = curve_of(family, fit(others, family, known), slows=slows)
        kept = [rows[i] for i in held]
        off[held] = errors(kept, predictions(kept, family, curve, known))
    return off


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Results of one precision and family: parameters by chip, errors by device, left-out chips."""

    fits: dict[str, Params]
    by_device: dict[str, Any]
    left_out: dict[str, Any]

    def spread(self) -> Spread:
        off = np.concatenate(list(self.by_device.values()))
        left = np.concatenate(list(self.left_out.values()))
        return Spread(
            median=_digits(np.median(off)), mean=_digits(off.mean()),
            p90=_digits(np.quantile(off, 0.9)), left_out_median=_digits(np.median(left)),
        )  # fmt: skip


def judge(rows: list[Row], family: str, precision: str, known: dict[str, DeviceSpec]) -> Result:
    """Fit every chip of one family, and test each fit on data that it did not see."""
    chips: dict[str, list[Row]] = {}
    for row in rows:
        if row["family"] == family:
            chips.setdefault(chip_name(row["device"]), []).append(row)
    fits = {chip: fit(of, family, known) for chip, of in chips.items()}
    by_device: dict[str, Any] = {}
    left_out = {}
    for chip, of in chips.items():
        off = unseen(of, family, known)
        for device in dict.fromkeys(row["device"] for row in of):
            by_device[device] = off[[row["device"] == device for row in of]]
        others = {name: x for name, x in fits.items() if name != chip}
        parameters = expected(chip, family, precision, others)
        curve = curve_of(family, parameters, slows=slows_down(chip, family))
        left_out[chip] = errors(of, predictions(of, family, curve, known))
    return Result(fits=fits, by_device=by_device, left_out=left_out)


def curves(chip: str, results: dict[tuple[str, str], Result], precision: str) -> Curves:
    """The curves of one chip; families that were not measured on it are estimated."""
    found: dict[str, Any] = {}
    fitted = False
    for (of, family), result in results.items():
        if of != precision:
            continue
        x = result.fits.get(chip)
        fitted |= x is not None
        if x is None:
            x = expected(chip, family, precision, result.fits)
        found[family] = _rounded(curve_of(family, x, slows=slows_down(chip, family)))
    for family in ("batched", "softmax"):  # not among the half-precision rows
        found.setdefault(family, found["linear" if family == "batched" else "normalization"])
    return Curves(source="fitted" if fitted else "predicted", **found)


def _rounded(curve: Any) -> Any:
    found = {k: _digits(v) for k, v in msgspec.structs.asdict(curve).items()}
    if found.get("ragged", 0.0) > RAGGED_AT_MOST:
        found["ragged"] = 1.0
    return type(curve)(**found)


def _digits(value: Any) -> float:
    return float(f"{float(value):.4g}")


def run(folder: Path, say: Callable[[str], None] = print) -> dict[tuple[str, str], Result]:
    """Fit every precision and family of the folder."""
    known = devices(folder)
    results = {}
    for precision in ("float32", "float16"):
        rows = read(folder, f"kernels_{precision}.csv")
        for family in sorted({row["family"] for row in rows}):
            result = results[precision, family] = judge(rows, family, precision, known)
            say(f"{precision} {family}: {result.spread()}")
    return results


def document(folder: Path, results: dict[tuple[str, str], Result]) -> CurveFile:
    provenance = {
        "made_by": "benchmarks/fit_gpu_prices.py",
        "data": "NeuSight (sitar-lab/NeuSight) and Vidur (microsoft/vidur), MIT licence",
    }
    for name in ("kernels_float32.csv", "kernels_float16.csv", "devices.json"):
        provenance[name] = "sha256:" + hashlib.sha256((folder / name).read_bytes()).hexdigest()
    spread: dict[str, dict[str, Spread]] = {}
    for (precision, family), result in results.items():
        spread.setdefault(precision, {})[family] = result.spread()

    def chip(name: str) -> Chip:
        return Chip(
            names=CHIPS[name].names,
            float32=curves(name, results, "float32"),
            float16=curves(name, results, "float16"),
        )

    other = msgspec.structs.replace(chip("B200"), names=())
    return CurveFile(
        provenance=provenance, spread=spread, chips={n: chip(n) for n in CHIPS}, other=other
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="where the measurements lie")
    folder = parser.parse_args().folder
    text = msgspec.json.format(msgspec.json.encode(document(folder, run(folder))), indent=1)
    OUT.write_bytes(text + b"\n")


if __name__ == "__main__":
    main()
