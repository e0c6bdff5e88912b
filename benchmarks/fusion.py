"""Arrays of models compared with the same models trained without fusion, on CPUs or one GPU.

    python benchmarks/fusion.py [--rounds 5] [--cases mlp convnet transformer] [--sizes 1 2 4 8]
    python benchmarks/fusion.py --only-sweeps

A contender trains B models on one shared batch, each with its own learning rate. Its time is that
of `STEPS` steps of all models, and its samples per second count all models. A round runs every
contender once, in a new order. Contenders: ``array``, ``autopar.compile`` of all models on one
device; ``one by one``, eager PyTorch, one step of each model in turn; ``processes``, B concurrent
processes, each with its share of the cores; ``vmap``, ``torch.func.stack_module_state`` under
``vmap`` with one optimizer for all (and so one learning rate). Case ``partial``: arrays of
transformers in which the last k blocks differ between models and are computed model by model.
Writes medians and, by round, the array over the best other contender to
benchmarks/results/fusion.json.

Sweeps: 81 configurations, by random search and by Hyperband, in arrays, one by one, and in as many
processes as there are cores; of a model that sweeps were tuned on, and of one that is held out.
Writes benchmarks/results/sweeps.json.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from setting import num_cores, setting
from torch import Tensor, nn

import autopar
from autopar.fusion import Candidate, Hyperband, RandomSearch, Searcher, Uniform, sweep

RESULT = Path(__file__).parent / "results" / "fusion.json"
SWEEPS = Path(__file__).parent / "results" / "sweeps.json"
STEPS = 10
BATCH = 32
CLASSES = 10
NUM_TRIALS, MAX_STEPS = 81, 81
SWEPT, HELD_OUT = "mlp", "convnet"
Batch = tuple[Tensor, Tensor]


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES)
    )


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 8 * 8, CLASSES),
    )  # fmt: skip


class Transformer(nn.Module):
    """Four blocks; those in ``odd`` have an activation that differs from that of other models."""

    def __init__(self, odd: int = 0, number: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 64)
        acts = [F.gelu, F.relu, torch.tanh, F.silu]
        self.acts = [F.gelu] * (4 - odd) + [acts[number % 4]] * odd
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(64, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block, act in zip(self.blocks, self.acts):
            x = block(x, act)
        return self.head(x.mean(1))


class Block(nn.Module):
    """Attention with four heads and a two-layer MLP, each after a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(64), nn.LayerNorm(64)
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(act(self.up(self.norm2(x))))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, lambda: torch.randn(BATCH, 64)),
    "convnet": (convnet, lambda: torch.randn(BATCH, 3, 32, 32)),
    "transformer": (Transformer, lambda: torch.randint(64, (BATCH, 32))),
}


def case(name: str, num: int) -> tuple[list[nn.Module], Batch]:
    torch.manual_seed(0)
    make, inputs = CASES[name]
    return [make().train() for _ in range(num)], (inputs(), torch.randint(CLASSES, (BATCH,)))


def optimizers(num: int) -> list[Callable[..., torch.optim.Optimizer]]:
    return [functools.partial(torch.optim.AdamW, lr=1e-3 * 0.9**i) for i in range(num)]


# --- contenders: each returns a function that runs STEPS steps of all models ---------------------


def array_of(models: Sequence[nn.Module], batch: Batch, device: str) -> tuple[Callable, Callable]:
    array = autopar.compile(
        list(models), [device], example_inputs=batch, loss_fn=F.cross_entropy,
        optimizer=optimizers(len(models)), check_gradients=False, profile_limit_s=0,
    )  # fmt: skip

    def steps() -> None:
        for _ in range(STEPS):
            array.train_step(*batch)

    return steps, array.close


def one_by_one(models: Sequence[nn.Module], batch: Batch, device: str) -> tuple[Callable, Callable]:
    x, y = (t.to(device) for t in batch)
    own = [copy.deepcopy(m).to(device) for m in models]
    opts = [make(m.parameters()) for make, m in zip(optimizers(len(own)), own)]

    def steps() -> None:
        for model, optimizer in zip(own, opts):
            for _ in range(STEPS):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        _wait(device)

    return steps, lambda: None


