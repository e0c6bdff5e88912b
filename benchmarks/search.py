"""Search times on instances with known optima, and on large, dense and memory-limited graphs.

    python benchmarks/search.py [FOLDER] [--quick]

FOLDER holds PaSE instances as .npz (by default those in tests/search/data). Three more parts are
generated here: a graph of 10,000 nodes, dense blocks, and layers under memory budgets. Writes
benchmarks/results/search.json with the machine and the versions.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from setting import setting

from autopar.search import Problem, solve

ROOT = Path(__file__).parent
RESULTS = ROOT / "results" / "search.json"

# Search seconds of the authors' own program on a two-core machine.
AUTHORS_S = {
    "inception3_p4": 6.9,
    "inception3_p8": 10.3,
    "inception3_p16": 22.0,
    "transformer_p4": 8.8,
    "transformer_p8": 37.0,
}
LIMIT_S, LIMIT_RELATIVE = 0.5, 1e-9
REPEATS = 5

Row = dict[str, Any]


def main() -> int:
    """Run every part; exit status 1 if a required figure was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = ROOT.parent / "tests" / "search" / "data"
    parser.add_argument("folder", nargs="?", type=Path, default=default)
    parser.add_argument("--quick", action="store_true", help="only the instances in FOLDER")
    arguments = parser.parse_args()
    instances = [instance_row(path) for path in sorted(arguments.folder.glob("*.npz"))]
    show("instances of the PaSE authors", instances)
    parts: dict[str, list[Row]] = {"instances": instances}
    if not arguments.quick:
        parts["large"] = [large_row(shared=True), large_row(shared=False)]
        show("10,000 nodes, 81 choices each, with skip edges", parts["large"])
        parts["dense"] = [dense_row(num_choices=k) for k in (16, 24, 57)]
        show("blocks of 6, 12, 24 and 16 layers, each joined to all before it", parts["dense"])
        parts["budgets"] = budget_rows()
        show("32 layers of 60 nodes, 81 choices each, under a memory budget", parts["budgets"])
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({**setting("numpy", "ortools"), **parts}, indent=1) + "\n")
    missed = [row["name"] for rows in parts.values() for row in rows if not row["met"]]
    print("missed:", ", ".join(missed) if missed else "nothing")
    return 1 if missed else 0


def instance_row(path: Path) -> Row:
    """One instance: the median of several runs, without loading, with checking."""
    with np.load(path) as data:
        nodes = [data[f"node_{node}"] for node in range(int(data["n_nodes"]))]
        edges = {(int(i), int(j)): data[f"edge_{i}_{j}"] for i, j in data["edges"]}
        optimum = float(data["optimal_cost"])
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        solution = solve(Problem(nodes, edges))
        times.append(time.perf_counter() - start)
    time_s = float(np.median(times))
    error = abs(solution.cost / optimum - 1)
    chain = solve(Problem(nodes, edges), method="mcmc")
    authors_s = AUTHORS_S.get(path.stem)
    return {
        "name": path.stem,
        "num_nodes": len(nodes),
        "most_choices": max(len(cost) for cost in nodes),
        "status": solution.status,
        "relative_error": error,
        "time_s": round(time_s, 5),
        "authors_time_s": authors_s,
        "times_faster": None if authors_s is None else round(authors_s / time_s),
        "mcmc_over_optimum": round(chain.cost / optimum, 4),
        "mcmc_time_s": round(chain.time_s, 3),
        "met": error <= LIMIT_RELATIVE and time_s <= LIMIT_S,
    }


def large_row(*, shared: bool) -> Row:
    """Blocks of five nodes with two skips: equal blocks, or each with its own tables."""
    rng = np.random.default_rng(0)
    num_nodes, num_choices, block = 10_000, 81, 5
    pool = [rng.random((num_choices, num_choices)) for _ in range(block + 2)]
    costs = [rng.random(num_choices) for _ in range(block)]

    def table(kind: int) -> Any:
        return pool[kind] if shared else rng.random((num_choices, num_choices))

    edges = {(i, i + 1): table(i % block) for i in range(num_nodes - 1)}
    for i in range(0, num_nodes - block, block):
        edges[i, i + 2] = table(block)
        edges[i + 2, i + block] = table(block + 1)
    nodes = [costs[i % block] if shared else rng.random(num_choices) for i in range(num_nodes)]
    start = time.perf_counter()
    solution = solve(Problem(nodes, edges))
    time_s = time.perf_counter() - start
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "name": "equal blocks" if shared else "all tables distinct",
        "num_nodes": num_nodes,
        "num_edges": len(edges),
        "status": solution.status,
        "time_s": round(time_s, 3),
        "peak_process_bytes": peak_bytes,
        "met": solution.status == "OPTIMAL" and time_s < 10 and peak_bytes < 4 * 2**30,
    }


