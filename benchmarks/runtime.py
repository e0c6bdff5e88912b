"""Training steps compared with eager PyTorch, ``torch.compile``, DistributedDataParallel and FSDP2.

    python benchmarks/runtime.py [--rounds 12] [--cases gpt2 roberta] [--world-sizes 1 2]
        [--kernels eager compiled auto] [--device cuda]

Each case starts its processes once. In every process all contenders hold their own copy of the same
model and optimizer; each round runs one step of each, in a new order, after a barrier, so that
other load on the machine affects all of them alike. A step's time is that of the slowest rank.
Prints and writes to benchmarks/results/runtime.json medians, and ours over each peer's, also by
round; rows of other cases stay. Models held out are listed apart. ``--kernels``: how our blocks
run, one contender for each; peers run eagerly and compiled. With ``--device cuda`` each process has
a GPU, ``torch.compile`` also replays CUDA graphs (``mode="reduce-overhead"``), and the result is
benchmarks/results/runtime_gpu.json.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cpu_models import MODELS, Batch, fresh
from held_out_models import HELD_OUT
from setting import num_cores, setting
from torch import Tensor, nn

RESULTS = Path(__file__).parent / "results"
FILES = {"cpu": RESULTS / "runtime.json", "cuda": RESULTS / "runtime_gpu.json"}
WARM_UP = 3
PROFILE_LIMIT_S = 90.0

CASES = ("gpt2", "resnet50", *HELD_OUT)
MODELS.update(HELD_OUT)
make_optimizer = functools.partial(torch.optim.AdamW, lr=1e-4)
Step = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--cases", nargs="+", choices=list(MODELS), default=list(CASES))
    parser.add_argument("--world-sizes", nargs="+", type=int, default=[1, 2])
    parser.add_argument(
        "--kernels", nargs="+", choices=("eager", "compiled", "auto"), default=["eager", "auto"]
    )
    parser.add_argument("--device", choices=list(FILES), default="cpu")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    for case in arguments.cases:
        for size in arguments.world_sizes:
            made = run(case, size, arguments)
            show(made)
            write(made, FILES[arguments.device])


def run(case: str, num_processes: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Start the processes of one case; returns the row that rank 0 wrote."""
    num_threads = max(1, num_cores() // num_processes)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(num_processes), __file__, "--worker", case]
        command += ["--rounds", str(arguments.rounds), "--out", str(out)]
        command += ["--device", arguments.device, "--kernels", *arguments.kernels]
        environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
        subprocess.run(command, env=environment, check=True, timeout=1800)
        row: dict[str, Any] = json.loads(out.read_text())
    return row


def worker(arguments: argparse.Namespace) -> None:
    """One rank: make every contender, then time them in turn."""
    case = arguments.worker
    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    make = one_process if dist.get_world_size() == 1 else several_processes
    contenders, ours = make(case, arguments.kernels, device)
    times = timed(contenders, arguments.rounds)
    if dist.get_rank() == 0:
        Path(arguments.out).write_text(json.dumps(row(case, times, ours)))
    dist.barrier()
    dist.destroy_process_group()


def made_on(case: str, device: torch.device) -> tuple[nn.Module, Batch]:
    model, batch = fresh(case)
    return model.to(device), {name: x.to(device) for name, x in batch.items()}


def one_process(
    case: str, kernels: Sequence[str], device: torch.device
) -> tuple[dict[str, Step], list[str]]:
    model, batch = made_on(case, device)
    contenders = {"eager": trainer(model, batch)}
    modes = [None] if device.type == "cpu" else [None, "reduce-overhead"]
    for mode in modes:
        model, _ = made_on(case, device)
        name = "torch.compile" if mode is None else f"torch.compile, {mode}"
        contenders[name] = trainer(model, batch, torch.compile(model, mode=mode))
    ours = {name_of("autopar", each): each for each in kernels}
    for name, each in ours.items():
        contenders[name] = compiled_trainer(case, [], device, kernels=each)
    return contenders, list(ours)


def several_processes(
    case: str, kernels: Sequence[str], device: torch.device
) -> tuple[dict[str, Step], list[str]]:
    """Peers on shares of the batch; ours under a searched plan and under known strategies.

    Batch normalization is local in all of them, as in DistributedDataParallel.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import autopar

    rank, size = dist.get_rank(), dist.get_world_size()
    _, batch = made_on(case, device)
    share = {name: x.chunk(size)[rank].contiguous() for name, x in batch.items()}
    mesh = init_device_mesh(device.type, (size,))
    contenders = {}
    for suffix in ("", ", compiled"):
        made: nn.Module = DistributedDataParallel(made_on(case, device)[0])
        contenders[f"DDP{suffix}"] = trainer(made, share, torch.compile(made) if suffix else made)
        made, _ = made_on(case, device)
        for part in layers_of(made):
            fully_shard(part, mesh=mesh)
        fully_shard(made, mesh=mesh)
        contenders[f"FSDP2{suffix}"] = trainer(made, share, torch.compile(made) if suffix else made)
    plans: dict[str, list[Any]] = {
        "autopar": [],
        "autopar data parallel": [autopar.Force("data_parallel")],
        "autopar ZeRO-3": [autopar.Force("zero3")],
    }
    ours = []
    for plan, constraints in plans.items():
        for each in kernels:
            ours.append(name := name_of(plan, each))
            contenders[name] = compiled_trainer(
                case, constraints, device, kernels=each, batch_norm="local"
            )
    return contenders, ours


def name_of(plan: str, kernels: str) -> str:
    return plan if kernels == "eager" else f"{plan}, {kernels}"


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The repeated modules, as users of FSDP2 wrap them: transformer layers, stages of a ResNet."""
    names = (
        "GPT2Block", "ResNetStage", "RobertaLayer", "AlbertLayer", "MistralDecoderLayer",
        "ConvNextStage",
    )  # fmt: skip
    return [m for m in model.modules() if type(m).__name__ in names]


def trainer(model: nn.Module, batch: Batch, called: Callable[..., Any] | None = None) -> Step:
    """Steps of a model, which ``called`` (compiled, say) runs."""
    called = model if called is None else called
    optimizer = make_optimizer(model.parameters())

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss: Tensor = called(**batch).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def compiled_trainer(
    case: str, constraints: Sequence[Any], device: torch.device, **options: Any
) -> Step:
    import autopar

    model, batch = fresh(case)
    size = dist.get_world_size()
    devices = size if device.type == "cpu" else [f"cuda:{number}" for number in range(size)]
    compiled = autopar.compile(
        model, devices, example_inputs=batch, optimizer=make_optimizer,
        constraints=constraints, profile_limit_s=PROFILE_LIMIT_S, **options,
    )  # fmt: skip

    given = {name: x.to(device) for name, x in batch.items()}

    def step() -> Tensor:
        return compiled.train_step(**given)

    return step


def timed(
    contenders: dict[str, Step], rounds: int, warm_up: int = WARM_UP
) -> dict[str, list[float]]:
    """Seconds of each round's step of each contender, on the slowest rank."""
    for step in contenders.values():
        for _ in range(warm_up):
            step()
    order = random.Random(0)
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    times: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for _ in range(rounds):
        order.shuffle(names)
        for name in names:
            wait()
            dist.barrier()
            start = time.perf_counter()
            contenders[name]()
            wait()
            taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            times[name].append(taken.item())
    return times


def row(case: str, times: dict[str, list[float]], ours: Sequence[str]) -> dict[str, Any]:
    def ratio(own: str, peer: str) -> dict[str, float]:
        rounds = [a / b for a, b in zip(times[own], times[peer])]
        return {
            "of_medians": round(statistics.median(times[own]) / statistics.median(times[peer]), 3),
            "median_of_rounds": round(statistics.median(rounds), 3),
        }

    return {
        "case": case,
        "num_processes": dist.get_world_size(),
        "num_threads": torch.get_num_threads(),
        "held_out": case in HELD_OUT,
        "median_s": {name: round(statistics.median(each), 4) for name, each in times.items()},
        "times_s": {name: [round(t, 4) for t in each] for name, each in times.items()},
        "ours_over": {
            own: {peer: ratio(own, peer) for peer in times if peer not in ours} for own in ours
        },
    }


def show(made: dict[str, Any]) -> None:
    medians = ", ".join(f"{name} {each * 1e3:.0f} ms" for name, each in made["median_s"].items())
    held = " (held out)" if made["held_out"] else ""
    print(f"{made['case']}{held} on {made['num_processes']} process(es): {medians}")
    for own, peers in made["ours_over"].items():
        for peer, each in peers.items():
            print(
                f"    {own} / {peer}: {each['of_medians']:.3f} "
                f"(round by round {each['median_of_rounds']:.3f})",
                flush=True,
            )


def write(made: dict[str, Any], path: Path) -> None:
    """Replace the row of this case, and keep the others; each has its own setting."""
    known = json.loads(path.read_text()) if path.exists() else {}
    head = {name: known[name] for name in ("machine", "versions") if name in known}
    rows = [{**head, **row} for row in (*known.get("cases", []), *known.get("held_out", []))]
    place = made["case"], made["num_processes"]
    rows = [row for row in rows if (row["case"], row["num_processes"]) != place]
    rows.append({**setting("torch", "transformers"), **made})
    document = {
        "target": "1.00 or less of each peer",
        "cases": [row for row in rows if not row.get("held_out")],
        "held_out": [row for row in rows if row.get("held_out")],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
