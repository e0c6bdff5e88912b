"""Time from the start of a script to its first training step's loss, beside ``torch.compile``'s.

    python benchmarks/first_step.py [--rounds 5] [--cases mlp-3 gpt2-12] [--earlier PATH]

Every measurement is a fresh process that imports what it needs, compiles one model and trains one
step. Each round runs all contenders in a new order: ours on one and on two local workers, with an
empty store of measured prices and with the one that this wrote; ``torch.compile`` with an empty
cache and with a warm one; the same step in eager mode. ``--earlier`` adds another checkout of
autopar as a contender. Prints and writes medians to benchmarks/results/first_step.json; rows of
other cases stay. Models held out are listed apart.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULT = HERE / "results" / "first_step.json"
TUNED = ("mlp-3", "gpt2-12")
HELD_OUT = ("resnet50", "roberta")
LIMIT_S = 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", default=[*TUNED, *HELD_OUT])
    parser.add_argument("--earlier", type=Path, help="another checkout")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(*arguments.worker)
        return
    for case in arguments.cases:
        row = measured(case, arguments.rounds, arguments.earlier)
        show(row)
        write(row)


def contenders(earlier: Path | None) -> dict[str, tuple[str, Path]]:
    """For each contender how it trains, and the checkout that it imports autopar from."""
    found = {"eager": ("eager", HERE.parent), "torch.compile": ("torch.compile", HERE.parent)}
    for count in (1, 2):
        found[f"autopar, {count} workers"] = (f"{count}", HERE.parent)
        if earlier is not None:
            found[f"earlier autopar, {count} workers"] = (f"{count}", earlier.resolve())
    return found


def measured(case: str, rounds: int, earlier: Path | None) -> dict[str, Any]:
    """Times of each contender, cold and warm, in seconds."""
    every: dict[str, list[dict[str, float]]] = {}
    for number in range(rounds):
        order = list(contenders(earlier).items())
        random.Random(number).shuffle(order)
        for name, (how, tree) in order:
            with tempfile.TemporaryDirectory() as cache:
                for state in ("cold", "warm"):
                    found = run(case, how, tree, cache)
                    every.setdefault(f"{name}, {state}", []).append(found)
                    print(f"{case} round {number}: {name}, {state}: {found}", flush=True)
    return {
        "case": case,
        "held_out": case in HELD_OUT,
        "rounds": rounds,
        "median_s": {
            name: {part: round(statistics.median(x[part] for x in times), 2) for part in times[0]}
            for name, times in sorted(every.items())
        },
        "range_s": {
            name: [round(f(x["whole"] for x in times), 2) for f in (min, max)]
            for name, times in sorted(every.items())
        },
    }


def run(case: str, how: str, tree: Path, cache: str) -> dict[str, float]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "AUTOPAR_CACHE_DIR": str(Path(cache, "autopar")),
        "TORCHINDUCTOR_CACHE_DIR": str(Path(cache, "inductor")),
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # or all but torch is compiled every time
    started_s = time.time()
    ran = subprocess.run(
        [sys.executable, __file__, "--worker", case, how],
        env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    if ran.returncode:
        raise RuntimeError(f"{case} {how} failed:\n{ran.stderr[-4000:]}")
    found: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    done_s = found.pop("done_s")
    return {"whole": round(done_s - started_s, 3), **found}


def worker(case: str, how: str) -> None:
    """One measurement; prints it as JSON."""
    start_s = time.perf_counter()
    model, batch, imported = made(case, with_autopar=how in "12")
    imported_s = time.perf_counter()
    step = imported(model, batch, how)
    loss = step()
    assert loss == loss, "the loss is not a number"
    found = {
        "imports": round(imported_s - start_s, 3),
        "to_loss": round(time.perf_counter() - imported_s, 3),
        "done_s": time.time(),
    }
    print(json.dumps(found), flush=True)


def made(case: str, *, with_autopar: bool) -> tuple[Any, Any, Callable[..., Callable[[], float]]]:
    """The model, its batch, and a function that compiles them."""
    import torch
    from cpu_models import MODELS, fresh
    from held_out_models import HELD_OUT as MORE

    MODELS.update(MORE)
    MODELS["mlp-3"] = three_layers
    MODELS["gpt2-12"] = twelve_layers
    model, batch = fresh(case)
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-4)
    if with_autopar:
        import autopar

        def ours(model: Any, batch: Any, how: str) -> Callable[[], float]:
            compiled = autopar.compile(model, int(how), example_inputs=batch, optimizer=optimizer)
            return lambda: float(compiled.train_step(**batch))

        return model, batch, ours

    def peers(model: Any, batch: Any, how: str) -> Callable[[], float]:
        call = torch.compile(model) if how == "torch.compile" else model
        updates = optimizer(model.parameters())

        def step() -> float:
            found = call(**batch)
            loss = getattr(found, "loss", found)
            loss.backward()
            updates.step()
            return float(loss)

        return step

    return model, batch, peers


def three_layers() -> tuple[Any, Any]:
    """A multilayer perceptron of three layers, 64 rows."""
    import torch
    from torch import nn

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
            )

        def forward(self, x: Any, labels: Any) -> Any:
            return nn.functional.cross_entropy(self.layers(x), labels)

    return Classifier(), {"x": torch.randn(64, 256), "labels": torch.randint(0, 10, (64,))}


def twelve_layers() -> tuple[Any, Any]:
    """GPT-2 of 12 layers, 256 wide, 4 x 128 tokens."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=4096, n_positions=128, n_embd=256, n_layer=12, n_head=4)
    ids = torch.randint(0, 4096, (4, 128))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def show(row: dict[str, Any]) -> None:
    print(f"{row['case']}{' (held out)' if row['held_out'] else ''}, median seconds:")
    for name, parts in row["median_s"].items():
        print(f"  {name:40s} {parts['whole']:7.2f}  (imports {parts['imports']:.2f})")


def write(row: dict[str, Any]) -> None:
    from setting import setting

    known = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    rows = [other for other in known if other["case"] != row["case"]]
    row["load"] = [round(x, 2) for x in os.getloadavg()]
    document = {**setting("torch", "transformers"), "rows": [*rows, row]}
    RESULT.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
