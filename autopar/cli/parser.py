"""The parser of the command line: its commands, their options and their help.

In: nothing. Out: an `argparse` parser whose arguments have the function to run as ``run``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from autopar._version import __version__
from autopar.base.completion import SHELLS, completion_script
from autopar.cli import commands
from autopar.cli.arguments import (
    argument,
    cluster_name,
    count_of,
    devices_of,
    factory_name,
    mesh_of,
    output_file,
)
from autopar.cost_models.presets import PRESET_NAMES

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


def made_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="autopar", description="Plan how to train a model on a cluster, and read plans.",
        epilog=EXAMPLES, formatter_class=raw,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"autopar {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], None], text: str, example: str
    ) -> argparse.ArgumentParser:
        made = subparsers.add_parser(
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
        "plan", commands.plan, "search the fastest plan for a model on a cluster",
        "plan models:llama --cluster h100-sxm:8x8 -o plan.json",
    )  # fmt: skip
    _add_search(plan)
    to_file = argument(output_file)
    plan.add_argument("-o", "--output", metavar="PLAN", type=to_file, help="write the plan as JSON")
    plan.add_argument(
        "--report", metavar="FILE", type=to_file,
        help="write the report as HTML, with the search's progress",
    )  # fmt: skip
    memory = command(
        "estimate-memory", commands.estimate_memory, "memory of a device under the plan and others",
        "estimate-memory models:llama --cluster a100-80:1x8",
    )  # fmt: skip
    _add_search(memory)


def _add_reading(command: AddCommand) -> None:
    """The commands that read a plan."""
    show = command("show", commands.show, "print the report of a plan", "show plan.json --full")
    _add_plan(show)
    show.add_argument("--full", action="store_true", help="all details")
    explain = command(
        "explain", commands.explain, "explain the strategy of a module, block, parameter or op",
        "explain plan.json layers.3.mlp",
    )  # fmt: skip
    _add_plan(explain)
    explain.add_argument("name", metavar="NAME", help="such as layers.3.mlp")
    diff = command("diff", commands.diff, "compare two plans", "diff plan.json other.json")
    _add_plan(diff)
    diff.add_argument("other", metavar="OTHER", help="the plan to compare with")
    report = command(
        "report", commands.report, "write a plan's report as one HTML file",
        "report plan.json -o report.html",
    )  # fmt: skip
    _add_plan(report)
    _add_output(report)
    trace = command(
        "trace", commands.trace, "write a plan's predicted timeline for ui.perfetto.dev",
        "trace plan.json -o trace.json",
    )  # fmt: skip
    _add_plan(trace)
    _add_output(trace)
    figure = command(
        "figure", commands.figure, "draw a figure of a plan as SVG, PDF or PNG",
        "figure plan.json memory -o memory.svg",
    )  # fmt: skip
    _add_plan(figure)
    figure.add_argument("figure", metavar="NAME", help="such as strategy, memory or timeline")
    _add_output(figure)


def _add_others(command: AddCommand) -> None:
    """The commands that train, list presets, or describe the command line itself."""
    _add_profile(
        command(
            "profile", commands.profile, "train on this machine, measured beside the prediction",
            "profile models:llama --devices 2 --plan plan.json",
        )
    )  # fmt: skip
    command("clusters", commands.clusters, "list the presets of clusters", "clusters")
    cluster = command(
        "cluster", commands.cluster, "print a cluster as JSON, to be edited", "cluster h100-sxm:8x8"
    )
    cluster.add_argument(
        "cluster", metavar="CLUSTER", type=argument(cluster_name), help=CLUSTER_HELP
    )
    command("schema", commands.schema, "print the JSON Schema of plans", "schema")
    completion = command(
        "completion", _completion, "print a script that completes this command in a shell",
        "completion bash > ~/.local/share/bash-completion/completions/autopar",
    )  # fmt: skip
    completion.add_argument("shell", choices=SHELLS, help="the shell")


CLUSTER_HELP = "a preset with nodes x devices a node (h100-sxm:8x8), a JSON file, or 'detect'"


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help="a plan's JSON file")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", metavar="FILE", required=True, type=argument(output_file),
        help="the file to write",
    )  # fmt: skip


def _add_factory(parser: argparse.ArgumentParser, text: str) -> None:
    parser.description = f"{parser.description}\n\n{text}"
    parser.add_argument(
        "factory", metavar="MODULE:FACTORY", type=argument(factory_name),
        help="returns a model and its inputs",
    )  # fmt: skip


def _add_profile(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command that measures."""
    _add_factory(parser, FACTORY)
    parser.add_argument(
        "--devices", required=True, type=argument(devices_of), metavar="DEVICES",
        help="a number, or a device such as cuda:0",
    )  # fmt: skip
    parser.add_argument("--plan", metavar="PLAN", help="run this plan instead of a search")
    parser.add_argument(
        "--num-steps", type=argument(count_of), default=10, metavar="N", help="steps to measure"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=argument(output_file),
        help="write all numbers as JSON",
    )  # fmt: skip
    parser.add_argument(
        "--trace", metavar="FILE", type=argument(output_file),
        help="write a trace for ui.perfetto.dev",
    )  # fmt: skip


def _add_search(parser: argparse.ArgumentParser) -> None:
    """The arguments of commands that search."""
    _add_factory(parser, FACTORY + ON_META)
    parser.add_argument("--cluster", required=True, type=argument(cluster_name), help=CLUSTER_HELP)
    parser.add_argument("--precision", choices=("bf16", "fp16"), help="of computation")
    parser.add_argument(
        "--mesh", metavar="AXES", type=argument(mesh_of),
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


def _completion(chosen: argparse.Namespace) -> None:
    from autopar.plans.figures.catalog import FIGURES  # imports matplotlib

    words = {"cluster": PRESET_NAMES, "figure": tuple(FIGURES), "recompute": ("none", "full")}
    print(completion_script(made_parser(), chosen.shell, words), end="")
