"""Architectures of ``transformers`` that autopar trains on two processes as eager PyTorch does.

Run: ``python benchmarks/architectures.py [--limit N] [--only NAME ...]``. Every model type of the
auto-model mappings is built small (see ``small_transformers.py``) and goes through

====== ==========================================================================================
build  the model is made, with random weights, in train mode, in float64 if possible
eager  three steps of SGD in eager PyTorch, twice: both runs must agree, or there is no reference
export ``torch.export`` alone captures the call, with the loss (the share is of these)
capture ``autopar.frontend.capture``
plan   ``autopar.plan`` for two CPU devices with free links, so that every split pays
train  ``autopar.compile`` with that plan: three steps on two real gloo processes
match  losses, the first step's gradients, and the weights and buffers after the third
====== ==========================================================================================

An error is the largest difference of any tensor, relative to its largest number (or to a hundredth
of the largest number of all tensors of that kind, where that is more). Each architecture has a time
limit and runs in a process that may die. Writes ``benchmarks/results/architectures.json`` after
each; results of the same versions are reused unless ``--again``, ``--failed`` or ``--only`` is
given.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from setting import setting
from small_transformers import (
    Architecture,
    NoBatchError,
    Task,
    architectures,
    build,
    find_task,
    loss_of,
)
from torch import Tensor, nn

import autopar
from autopar import Cluster
from autopar.cost_models import DeviceSpec, Level, PeakFlops

RESULT = Path(__file__).parent / "results" / "architectures.json"
PACKAGES = ("torch", "transformers", "autopar")
STAGES = ("build", "eager", "export", "capture", "plan", "train", "match")
NUM_STEPS, NUM_DEVICES = 3, 2
# transformers computes norms, softmax and losses in float32 in any dtype.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}
LIMIT_S = 240.0
TRIALS_PER_PROCESS = 20
REASON_LENGTH = 240
Row = dict[str, Any]

# Slow devices on free links: all work that can be split is worth splitting.
CLUSTER = Cluster(
    device=DeviceSpec(
        name="a slow device, so that every split pays",
        kind="cpu",
        peak_flops_per_s=PeakFlops(float32=1e8, float64=1e8),
        memory_bandwidth_bytes_per_s=1e8,
        memory_bytes=8 << 30,
        kernel_launch_s=0.0,
    ),
    levels=(Level(name="free links", size=NUM_DEVICES, latency_s=0.0, bandwidth_bytes_per_s=1e15),),
    backend="gloo",
)


class StageError(Exception):
    """A stage had a wrong result without an error of its own; the message says which."""


class Training:
    """The results of a few steps of training, eager or compiled."""

    def __init__(self) -> None:
        self.losses: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self.state: dict[str, Tensor] = {}


optimizer = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)


def train_eagerly(model: nn.Module, task: Task) -> Training:
    """Train ``model`` itself, and restore it afterwards."""
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    stepper, result = optimizer(list(model.parameters())), Training()
    for step in range(NUM_STEPS):
        model.zero_grad(set_to_none=True)
        loss = loss_of(model, task, task.make_batch(step))
        loss.backward()
        result.losses[f"loss of step {step + 1}"] = loss.detach()
        if step == 0:
            result.gradients = {
                n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
            }
        stepper.step()
    model.zero_grad(set_to_none=True)
    result.state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(start)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    return result


def train_compiled(model: nn.Module, task: Task, plan: autopar.Plan) -> Training:
    result = Training()
    with autopar.compile(
        model,
        CLUSTER,
        example_inputs=task.make_batch(0),
        loss_fn=task.loss_fn,
        optimizer=optimizer,
        plan=plan,
    ) as compiled:
        for step in range(NUM_STEPS):
            loss = compiled.train_step(**task.make_batch(step))
            result.losses[f"loss of step {step + 1}"] = loss
            if step == 0:
                result.gradients = compiled.gradients()
        result.state = compiled.full_state_dict()
    return result


def error_of(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest relative error and the name of its tensor; see the module's docstring."""
    known = {n: t.double() for n, t in expected.items() if t.numel()}
    largest = max((t.abs().max().item() for t in known.values()), default=0.0)
    worst, where = 0.0, ""
    for name, tensor in known.items():
        difference = (got[name].double() - tensor).abs().max().item()
        scale = max(tensor.abs().max().item(), largest / 100) or 1.0
        if not difference / scale <= worst:
            worst, where = difference / scale, name
    return worst, where


