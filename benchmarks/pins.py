"""The searched plan beside plans of which a user fixed a part, at the same prices.

Run: ``python benchmarks/pins.py [--cases 0-23]``. Each case is a drawn network on a drawn cluster,
planned with nothing fixed, then with one drawn pin at a time: the split of one op, or the placement
of one parameter, on a drawn mesh. What a pin leaves open is searched as always, so a pin that makes
the step faster shows a strategy that the search missed. Prints, and writes to
``benchmarks/results/pins.json``, the predicted seconds of a step, the gap that the plan reports,
and the least time with a pin by that of the plan (target: at least 1). The networks of cases from
12 on are held out: nothing was tuned on them.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from networks import captured
from setting import setting

RESULT = Path(__file__).parent / "results" / "pins.json"
NETWORKS = ("mlp", "gpt2", "bert", "resnet50", "llama", "vgg16")
HELD_OUT = ("alexnet", "rnnlm", "transformer", "vit", "t5", "mobilenet_v2")
NUM_EACH, NUM_PINS = 12, 8
CLUSTERS = ("v100", "v100-pcie", "a100-80", "a100-80-ethernet", "h100-sxm")
CHOICES = ("m0", "m1", "n", "k", "d0", "d1", "b0", "-")
"""Names of the dimensions of matrix products, pointwise ops and convolutions."""


def run_case(number: int) -> dict[str, Any]:
    """Plan a case freely, and with each pin."""
    from autopar import Cluster
    from autopar.base.errors import AutoparError
    from autopar.options import PlanOptions
    from autopar.passes.prepare import prepare
    from autopar.planning.planner import make_planned

    draw = random.Random(number)
    held_out = number >= NUM_EACH
    network = draw.choice(HELD_OUT if held_out else NETWORKS)
    preset, nodes, devices = draw.choice(CLUSTERS), draw.choice([1, 2, 4]), draw.choice([2, 4, 8])
    cluster = Cluster.preset(preset, nodes=nodes, devices_per_node=devices)
    prepared = prepare(captured(network))
    begun_s = time.process_time()
    free = make_planned(prepared, cluster).plan
    planned_s = time.process_time() - begun_s
    meshes = [{"x": nodes * devices}, *([{"x": nodes, "y": devices}] if nodes > 1 else [])]
    pins = []
    while len(pins) < NUM_PINS:
        mesh, pin = draw.choice(meshes), _drawn_pin(draw, free)
        pin = pin(len(mesh))
        options = PlanOptions(mesh=mesh, constraints=[pin])
        try:
            plan = make_planned(
                prepared, cluster, options.space(cluster.num_devices),
                constraints=options.constraints,
            ).plan  # fmt: skip
        except AutoparError:
            continue  # nothing is split so: another one is drawn
        step_s = plan.prediction.step_time_s
        pins.append({"mesh": mesh, "pin": str(pin), "step_s": step_s})
    step_s = free.prediction.step_time_s
    return {
        "network": network,
        "cluster": f"{preset}:{nodes}x{devices}",
        "held_out": held_out,
        "planned_s": round(planned_s, 1),
        "plan": repr(free),
        "step_s": step_s,
        "gap": free.search.gap,
        "pins": pins,
        "least_ratio": min(each["step_s"] for each in pins) / step_s,
    }


def _drawn_pin(draw: random.Random, plan: Any) -> Any:
    """A function from the number of mesh axes to a pin of one op or one parameter."""
    from autopar import Pin

    if draw.random() < 0.5:
        name = draw.choice(list(plan.ops))
        words = [draw.choice(CHOICES) for _ in range(2)]
        return lambda num_axes: Pin(name, choice=" ".join(words[:num_axes]))
    name = draw.choice(list(plan.parameters))
    words = [draw.choice(("S0", "S1", "R")) for _ in range(2)]
    return lambda num_axes: Pin(name, stored=" ".join(words[:num_axes]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="0-23", help="first and last number, such as 0-11")
    first, _, last = parser.parse_args().cases.partition("-")
    document = json.loads(RESULT.read_text()) if RESULT.exists() else {"cases": {}}
    for number in range(int(first), int(last or first) + 1):
        row = run_case(number)
        document["cases"][str(number)] = row
        print(
            f"{number}: {row['network']} on {row['cluster']}, {row['step_s']:.6g} s, gap "
            f"{row['gap']:.3%}; fastest pin {row['least_ratio']:.6f}", flush=True,
        )  # fmt: skip
        document |= setting("torch", "transformers", "numpy")
        RESULT.write_text(json.dumps(document, indent=1) + "\n")
    for held_out in (False, True):
        rows = [row for row in document["cases"].values() if row["held_out"] == held_out]
        ratios = [row["least_ratio"] for row in rows]
        print(
            "held out:" if held_out else "others:", f"{len(rows)} cases, a pin is faster in",
            sum(ratio < 1 - 1e-9 for ratio in ratios), f"least ratio {min(ratios, default=1.0)}",
        )  # fmt: skip


if __name__ == "__main__":
    main()
