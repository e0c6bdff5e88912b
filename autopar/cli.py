"""The ``autopar`` command: make, show, explain and compare plans, without devices.

Reports go to standard output, progress and errors to standard error. It exits with 0, with 1 for an
error that it explains, and with 2 for a wrong command line. Nothing is colored.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from autopar._version import __version__
from autopar.api import plan as make_plan
from autopar.base.documents import shown
from autopar.base.errors import AutoparError, InputError
from autopar.base.source_files import is_users
from autopar.base.torch_private import pytree
from autopar.base.units import format_bytes
from autopar.cost_models import Cluster
from autopar.cost_models.presets import PRESET_NAMES
from autopar.plans.alternatives import alternatives
from autopar.plans.document import Plan
from autopar.plans.layout import WIDTH, Section
from autopar.plans.page import Page
from autopar.plans.summary import headline, memory_rows, summary_page

LEAST_WIDTH = 40

EXAMPLES = """\
examples:
  autopar plan models:llama --cluster h100-sxm:8x8 -o plan.json
  autopar plan models:llama --cluster cluster.json --precision bf16 --schedule auto
  autopar show plan.json
  autopar explain plan.json layers.3.mlp
  autopar diff plan.json other.json
  autopar report plan.json -o report.html
  autopar clusters
"""
FACTORY = """\
MODULE:FACTORY names a function without arguments that returns (model, example inputs):

  def llama():
      return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}