def dense_row(*, num_choices: int) -> Row:
    """Blocks where each layer reads all before it, as in DenseNet-121, with placement classes."""
    rng = np.random.default_rng(0)
    num_classes = 4 + num_choices // 7
    distance = rng.random((num_classes, num_classes)) * 2e-3
    np.fill_diagonal(distance, 0)
    nodes: list[Any] = []
    supplied: list[Any] = []
    needed: list[Any] = []
    edges: dict[tuple[int, int], Any] = {}

    def add(*sources: int) -> int:
        nodes.append(rng.exponential(1e-3, num_choices))
        supplied.append(rng.integers(0, num_classes, num_choices))
        needed.append(rng.integers(0, num_classes, num_choices))
        new = len(nodes) - 1
        for source in sources:
            edges[source, new] = rng.uniform(0.5, 2) * distance[supplied[source]][:, needed[new]]
        return new

    last = add()
    for num_layers in (6, 12, 24, 16):
        features = [last]
        for _ in range(num_layers):
            node = add(*features)
            for _ in range(5):
                node = add(node)
            features.append(node)
        last = add(add(*features))
    solution = solve(Problem(nodes, edges), time_limit_s=60)
    return {
        "name": f"dense blocks, {num_choices} choices",
        "num_nodes": len(nodes),
        "num_edges": len(edges),
        "status": solution.status,
        "method": solution.method,
        "gap": solution.gap,
        "time_s": round(solution.time_s, 2),
        "met": solution.gap <= 0.01,
    }


def budget_rows() -> list[Row]:
    """Budgets as fractions of what the unconstrained optimum needs, with one and four stages."""
    rows = []
    for num_stages in (1, 4):
        free = layers(num_stages=num_stages, budgets=None)
        needed = solve(free).memory
        for part in (1.0, 0.6, 0.4, 0.3, 0.05):
            problem = layers(num_stages=num_stages, budgets=[part * used for used in needed])
            solution = solve(problem, time_limit_s=60, gap=1e-3)
            least = solution.least_feasible_budget
            rows.append(
                {
                    "name": f"{part:.0%} of the memory, {num_stages} stages",
                    "status": solution.status,
                    "method": solution.method,
                    "gap": solution.gap,
                    "least_feasible_part": least and round(least / max(needed), 4),
                    "time_s": round(solution.time_s, 2),
                    "met": solution.gap <= 0.01
                    and (solution.status != "INFEASIBLE" or least is not None),
                }
            )
    return rows


def layers(*, num_stages: int, budgets: list[float] | None) -> Problem:
    """32 equal layers of 60 operators on two axes, with nine choices per axis."""
    rng = np.random.default_rng(0)
    num_layers, num_ops, per_axis = 32, 60, 9
    table = rng.random((5, 5)) * 4
    np.fill_diagonal(table, 0)
    options, costs, memory = [], [], []
    for _ in range(num_ops):
        supplied, needed = rng.integers(0, 5, (2, per_axis))
        work, share = rng.choice([1, 1 / 8], (2, per_axis))
        options.append((supplied, needed))
        costs.append(rng.exponential(1e-3) * np.outer(work, work).ravel())
        memory.append(rng.exponential(1e8) * np.outer(share, share).ravel())
    known: dict[tuple[int, int, float], Any] = {}

    def edge(source: int, target: int, scale: float) -> Any:
        key = (source % num_ops, target % num_ops, scale)
        if key not in known:
            axis = table[options[key[0]][0]][:, options[key[1]][1]]
            both = axis[:, None, :, None] + 3 * axis[None, :, None, :]
            known[key] = scale * both.reshape(per_axis**2, per_axis**2)
        return known[key]

    num_nodes = num_layers * num_ops
    edges = {(i, i + 1): edge(i, i + 1, 1e-4) for i in range(num_nodes - 1)}
    skips = ((0, 20), (20, 40), (40, 60), (2, 6), (2, 10), (2, 14), (6, 15), (22, 30))
    for base in range(0, num_nodes, num_ops):
        for source, target in skips:
            if base + target < num_nodes:
                edges[base + source, base + target] = edge(source, target, 2e-4)
    return Problem(
        [costs[i % num_ops] for i in range(num_nodes)],
        edges,
        [memory[i % num_ops] for i in range(num_nodes)],
        budgets,
        memory_groups=[i * num_stages // num_nodes for i in range(num_nodes)],
    )


def show(title: str, rows: list[Row]) -> None:
    """Print one line per row, as it is stored."""
    print(f"{title}:")
    for row in rows:
        print("  " + "  ".join(f"{key} {_short(value)}" for key, value in row.items()), flush=True)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
