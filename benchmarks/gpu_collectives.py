"""Prices of collectives on GPUs compared with measurements inside and between nodes.

Called by ``gpu_prices.py``. What a network between nodes reaches is in no specification, so it is a
parameter of a preset (``network_efficiency=``). Each shape between nodes is priced by the preset as
it is, with this parameter fitted to every second size, where the sizes left out are reported apart,
and with the median of what fits the other shapes. Inside nodes the presets are priced as they are;
their constants were fitted to A100 and to pairs of H100. The figures that others report of
nccl-tests were not used for a constant.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from autopar.cost_models import Cluster, CommunicationModel

# The presets of the data's nodes, alone and several of them.
PRESETS = {
    "a100_dgx": ("a100-80", "a100-80-ethernet"),
    "h100_dgx": ("h100-sxm", "h100-sxm"),
    "h100_pairwise_nvlink": ("h100-pcie", "h100-pcie"),
    "a40_pairwise_nvlink": ("a40", "a40"),
}
EFFICIENCIES = np.round(np.arange(0.1, 1.0, 0.01), 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Bus bandwidth in GB/s that an issue reports of nccl-tests on nodes of eight devices."""

    preset: str
    nodes: int
    adapters: int
    gigabits_per_s: int
    kind: str
    size_bytes: int
    reported: float
    issue: str


REPORTS = (
    Report(preset="a100-40", nodes=3, adapters=4, gigabits_per_s=200, kind="all_reduce",
           size_bytes=128 << 20, reported=96, issue="NVIDIA/nccl-tests 119"),
    Report(preset="h100-sxm", nodes=32, adapters=8, gigabits_per_s=400, kind="all_reduce",
           size_bytes=2 << 30, reported=340, issue="NVIDIA/nccl 1218, with NVLink SHARP"),
    Report(preset="h100-sxm", nodes=32, adapters=8, gigabits_per_s=400, kind="all_gather",
           size_bytes=2 << 30, reported=200, issue="NVIDIA/nccl 1218, one repetition"),
)  # fmt: skip


def summary(off: Any) -> dict[str, float]:
    return {
        "median": round(100 * float(np.median(off)), 1),
        "mean": round(100 * float(np.mean(off)), 1),
        "p90": round(100 * float(np.quantile(off, 0.9)), 1),
        "rows": len(off),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One collective on ``nodes`` nodes with ``each`` devices of each."""

    kind: str
    node: str
    nodes: int
    each: int

    def cluster(self, efficiency: float | None = None) -> Cluster:
        return Cluster.preset(
            PRESETS[self.node][self.nodes > 1],
            nodes=self.nodes,
            devices_per_node=self.each,
            network_efficiency=efficiency,
        )

    @property
    def where(self) -> str:
        return "between nodes" if self.nodes > 1 else "inside a node"


Rows = Sequence[tuple[int, float]]
"""Bytes and seconds."""


def measured(folder: Path) -> dict[Shape, Rows]:
    """The measured rows of each shape, by size."""
    shapes: dict[Shape, list[tuple[int, float]]] = {}
    with (folder / "collectives.csv").open() as file:
        for row in csv.DictReader(file):
            count, each = int(row["num_devices"]), int(row["devices_per_node"])
            shape = Shape(kind=row["collective"], node=row["node"], nodes=count // each, each=each)
            shapes.setdefault(shape, []).append((int(row["bytes"]), float(row["ms"]) / 1e3))
    return {shape: sorted(rows) for shape, rows in shapes.items()}


def collectives(folder: Path) -> dict[str, Any]:
    """Errors by shape, and those of all shapes inside and between nodes."""
    shapes = measured(folder)
    fitted = {
        shape: min(EFFICIENCIES, key=lambda value: _fit(shape, float(value), rows[::2]))
        for shape, rows in shapes.items()
        if shape.nodes > 1
    }
    found: dict[str, Any] = {}
    whole: dict[str, list[Any]] = {}
    for shape, rows in shapes.items():
        parts = {"presets": (None, rows)}
        if shape in fitted:
            efficiency = float(fitted[shape])
            parts |= {
                "fitted sizes": (efficiency, rows[::2]),
                "left-out sizes": (efficiency, rows[1::2]),
            }
        errors = {name: _errors(shape, *part) for name, part in parts.items()}
        for name, off in errors.items():
            whole.setdefault(f"{shape.where}, {name}", []).append(off)
        others = [
            value
            for other, value in fitted.items()
            if (other.kind, other.node) == (shape.kind, shape.node) and other != shape
        ]
        if shape in fitted and others:
            errors["left-out shape"] = _errors(shape, float(np.median(others)), rows)
        title = f"{shape.kind} {shape.node} {shape.where}, {shape.nodes} x {shape.each}"
        found[title] = {name: summary(off) for name, off in errors.items()}
        if shape in fitted:
            found[title]["network efficiency"] = float(fitted[shape])
    totals = {name: summary(np.concatenate(parts)) for name, parts in whole.items()}
    return {"shapes": found, "all": totals, "nccl-tests": [_reported(one) for one in REPORTS]}


def _fit(shape: Shape, efficiency: float, rows: Rows) -> float:
    """The mean error, where outliers count as the 90th percentile that is asked."""
    return float(np.mean(np.minimum(_errors(shape, efficiency, rows), 0.25)))


def _errors(shape: Shape, efficiency: float | None, rows: Rows) -> Any:
    cluster = shape.cluster(efficiency)
    model, ranks = CommunicationModel(cluster), tuple(range(cluster.num_devices))
    priced = [model.estimate(shape.kind, size_bytes, ranks).time_s for size_bytes, _ in rows]
    return np.abs(np.array(priced) / np.array([time_s for _, time_s in rows]) - 1)


def _reported(report: Report) -> dict[str, Any]:
    cluster = Cluster.preset(report.preset, nodes=report.nodes)
    adapter = report.gigabits_per_s / 8 * 1e9
    network = structs.replace(
        cluster.levels[1],
        bandwidth_bytes_per_s=report.adapters * adapter,
        device_bandwidth_bytes_per_s=adapter,
    )
    model = CommunicationModel(structs.replace(cluster, levels=(cluster.levels[0], network)))
    num, size_bytes = cluster.num_devices, report.size_bytes
    time_s = model.estimate(report.kind, size_bytes, tuple(range(num))).time_s
    rounds = 2 if report.kind == "all_reduce" else 1
    priced = rounds * (num - 1) / num * size_bytes / time_s / 1e9
    return {**_fields(report), "priced": round(priced, 1)}


def _fields(report: Report) -> dict[str, Any]:
    return {name: getattr(report, name) for name in report.__slots__}


def show(found: dict[str, Any]) -> None:
    for name, numbers in found["shapes"].items():
        print(f"{name}: {numbers}")
    for name, numbers in found["all"].items():
        print(f"collectives {name}: {numbers}")
    for row in found["nccl-tests"]:
        print(
            f"{row['kind']} of {row['size_bytes'] >> 20} MiB on {row['nodes']} nodes of "
            f"{row['preset']}, {row['adapters']} x {row['gigabits_per_s']} Gb/s: {row['priced']} "
            f"GB/s, reported {row['reported']} ({row['issue']})"
        )
