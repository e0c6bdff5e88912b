"""GPU prices compared with measurements: kernels, collectives, published errors.

Run: ``python benchmarks/gpu_prices.py FOLDER``, about a minute on one core. Kernels are priced by
fits that did not see them: over five folds of the shapes, and over each chip left out; they are
compared with the plain roofline and with the errors that NeuSight's authors published on this data.
Fused attention is compared with figures of papers.
Gradient-boosted trees on the sizes of convolutions, over the same folds, miss the 10% asked too.
Collectives are in `gpu_collectives`. Prints and writes ``benchmarks/results/gpu_prices.json``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from fit_gpu_attention import by_kernel_of_hopper, folded
from fit_gpu_prices import PASSES, Result, devices, errors, read, run
from gpu_collectives import collectives, show, summary
from setting import setting

from autopar.cost_models.gpu_attention import attention_file

RESULT = Path(__file__).parent / "results" / "gpu_prices.json"
ASKED = {
    "kernels": "median 10, p90 30; a chip left out: median 20",
    "collectives": "median 10, p90 25",
}
# Mean errors in percent reported by NeuSight's authors, the lowest of the methods they compare.
PUBLISHED = {"batched": 14, "linear": 14, "pointwise": 14, "softmax": 14, "normalization": 20}


def roofline(folder: Path, precision: str, family: str) -> Any:
    """Errors of the larger of compute and memory time at the datasheet's peaks."""
    known = devices(folder)
    rows = [r for r in read(folder, f"kernels_{precision}.csv") if r["family"] == family]
    item_bytes = 2 if precision == "float16" else 4
    predicted = []
    for row in rows:
        device = known[row["device"]]
        if family in ("linear", "batched"):
            m, n, k, batch = row["M"], row["N"], row["K"], row.get("B", 1)
            flops, numbers = 2 * batch * m * n * k, batch * (m * k + k * n + m * n)
        elif family == "convolution":
            outputs = row["B"] * row["H"] ** 2
            flops = 2 * outputs * row["O"] * row["C"] * row["k"] ** 2
            numbers = outputs * (row["C"] + row["O"]) + row["C"] * row["O"] * row["k"] ** 2
        else:
            flops, numbers = 0, PASSES[row["op"]] * row["B"] * row["H"]
        bandwidth = device.memory_bandwidth_bytes_per_s
        arithmetic_s = flops / device.peak_flops_per_s.float32
        predicted.append(max(arithmetic_s, numbers * item_bytes / bandwidth))
    return errors(rows, np.array(predicted))


def kernels(folder: Path, results: dict[tuple[str, str], Result]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for (precision, family), result in results.items():
        found[f"{precision} {family}"] = {
            "unseen shapes": summary(np.concatenate(list(result.by_device.values()))),
            "roofline": summary(roofline(folder, precision, family)),
            "best published mean": PUBLISHED.get(family) if precision == "float32" else None,
            "by device": {name: summary(off) for name, off in result.by_device.items()},
            "chip left out": {name: summary(off) for name, off in result.left_out.items()},
        }
    return found


def attention() -> dict[str, Any]:
    """Fused attention in half precision by figures of papers, which `fit_gpu_attention` lists."""
    left_out = attention_file().spread
    found = {}
    for kernel, rows in by_kernel_of_hopper().items():
        roof = np.array([1 - part for part, *_ in rows])  # of a time at the peak
        found[f"{kernel} on H100"] = {
            "unseen figures": summary(np.abs(np.expm1(folded(rows)))),
            "roofline": summary(roof),
            "another device or kernel, median": round(100 * left_out[kernel].left_out_median, 1),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="where the measurements lie")
    folder = parser.parse_args().folder
    results = run(folder, say=lambda line: None)
    found = {
        "setting": setting("numpy", "scipy"),
        "asked, in percent": ASKED,
        "kernels": kernels(folder, results),
        "attention": attention(),
        "collectives": collectives(folder),
    }
    for kernel, of in found["attention"].items():
        print(f"attention by {kernel}: {of}")
    for name, of in found["kernels"].items():
        print(f"{name}: unseen {of['unseen shapes']}, roofline {of['roofline']}, ", end="")
        print(f"best published mean {of['best published mean']}")
        for device, numbers in of["by device"].items():
            print(f"    {device}: {numbers}")
        for chip, numbers in of["chip left out"].items():
            print(f"    {chip} left out: {numbers}")
    show(found["collectives"])
    RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
