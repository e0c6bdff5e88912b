"""Recomputation against ``torch.utils.checkpoint`` and PyTorch's activation memory budget.

On one CPU device each model is trained by autopar (``recompute="none"``, three fractions, and
``"full"``), by eager PyTorch with none, half or all of its layers checkpointed, and by
``torch.compile`` with five values of ``activation_memory_budget``. The backend of the latter is the
partitioner alone (``aot_eager_decomp_partition``), so that all three run the same kernels of
ATen; ``--backend inductor`` generates kernels too, which compiles for minutes.

Steps are interleaved: each round runs one step of every configuration. Reported are the peak bytes
of all tensors of a step, and the ratio of median times to eager PyTorch without checkpoints. For
each point of another, autopar's time at that memory is read off the lower hull of its points, and
its memory at that time likewise.

    python benchmarks/recomputation.py [--models gpt2 resnet50 bert] [--rounds 7]

Held out: the prices and the search were not adjusted to `HELD_OUT`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cpu_models import fresh
from setting import setting
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.base.torch_private import activation_memory_budget, allocations

RESULTS = Path(__file__).parent / "results" / "recomputation.json"
MODELS, HELD_OUT = ("gpt2", "resnet50"), ("bert",)
OURS: tuple[Any, ...] = ("none", 0.75, 0.5, 0.25, "full")
BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.0)
SGD = functools.partial(torch.optim.SGD, lr=1e-4)
Step = Callable[[], float]
Point = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=[*MODELS, *HELD_OUT])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--backend", default="aot_eager_decomp_partition")
    options = parser.parse_args()
    found = json.loads(RESULTS.read_text())["models"] if RESULTS.exists() else {}
    for name in options.models:
        found[name] = measured(name, options.rounds, options.backend)
        show(name, found[name])
        RESULTS.write_text(
            json.dumps({**setting("torch", "transformers"), "models": found}, indent=1) + "\n"
        )


def measured(name: str, num_rounds: int, backend: str) -> dict[str, Any]:
    steps: dict[str, Step] = {}
    peaks: dict[str, int] = {}
    compiled = []
    for share in (0.0, 0.5, 1.0):
        key = f"checkpoint {share:g}"
        steps[key], peaks[key] = eager(checkpointed(name, share))
    for budget in BUDGETS:
        key = f"budget {budget:g}"
        steps[key], peaks[key] = partitioned(name, budget, backend)
    for recompute in OURS:
        key = f"autopar {recompute}"
        model, batch = fresh(name)
        one = autopar.compile(
            model, 1, example_inputs=batch, optimizer=SGD, recompute=recompute, update="at_end",
            check_gradients=False,
        )  # fmt: skip
        compiled.append(one)
        steps[key] = functools.partial(timed, functools.partial(one.train_step, **batch))
        peaks[key] = max(one.peak_tensor_bytes(**batch))
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {key: [] for key in steps}
    for _ in range(num_rounds):
        for key, step in steps.items():
            times[key].append(step())
    for one in compiled:
        one.close()
    base_s = statistics.median(times["checkpoint 0"])
    points = [
        {
            "configuration": key,
            "peak_bytes": peaks[key],
            "time_s": round(statistics.median(times[key]), 5),
            "time_ratio": round(statistics.median(times[key]) / base_s, 4),
        }
        for key in steps
    ]
    return {
        "held_out": name in HELD_OUT,
        "backend": backend,
        "num_rounds": num_rounds,
        "points": points,
        "compared": compared(points),
    }


def timed(step: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    step()
    return time.perf_counter() - start_s


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The elements of the model's longest lists of layers."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    kinds = [type(layer) for m in lists for layer in m if any(True for _ in layer.children())]
    most = max(set(kinds), key=kinds.count)
    return [layer for m in lists for layer in m if type(layer) is most]


def checkpointed(name: str, share: float) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model with this share of its layers checkpointed, evenly spread."""
    model, batch = fresh(name)
    layers = layers_of(model)
    for place, layer in enumerate(layers):
        if int((place + 1) * share) > int(place * share):
            layer.forward = functools.partial(  # type: ignore[method-assign]
                checkpoint, layer.forward, use_reentrant=False
            )
    return model, batch


def eager(made: tuple[nn.Module, dict[str, Tensor]]) -> tuple[Step, int]:
    model, batch = made
    optimizer = SGD(list(model.parameters()))

    def train() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(**batch).loss.backward()
        optimizer.step()

    return functools.partial(timed, train), peak_bytes(train, model, optimizer)


def partitioned(name: str, budget: float, backend: str) -> tuple[Step, int]:
    model, batch = fresh(name)
    torch.compiler.reset()
    optimizer = SGD(list(model.parameters()))
    with activation_memory_budget(budget):
        run = torch.compile(model, backend=backend)

        def train() -> None:
            optimizer.zero_grad(set_to_none=True)
            run(**batch).loss.backward()
            optimizer.step()

        peak = peak_bytes(train, model, optimizer)

    def step() -> float:
        with activation_memory_budget(budget):
            return timed(train)

    return step, peak


def peak_bytes(
    train: Callable[[], None], model: nn.Module, optimizer: torch.optim.Optimizer
) -> int:
    """The peak bytes of all tensors of a step: those of the model, and those made in the step."""
    train()
    optimizer.zero_grad(set_to_none=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    profiler = torch.profiler.profile(activities=activities, profile_memory=True)
    profiler.start()
    train()
    profiler.stop()
    growth = max(itertools.accumulate(allocations(profiler), initial=0))
    held = [*model.parameters(), *model.buffers()]
    return growth + sum(x.untyped_storage().nbytes() for x in held)


# --- comparison ---------------------------------------------------------------------------------
def compared(points: list[Point]) -> list[Point]:
    """Autopar's time at the memory of each other point, and its memory at its time, as ratios."""
    ours = [
        (p["peak_bytes"], p["time_s"]) for p in points if p["configuration"].startswith("autopar")
    ]
    found = []
    for p in points:
        if p["configuration"].startswith("autopar"):
            continue
        size, time_s = p["peak_bytes"], p["time_s"]
        same_memory, same_time = least(ours, size), least([(t, b) for b, t in ours], time_s)
        found.append(
            {
                "configuration": p["configuration"],
                "time_at_its_memory": None if same_memory is None else same_memory / time_s,
                "memory_at_its_time": None if same_time is None else same_time / size,
                "is_undominated": not any(size <= b and time_s <= t for b, t in ours),
            }
        )
    return found


def least(points: list[tuple[float, float]], at: float) -> float | None:
    """The least second number at a first number of at most ``at``, between points along a line."""
    found = [y for x, y in points if x <= at]
    for (x0, y0), (x1, y1) in itertools.permutations(points, 2):
        if x0 < at < x1:
            found.append(y0 + (y1 - y0) * (at - x0) / (x1 - x0))
    return min(found, default=None)


def show(name: str, row: dict[str, Any]) -> None:
    print(name)
    for p in row["points"]:
        size = p["peak_bytes"] / 2**20
        print(f"  {p['configuration']:<18} {size:8.1f} MiB  {p['time_ratio']:.3f} of eager")
    for p in row["compared"]:
        at_memory, at_time = p["time_at_its_memory"], p["memory_at_its_time"]
        print(
            f"  against {p['configuration']:<16}: time "
            f"{'out of reach' if at_memory is None else f'{at_memory:.3f}'}, memory "
            f"{'out of reach' if at_time is None else f'{at_time:.3f}'}"
        )


if __name__ == "__main__":
    main()
