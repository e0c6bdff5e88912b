"""Pipelines compared with torch.distributed.pipelining: same stages and micro-batches.

    python benchmarks/pipelines.py [--processes 4] [--rounds 12]

Two or four processes hold each contender's own copy of one model, a chain of transformer layers,
and its optimizer. Each round runs one step of each contender, in a new order, after a barrier; a
step's time is that of the slowest process. Before anything is timed, all must have computed the
losses of eager PyTorch. Prints and writes to benchmarks/results/pipelines.json medians, and ours
over torch's for each schedule that torch has, also by round. It also reports the bubble of each of
our schedules, the share of all devices' time between the first and the last action in which they
neither compute nor handle a message, and that of the simulated schedule: with every action's own
time in that step, and with one time for all actions of a kind and stage, their median. Both
simulations know the latency of a message. On fewer cores than processes, processes wait for each
other's cores, which counts as time of their actions.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from runtime import timed
from setting import num_cores, setting
from torch import Tensor, nn

from autopar.comm.transports.shared_memory import SharedMemoryMessages
from autopar.schedules import Action, Durations, Kind, Links, Schedule, build, simulate
from autopar.schedules.action import SEND_KINDS
from autopar.schedules.generators.build import ANY_STAGES

RESULT = Path(__file__).parent / "results" / "pipelines.json"
NUM_LAYERS, WIDTH, HEADS, LENGTH, BATCH, NUM_MICROBATCHES = 8, 256, 4, 64, 16, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A schedule of ours, and torch's class for it, if it has one.

    ``stages`` are those of a device, which form a V where ``is_v``.
    """

    schedule: str
    options: dict[str, Any] = field(default_factory=dict)
    torch_class: str | None = None
    stages: int = 1
    is_v: bool = False

    def build(self, num_devices: int) -> Schedule:
        dealt = {"num_devices": num_devices} if self.schedule in ANY_STAGES else {}
        return build(
            self.schedule, num_stages=self.stages * num_devices,
            num_microbatches=NUM_MICROBATCHES, **self.options, **dealt,
        )  # fmt: skip


CONTENDERS = {
    "gpipe": Contender(schedule="gpipe", torch_class="ScheduleGPipe"),
    "1f1b": Contender(schedule="1f1b", torch_class="Schedule1F1B"),
    "interleaved": Contender(
        schedule="interleaved", torch_class="ScheduleInterleaved1F1B", stages=2
    ),
    "zb_v": Contender(schedule="zb_v", torch_class="ScheduleZBVZeroBubble", stages=2, is_v=True),
    "chimera": Contender(schedule="chimera"),
    "chimera, merged": Contender(schedule="chimera", options={"concatenation": "merged"}),
    "fast_forward": Contender(schedule="fast_forward", stages=2),
}
COMPUTING = (Kind.F, Kind.I, Kind.W, Kind.B)
make_optimizer = functools.partial(torch.optim.SGD, lr=1e-3)
Step = Callable[[], Any]


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.first(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = (heads.select(2, i).transpose(1, 2) for i in range(3))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        x = x + self.out(mixed.reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--processes", type=int, choices=(2, 4), default=2)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.out:
        worker(arguments.rounds, Path(arguments.out))
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        num = arguments.processes
        command += ["--nproc-per-node", str(num), __file__, "--rounds", str(arguments.rounds)]
        threads = str(max(1, num_cores() // num))
        environment = {**os.environ, "OMP_NUM_THREADS": threads}
        subprocess.run([*command, "--out", str(out)], env=environment, check=True, timeout=1800)
        write(num, json.loads(out.read_text()))


def worker(rounds: int, out: Path) -> None:
    dist.init_process_group("gloo")
    expected = eager_losses()
    contenders: dict[str, Step] = {}
    for name, each in CONTENDERS.items():
        contenders[name] = our_step(each)
        if each.torch_class is not None:
            contenders[f"torch {name}"] = torch_step(each)
    for step in contenders.values():
        losses = [step() for _ in expected]
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)
    times = timed(contenders, rounds)
    bubbles = {name: bubble(contenders[name]) for name in CONTENDERS}
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"times": times, "bubbles": bubbles}))
    dist.barrier()
    dist.destroy_process_group()


