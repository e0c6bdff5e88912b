"""Fit the CPU table of efficiencies to this machine's profile store, with errors on held-out calls.

    PYTHONPATH=. python benchmarks/fit_cpu_prices.py [--store FILE] [--devices 1]

The store fills as models are compiled or profiled (`benchmarks/profiling.py`). Each family is
fitted to one half of its measured calls and tested on the other. Prints and writes to
benchmarks/results/cpu_prices.json the fitted efficiencies and, beside each other, the median factor
by which the fit and the table in use are off; the numbers of `autopar.cost_models.efficiency.CPU`
come from such a run.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from setting import setting

from autopar.cost_models import Cluster, CostError, OpCall, ProfileStore, RooflineModel, calibrate
from autopar.cost_models.op_work import work
from autopar.cost_models.store import OpTime, default_store_path
from autopar.cost_models.work import Family

RESULT = Path(__file__).parent / "results" / "cpu_prices.json"
Measured = list[tuple[OpCall, OpTime]]


def factors_of(model: RooflineModel, measured: Measured) -> dict[Family, list[float]]:
    """The factors by which a model's forward prices are off, by family."""
    found: dict[Family, list[float]] = {}
    for call, times in measured:
        try:
            family, predicted_s = work(call).family, model.estimate(call).forward_s
        except CostError:
            continue
        if predicted_s > 0 and times.forward_s > 0:
            off = abs(math.log(predicted_s / times.forward_s))
            found.setdefault(family, []).append(math.exp(off))
    return found


def rows_of(cluster: Cluster, measured: Measured) -> Iterable[dict[str, Any]]:
    calibration = calibrate(cluster.device, measured)
    in_use = factors_of(RooflineModel(cluster.device), measured)
    for family, held_out in sorted(calibration.uncertainty.items()):
        fitted = calibration.table.of(family)
        yield {
            "family": str(family),
            "samples": held_out.num_samples,
            "compute": round(fitted.compute, 3),
            "memory": round(fitted.memory, 3),
            "kernel_us": round(1e6 * fitted.kernel_s, 2),
            "held-out median factor": round(held_out.median_factor, 3),
            "held-out p90 factor": round(held_out.p90_factor, 3),
            "table in use, median factor": round(statistics.median(in_use.get(family, [1.0])), 3),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", type=Path, default=default_store_path())
    parser.add_argument("--devices", type=int, default=1, help="the processes that share the host")
    arguments = parser.parse_args()
    cluster = Cluster.detect(arguments.devices)
    with ProfileStore(arguments.store, cluster.device) as store:
        measured = list(store.everything())
    rows = list(rows_of(cluster, measured))
    if not rows:
        parser.exit(1, f"{arguments.store} has too few measured calls of {cluster.device.name}\n")
    for row in rows:
        print(json.dumps(row))
    result = {**setting("torch"), "device": cluster.device.name, "rows": rows}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
