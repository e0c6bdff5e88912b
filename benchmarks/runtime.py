"""Training steps compared with eager PyTorch, ``torch.compile``, DistributedDataParallel and FSDP2.

    python benchmarks/runtime.py [--rounds 12] [--cases gpt2 roberta] [--world-sizes 1 2]
        [--kernels eager compiled auto] [--device cuda] [--precision bf16] [--out FILE]
        [--together 120] [--profile-limit-s 90]

Each case starts its processes once. In every process all contenders hold their own copy of the same
model and optimizer; each round runs one step of each, in a new order, after a barrier, so that
other load on the machine affects all of them alike. A step's time is that of the slowest rank.
A peer that fails is left out, with its error.
Prints and writes to benchmarks/results/runtime.json medians, and ours over each peer's, also by
round; rows of other cases stay. Models held out are listed apart. ``--kernels``: how our blocks
run, one contender for each; peers run eagerly and compiled. ``--precision bf16``: peers under
``torch.autocast``, ours with masters in float32. With ``--device cuda`` each process has a GPU,
``torch.compile`` also replays CUDA graphs (``mode="reduce-overhead"``), one process of ours also
runs weight gradients on a second stream, each with CUDA graphs and launched op by op, and the
result is benchmarks/results/runtime_gpu.json. ``--together`` prepares all cases at once, for at
most so many seconds, and times one after another, where a machine is rented by the minute.
Rows also have what our plans predicted, in seconds and bytes of tensors, beside the bytes counted
on a GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cpu_models import MODELS, Batch, fresh
from cuda_models import CUDA_HELD_OUT, CUDA_MODELS
from held_out_models import HELD_OUT
from setting import num_cores, setting
from torch import Tensor, nn

from autopar.base.torch_private import clear_matmul_workspaces

RESULTS = Path(__file__).parent / "results"
FILES = {"cpu": RESULTS / "runtime.json", "cuda": RESULTS / "runtime_gpu.json"}
WARM_UP = 4
LOCK = threading.Lock()
CASE_LIMIT_S = 1800.0

CASES = ("gpt2", "resnet50", *HELD_OUT)
MODELS.update({**HELD_OUT, **CUDA_MODELS, **CUDA_HELD_OUT})
IS_HELD_OUT = {*HELD_OUT, *CUDA_HELD_OUT}
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
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--together", type=float, metavar="SECONDS")
    parser.add_argument("--profile-limit-s", type=float, default=90.0)
    parser.add_argument("--turn", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    path = arguments.out or FILES[arguments.device]
    runs = [(case, size) for case in arguments.cases for size in arguments.world_sizes]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(runs)) as pool:
        turns = [
            Path(folder) / f"turn{i}" if arguments.together else None for i in range(len(runs))
        ]
        rows = [pool.submit(run, *each, arguments, turn) for each, turn in zip(runs, turns)]
        if arguments.together:
            wait_for(rows, turns, time.monotonic() + arguments.together)
        for row, turn in zip(rows, turns):
            if turn is not None and turn.with_suffix(".ready").exists():
                turn.touch()
            elif turn is not None:
                turn.with_suffix(".late").touch()
            try:
                made = row.result()
            except subprocess.CalledProcessError as error:
                print(f"failed, or not ready in time: {error.cmd}", flush=True)
                continue
            show(made)
            write(made, path)


def wait_for(rows: Sequence[Future[Any]], turns: Sequence[Path | None], end_s: float) -> None:
    """Wait until each case is prepared or has ended, or the time is up."""
    for row, turn in zip(rows, turns):
        while turn is not None and not row.done() and not turn.with_suffix(".ready").exists():
            if time.monotonic() > end_s:
                break
            time.sleep(0.1)


def run(
    case: str, num_processes: int, arguments: argparse.Namespace, turn: Path | None
) -> dict[str, Any]:
    """Start the processes of one case; returns the row that rank 0 wrote."""
    num_threads = max(1, num_cores() // num_processes)
    with tempfile.TemporaryDirectory() as folder, LOCK if turn is None else nullcontext():
        out = Path(folder) / "row.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(num_processes), __file__, "--worker", case]
        command += ["--rounds", str(arguments.rounds), "--out", str(out)]
        command += ["--device", arguments.device, "--precision", arguments.precision]
        command += ["--profile-limit-s", str(arguments.profile_limit_s)]
        command += [] if turn is None else ["--turn", str(turn)]
        command += ["--kernels", *arguments.kernels]
        environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        started_s = time.monotonic()
        while process.poll() is None:
            is_late = turn is not None and turn.with_suffix(".late").exists()
            if is_late or time.monotonic() - started_s > CASE_LIMIT_S:
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.05)
        if process.returncode != 0:
            raise subprocess.CalledProcessError(process.returncode, case)
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
    setup = Setup(device, arguments.precision, arguments.profile_limit_s)
    make = one_process if dist.get_world_size() == 1 else several_processes
    contenders, ours = make(case, arguments.kernels, setup)
    failed = warmed_up(contenders, ours)
    times = timed(contenders, arguments.rounds, arguments.turn)
    made = row(case, times, {name: contenders[name] for name in ours}, arguments.precision)
    made |= {"failed": failed} if failed else {}
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(made))
    dist.barrier()
    dist.destroy_process_group()


def made_on(case: str, device: torch.device) -> tuple[nn.Module, Batch]:
    model, batch = fresh(case)
    return model.to(device), {name: x.to(device) for name, x in batch.items()}


@dataclass(frozen=True)
class Setup:
    """The device, the precision and the limit on profiling, the same for all contenders."""

    device: torch.device
    precision: str
    profile_limit_s: float


def one_process(
    case: str, kernels: Sequence[str], setup: Setup
) -> tuple[dict[str, Step], list[str]]:
    device, precision = setup.device, setup.precision
    model, batch = made_on(case, device)
    contenders = {"eager": trainer(model, batch, precision)}
    modes = [None] if device.type == "cpu" else [None, "reduce-overhead"]
    for mode in modes:
        model, _ = made_on(case, device)
        name = "torch.compile" if mode is None else f"torch.compile, {mode}"
        contenders[name] = trainer(model, batch, precision, torch.compile(model, mode=mode))
    ours: dict[str, dict[str, Any]] = {
        name_of("autopar", each): {"kernels": each} for each in kernels
    }
    if device.type == "cuda":
        two = {"schedule": "multi_stream", "num_stages": 4, "update": "at_end", "offload": False}
        ours["autopar, two streams"] = {"kernels": "eager", **two}
        for name in ("autopar", "autopar, two streams"):
            ours[f"{name}, launched"] = {"like": name, "cuda_graphs": False}
    for name, options in ours.items():
        like = contenders.get(options.pop("like", ""))
        if isinstance(like, CompiledTrainer):
            options["plan"] = like.compiled.plan
        contenders[name] = CompiledTrainer(case, [], setup, **options)
    return contenders, list(ours)


def several_processes(
    case: str, kernels: Sequence[str], setup: Setup
) -> tuple[dict[str, Step], list[str]]:
    """Peers on shares of the batch; ours under a searched plan and under known strategies.

    Batch normalization is local in all of them, as in DistributedDataParallel.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import autopar

    device, precision = setup.device, setup.precision
    rank, size = dist.get_rank(), dist.get_world_size()
    _, batch = made_on(case, device)
    share = {name: x.chunk(size)[rank].contiguous() for name, x in batch.items()}
    mesh = init_device_mesh(device.type, (size,))
    contenders = {}
    for suffix in ("", ", compiled"):
        made: nn.Module = DistributedDataParallel(made_on(case, device)[0])
        called = torch.compile(made) if suffix else made
        contenders[f"DDP{suffix}"] = trainer(made, share, precision, called)
        made, _ = made_on(case, device)
        for part in layers_of(made):
            fully_shard(part, mesh=mesh)
        fully_shard(made, mesh=mesh)
        called = torch.compile(made) if suffix else made
        contenders[f"FSDP2{suffix}"] = trainer(made, share, precision, called)
    plans: dict[str, list[Any]] = {
        "autopar": [],
        "autopar data parallel": [autopar.Force("data_parallel")],
        "autopar ZeRO-3": [autopar.Force("zero3")],
    }
    ours = []
    for plan, constraints in plans.items():
        for each in kernels:
            ours.append(name := name_of(plan, each))
            contenders[name] = CompiledTrainer(
                case, constraints, setup, kernels=each, batch_norm="local"
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


def trainer(
    model: nn.Module, batch: Batch, precision: str, called: Callable[..., Any] | None = None
) -> Step:
    """Steps of a model, which ``called`` (compiled, say) runs."""
    called = model if called is None else called
    optimizer = make_optimizer(model.parameters())
    device = next(model.parameters()).device.type
    is_cast = precision == "bf16"

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=is_cast):
            output = called(**batch)
        loss: Tensor = output if isinstance(output, Tensor) else output.loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


