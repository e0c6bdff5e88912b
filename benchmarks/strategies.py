"""Plans compared with every known strategy at the same prices: networks x devices x device types.

    python benchmarks/strategies.py [--networks alexnet gpt2] [--instances FOLDER] [--fresh]

Each cell searches every mesh of up to two axes exactly, offline, and prices the strategies of
`autopar.planning.baselines`. The global batch is the same for any number of devices. For PaSE's
four networks the speed-up over data parallelism is compared with the paper's, and with that of the
authors' own cost model on their own graphs (FOLDER holds these instances as .npz), with a reason
where they differ by more than a quarter. benchmarks/results/strategies.json keeps the cells;
existing cells are recomputed only with --fresh.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from networks import NETWORKS, PASE, captured
from setting import setting

ROOT = Path(__file__).parent
RESULT = ROOT / "results" / "strategies.json"
DEVICES = (4, 8, 16, 32, 64)
PRESETS = ("1080ti", "2080ti", "a100-80", "h100-sxm")
DEVICES_PER_NODE = 8
PASE_STEPS_PER_NODE = 3_000  # FlexFlow's chain, for PaSE's networks; planning takes fewer

# Speed-up over data parallelism in the paper's figure 6, read off the bars, at 4 to 64 devices.
PAPER = {
    ("alexnet", "1080ti"): (1.65, 1.75, 1.85, 1.44, 1.41),
    ("alexnet", "2080ti"): (3.54, 4.01, 4.00, 2.78, 1.76),
    ("inception_v3", "1080ti"): (1.03, 1.08, 1.07, 1.09, 1.12),
    ("inception_v3", "2080ti"): (1.01, 1.09, 1.10, 1.12, 1.18),
    ("rnnlm", "1080ti"): (1.85, 1.76, 1.45, 1.41, 1.36),
    ("rnnlm", "2080ti"): (2.03, 2.41, 1.68, 1.62, 1.33),
    ("transformer", "1080ti"): (1.03, 1.02, 1.55, 1.50, 1.43),
    ("transformer", "2080ti"): (1.00, 1.83, 1.75, 1.60, 2.70),
}
INSTANCES = {"inception_v3": "inception3"}
CLOSE = 0.25

Row = dict[str, Any]


def main() -> int:
    """Compute the missing cells, then the summary; exit status 1 if a plan was ever worse."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--instances", type=Path, default=ROOT.parent / "tests" / "search" / "data")
    parser.add_argument("--fresh", action="store_true", help="make every cell anew")
    arguments = parser.parse_args()
    known = {} if arguments.fresh or not RESULT.exists() else json.loads(RESULT.read_text())
    cells = {(c["network"], c["preset"], c["devices"]): c for c in known.get("cells", [])}
    for network in arguments.networks:
        wanted = [
            (preset, count)
            for preset in PRESETS
            for count in DEVICES
            if (network, preset, count) not in cells
        ]
        if not wanted:
            continue
        prepared = prepared_of(network)
        for preset, count in wanted:
            cells[network, preset, count] = cell(network, prepared, preset, count)
            show(cells[network, preset, count])
            write(list(cells.values()), arguments.instances)
    write(list(cells.values()), arguments.instances)
    worse = [each for each in cells.values() if not each["never_worse"]]
    print(f"{len(cells)} cells; a plan is worse than a strategy that can be run in {len(worse)}")
    return 1 if worse else 0


def prepared_of(network: str) -> Any:
    from autopar.passes.prepare import prepare

    return prepare(captured(network))


