"""Data parallelism with overlapped reductions compared with DistributedDataParallel, two processes.

    python benchmarks/overlap.py [--rounds 6] [--cases gpt2 resnet50] [--links full 1gbit]

Two gloo processes hold each contender's own copy of one model and optimizer. A round runs `STEPS`
consecutive steps of each contender, in a new order, after a barrier, until the weights of the last
step are final; the time is that of the slower process, per step. Ours: data parallelism without a
schedule, with the conventional order (a stage's reductions start after its last W, its weights are
updated just before its next forward) and with reverse first-k (k by the plan's prices). Batch
normalization is local in all of them, as in DistributedDataParallel.

Over the full link, ours communicates through sockets on the computing thread (one host). The link
``1gbit`` emulates one between hosts, where gloo does all communication, and is slowed down in the
process (`SlowLink`): an all-reduce of 64 KiB or more is complete, for DistributedDataParallel (by a
communication hook) and for ours alike, when the collective has ended and its bytes would have
passed a link of that bandwidth, one after another.

Prints and writes to benchmarks/results/overlap.json medians, and ours over DDP's, also by round.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cpu_models import MODELS, fresh
from msgspec import structs
from runtime import timed
from setting import num_cores, setting
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.comm.transports import registry
from autopar.comm.transports.c10d import GlooCollectives
from autopar.schedules import Kind

RESULT = Path(__file__).parent / "results" / "overlap.json"
LINKS: dict[str, float | None] = {"full": None, "1gbit": 1e9 / 8}
"""Bandwidths in bytes per second; None leaves the link as it is."""
SMALL_BYTES = 64 * 1024
STEPS = 8
NUM_STAGES = {"resnet50": 18}
"""As many as there are residual units and transformer layers, and what lies around them."""
OURS = {
    "autopar": None,
    "autopar conventional": "conventional",
    "autopar reverse-first-k": "reverse_first_k",
}
make_optimizer = functools.partial(torch.optim.AdamW, lr=1e-4)
Steps = Callable[..., Any]


class SlowLink:
    """All-reduces that take at least as long as over a link of this bandwidth.

    Each of n processes sends 2 (n - 1) / n of the bytes.
    """

    def __init__(self, bandwidth_bytes_per_s: float) -> None:
        self.bandwidth_bytes_per_s = bandwidth_bytes_per_s
        self.free_at_s = 0.0
        self.started: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.all_reduce = dist.all_reduce
        threading.Thread(target=self._complete, daemon=True).start()

    def start(self, tensor: Tensor, group: Any = None) -> torch.futures.Future[Tensor]:
        """Start a sum in place; the future is complete when the link is done."""
        size = dist.get_world_size(group)
        sent_bytes = tensor.nbytes * 2 * (size - 1) / size
        begin_s = max(time.perf_counter(), self.free_at_s)
        self.free_at_s = begin_s + sent_bytes / self.bandwidth_bytes_per_s
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        work = self.all_reduce(tensor, group=group, async_op=True)
        self.started.put((work, self.free_at_s, tensor, done))
        return done

    def _complete(self) -> None:
        while True:
            work, end_s, tensor, done = self.started.get()
            work.wait()
            time.sleep(max(end_s - time.perf_counter(), 0.0))
            done.set_result(tensor)

    def install(self) -> None:
        """Slow down ``torch.distributed.all_reduce`` in this process."""

        def slowed(
            tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
        ) -> Any:
            if tensor.nbytes < SMALL_BYTES or op != dist.ReduceOp.SUM:
                return self.all_reduce(tensor, op, group=group, async_op=async_op)
            done = self.start(tensor, group)
            if async_op:
                return done
            done.wait()
            return None

        dist.all_reduce = slowed
        registry.COLLECTIVES = (GlooCollectives,)  # this link is not within a host

    def mean(self, tensor: Tensor) -> torch.futures.Future[Tensor]:
        """Start an average in place: DistributedDataParallel's own hook, over this link."""
        return self.start(tensor.div_(dist.get_world_size()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--cases", nargs="+", choices=list(MODELS), default=["gpt2", "resnet50"])
    parser.add_argument("--links", nargs="+", choices=list(LINKS), default=list(LINKS))
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(*arguments.worker, arguments.rounds, Path(arguments.out))
        return
    for case in arguments.cases:
        for link in arguments.links:
            write(run(case, link, arguments.rounds))


def run(case: str, link: str, rounds: int) -> dict[str, Any]:
    """Start the processes of one case; returns the row that rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", __file__, "--worker", case, link]
        command += ["--rounds", str(rounds), "--out", str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, num_cores() // 2))}
        subprocess.run(command, env=environment, check=True, timeout=1800)
        row: dict[str, Any] = json.loads(out.read_text())
    return row


def worker(case: str, link: str, rounds: int, out: Path) -> None:
    """One rank: make every contender, compare their losses, then time them in turn."""
    dist.init_process_group("gloo")
    bandwidth = LINKS[link]
    slow = None if bandwidth is None else SlowLink(bandwidth)
    contenders = {"DDP": ddp_steps(case, slow)}
    if slow is not None:
        slow.install()
    orders: dict[str, list[int]] = {}
    for name, schedule in OURS.items():
        contenders[name], orders[name] = our_steps(case, bandwidth, schedule)
    # The second loss follows the first update; later ones would differ by accumulated rounding.
    losses = {name: steps(2) for name, steps in contenders.items()}
    for name, loss in losses.items():
        torch.testing.assert_close(loss, losses["DDP"], rtol=1e-3, atol=1e-3, msg=name)
    for steps in contenders.values():
        steps()
    times = timed(contenders, rounds, warm_up=0)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(row(case, link, times, orders)))
    dist.barrier()
    dist.destroy_process_group()


def ddp_steps(case: str, slow: SlowLink | None) -> Steps:
    rank, size = dist.get_rank(), dist.get_world_size()
    model, batch = fresh(case)
    half = {name: x.chunk(size)[rank].contiguous() for name, x in batch.items()}
    wrapped = DistributedDataParallel(model)
    if slow is not None:
        wrapped.register_comm_hook(None, lambda _, bucket: slow.mean(bucket.buffer()))
    optimizer = make_optimizer(wrapped.parameters())

    def steps(count: int = STEPS) -> Tensor:
        for _ in range(count):
            optimizer.zero_grad(set_to_none=True)
            loss: Tensor = wrapped(**half).loss
            loss.backward()
            optimizer.step()
        mean = loss.detach() / size  # the ranks' halves have equally many targets
        dist.all_reduce(mean)
        return mean

    return steps


def our_steps(case: str, bandwidth: float | None, schedule: str | None) -> tuple[Steps, list[int]]:
    """Our steps under a schedule, and the order in which it reduces the stages."""
    model, batch = fresh(case)
    cluster = autopar.Cluster.detect(dist.get_world_size())
    if bandwidth is not None:
        levels = [structs.replace(x, bandwidth_bytes_per_s=bandwidth) for x in cluster.levels]
        slowdown = autopar.Cluster.preset("cpu", nodes=2).overlap_slowdown  # as between hosts
        cluster = structs.replace(cluster, levels=tuple(levels), overlap_slowdown=slowdown)
    compiled = autopar.compile(
        model, cluster, example_inputs=batch, optimizer=make_optimizer, batch_norm="local",
        constraints=autopar.Force("data_parallel"), schedule=schedule,
        num_stages=None if schedule is None else NUM_STAGES.get(case, 8),
    )  # fmt: skip
    staged = compiled.plan.schedule.pipeline()
    steps_of = staged[1].devices[0] if staged is not None else ()
    order = [item.action.stage for item in steps_of if item.action.kind is Kind.G]

    def steps(count: int = STEPS) -> Tensor:
        for _ in range(count):
            loss = compiled.train_step(**batch)
        compiled.gradients()  # wait for the last reductions and updates
        return loss

    return steps, order


def row(
    case: str, link: str, times: dict[str, list[float]], orders: dict[str, list[int]]
) -> dict[str, Any]:
    def ratios(own: str) -> dict[str, float]:
        rounds = [a / b for a, b in zip(times[own], times["DDP"])]
        medians = statistics.median(times[own]) / statistics.median(times["DDP"])
        return {
            "of_medians": round(medians, 3),
            "median_of_rounds": round(statistics.median(rounds), 3),
        }

    each = {name: [round(t / STEPS, 4) for t in found] for name, found in times.items()}
    return {
        "case": case,
        "link": link,
        "median_s": {name: round(statistics.median(found), 4) for name, found in each.items()},
        "stages_reduced_in_order": {name: order for name, order in orders.items() if order},
        "over_ddp": {name: ratios(name) for name in OURS},
        "times_s": each,
    }


def write(made: dict[str, Any]) -> None:
    """Print a row, and replace that of the same case and link."""
    print(f"{made['case']}, link {made['link']}: {made['median_s']}")
    for name, each in made["over_ddp"].items():
        print(f"    {name} / DDP: {each['of_medians']} (by round {each['median_of_rounds']})")
    rows = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    kept = [r for r in rows if (r["case"], r["link"]) != (made["case"], made["link"])]
    document = {
        **setting("torch", "transformers"),
        "num_processes": 2,
        "steps_a_round": STEPS,
        "slowed_links": "all-reduces of 64 KiB or more end when a link of so many bytes a second "
        "would have passed them, made in the process, for DDP and autopar alike",
        "links_bytes_per_s": LINKS,
        "target": "1.00 or less of DistributedDataParallel",
        "rows": sorted([*kept, made], key=lambda r: (r["case"], r["link"])),
    }
    RESULT.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