MODULE is imported from the current folder or the environment. The function is called under the meta
device, so that a model takes no memory, and again without it if it raises an error there.
"""


class Factory(NamedTuple):
    """A model and the example inputs that its factory returned."""

    model: nn.Module
    inputs: Any


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
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

    plan = command(
        "plan", _plan, "search the fastest plan for a model on a cluster",
        "plan models:llama --cluster h100-sxm:8x8 -o plan.json",
    )  # fmt: skip
    _add_search(plan)
    plan.add_argument("-o", "--output", metavar="PLAN", help="write the plan as JSON")
    memory = command(
        "estimate-memory", _estimate_memory, "memory of a device under the plan and others",
        "estimate-memory models:llama --cluster a100-80:1x8",
    )  # fmt: skip
    _add_search(memory)
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
    report.add_argument("-o", "--output", metavar="FILE", required=True, help="the file to write")
    trace = command(
        "trace", _trace, "write a plan's predicted timeline for ui.perfetto.dev",
        "trace plan.json -o trace.json",
    )  # fmt: skip
    _add_plan(trace)
    trace.add_argument("-o", "--output", metavar="FILE", required=True, help="the file to write")
    command("clusters", _clusters, "list the presets of clusters", "clusters")
    cluster = command(
        "cluster", _cluster, "print a cluster as JSON, to be edited", "cluster h100-sxm:8x8"
    )
    cluster.add_argument("cluster", metavar="CLUSTER", help=CLUSTER_HELP)
    command("schema", _schema, "print the JSON Schema of plans", "schema")
    return parser


CLUSTER_HELP = "a preset with nodes x devices a node (h100-sxm:8x8), a JSON file, or 'detect'"


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help="a plan's JSON file")


def _add_search(parser: argparse.ArgumentParser) -> None:
    """The arguments of commands that search."""
    parser.description = f"{parser.description}\n\n{FACTORY}"
    parser.add_argument("factory", metavar="MODULE:FACTORY", help="returns a model and its inputs")
    parser.add_argument("--cluster", required=True, help=CLUSTER_HELP)
    parser.add_argument("--precision", choices=("bf16", "fp16"), help="of computation")
    parser.add_argument("--mesh", metavar="AXES", help="such as dp=8,tp=8; sizes may be left out")
    parser.add_argument("--schedule", help="'auto' or a pipeline schedule such as 1f1b")
    parser.add_argument("--num-stages", type=int, metavar="N", help="stages of a pipeline")
    parser.add_argument("--num-microbatches", type=int, metavar="N", help="parts of the batch")
    parser.add_argument("--recompute", help="none, full, or a limit such as 8GiB or 0.5")
    parser.add_argument(
        "--offload", action=argparse.BooleanOptionalAction,
        help="tensors may move to the host; by default where nothing else fits a GPU",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="no progress")


# --- commands ------------------------------------------------------------------------------------
def _plan(chosen: argparse.Namespace) -> None:
    found = _searched(chosen)
    if chosen.output:
        found.to_json(chosen.output)
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
                _fits(each.memory_bytes, usable),
            )
            for each in alternatives(found)
            if each.memory_bytes is not None
        ),
    )
    memory = Section(title="memory of a device under the plan", rows=memory_rows(found))
    sections = (memory, others) if others.rows else (memory,)
    _print_page(Page(headline=headline(found), sections=sections))


def _fits(size: int, usable: int) -> str:
    return "yes" if size <= usable else "no"


def _show(chosen: argparse.Namespace) -> None:
    found = Plan.from_json(Path(chosen.plan))
    if chosen.full:
        print(found.report("full"))
    else:
        _print_page(summary_page(found))


def _explain(chosen: argparse.Namespace) -> None:
    _print_page(Plan.from_json(Path(chosen.plan)).explain(chosen.name))


def _diff(chosen: argparse.Namespace) -> None:
    other = Plan.from_json(Path(chosen.other))
    _print_page(Plan.from_json(Path(chosen.plan)).diff(other))


def _report(chosen: argparse.Namespace) -> None:
    Plan.from_json(Path(chosen.plan)).save_report(chosen.output)


def _trace(chosen: argparse.Namespace) -> None:
    Plan.from_json(Path(chosen.plan)).save_trace(chosen.output)


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
                cluster.levels[0].name,
            )
        )
    table = Section(
        title="",
        columns=("preset", "device", "memory", "16-bit peak", "bandwidth", "links in a node"),
        rows=tuple(rows),
        notes=("Use one as PRESET:NODESxDEVICES, such as h100-sxm:8x8.",),
    )
    _print_page(Page(headline=f"{len(rows)} presets of clusters", sections=(table,)))


def _cluster(chosen: argparse.Namespace) -> None:
    print(cluster_of(chosen.cluster).to_json(), end="")


def _schema(_: argparse.Namespace) -> None:
    print(msgspec.json.format(msgspec.json.encode(msgspec.json.schema(Plan)), indent=2).decode())


def _print_page(page: Page) -> None:
    """Print a page as wide as the terminal, if there is one, up to the width of reports."""
    width = WIDTH
    if sys.stdout.isatty():
        width = max(LEAST_WIDTH, min(WIDTH, shutil.get_terminal_size().columns))
    print(page.to_text(width))


# --- arguments -----------------------------------------------------------------------------------
def _searched(chosen: argparse.Namespace) -> Plan:
    """The plan that the arguments of a search ask for."""
    cluster = cluster_of(chosen.cluster)
    options: dict[str, Any] = {
        "mesh": None if chosen.mesh is None else mesh_of(chosen.mesh),
        "recompute": recompute_of(chosen.recompute),
    }
    for name in ("precision", "schedule", "num_stages", "num_microbatches", "offload"):
        options[name] = getattr(chosen, name)
    made = factory_of(chosen.factory)
    return make_plan(made.model, cluster, made.inputs, progress=not chosen.quiet, **options)


def cluster_of(text: str) -> Cluster:
    """``h100-sxm:8x8``, ``h100-sxm`` (one node of 8), a JSON file, or ``detect``.

    Raises ClusterError, or InputError where the size cannot be read.
    """
    if text == "detect":
        return Cluster.detect()
    if text.endswith(".json"):
        return Cluster.from_json(Path(text))
    name, colon, size = text.partition(":")
    if not colon:
        return Cluster.preset(name)
    nodes, cross, devices = size.partition("x")
    if not (cross and nodes.isdecimal() and devices.isdecimal()):
        raise InputError(
            f"the cluster's size is {shown(size)}; write nodes x devices a node: {name}:8x8"
        )
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


def factory_of(text: str) -> Factory:
    """The model and inputs of ``MODULE:FACTORY``; raises InputError where it cannot be called."""
    name, colon, attribute = text.partition(":")
    if not (colon and name and attribute):
        raise InputError(f"{shown(text)} is no factory; write MODULE:FACTORY, such as models:llama")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(name)
    except Exception as error:
        raise InputError(f"cannot import {name}: {_reason(error)}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise InputError(f"module {name} has no {shown(attribute)}; define it there")
        found = getattr(found, part)
    if not callable(found):
        raise InputError(f"{text} is {shown(found)}; write a function that returns the model")
    return _checked(text, _called(text, found))


def _called(text: str, factory: Callable[[], Any]) -> Any:
    """The factory's result, under the meta device where it allows that."""
    try:
        with torch.device("meta"):
            return factory()
    except Exception:  # it needs values: the error that counts is that of a plain call
        try:
            return factory()
        except Exception as error:
            raise InputError(f"{text} raised {_reason(error)}") from error


def _checked(text: str, made: Any) -> Factory:
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise InputError(
            f"{text} returned {shown(made)}; return a model and its example inputs: "
            "return model, (x, y)"
        )
    model, inputs = made
    return Factory(model, pytree.tree_map(_with_data, inputs))


def _with_data(leaf: Any) -> Any:
    """Inputs made under the meta device, as zeros: a plan depends on shapes and dtypes only."""
    if isinstance(leaf, Tensor) and leaf.is_meta:
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device="cpu")
    return leaf


def _reason(error: Exception) -> str:
    """The error in one line, with the user's own line that raised it."""
    lines = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    where = f" ({lines[-1].filename}:{lines[-1].lineno})" if lines else ""
    return f"{type(error).__name__}: {error}{where}"


if __name__ == "__main__":
    sys.exit(main())