def cell(network: str, prepared: Any, preset: str, count: int) -> Row:
    """One network on ``count`` devices of one type: the plan and every known strategy."""
    from autopar.cost_models import Cluster
    from autopar.planning.baselines import MARKOV_STEPS_PER_NODE, price_baselines
    from autopar.planning.planner import make_setting
    from autopar.planning.ranking import cheapest
    from autopar.planning.sharding_search import search_meshes
    from autopar.pricing.step_time import time_parts

    inner = min(count, DEVICES_PER_NODE)
    cluster = Cluster.preset(preset, nodes=count // inner, devices_per_node=inner)
    start = time.perf_counter()
    setting = make_setting(prepared, cluster)
    candidates = search_meshes(setting, prepared.cut(1), setting.space.meshes(cluster))
    best = cheapest(candidates)
    searched = time.perf_counter()
    steps = PASE_STEPS_PER_NODE if network in PASE else MARKOV_STEPS_PER_NODE
    known = price_baselines([c.priced for c in candidates], best, steps_per_node=steps)
    plan_s = time_parts(best).step_s
    found = {
        name: {
            "time_s": float(f"{each.time_s:.6g}"),
            "over_plan": round(each.time_s / plan_s, 4),
            "mesh": str(each.mesh),
            "can_be_run": each.candidate is not None,
        }
        for name, each in known.found.items()
    }
    run = [name for name, each in found.items() if each["can_be_run"]]
    formula = [name for name in found if name not in run]
    best_run = min(run, key=lambda name: found[name]["time_s"])
    best_formula = min(formula, key=lambda name: found[name]["time_s"], default=None)
    return {
        "network": network,
        "preset": preset,
        "devices": count,
        "plan_s": float(f"{plan_s:.6g}"),
        "mesh": str(best.mesh),
        "gap": max(0.0, round(1 - min(c.solution.bound for c in candidates) / plan_s, 9)),
        "price_and_search_s": round(searched - start, 2),
        "baselines_s": round(time.perf_counter() - searched, 2),
        "best_that_can_be_run": best_run,
        "best_by_formula": best_formula,
        "never_worse": known.found[best_run].time_s >= plan_s * (1 - 1e-9),
        **({"parts_ms": parts_ms(best, known)} if network in PASE else {}),
        "baselines": found,
        "missing": dict(known.missing),
    }


def parts_ms(best: Any, known: Any) -> Row:
    """Milliseconds of the plan and of data parallelism, by category."""
    from autopar.plans.strategy_names import DATA
    from autopar.pricing.step_time import time_parts

    parts = {"plan": time_parts(best), "data_parallel": time_parts(known.found[DATA].candidate)}
    return {
        name: {
            "forward": round(part.forward_s * 1e3, 3),
            "backward": round(part.backward_s * 1e3, 3),
            "communication": round(part.communication_s * 1e3, 3),
            "update": round(part.update_s * 1e3, 3),
        }
        for name, part in parts.items()
    }


def show(row: Row) -> None:
    """Print one line per cell."""
    times = {name: each["over_plan"] for name, each in row["baselines"].items()}
    best, formula = row["best_that_can_be_run"], row["best_by_formula"]
    print(
        f"{row['network']:13} {row['devices']:3} {row['preset']:9} "
        f"plan {row['plan_s'] * 1e3:9.2f} ms  data x{times.get('data parallel', math.nan):.2f}  "
        f"best {best} x{times[best]:.3f}  formula x{times.get(formula, math.nan):.3f}  "
        f"{row['price_and_search_s']:.1f} + {row['baselines_s']:.1f} s",
        flush=True,
    )


def write(cells: list[Row], instances: Path) -> None:
    """Write the table with its summary, machine and versions."""
    packages = ("torch", "transformers", "numpy", "ortools")
    document = {
        **setting(*packages),
        "summary": summary(cells),
        "pase": pase_rows(cells, instances),
        "cells": cells,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(document, indent=1) + "\n")


def summary(cells: list[Row]) -> Row:
    """Over all cells: how far each strategy is from the plan, and how often plans were worse."""
    ratios: dict[str, list[float]] = {}
    for row in cells:
        for name, each in row["baselines"].items():
            ratios.setdefault(name, []).append(each["over_plan"])
    formula = [
        row["baselines"][row["best_by_formula"]]["over_plan"]
        for row in cells
        if row["best_by_formula"]
    ]
    return {
        "num_cells": len(cells),
        "num_exact": sum(row["gap"] <= 1e-9 for row in cells),
        "num_worse_than_one_that_can_be_run": sum(not row["never_worse"] for row in cells),
        "num_worse_than_one_by_formula": sum(ratio < 1 - 1e-9 for ratio in formula),
        "least_over_plan_by_formula": min(formula, default=None),
        "over_plan": {
            name: {
                "least": min(each),
                "median": round(float(np.median(each)), 4),
                "most": max(each),
                "num_cells": len(each),
            }
            for name, each in ratios.items()
        },
    }


def pase_rows(cells: list[Row], instances: Path) -> list[Row]:
    """PaSE's networks: our speed-up over data parallelism, the paper's, its cost model's."""
    rows = []
    for row in cells:
        paper = PAPER.get((row["network"], row["preset"]))
        if row["network"] not in PASE or paper is None or "parts_ms" not in row:
            continue
        published = paper[DEVICES.index(row["devices"])]
        ours = row["baselines"]["data parallel"]["over_plan"]
        made = {
            "network": row["network"],
            "preset": row["preset"],
            "devices": row["devices"],
            "speed_up": ours,
            "paper": published,
            "ratio": round(ours / published, 3),
            "authors_model": authors_speed_up(instances, row["network"], row["devices"]),
            "if_all_communication_hid_behind_backward": hidden_speed_up(row["parts_ms"]),
        }
        if abs(ours / published - 1) > CLOSE:
            made["because"] = reason(row, ours, published)
        rows.append(made)
    return rows


def hidden_speed_up(parts: Row) -> float:
    """Our speed-up if all communication, in both strategies, overlapped with the backward pass."""

    def hidden_ms(part: Row) -> float:
        return part["forward"] + part["update"] + max(part["backward"], part["communication"])

    return round(hidden_ms(parts["data_parallel"]) / hidden_ms(parts["plan"]), 3)


def reason(row: Row, ours: float, published: float) -> str:
    """A text on the difference from the paper's figure, by the parts of our prices."""
    plan, data = (sum(row["parts_ms"][each].values()) for each in ("plan", "data_parallel"))
    moved = row["parts_ms"]["data_parallel"]["communication"]
    if ours > published:
        fixed = (data - published * plan) / (published - 1) if published > 1 else math.inf
        hidden = hidden_speed_up(row["parts_ms"])
        beside = (
            "overlap alone would explain it"
            if hidden <= published
            else f"overlap alone leaves {hidden:.2f}"
        )
        return (
            f"the paper measured Mesh-TensorFlow, which overlaps gradients with the backward pass "
            f"and has costs a step of its own; our prices, like the authors' cost model, are a "
            f"serial sum of work and communication. {beside}; {fixed:.0f} ms more a step in both "
            f"strategies, beside our {data:.0f} and {plan:.0f} ms, would give the paper's figure. "
            + STRONG_SCALING
        )
    slower = published * plan - (data - moved)
    text = (
        f"data parallelism was slower in the paper than priced here: with the plan at our "
        f"{plan:.0f} ms its communication would have taken {slower:.0f} ms, not {moved:.0f}. "
    )
    return text + SLOW_LINKS.get(row["network"], "")


STRONG_SCALING = (
    "The batch is fixed, so a step shrinks with the number of devices and what does not shrink "
    "weighs more: the paper's speed-ups fall with it, those of both cost models rise."
)
# Possible reasons where the paper's speed-up is larger. How its runs moved gradients is not
# published, so why they were slow is a guess and is marked as one.
SLOW_LINKS = {
    "alexnet": (
        "The presets give both cards the same bus (four links for a node); the paper says that the "
        "2080 Ti has no peer access, so its effective bus is likely to have been slower."
    ),
    "rnnlm": (
        "Six sevenths of the gradient bytes belong to two tables of 100,000 words; a reduction "
        "slower than the bus allows is the likely cause. Besides, PaSE splits the LSTM on its "
        "layers and both hidden dimensions, while our rule for aten.lstm splits the batch only, so "
        "that our plan still reduces the LSTM's gradients."
    ),
    "transformer": (
        "Two thirds of the gradient bytes belong to three tables of 50,000 words; a reduction "
        "slower than the bus allows is the likely cause."
    ),
}


def authors_speed_up(folder: Path, network: str, count: int) -> float | None:
    """Speed-up of the optimum over data parallelism in the authors' own graph and prices.

    Their data parallelism splits every layer on its first dimension that can use all devices: the
    batch, which is the first dimension but for a stack or the layers of an LSTM. None where the
    instance is missing, and where a layer cannot be split that far, as their convolutions, which
    keep four images per device.
    """
    path = folder / f"{INSTANCES.get(network, network)}_p{count}.npz"
    if not path.exists():
        return None
    with np.load(path) as data:
        found = [_on_the_batch(data[f"conf_{i}"], count) for i in range(int(data["n_nodes"]))]
        if None in found:
            return None
        chosen = [int(pick) for pick in found if pick is not None]
        cost = math.fsum(float(data[f"node_{i}"][pick]) for i, pick in enumerate(chosen))
        cost += math.fsum(
            float(data[f"edge_{i}_{j}"][chosen[i], chosen[j]]) for i, j in data["edges"]
        )
        return round(cost / float(data["optimal_cost"]), 3)


def _on_the_batch(configurations: Any, count: int) -> int | None:
    wide = np.flatnonzero(configurations.max(axis=0) == count)
    wanted = np.ones(configurations.shape[1], dtype=int)
    wanted[wide[:1]] = count
    found = np.flatnonzero((configurations == wanted).all(axis=1))
    return int(found[0]) if len(wide) and len(found) else None


if __name__ == "__main__":
    sys.exit(main())
