"""The page docs/published.md: figures that papers report, with this project's beside them.

    python benchmarks/published.py [--check]

In: benchmarks/results/*.json, and the published figures below, each with its source. Out: the page,
or with --check exit status 1 if the page that is there differs. Nothing is measured here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "published.md"

Rows = Iterable[Sequence[object]]

PASE_SEARCH = {  # seconds at p = 64; text of arXiv 2407.04001
    "Inception-V3": "3 min 16 s",
    "Transformer": "31 min 23 s",
    "Inception-V3 by FlexFlow's MCMC": "37 min 17 s",
    "RNNLM by FlexFlow's MCMC": "17 min 22 s",
}
# Idle time of a device with p stages of equal forward, input-gradient and weight-gradient time 1.
BUBBLES = (
    ("1f1b", "(p - 1)(F + I + W)", lambda p: 3.0 * (p - 1), "Qi et al., ICLR 2024"),
    ("zb_h1", "(p - 1)(F + I - W)", lambda p: 1.0 * (p - 1), "Qi et al., ICLR 2024"),
    ("zb_h2", "(p - 1)(F + I - 2W)", lambda p: 0.0, "Qi et al., ICLR 2024"),
    ("zb_v", "0", lambda p: 0.0, "Qi et al., ICLR 2024"),
    ("v_half", "1/2 of 1F1B's", lambda p: 1.5 * (p - 1), "Qi et al., NeurIPS 2024"),
    ("v_min", "2/3 of 1F1B's", lambda p: 2.0 * (p - 1), "Qi et al., NeurIPS 2024"),
)
STAGES = 8  # of the bubbles in schedules.json
CHIMERA = {  # GPT-2, 1.39 B parameters, on 2,048 nodes; a third party's transcription
    "PipeDream-2BW": 1.16,
    "DAPPLE (1F1B)": 1.38,
    "GPipe": 1.42,
    "PipeDream": 2.01,
    "GEMS": 2.34,
}
BEST_FORM = "autopar's best form"
HFTA = (
    ("GPUs, over one job a device", "2.42-11.50"),
    ("GPUs, over MPS", "1.25-4.72"),
    ("GPUs, over MIG", "1.33-4.88"),
    ("TPU v3", "up to 15.13"),
)


def load(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table(head: Sequence[str], rows: Rows) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines)


def span(values: Iterable[float]) -> str:
    found = list(values)
    low, high = min(found), max(found)
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f}-{high:.2f}"


def percent(part: float) -> str:
    return f"{100 * part:.1f}%"


def out_of_order() -> str:
    found = load("out_of_order")
    low, high = found["published"]["single_gpu"]
    rows: list[Sequence[object]] = [
        ("one GPU, over XLA", f"{low}-{high}", "one V100, by formula",
         span(row["gain"] for row in found["single_gpu"])),
    ]  # fmt: skip
    for key, what in (
        ("data_parallel", "data parallel, over BytePS"),
        ("pipeline", "pipeline, over GPipe"),
    ):
        low, high = found["published"][key]
        networks = dict.fromkeys(row["network"] for row in found[key])
        for network in networks:
            gains = [row["gain"] for row in found[key] if row["network"] == network]
            rows.append((what, f"{low}-{high}", network, span(gains)))
    ours = table(["where", "published", "ours: setting", "ours: predicted gain"], rows)
    return f"""## Out-of-order backprop

Oh et al., EuroSys 2022; ranges over twelve networks on up to 48 V100, from the paper's text. Ours
are predictions for V100s over the networks of `benchmarks/out_of_order.py`, nothing is measured;
the baselines are a reduction per layer in the order of the backward pass, and a GPipe that keeps
its activations.

{ours}

Where ours is below the published range, `benchmarks/results/out_of_order.json` says why, row by
row: mostly all-reduces that already fit behind the backward pass, or a layer that is larger than
a device's even share.
"""


def chimera() -> str:
    merged = load("schedules")["merged_chimera"]
    cases = load("chimera")["cases"]
    published = [
        case for case in cases if any(row["published"] for row in case["schemes"].values())
    ]
    reported = table(
        ["Chimera over", "published",
         *(f"ours, {case['network_efficiency']:.0%} of the network" for case in published), "note"],
        [
            (name, speed_up,
             *(f"{case['schemes'][name]['chimera_is_faster_by']:.2f}" for case in published),
             published[0]["schemes"][name].get("note", ""))
            for name, speed_up in CHIMERA.items()
        ],
    )  # fmt: skip
    best = [
        f"{1 / case['schemes'][BEST_FORM]['chimera_is_faster_by']:.2f} "
        f"({case['schemes'][BEST_FORM]['schedule']}; {case['model']})"
        for case in cases
    ]
    off = max(abs(row["equation_off_by"]) for case in cases for row in case["equation"])
    ours = table(
        ["stages", "micro-batches", "1F1B", "Chimera, concatenated", "Chimera, merged"],
        [
            (row["stages"], row["micro_batches"], percent(row["1f1b"]), percent(row["direct"]),
             percent(row["merged"]))
            for row in merged
        ],
    )  # fmt: skip
    return f"""## Chimera

