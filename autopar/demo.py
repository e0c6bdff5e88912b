"""The demo: a byte-level GPT planned, trained on two workers, and trained again from its plan.

``python -m autopar.demo`` trains a small GPT-2 from ``transformers`` (random weights) on the
sources of the standard library, on two local CPU workers and, for comparison, in one process. It
prints the plan, both losses, and predicted and measured time and memory; then it writes
``plan.json`` and trains from it again without a search. It fails if the losses differ by more than
1e-4.
"""

from __future__ import annotations

import copy
import functools
import pathlib
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import autopar
from autopar.base.units import format_bytes, format_seconds

NUM_WORKERS = 2
NUM_STEPS = 12
NUM_REPLAYED = 3
BATCH, SEQUENCE = 8, 128
TOLERANCE = 1e-4
Batch = dict[str, Any]


def make_model() -> nn.Module:
    """A byte-level GPT-2: 4 layers, width 256, and no dropout, so that both runs are comparable."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=SEQUENCE,
            n_embd=256,
            n_layer=4,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    ).train()


def read_corpus(limit_bytes: int = 1 << 20) -> Tensor:
    """The sources of the standard library as bytes: text that every machine with Python has."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    return torch.frombuffer(text[:limit_bytes], dtype=torch.uint8).long()


def make_batches(corpus: Tensor, count: int) -> list[Batch]:
    """``count`` batches ``[BATCH, SEQUENCE]`` of consecutive bytes at random positions."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(count):
        starts = torch.randint(0, len(corpus) - SEQUENCE, (BATCH,), generator=generator)
        ids = torch.stack([corpus[s : s + SEQUENCE] for s in starts.tolist()])
        batches.append({"input_ids": ids, "labels": ids.clone()})
    return batches


MAKE_OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-3)


def train_alone(model: nn.Module, batches: list[Batch]) -> Iterator[tuple[float, float]]:
    """(loss, seconds) of each step of eager PyTorch in one process."""
    model = copy.deepcopy(model)
    optimizer = MAKE_OPTIMIZER(list(model.parameters()))
    for batch in batches:
        started_s = time.perf_counter()
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        yield loss.item(), time.perf_counter() - started_s


def train_compiled(
    compiled: autopar.Compiled, batches: list[Batch]
) -> Iterator[tuple[float, float]]:
    for batch in batches:
        started_s = time.perf_counter()
        loss = compiled.train_step(**batch).item()
        yield loss, time.perf_counter() - started_s


def compile_model(model: nn.Module, batch: Batch, plan: Any = None) -> autopar.Compiled:
    return autopar.compile(
        model,
        NUM_WORKERS,
        example_inputs=batch,
        optimizer=MAKE_OPTIMIZER,
        plan=plan,
        progress=True,
    )


def show_losses(
    console: Console, ours: list[tuple[float, float]], alone: list[tuple[float, float]]
) -> float:
    """Print both runs side by side; returns the largest difference of their losses."""
    table = Table(title=f"losses: {NUM_WORKERS} workers and one process")
    for column in ("step", f"{NUM_WORKERS} workers", "one process", "difference", "time", "alone"):
        table.add_column(column, justify="right")
    for step, ((loss, time_s), (reference, alone_s)) in enumerate(zip(ours, alone)):
        table.add_row(
            str(step),
            f"{loss:.6f}",
            f"{reference:.6f}",
            f"{abs(loss - reference):.1e}",
            format_seconds(time_s),
            format_seconds(alone_s),
        )
    console.print(table)
    return max(abs(a - b) for (a, _), (b, _) in zip(ours, alone))


def show_prediction(
    console: Console, compiled: autopar.Compiled, steps: list[tuple[float, float]]
) -> None:
    prediction = compiled.plan.prediction
    measured_s = statistics.median(time_s for _, time_s in steps[2:])
    memory = prediction.resident_bytes or sum(prediction.memory_bytes.values())
    table = Table(title="predicted and measured, one worker")
    for column in ("", "predicted", "measured", "ratio"):
        table.add_column(column, justify="right")
    table.add_row(
        "step time",
        format_seconds(prediction.step_time_s),
        format_seconds(measured_s),
        f"{measured_s / prediction.step_time_s:.2f}",
    )
    peak = max(compiled.memory_growth_bytes())
    table.add_row("peak memory", format_bytes(memory), format_bytes(peak), f"{peak / memory:.2f}")
    console.print(table)


def main() -> int:
    console = Console(width=100)
    model = make_model()
    batches = make_batches(read_corpus(), NUM_STEPS)
    alone = list(track(train_alone(model, batches), "one process", NUM_STEPS, console=console))
    with compile_model(model, batches[0]) as compiled:
        console.print(str(compiled.plan), highlight=False)
        steps = train_compiled(compiled, batches)
        ours = list(track(steps, f"{NUM_WORKERS} workers", NUM_STEPS, console=console))
        worst = show_losses(console, ours, alone)
        show_prediction(console, compiled, ours)
        compiled.plan.to_json("plan.json")
    console.print("plan written to plan.json; training from it again without a search")
    with compile_model(model, batches[0], plan="plan.json") as replayed:
        again = list(train_compiled(replayed, batches[:NUM_REPLAYED]))
    replay_worst = show_losses(console, again, alone[:NUM_REPLAYED])
    if max(worst, replay_worst) > TOLERANCE:
        console.print(f"losses differ by {max(worst, replay_worst):.1e}, more than {TOLERANCE:g}")
        return 1
    console.print(f"losses agree to {max(worst, replay_worst):.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