class WholeStep(nn.Module):
    """The model's call with its loss: what is captured."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model, self.task = model, task

    def forward(self, **batch: Any) -> Tensor:
        return loss_of(self.model, self.task, batch)


class Trial:
    """One architecture on its way through the stages; ``row`` holds its results so far."""

    def __init__(self, one: Architecture, say: Callable[[str], None]) -> None:
        self.one, self.say = one, say
        self.dtype = torch.float64
        self.row: Row = {"class": one.class_name, "mapping": one.task, "passed": [], "seconds": {}}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.say(name)
        start = time.perf_counter()
        try:
            yield
            self.row["passed"].append(name)
        finally:
            self.row["seconds"][name] = round(time.perf_counter() - start, 2)

    def run(self) -> Row:
        try:
            self._run()
        except Exception as error:
            self.row.setdefault("reason", reason_of(error))
        return self.row

    def _run(self) -> None:
        row = self.row
        with self.stage("build"):
            model = build(self.one, torch.float64)
            row["num_parameters"] = sum(p.numel() for p in model.parameters())
        with self.stage("eager"):
            try:
                task, expected = self._reference(model)
            except (NoBatchError, RuntimeError):  # for example, grouped products have no float64
                self.dtype = torch.float32
                model = build(self.one, torch.float32)
                task, expected = self._reference(model)
        row["dtype"] = str(self.dtype).removeprefix("torch.")
        batch = task.make_batch(0)
        try:
            with self.stage("export"):
                torch.export.export(WholeStep(model, task), (), batch, strict=False)
        except Exception as error:  # autopar may still succeed; if not, export is blamed
            row["reason"] = reason_of(error)
        with self.stage("capture"):
            captured = autopar.capture(model, batch, loss_fn=task.loss_fn)
            row["num_ops"] = len(captured.graph.ops)
        row.pop("reason", None)
        with self.stage("plan"):
            plan = autopar.plan(model, CLUSTER, batch, loss_fn=task.loss_fn)
            row["num_split_ops"] = len(plan.ops)
            row["ops_without_rule"] = dict(plan.redundant_ops)
        with self.stage("train"):
            got = train_compiled(model, task, plan)
        with self.stage("match"):
            self._match(got, expected)

    def _reference(self, model: nn.Module) -> tuple[Task, Training]:
        task = find_task(self.one, model)
        self.row["inputs"] = sorted(task.make_batch(0))
        self.row["loss"] = "its own" if task.loss_fn is None else "distance to a pattern"
        expected, again = train_eagerly(model, task), train_eagerly(model, task)
        for kind in ("losses", "gradients", "state"):
            error, name = error_of(getattr(again, kind), getattr(expected, kind))
            if not error <= TOLERANCES[self.dtype] / 100:
                raise StageError(f"two eager runs differ by {error:.1e} in {kind}, {name}")
        return task, expected

    def _match(self, got: Training, expected: Training) -> None:
        if got.gradients.keys() != expected.gradients.keys():
            differing = sorted(got.gradients.keys() ^ expected.gradients.keys())
            raise StageError(f"gradients of other parameters than in eager: {differing[:3]}")
        self.row["errors"] = {}
        wrong = []
        for kind in ("losses", "gradients", "state"):
            error, name = error_of(getattr(got, kind), getattr(expected, kind))
            self.row["errors"][kind] = float(f"{error:.2g}")
            if not error <= TOLERANCES[self.dtype]:
                wrong.append(f"{kind} off by {error:.1e} in {name}")
        if wrong:
            raise StageError("; ".join(wrong))


def reason_of(error: BaseException) -> str:
    """One line on what went wrong, without the paths of this machine."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {' '.join(lines)}"
    text = re.sub(r"/\S*/(?=[\w.-]+\.py)", "", text)
    return text if len(text) <= REASON_LENGTH else text[: REASON_LENGTH - 3] + "..."