Li and Hoefler, SC 2021: GPT-2 with 1.39 billion parameters on 2,048 nodes, as a third party
transcribed it.

{reported}

Ours are simulated on a described cluster of P100s (`benchmarks/chimera.py`), each scheme with the
number of stages and the micro-batch that are best for it; nothing of that size is measured here.
Among the schemes that flush the pipeline GEMS is as far behind as in the paper, 1F1B and GPipe less
far. Those that do not flush it have no bubble and are *faster* here, on old weights: what slowed
them in the paper, such as reductions through the hosts, is not in a model that overlaps reductions
with computation.
The sequences in a step and the network's efficiency are assumed: we know no published figure.
Chimera's own performance equation and the simulator differ by at most {off:.2%} there. The best of
autopar's forms is as many times as fast as the paper's Chimera: {"; ".join(best)}.

What can be held against the paper without its machine are its bubble ratios:
(D - 2) / (2N + D - 2) for D stages and N micro-batches where forward and
backward take equal time. The tests compare the generated schedules with it
(`tests/schedules/test_schedule_formulas.py`). Where the backward pass takes twice the forward
pass, units that follow one another unmerged have a *larger* bubble than 1F1B, and autopar merges
them (bubble ratios, simulated):

{ours}
"""


def pase() -> str:
    rows = load("strategies")["pase"]
    presets = sorted({row["preset"] for row in rows})
    networks = list(dict.fromkeys(row["network"] for row in rows))
    body = []
    for network in networks:
        for devices in sorted({row["devices"] for row in rows}):
            cells: list[object] = [network, devices]
            for preset in presets:
                for row in rows:
                    if (row["network"], row["devices"], row["preset"]) == (
                        network,
                        devices,
                        preset,
                    ):
                        cells += [f"{row['paper']:.2f}", f"{row['speed_up']:.2f}"]
            if len(cells) == 2 + 2 * len(presets):
                body.append(cells)
    head = ["network", "devices"]
    head += [f"{preset}, {who}" for preset in presets for who in ("published", "ours")]
    instances = sorted(load("search")["instances"], key=lambda row: (len(row["name"]), row["name"]))
    searched = [
        (row["name"], f"{row['authors_time_s']:g}", f"{row['time_s']:.3f}", row["status"].lower())
        for row in instances
        if row["authors_time_s"] is not None
    ]
    times = table(["instance", "authors' program, s", "ours, s", "ours"], searched)
    paper = table(["search at p = 64", "published"], PASE_SEARCH.items())
    return f"""## PaSE

Elango, IPDPS 2021 (arXiv 2407.04001). Speed-up over data parallelism; published values are bar
heights of the paper's figures, measured with Mesh-TensorFlow, ours are predicted at autopar's
prices for the same cards.

{table(head, body)}

The published speed-ups fall with the number of devices where the predicted ones rise. The prices,
like the authors' own cost model, are a serial sum of work and communication; Mesh-TensorFlow
overlaps gradients with the backward pass and has a fixed cost a step, which weighs more as steps
get shorter. `benchmarks/results/strategies.json` has the likely reason for each row that differs
by much.

Search times in the paper, on its machine:

{paper}

The authors' own instances as numbers, their program and ours on machines with two cores. The
optimum is the same to 1e-9 in each:

{times}
"""


def hfta() -> str:
    found = load("fusion_gpu")
    columns = ("one by one", "processes", "vmap")
    ours = table(
        ["models", *(f"array over {name}" for name in columns)],
        [
            (
                f"{row['num_models']} of {row['case']}",
                *(
                    f"{row['samples_per_s']['array'] / row['samples_per_s'][name]:.2f}"
                    if name in row["samples_per_s"] else "-"
                    for name in columns
                ),
            )
            for row in found["arrays"]
        ],
    )  # fmt: skip
    return f"""## HFTA