class CompiledTrainer:
    """Steps of our compiled model, and what its plan predicted."""

    def __init__(self, case: str, constraints: Sequence[Any], setup: Setup, **options: Any) -> None:
        import autopar

        device, precision = setup.device, setup.precision
        held_bytes = requested_bytes(device)
        model, batch = fresh(case)
        size = dist.get_world_size()
        self.batch = {name: x.to(device) for name, x in batch.items()}
        self.compiled = autopar.compile(
            model, size if device.type == "cpu" else [f"cuda:{number}" for number in range(size)],
            example_inputs=batch, optimizer=make_optimizer, constraints=constraints,
            profile_limit_s=setup.profile_limit_s,
            precision=None if precision == "fp32" else precision, **options,
        )  # fmt: skip
        prediction = self.compiled.plan.prediction
        self.predicted = {
            "step_time_s": round(prediction.step_time_s, 5),
            "tensor_bytes": sum(prediction.memory_bytes.values()),
        }
        if device.type == "cuda":
            counted = max(self.compiled.peak_tensor_bytes(**self.batch))
            self.predicted["counted_tensor_bytes"] = counted - held_bytes

    def __call__(self) -> Tensor:
        loss: Tensor = self.compiled.train_step(**self.batch)
        return loss


def requested_bytes(device: torch.device) -> int:
    """Bytes of this process's tensors on a GPU, without cuBLAS's workspaces; 0 on CPUs."""
    if device.type == "cpu":
        return 0
    clear_matmul_workspaces()
    return int(torch.cuda.memory_stats(device)["requested_bytes.all.current"])


