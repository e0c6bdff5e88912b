"""The ``autopar`` command: make, show, explain, draw and compare plans; measure steps.

Reports go to standard output, progress and errors to standard error. It exits with 0, with 1 for an
error that it explains, and with 2 for a wrong command line. Nothing is colored. Only commands that
search or train import torch.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import gc
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from autopar._version import __version__
from autopar.base.completion import completion_script
from autopar.base.documents import shown
from autopar.base.errors import AutoparError, InputError
from autopar.base.gc_pause import collector_paused
from autopar.base.units import format_bytes
from autopar.cost_models import Cluster
from autopar.cost_models.presets import PRESET_NAMES
from autopar.plans.alternatives import alternatives
from autopar.plans.document import Plan
from autopar.plans.explanation import difference
from autopar.plans.layout import WIDTH, Section
from autopar.plans.page import Page
from autopar.plans.summary import headline, memory_rows, summary_page
from autopar.plans.text import format_plan

LEAST_WIDTH = 40

EXAMPLES = """\
examples:
  autopar plan models:llama --cluster h100-sxm:8x8 -o plan.json
  autopar plan models:llama --cluster my.json --precision bf16 --schedule auto
  autopar show plan.json
  autopar explain plan.json layers.3.mlp
  autopar diff plan.json other.json
  autopar report plan.json -o report.html
  autopar figure plan.json memory -o memory.svg
  autopar profile models:llama --devices 2 --plan plan.json
  autopar clusters

exit status: 0 if done, 1 if it fails, 2 for a wrong command line
"""
FACTORY = """\
MODULE:FACTORY names a function without arguments that returns a model and its
example inputs:

  def llama():
      return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}

MODULE is imported from the current folder or the environment.
"""
ON_META = """\
The function is called under the meta device, so that a model takes no memory,
and again without it if it raises an error there.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    if arguments is None:  # a process of its own, which ends before a collection would pay
        gc.disable()
    atexit.register(gc.freeze)
    chosen = _parser().parse_args(arguments)
    try:
        chosen.run(chosen)
    except BrokenPipeError:  # the reader of standard output has left, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (AutoparError, OSError) as error:
        print(f"autopar: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("autopar: interrupted", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="autopar", description="Plan how to train a model on a cluster, and read plans.",
        epilog=EXAMPLES, formatter_class=raw,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"autopar {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], None], text: str, example: str
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", formatter_class=raw,
            epilog=f"example:\n  autopar {example}",
        )  # fmt: skip
        made.set_defaults(run=run)
        return made

    _add_planning(command)
    _add_reading(command)
    _add_others(command)
    return parser


AddCommand = Callable[
    [str, Callable[[argparse.Namespace], None], str, str], argparse.ArgumentParser
]
"""Adds a command: its name, what runs it, its help and an example; returns its parser."""


def _add_planning(command: AddCommand) -> None:
    """The commands that search a plan."""
    plan = command(
        "plan", _plan, "search the fastest plan for a model on a cluster",
        "plan models:llama --cluster h100-sxm:8x8 -o plan.json",
    )  # fmt: skip
    _add_search(plan)
    to_file = _argument(output_file)
    plan.add_argument("-o", "--output", metavar="PLAN", type=to_file, help="write the plan as JSON")
    plan.add_argument(
        "--report", metavar="FILE", type=to_file,
        help="write the report as HTML, with the search's progress",
    )  # fmt: skip
    memory = command(
        "estimate-memory", _estimate_memory, "memory of a device under the plan and others",
        "estimate-memory models:llama --cluster a100-80:1x8",
    )  # fmt: skip
    _add_search(memory)


def _add_reading(command: AddCommand) -> None:
    """The commands that read a plan."""
    show = command("show", _show, "print the report of a plan", "show plan.json --full")
    _add_plan(show)
    show.add_argument("--full", action="store_true", help="all details")
    explain = command(
        "explain", _explain, "explain the strategy of a module, block, parameter or op",
        "explain plan.json layers.3.mlp",
    )  # fmt: skip
    _add_plan(explain)
    explain.add_argument("name", metavar="NAME", help="such as layers.3.mlp")
    diff = command("diff", _diff, "compare two plans", "diff plan.json other.json")
    _add_plan(diff)
    diff.add_argument("other", metavar="OTHER", help="the plan to compare with")
    report = command(
        "report", _report, "write a plan's report as one HTML file",
        "report plan.json -o report.html",
    )  # fmt: skip
    _add_plan(report)
    _add_output(report)
    trace = command(
        "trace", _trace, "write a plan's predicted timeline for ui.perfetto.dev",
        "trace plan.json -o trace.json",
    )  # fmt: skip
    _add_plan(trace)
    _add_output(trace)
    figure = command(
        "figure", _figure, "draw a figure of a plan as SVG, PDF or PNG",
        "figure plan.json memory -o memory.svg",
    )  # fmt: skip
    _add_plan(figure)
    figure.add_argument("figure", metavar="NAME", help="such as strategy, memory or timeline")
    _add_output(figure)