def fresh() -> tuple[Chain, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Chain()
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(BATCH, LENGTH, WIDTH, generator=generator) for _ in range(2))
    return model, x, y


def eager_losses(num_steps: int = 3) -> list[float]:
    model, x, y = fresh()
    optimizer, losses = make_optimizer(model.parameters()), []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def our_step(contender: Contender) -> Step:
    import autopar

    model, x, y = fresh()
    num_devices = dist.get_world_size()
    size = NUM_LAYERS // (contender.stages * num_devices)
    compiled = autopar.compile(
        model, num_devices, example_inputs=(x, y), optimizer=make_optimizer, profile_limit_s=0,
        schedule=contender.build(num_devices),
        cuts=[f"layers.{first}" for first in range(size, NUM_LAYERS, size)],
    )  # fmt: skip
    return OurStep(compiled, (x, y))


class OurStep:
    """A step of ours, and the record of its actions."""

    def __init__(self, compiled: Any, batch: tuple[Tensor, Tensor]) -> None:
        self.compiled = compiled
        self.batch = batch

    def __call__(self) -> float:
        return self.compiled.train_step(*self.batch).item()


def bubble(step: OurStep, num_steps: int = 12) -> dict[str, float]:
    """The measured bubble and the simulated ones, as shares of the makespan; medians over steps.

    ``error`` is that of a step simulated with the times of its own actions, ``error_of_medians``
    that of the schedule simulated with one time per kind and stage.
    """
    _, schedule = step.compiled.plan.schedule.pipeline()
    links = Links(latency_s=message_s())
    stages = range(schedule.shape.num_stages)
    measured, replayed, makespans_s = [], [], []
    seconds: dict[tuple[str, int], list[float]] = {}
    for _ in range(num_steps):
        dist.barrier()
        step()
        ranks = step.compiled.action_times()
        spans = [(t.start_s, t.end_s) for times in ranks for t in times]
        makespan_s = max(end for _, end in spans) - min(start for start, _ in spans)
        makespans_s.append(makespan_s)
        measured.append(1 - sum(end - start for start, end in spans) / makespan_s / len(ranks))
        own = {action: taken_s for times in ranks for action, taken_s in with_messages(times)}
        for action, taken_s in own.items():
            seconds.setdefault((action.kind.value, action.stage), []).append(taken_s)
        nothing = Durations(F=1.0, I=1.0, W=1.0, single=own)
        replayed.append(simulate(schedule, nothing, links).bubble_ratio)
    medians = {place: statistics.median(found) for place, found in seconds.items()}
    durations = Durations(
        **{k: [medians.get((k, s), 0.0) for s in stages] for k in ("F", "I", "W", "B")}
    )
    timeline = simulate(schedule, durations, links)
    found, simulated = statistics.median(measured), statistics.median(replayed)
    return {
        "measured": round(found, 4),
        "simulated": round(simulated, 4),
        "error": round(simulated / found - 1, 3),
        "simulated_of_medians": round(timeline.bubble_ratio, 4),
        "error_of_medians": round(timeline.bubble_ratio / found - 1, 3),
        "measured_makespan_s": round(statistics.median(makespans_s), 4),
        "simulated_makespan_s": round(timeline.makespan_s, 4),
    }


def with_messages(times: list[Any]) -> list[tuple[Action, float]]:
    """Seconds of each computing action, including the handling of its messages.

    A sent message is handled after the action; a received one, which must have arrived, before the
    next.
    """
    found: list[tuple[Action, float]] = []
    ahead_s = 0.0
    for item in times:
        taken_s = item.end_s - item.start_s
        if item.action.kind in COMPUTING:
            found.append((item.action, taken_s + ahead_s))
            ahead_s = 0.0
        elif item.action.kind in SEND_KINDS and found:
            found[-1] = (found[-1][0], found[-1][1] + taken_s)
        else:
            ahead_s += taken_s
    found[-1] = (found[-1][0], found[-1][1] + ahead_s)
    return found


