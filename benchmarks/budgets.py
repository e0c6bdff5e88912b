"""Searches through the whole pipeline (capture, price, problem, solve), also under memory budgets.

    python benchmarks/budgets.py [--quick]

- Llama-3-8B (32 layers, bfloat16, batch 64, sequence 2,048) on 8 x 8 H100, with budgets that are
  fractions of what the unconstrained plan needs. It is solved twice: by the search, on its own
  count of memory, and by the planner, which applies the budget to the lowered program's count and
  tries every mesh. Nothing is recomputed.
- DenseNet-121 and DenseNet-201 (batch 128, 224 x 224 images) on 2 x 8 A100, every mesh.

A row is met with a gap of at most 1% within 60 s, or if it is INFEASIBLE with the least feasible
budget. The planner's 60 s are processor time; where nothing fits, it names the most frugal strategy
it counted. Results are written to benchmarks/results/budgets.json with the machine and the
versions. --quick omits DenseNet-201 and uses 4 layers of Llama.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from networks import captured
from planning import graph_of
from setting import setting

RESULT = Path(__file__).parent / "results" / "budgets.json"
PARTS = (1.0, 0.8, 0.7, 0.6, 0.4, 0.3)
LIMIT_S, LIMIT_GAP = 60.0, 0.01

Row = dict[str, Any]


def main() -> int:
    """Run every part; exit status 1 if a row was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller models")
    quick = parser.parse_args().quick
    graph = graph_of("llama", 4 if quick else 32, 64)
    rows = {
        "llama_search_8x8": llama_search(graph),
        "llama_planner": llama_planner(graph),
        "densenet": [
            row
            for name in (("densenet121",) if quick else ("densenet121", "densenet201"))
            for row in densenet(name)
        ],
    }
    document = {
        **setting("torch", "transformers", "numpy", "ortools"),
        **rows,
    }
    RESULT.write_text(json.dumps(document, indent=1) + "\n")
    missed = [row["name"] for part in rows.values() for row in part if not row["met"]]
    print("missed:", ", ".join(missed) if missed else "nothing")
    return 1 if missed else 0


def priced(graph: Any, preset: str, nodes: int, sizes: tuple[int, ...]) -> Any:
    from autopar.cost_models import Cluster, CommunicationModel, RooflineModel
    from autopar.ir.mesh import Mesh
    from autopar.pricing.problem import price_graph
    from autopar.pricing.tables import Pricing
    from autopar.sharding.strategy import Analysis

    cluster = Cluster.preset(preset, nodes=nodes, devices_per_node=8)
    mesh = Mesh(("x", "y")[: len(sizes)], sizes)
    compute, communication = RooflineModel(cluster.device), CommunicationModel(cluster)
    return price_graph(Pricing(Analysis(graph.graph), mesh, cluster, compute, communication))


def llama_search(graph: Any) -> list[Row]:
    """The search alone on mesh 8 x 8, with bytes as it counts them, node by node."""
    from autopar.search import solve

    table = priced(graph, "h100-sxm", 8, (8, 8))
    free = solve(table.problem(budget_bytes=float("inf")))
    needed = free.memory[0]
    rows = []
    for part in PARTS:
        solution = solve(
            table.problem(budget_bytes=part * needed), time_limit_s=LIMIT_S, gap=LIMIT_GAP
        )
        least = solution.least_feasible_budget
        rows.append(
            {
                "name": f"{part:.0%} of {needed / 1e9:.1f} GB",
                "status": solution.status,
                "method": solution.method,
                "over_unconstrained": round(solution.cost / free.cost, 4)
                if solution.assignment
                else None,
                "gap": solution.gap,
                "least_feasible_part": least and round(least / needed, 4),
                "time_s": round(solution.time_s, 2),
                "met": solution.time_s <= LIMIT_S
                and solution.gap <= LIMIT_GAP
                and (solution.status != "INFEASIBLE" or least is not None),
            }
        )
        show(rows[-1])
    return rows


def llama_planner(graph: Any) -> list[Row]:
    """The planner over every mesh, with bytes counted by liveness over the lowered program."""
    from autopar.base.errors import ConstraintError
    from autopar.cost_models import Cluster
    from autopar.planning.constraints import MemoryBudget
    from autopar.planning.planner import make_planned
    from autopar.planning.space import Space

    cluster = Cluster.preset("h100-sxm", nodes=8, devices_per_node=8)
    free = make_planned(graph, cluster).plan
    needed = sum(free.prediction.memory_bytes.values())
    rows, whole = [], Space(num_microbatches=1)
    for part in PARTS:
        budget = MemoryBudget(int(part * needed))
        row: Row = {"name": f"{part:.0%} of {needed / 1e9:.1f} GB, counted, any mesh"}
        start, cpu = time.perf_counter(), time.process_time()
        try:
            plan = make_planned(graph, cluster, whole, constraints=[budget]).plan
        except ConstraintError as error:
            needs = re.search(r"smallest one tried needs ([\d,]+) bytes", str(error))
            least = int(needs[1].replace(",", "")) / needed if needs else None
            row |= {"status": "INFEASIBLE", "least_counted_part": least and round(least, 4)}
        else:
            row |= {
                "status": plan.search.status,
                "over_unconstrained": round(
                    plan.prediction.step_time_s / free.prediction.step_time_s, 4
                ),
                "gap": plan.search.gap,
                "gigabytes": round(sum(plan.prediction.memory_bytes.values()) / 1e9, 2),
                "mesh": str(plan.device_mesh),
            }
        row["time_s"] = round(time.perf_counter() - start, 1)
        row["cpu_s"] = round(time.process_time() - cpu, 1)
        answered = row.get("gap", 1.0) <= LIMIT_GAP or row.get("least_counted_part") is not None
        row["met"] = answered and row["cpu_s"] <= LIMIT_S
        rows.append(row)
        show(row)
    return rows


def densenet(name: str) -> list[Row]:
    """Every mesh of 16 devices; the time of the search alone, and that of pricing."""
    from autopar.search import solve

    start = time.perf_counter()
    graph = captured(name)
    capture_s = time.perf_counter() - start
    rows = []
    for sizes in ((16,), (2, 8), (4, 4), (8, 2)):
        start = time.perf_counter()
        table = priced(graph, "a100-80", 2, sizes)
        price_s = time.perf_counter() - start
        solution = solve(table.problem(), time_limit_s=LIMIT_S)
        rows.append(
            {
                "name": f"{name} on {table.pricing.mesh}",
                "num_nodes": len(table.nodes),
                "num_edges": len(table.edges),
                "most_choices": max(len(cost) for cost in table.costs),
                "status": solution.status,
                "method": solution.method,
                "gap": solution.gap,
                "capture_s": round(capture_s, 2),
                "price_s": round(price_s, 2),
                "time_s": round(solution.time_s, 2),
                "met": solution.gap <= LIMIT_GAP and solution.time_s <= LIMIT_S,
            }
        )
        show(rows[-1])
    return rows


def show(row: Row) -> None:
    """Print one row, as it is stored."""
    print("  " + "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    sys.exit(main())