def _add_others(command: AddCommand) -> None:
    """The commands that train, list presets, or describe the command line itself."""
    _add_profile(
        command(
            "profile", _profile, "train on this machine, measured beside the prediction",
            "profile models:llama --devices 2 --plan plan.json",
        )
    )  # fmt: skip
    command("clusters", _clusters, "list the presets of clusters", "clusters")
    cluster = command(
        "cluster", _cluster, "print a cluster as JSON, to be edited", "cluster h100-sxm:8x8"
    )
    cluster.add_argument(
        "cluster", metavar="CLUSTER", type=_argument(cluster_name), help=CLUSTER_HELP
    )
    command("schema", _schema, "print the JSON Schema of plans", "schema")
    completion = command(
        "completion", _completion, "print a script that completes this command in a shell",
        "completion bash > ~/.local/share/bash-completion/completions/autopar",
    )  # fmt: skip
    completion.add_argument("shell", choices=("bash", "zsh"), help="the shell")


CLUSTER_HELP = "a preset with nodes x devices a node (h100-sxm:8x8), a JSON file, or 'detect'"


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help="a plan's JSON file")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", metavar="FILE", required=True, type=_argument(output_file),
        help="the file to write",
    )  # fmt: skip


def _argument(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """``read`` for argparse: what it refuses is a wrong command line."""

    def checked(text: str) -> Any:
        try:
            return read(text)
        except InputError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked


def _add_factory(parser: argparse.ArgumentParser, text: str) -> None:
    parser.description = f"{parser.description}\n\n{text}"
    parser.add_argument(
        "factory", metavar="MODULE:FACTORY", type=_argument(factory_name),
        help="returns a model and its inputs",
    )  # fmt: skip


def _add_profile(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command that measures."""
    _add_factory(parser, FACTORY)
    parser.add_argument(
        "--devices", required=True, type=_argument(devices_of), metavar="DEVICES",
        help="a number, or a device such as cuda:0",
    )  # fmt: skip
    parser.add_argument("--plan", metavar="PLAN", help="run this plan instead of a search")
    parser.add_argument(
        "--num-steps", type=_argument(count_of), default=10, metavar="N", help="steps to measure"
    )
    parser.add_argument(
        "--trace", metavar="FILE", type=_argument(output_file),
        help="write a trace for ui.perfetto.dev",
    )  # fmt: skip


def _add_search(parser: argparse.ArgumentParser) -> None:
    """The arguments of commands that search."""
    _add_factory(parser, FACTORY + ON_META)
    parser.add_argument("--cluster", required=True, type=_argument(cluster_name), help=CLUSTER_HELP)
    parser.add_argument("--precision", choices=("bf16", "fp16"), help="of computation")
    parser.add_argument(
        "--mesh", metavar="AXES", type=_argument(mesh_of),
        help="such as dp=8,tp=8; sizes may be left out",
    )  # fmt: skip
    parser.add_argument("--schedule", help="'auto' or a pipeline schedule such as 1f1b")
    parser.add_argument("--num-stages", type=int, metavar="N", help="stages of a pipeline")
    parser.add_argument("--num-microbatches", type=int, metavar="N", help="parts of the batch")
    parser.add_argument("--recompute", help="none, full, or a limit such as 8GiB or 0.5")
    parser.add_argument(
        "--offload", action=argparse.BooleanOptionalAction,
        help="tensors may move to the host; by default where nothing else fits a GPU",
    )  # fmt: skip
    parser.add_argument(
        "--time-limit", dest="time_limit_s", type=float, metavar="SECONDS",
        help="processor time of a search over schedules or micro-batches (60)",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="no progress")


# --- commands ------------------------------------------------------------------------------------
def _plan(chosen: argparse.Namespace) -> None:
    found = _searched(chosen)
    if chosen.output:
        found.to_json(chosen.output)
    if chosen.report:
        found.save_report(chosen.report)
    _print_page(summary_page(found))


def _estimate_memory(chosen: argparse.Namespace) -> None:
    found = _searched(chosen)
    usable = found.cluster.usable_memory_bytes
    others = Section(
        title="other strategies, estimated op by op and without recomputation",
        columns=("strategy", "mesh", "a device", "fits"),
        rows=tuple(
            (
                each.name,
                each.mesh,
                format_bytes(each.memory_bytes),
                "yes" if each.memory_bytes <= usable else "no",
            )
            for each in alternatives(found)
            if each.memory_bytes is not None
        ),
    )
    memory = Section(title="memory of a device under the plan", rows=memory_rows(found))
    sections = (memory, others) if others.rows else (memory,)
    _print_page(Page(headline=headline(found), sections=sections))


def _show(chosen: argparse.Namespace) -> None:
    found = Plan.from_json(Path(chosen.plan))
    if chosen.full:
        print(format_plan(found, _width()))
    else:
        _print_page(summary_page(found))


def _explain(chosen: argparse.Namespace) -> None:
    _print_page(Plan.from_json(Path(chosen.plan)).explain(chosen.name))


def _diff(chosen: argparse.Namespace) -> None:
    plan, other = (Plan.from_json(Path(path)) for path in (chosen.plan, chosen.other))
    _print_page(difference(plan, other, (chosen.plan, chosen.other)))


def _report(chosen: argparse.Namespace) -> None:
    Plan.from_json(Path(chosen.plan)).save_report(chosen.output)


def _trace(chosen: argparse.Namespace) -> None:
    Plan.from_json(Path(chosen.plan)).save_trace(chosen.output)


def _figure(chosen: argparse.Namespace) -> None:
    figure, _ = Plan.from_json(Path(chosen.plan)).figure(chosen.figure)
    suffix = Path(chosen.output).suffix.removeprefix(".")
    if suffix not in figure.canvas.get_supported_filetypes():
        raise InputError(f"{shown(chosen.output)} is no picture; write -o {chosen.figure}.svg")
    figure.savefig(chosen.output, dpi=150)


def _profile(chosen: argparse.Namespace) -> None:
    import torch
    from torch import Tensor

    from autopar.api import compile as compile_model
    from autopar.frontend.factory import factory_of

    made = factory_of(chosen.factory, on_meta=False)
    inputs = (made.inputs,) if isinstance(made.inputs, Tensor) else made.inputs
    positional = () if isinstance(inputs, Mapping) else inputs
    named = inputs if isinstance(inputs, Mapping) else {}
    plan = None if chosen.plan is None else Plan.from_json(Path(chosen.plan))
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-4)
    with compile_model(
        made.model, chosen.devices, inputs, optimizer=optimizer, plan=plan
    ) as compiled:
        found = compiled.profile(*positional, num_steps=chosen.num_steps, **named)
    if chosen.trace:
        found.save_trace(chosen.trace)
    print(found.report(_width()))


def _clusters(_: argparse.Namespace) -> None:
    rows = []
    for name in PRESET_NAMES:
        cluster = Cluster.preset(name)
        device = cluster.device
        peak = max(device.peak_flops_per_s.bfloat16, device.peak_flops_per_s.float16)
        rows.append(
            (
                name,
                device.name,
                format_bytes(device.memory_bytes),
                f"{(peak or device.peak_flops_per_s.float32) / 1e12:,.4g} TFLOP/s",
                f"{device.memory_bandwidth_bytes_per_s / 1e9:,.0f} GB/s",
                ", ".join(level.name for level in cluster.levels[: cluster.num_node_levels]),
            )
        )
    table = Section(
        title="",
        columns=("preset", "device", "memory", "16-bit peak", "bandwidth", "links in a node"),
        rows=tuple(rows),
        notes=("Use one as PRESET:NODESxDEVICES, such as h100-sxm:8x8.",),
        wraps=True,
    )
    _print_page(Page(headline=f"{len(rows)} presets of clusters", sections=(table,)))


def _cluster(chosen: argparse.Namespace) -> None:
    print(cluster_of(chosen.cluster).to_json(), end="")


def _schema(_: argparse.Namespace) -> None:
    print(msgspec.json.format(msgspec.json.encode(msgspec.json.schema(Plan)), indent=2).decode())


def _completion(chosen: argparse.Namespace) -> None:
    from autopar.plans.figures.catalog import FIGURES  # imports matplotlib

    words = {"cluster": PRESET_NAMES, "figure": tuple(FIGURES), "recompute": ("none", "full")}
    print(completion_script(_parser(), chosen.shell, words), end="")


def _width() -> int:
    """Columns to print: those of the terminal, if there is one, up to the width of reports."""
    if not sys.stdout.isatty():
        return WIDTH
    return max(LEAST_WIDTH, min(WIDTH, shutil.get_terminal_size().columns))


def _print_page(page: Page) -> None:
    print(page.to_text(_width()))


# --- arguments -----------------------------------------------------------------------------------
@collector_paused()
def _searched(chosen: argparse.Namespace) -> Plan:
    """The plan that the arguments of a search ask for."""
    from autopar.api import plan as make_plan
    from autopar.frontend.factory import factory_of

    cluster = cluster_of(chosen.cluster)
    options: dict[str, Any] = {
        "mesh": chosen.mesh,
        "recompute": recompute_of(chosen.recompute),
    }
    for name in (
        "precision", "schedule", "num_stages", "num_microbatches", "offload",
    ):  # fmt: skip
        options[name] = getattr(chosen, name)
    if chosen.time_limit_s is not None:
        options["time_limit_s"] = chosen.time_limit_s
    made = factory_of(chosen.factory)
    return make_plan(made.model, cluster, made.inputs, progress=not chosen.quiet, **options)


def factory_name(text: str) -> str:
    """The text, if it has the form ``MODULE:FACTORY``; raises InputError."""
    name, _, attribute = text.partition(":")
    if not (name and attribute):
        raise InputError(f"{shown(text)} is no factory; write MODULE:FACTORY, such as models:llama")
    return text


def output_file(text: str) -> str:
    """The text, if it can be the name of a file: its folder exists; raises InputError."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        why = "is a folder" if path.is_dir() else f"is in {shown(str(path.parent))}, not a folder"
        raise InputError(f"{shown(text)} {why}; write the name of a file in a folder that exists")
    return text


def cluster_name(text: str) -> str:
    """The text, if `cluster_of` can read the size in it; raises InputError."""
    name, colon, size = text.partition(":")
    nodes, _, devices = size.partition("x")
    if colon and not text.endswith(".json") and not (nodes.isdecimal() and devices.isdecimal()):
        raise InputError(
            f"the cluster's size is {shown(size)}; write nodes x devices a node: {name}:8x8"
        )
    return text


def cluster_of(text: str) -> Cluster:
    """``h100-sxm:8x8``, ``h100-sxm`` (one node of 8), a JSON file, or ``detect``.

    Raises ClusterError, or InputError where the size cannot be read.
    """
    if text == "detect":
        return Cluster.detect()
    if text.endswith(".json"):
        return Cluster.from_json(Path(text))
    name, colon, size = cluster_name(text).partition(":")
    if not colon:
        return Cluster.preset(name)
    nodes, _, devices = size.partition("x")
    return Cluster.preset(name, nodes=int(nodes), devices_per_node=int(devices))


def mesh_of(text: str) -> dict[str, int | None]:
    """``dp=8,tp`` as axis sizes, None where the size is searched; raises InputError."""
    found: dict[str, int | None] = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not name.isidentifier() or name in found or (equals and not size.isdecimal()):
            raise InputError(
                f"--mesh has {shown(part)}; write each axis once with its size: --mesh dp=8,tp=8"
            )
        found[name] = int(size) if equals else None
    return found


def recompute_of(text: str | None) -> str | int | float | None:
    """``4096`` as bytes, ``0.5`` as a fraction, ``none``, ``full`` and ``8GiB`` as text."""
    if text is None or text.isdecimal():
        return None if text is None else int(text)
    try:
        return float(text)
    except ValueError:
        return text


def count_of(text: str) -> int:
    """A whole number, at least 1; raises InputError."""
    if not (text.isdecimal() and int(text)):
        raise InputError(f"{shown(text)} is no number of steps; write a whole one, at least 1")
    return int(text)


def devices_of(text: str) -> int | str:
    """A number of devices, at least 1, or the name of a device; raises InputError."""
    if text.isdecimal() and int(text):
        return int(text)
    import torch

    try:
        return str(torch.device(text))
    except RuntimeError as error:
        raise InputError(f"{shown(text)} are no devices; write --devices 2 or cuda:0") from error


if __name__ == "__main__":
    sys.exit(main())