def message_s(num: int = 50) -> float:
    """Median seconds of a one-element message between the processes, sent as ours are.

    This is the latency without the handling of bytes, which is part of the actions' times.
    """
    messages, peer = SharedMemoryMessages.open(dist.group.WORLD), dist.get_rank() ^ 1
    assert messages is not None
    tensor, taken = torch.zeros(1), []
    for _ in range(num):
        time.sleep(0.005)  # as long as an action, so that the waiting process sleeps
        dist.barrier()
        start_s = time.perf_counter()
        for sends in (dist.get_rank() < peer, dist.get_rank() > peer):
            if sends:
                messages.send(peer, [tensor])
            else:
                messages.receive(peer, [tensor])()
        taken.append((time.perf_counter() - start_s) / 2)
    messages.close()
    return statistics.median(taken)


def torch_step(contender: Contender) -> Step:
    """torch's schedule over the same stages, with its loss on all ranks."""
    from torch.distributed import pipelining

    model, x, y = fresh()
    num_devices, rank, per_device = dist.get_world_size(), dist.get_rank(), contender.stages
    num_stages = per_device * num_devices
    size = NUM_LAYERS // num_stages
    second = num_stages - 1 - rank if contender.is_v else num_devices + rank
    own = [rank, second][:per_device]
    parts = {s: nn.Sequential(*model.layers[s * size : (s + 1) * size]) for s in own}
    stages = [pipelining.PipelineStage(parts[s], s, num_stages, torch.device("cpu")) for s in own]
    schedule = getattr(pipelining, str(contender.torch_class))(
        stages[0] if per_device == 1 else stages, NUM_MICROBATCHES, loss_fn=F.mse_loss
    )
    optimizer = make_optimizer([p for part in parts.values() for p in part.parameters()])
    last = num_stages - 1 in own

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        given = (x,) if 0 in own else ()
        options = {"target": y, "losses": losses} if last else {}
        schedule.step(*given, return_outputs=False, **options)
        optimizer.step()
        loss = torch.stack(losses).mean().detach() if last else torch.zeros(())
        dist.all_reduce(loss)
        return loss.item()

    return step


def write(num_processes: int, found: dict[str, Any]) -> None:
    """Add the rows of a number of processes, and keep those of the other."""
    times: dict[str, list[float]] = found["times"]
    rows: dict[str, Any] = {}
    for name in CONTENDERS:
        rows[name] = {"ours_s": round(statistics.median(times[name]), 4)}
        theirs = times.get(f"torch {name}")
        if theirs is not None:
            ratios = [a / b for a, b in zip(times[name], theirs)]
            rows[name] |= {
                "torch_s": round(statistics.median(theirs), 4),
                "of_medians": round(statistics.median(times[name]) / statistics.median(theirs), 3),
                "median_of_rounds": round(statistics.median(ratios), 3),
            }
        print(f"{name}: {rows[name]}")
        print(f"    bubble: {found['bubbles'][name]}", flush=True)
    document: dict[str, Any] = {"by_processes": {}}
    if RESULT.exists():
        document |= json.loads(RESULT.read_text())
    document |= {
        "model": f"{NUM_LAYERS} layers of {WIDTH}, {BATCH} sequences of {LENGTH}, "
        f"{NUM_MICROBATCHES} micro-batches",
        "target": "1.00 or less of torch.distributed.pipelining",
        "target_of_bubbles": "simulated within 10% of measured",
    }
    document["by_processes"][str(num_processes)] = {
        **setting("torch"),
        "schedules": rows,
        "bubbles": found["bubbles"],
        "times_s": {name: [round(t, 4) for t in each] for name, each in times.items()},
    }
    RESULT.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