Wang et al., MLSys 2021; training throughput of fused models, from the paper's text.

{table(["where", "published speed-up"], HFTA)}

Ours, by `benchmarks/fusion.py` on one {found["machine"]["gpu"]}: samples a second of an array over
those of its models trained one by one, in a process each at once, or in one process by
`torch.func.vmap`. The published gains are not reached.

{ours}

That every model of an array trains as if it were alone is a test (`tests/fusion/test_array.py`).
"""


def thesis() -> str:
    found = load("early_update")
    ours = found["networks"]
    rows = [
        (name, percent(saved), percent(ours[name]["early, whole tensors"]["saved_as_counted"]),
         percent(ours[name]["early, rows"]["saved_as_counted"]))
        for name, saved in found["thesis"]["one_whole_tensor"].items()
    ]  # fmt: skip
    most = percent(found["thesis"]["saved_at_most"])
    saved = table(
        ["network", "one whole-tensor buffer, computed", "ours, whole tensors", "ours, by rows"],
        rows,
    )
    pinned = []
    for group, each in load("pinning")["groups"].items():
        summary = each["summary"]
        pinned.append(
            (f"{group} networks",
             " / ".join(f"{part:+.1f}%" for part in summary["pinned_above_geeps_percent"]),
             " / ".join(f"{part:+.1f}%" for part in summary["saved_above_geeps_percent"]),
             summary["cases_that_only_geeps_refuses"],
             percent(min(summary["least_saved_of_optimum"].values())))
        )  # fmt: skip
    limit = load("pinning")["groups"]["shown"]["summary"]["thesis_pinned_above_geeps_percent"]
    gain = table(
        ["ours against GeePS", "bytes pinned, least / median / most",
         "traffic saved, least / median / most", "cases that only GeePS refuses",
         "least part of the optimum saved"],
        pinned,
    )  # fmt: skip
    return f"""## Delayed update and data pinning

"Scheduling optimisation of backpropagation on GPU", thesis, NTU, 2018; GeePS: Cui et al., EuroSys
2016.

The thesis saves up to {most} of the memory of gradients by updating each layer as soon as its
gradient is complete. The second column is what a buffer of the largest gradient gives, computed
from the networks' shapes; ours are counted over lowered programs.

{saved}

For data pinning the thesis pins up to {limit:g}% more bytes than GeePS's greedy policy. Ours
minimises the traffic instead of maximising the bytes pinned, so it may pin fewer; the table has
both, on the networks of `benchmarks/pinning.py`:

{gain}
"""


def schedules() -> str:
    ours: dict[str, Any] = {}
    for row in load("schedules")["bubbles"]:
        ours.setdefault(row["schedule"], row)
    bubbles = table(
        ["schedule", "published formula", f"at p = {STAGES}, F = I = W = 1", "ours, simulated",
         "source"],
        [
            (name, formula, f"{value(STAGES):g}", f"{ours[name]['bubble_in_device_span']:g}", where)
            for name, formula, value, where in BUBBLES
        ],
    )  # fmt: skip
    rows = [
        (row["model"], row["schedule"], row["num_microbatches"], row["published"],
         f"{row['predicted']:.2f}", f"{row['ratio']:.2f}")
        for row in load("zero_bubble")["rows"]
    ]  # fmt: skip
    throughput = table(
        ["model", "schedule", "micro-batches", "published", "ours, predicted", "ratio"], rows
    )
    return f"""## Zero-bubble schedules

The schedules that the above are compared with today. Idle time of a device between its first and
last action, for {STAGES} stages and 32 micro-batches:

{bubbles}

Samples per GPU and second on 8 A100, pipeline only; published values as a third party transcribed
them from Qi et al., ICLR 2024, ours predicted from the prices of the preset and nothing measured:

{throughput}
"""


def make() -> str:
    """The page as Markdown."""
    head = """# Published figures beside ours

<!-- made by benchmarks/published.py: change that, and run it again -->

What the five systems that autopar builds on report, and what this repository has to hold against
it. Published figures come from other machines, and each says where it was read. Ours are
*predicted* (prices and simulation), *computed* or *counted* unless a line says measured; their
files in `benchmarks/results/` have machine and versions.
"""
    parts = [head, out_of_order(), chimera(), pase(), hfta(), thesis(), schedules()]
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare the page and write nothing")
    page = make()
    if parser.parse_args().check:
        return int(PAGE.read_text(encoding="utf-8") != page)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