def serve(connection: Connection) -> None:
    """The child's side: receives names; sends stages as they begin, then rows."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch shows each graph that it cannot export
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    by_name = {one.name: one for one in architectures()}
    with contextlib.suppress(EOFError):
        while True:
            one = by_name[connection.recv()]
            row = Trial(one, lambda stage: connection.send(("stage", stage))).run()
            connection.send(("row", row))


class Tester:
    """The parent's side: a child that is replaced when it dies, hangs, or has done its share."""

    def __init__(self) -> None:
        self.process: Any = None
        self.num_trials = 0

    def check(self, one: Architecture, limit_s: float) -> Row:
        if self.process is None or self.num_trials >= TRIALS_PER_PROCESS:
            self._start()
        self.num_trials += 1
        self.connection.send(one.name)
        deadline_s = time.monotonic() + limit_s
        stage, passed = "build", []
        try:
            while self.connection.poll(max(0.0, deadline_s - time.monotonic())):
                kind, value = self.connection.recv()
                if kind == "row":
                    return value
                passed += [] if value == "build" else [stage]
                stage = value
            reason = f"no end of {stage} within {limit_s:.0f} s"
        except (EOFError, ConnectionError):
            self.process.join()
            reason = f"the process died in {stage} with exit code {self.process.exitcode}"
        self.close()
        return {"class": one.class_name, "mapping": one.task, "passed": passed, "reason": reason}

    def _start(self) -> None:
        self.close()
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,))
        self.process.start()
        theirs.close()
        self.num_trials = 0

    def close(self) -> None:
        if self.process is not None:
            self.connection.close()
            self.process.kill()  # its workers notice, and exit
            self.process.join()
            self.process = None


def failed_stage(row: Row) -> str | None:
    """The first stage that a row did not pass; a successful capture overrides a failed export."""
    missing = [stage for stage in STAGES if stage not in row["passed"]]
    if missing == ["export"] or not missing:
        return None
    return missing[0]


def summary_of(rows: Mapping[str, Row]) -> Row:
    passed = {stage: sum(stage in r["passed"] for r in rows.values()) for stage in STAGES}
    matched = sum({"export", "match"} <= set(r["passed"]) for r in rows.values())
    return {
        "tried": len(rows),
        **{f"passed_{stage}": count for stage, count in passed.items()},
        "exported_and_matched": matched,
        "share_of_exported": round(matched / passed["export"], 4) if passed["export"] else None,
    }


def document_of(rows: Mapping[str, Row]) -> Row:
    return {
        **setting(*PACKAGES),
        "settings": {
            "num_devices": NUM_DEVICES,
            "num_steps": NUM_STEPS,
            "tolerances": {str(k).removeprefix("torch."): v for k, v in TOLERANCES.items()},
        },
        "summary": summary_of(rows),
        "architectures": {name: rows[name] for name in sorted(rows)},
    }


def known_rows() -> dict[str, Row]:
    """The results of an earlier run with the same versions."""
    if not RESULT.exists():
        return {}
    document = json.loads(RESULT.read_text())
    return (
        document["architectures"] if document["versions"] == setting(*PACKAGES)["versions"] else {}
    )


def show(name: str, row: Row) -> None:
    errors = row.get("errors", {})
    numbers = f"{row.get('num_split_ops', 0)}/{row.get('num_ops', 0)} split"
    worst = f"{max(errors.values()):.0e}" if errors else ""
    status = failed_stage(row)
    print(
        f"{name:30} {'matches' if status is None else 'fails: ' + status:15} {numbers:16} "
        f"{worst:6} {sum(row.get('seconds', {}).values()):6.1f} s  {row.get('reason', '')}",
        flush=True,
    )


def chosen(names: Sequence[str], limit: int | None) -> list[Architecture]:
    everything = architectures()
    unknown = set(names) - {one.name for one in everything}
    if unknown:
        raise SystemExit(f"unknown model types: {', '.join(sorted(unknown))}")
    return [one for one in everything if not names or one.name in names][:limit]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="model types")
    parser.add_argument("--limit", type=int, help="at most this many")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds for each")
    parser.add_argument("--failed", action="store_true", help="also what failed before")
    parser.add_argument("--again", action="store_true", help="also all that is known already")
    options = parser.parse_args()
    rows = known_rows()
    tester = Tester()
    for one in chosen(options.only, options.limit):
        known = one.name in rows and not (options.failed and failed_stage(rows[one.name]))
        if not known or options.again or options.only:
            rows[one.name] = tester.check(one, options.limit_s)
            RESULT.write_text(json.dumps(document_of(rows), indent=1) + "\n")
        show(one.name, rows[one.name])
    tester.close()
    for name, value in summary_of(rows).items():
        print(f"{name:24} {value}")
    by_stage = Counter(failed_stage(row) for row in rows.values())
    print("stopped at:", {str(stage): n for stage, n in by_stage.items() if stage})


if __name__ == "__main__":
    main()