def vmapped(models: Sequence[nn.Module], batch: Batch, device: str) -> tuple[Callable, Callable]:
    x, y = (t.to(device) for t in batch)
    own = [copy.deepcopy(m).to(device) for m in models]
    parameters, buffers = torch.func.stack_module_state(own)
    base = copy.deepcopy(own[0]).to("meta")

    def loss(p: Any, b: Any) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(base, (p, b), (x,)), y)

    optimizer = torch.optim.AdamW(list(parameters.values()), lr=1e-3)

    def steps() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            torch.vmap(loss)(parameters, buffers).sum().backward()
            optimizer.step()
        _wait(device)

    return steps, lambda: None


def processes(models: Sequence[nn.Module], batch: Batch, device: str) -> tuple[Callable, Callable]:
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in models]
    threads = max(1, num_cores() // len(models))
    workers = [
        context.Process(target=_serve, args=(theirs, model, batch, device, threads), daemon=True)
        for (_, theirs), model in zip(pairs, models)
    ]
    for worker in workers:
        worker.start()
    for ours, _ in pairs:
        ours.recv()

    def steps() -> None:
        for ours, _ in pairs:
            ours.send(True)
        for ours, _ in pairs:
            ours.recv()

    def close() -> None:
        for ours, _ in pairs:
            ours.send(False)
        for worker in workers:
            worker.join(30)

    return steps, close


def _serve(pipe: Any, model: nn.Module, batch: Batch, device: str, threads: int) -> None:
    torch.set_num_threads(threads)
    steps, _ = one_by_one([model], batch, device)
    pipe.send(None)
    while pipe.recv():
        steps()
        pipe.send(None)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


CONTENDERS = {
    "array": array_of,
    "one by one": one_by_one,
    "processes": processes,
    "vmap": vmapped,
}


def compared(name: str, num: int, rounds: int, device: str) -> dict[str, Any]:
    """Samples per second of each contender, by round."""
    models, batch = case(name, num)
    with ExitStack() as stack:
        running: dict[str, Callable] = {}
        for contender, start in CONTENDERS.items():
            if contender == "vmap" and name == "convnet":
                continue  # batch norm's running statistics change in place, which vmap refuses
            steps, close = start(models, batch, device)
            stack.callback(close)
            running[contender] = steps
        rates = interleaved(running, rounds, num * BATCH * STEPS)
    others = [rates[c] for c in rates if c != "array"]
    ratios = [a / max(o[i] for o in others) for i, a in enumerate(rates["array"])]
    medians = {c: statistics.median(found) for c, found in rates.items()}
    return {
        "case": name,
        "num_models": num,
        "samples_per_s": {c: round(rate, 1) for c, rate in medians.items()},
        "array_over_best_other": round(statistics.median(ratios), 3),
    }


def interleaved(
    running: dict[str, Callable], rounds: int, num_samples: int
) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {contender: [] for contender in running}
    for steps in running.values():
        steps()
    for number in range(rounds):
        order = list(running)
        random.Random(number).shuffle(order)
        for contender in order:
            started_s = time.perf_counter()
            running[contender]()
            rates[contender].append(num_samples / (time.perf_counter() - started_s))
    return rates


def partly_fused(num_odd: int, num: int, rounds: int, device: str) -> dict[str, Any]:
    """Arrays of transformers whose last blocks differ between models."""
    _, batch = case("transformer", 1)
    models = [Transformer(num_odd, i).train() for i in range(num)]
    steps, close = array_of(models, batch, device)
    try:
        (rates,) = interleaved({"array": steps}, rounds, num * BATCH * STEPS).values()
    finally:
        close()
    return {"unfused_blocks": num_odd, "samples_per_s": round(statistics.median(rates), 1)}


# --- sweeps ---------------------------------------------------------------------------------------
SPACE = {"lr": Uniform(low=1e-4, high=1e-1, log=True)}


def candidate(name: str, configuration: Any) -> Candidate:
    torch.manual_seed(0)
    return Candidate(
        model=CASES[name][0]().train(),
        optimizer=functools.partial(torch.optim.AdamW, lr=configuration["lr"]),
    )


def serial(name: str, searcher: Searcher, batch: Batch, pool: Any = None) -> None:
    """Train every trial alone, one after another or in a pool of processes."""
    done: dict[int, int] = {}
    held: dict[int, Any] = {}
    while requests := list(searcher.ask()):
        tasks = [
            (name, r.configuration, held.get(r.number), done.get(r.number, 0), r.num_steps, batch)
            for r in requests
        ]
        found = map(_train, tasks) if pool is None else pool.imap(_train, tasks)
        for request, (value, state) in zip(requests, found):
            held[request.number], done[request.number] = state, request.num_steps
            searcher.tell(request.number, value)


def _train(task: Any) -> tuple[float, Any]:
    name, configuration, state, before, until, (x, y) = task
    made = candidate(name, configuration)
    optimizer = made.optimizer(list(made.model.parameters()))
    if state is not None:
        made.model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
    loss = torch.zeros(())
    for _ in range(before, until):
        optimizer.zero_grad()
        loss = F.cross_entropy(made.model(x), y)
        loss.backward()
        optimizer.step()
    return float(loss.detach()), (made.model.state_dict(), optimizer.state_dict())


def swept(name: str, device: str) -> list[dict[str, Any]]:
    """Seconds of a whole sweep of 81 configurations, including starts of processes."""
    _, batch = case(name, 1)
    compile = functools.partial(
        autopar.compile, devices=[device], example_inputs=batch, loss_fn=F.cross_entropy,
        check_gradients=False, profile_limit_s=0,
    )  # fmt: skip
    searchers: dict[str, Callable[[], Searcher]] = {
        "random search": lambda: RandomSearch(SPACE, num_trials=NUM_TRIALS, num_steps=MAX_STEPS),
        "hyperband": lambda: Hyperband(SPACE, max_steps=MAX_STEPS),
    }
    return [
        {
            "case": name,
            "held_out": name == HELD_OUT,
            "searcher": searcher,
            "seconds": _sweep_seconds(name, make, batch, compile),
        }
        for searcher, make in searchers.items()
    ]


def _sweep_seconds(
    name: str, make: Callable[[], Searcher], batch: Batch, compile: Callable[..., Any]
) -> dict[str, float]:
    def concurrent() -> None:
        with multiprocessing.get_context("spawn").Pool(num_cores(), _one_thread) as pool:
            serial(name, make(), batch, pool)

    return {
        "arrays": _seconds(
            lambda: sweep(
                functools.partial(candidate, name),
                make(),
                lambda _: batch,
                compile,
                array_size=NUM_TRIALS,
            )
        ),
        "serial": _seconds(lambda: serial(name, make(), batch)),
        "concurrent": _seconds(concurrent),
    }


def _one_thread() -> None:
    torch.set_num_threads(1)


def _seconds(run: Callable[[], Any]) -> float:
    started_s = time.perf_counter()
    run()
    return round(time.perf_counter() - started_s, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--sizes", nargs="*", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--skip-sweeps", action="store_true")
    parser.add_argument("--only-sweeps", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    if not given.skip_sweeps:
        rows = [row for name in (SWEPT, HELD_OUT) for row in swept(name, device)]
        for row in rows:
            print(json.dumps(row), flush=True)
        content = {**setting("torch"), "device": device, "sweeps": rows}
        SWEEPS.write_text(json.dumps(content, indent=1) + "\n")
    if given.only_sweeps:
        return
    result: dict[str, Any] = {**setting("torch"), "device": device, "rounds": given.rounds}
    result["arrays"] = []
    for name in given.cases:
        for num in given.sizes:
            result["arrays"].append(compared(name, num, given.rounds, device))
            print(json.dumps(result["arrays"][-1]), flush=True)
    if "transformer" in given.cases:
        result["partial"] = [partly_fused(k, 4, given.rounds, device) for k in range(5)]
        print(json.dumps(result["partial"]), flush=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