def warmed_up(contenders: dict[str, Step], ours: Sequence[str]) -> dict[str, str]:
    """Run the first steps of each; takes out the peers that fail on any rank, with their errors."""
    failed: dict[str, str] = {}
    for name, step in list(contenders.items()):
        error = ""
        try:
            for _ in range(WARM_UP):
                step()
        except Exception as caught:
            if name in ours:
                raise
            error = f"{type(caught).__name__}: {caught}".splitlines()[0]
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, error)
        if any(told):
            failed[name] = next(filter(None, told))
            del contenders[name]
    return failed


def timed(
    contenders: dict[str, Step], rounds: int, turn: Path | None = None
) -> dict[str, list[float]]:
    """Seconds of each round's step of each contender, on the slowest rank, from its ``turn`` on."""
    if turn is not None:
        turn.with_suffix(".ready").touch()
        while not turn.exists():
            time.sleep(0.1)
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


def row(
    case: str, times: dict[str, list[float]], ours: dict[str, CompiledTrainer], precision: str
) -> dict[str, Any]:
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
        "precision": precision,
        "held_out": case in IS_HELD_OUT,
        "median_s": {name: round(statistics.median(each), 4) for name, each in times.items()},
        "times_s": {name: [round(t, 4) for t in each] for name, each in times.items()},
        "ours_over": {
            own: {peer: ratio(own, peer) for peer in times if peer not in ours} for own in ours
        },
        "predicted": {own: each.predicted for own, each in ours.items()},
        "notes": {own: each.compiled._runner.graph_notes() for own, each in ours.items()},
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
    for name, error in made.get("failed", {}).items():
        print(f"    {name} failed: {error}", flush=True)
    for own, each in made["predicted"].items():
        counted = each.get("counted_tensor_bytes", math.nan)
        print(
            f"    {own}: predicted {each['step_time_s'] * 1e3:.1f} ms and "
            f"{each['tensor_bytes'] / 1e6:.0f} MB, counted {counted / 1e6:.0f}",
            flush=True,
        )


def _place_of(row: dict[str, Any]) -> tuple[str, int, str]:
    return row["case"], row["num_processes"], row.get("precision", "fp32")


def write(made: dict[str, Any], path: Path) -> None:
    """Replace the row of this case, and keep the others; each has its own setting."""
    known = json.loads(path.read_text()) if path.exists() else {}
    head = {name: known[name] for name in ("machine", "versions") if name in known}
    rows = [{**head, **row} for row in (*known.get("cases", []), *known.get("held_out", []))]
    rows = [row for row in rows if _place_of(row) != _place_of(made)]
    rows.append({**setting("torch", "transformers"), **made})
    document = {
        "target": "1.00 or less of each peer",
        "cases": [row for row in rows if not row.get("held_out")],
        "held_out": [row for row in rows if row.get("held_out")],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
