"""The functions behind the commands: they plan, read a plan, or measure steps.

In: the parsed arguments of a command. Out: a report on standard output, or a file.
"""

from __future__ import annotations

import argparse
import functools
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from autopar.base.documents import shown
from autopar.base.errors import InputError, PlanError
from autopar.base.gc_pause import collector_paused
from autopar.base.units import format_bytes
from autopar.cli.arguments import cluster_of, recompute_of
from autopar.cli.wording import page_in_commands
from autopar.cost_models import Cluster
from autopar.cost_models.presets import PRESET_NAMES
from autopar.plans.alternatives import ESTIMATE, alternatives
from autopar.plans.document import Plan
from autopar.plans.explanation import difference
from autopar.plans.layout import WIDTH, Section
from autopar.plans.page import Page
from autopar.plans.summary import headline, memory_rows, summary_page
from autopar.plans.text import format_plan

LEAST_WIDTH = 40


def plan(chosen: argparse.Namespace) -> None:
    found = _searched(chosen)
    if chosen.output:
        found.to_json(chosen.output)
    if chosen.report:
        found.save_report(chosen.report)
    _print_page(chosen, summary_page(found))


def estimate_memory(chosen: argparse.Namespace) -> None:
    found = _searched(chosen)
    usable = found.cluster.usable_memory_bytes
    estimated = [("this plan", str(found.device_mesh), found.search.estimated_bytes)]
    for each in alternatives(found):
        if each.memory_bytes is not None:
            estimated.append((each.name, each.mesh, each.memory_bytes))
    others = Section(
        title="beside other strategies, estimated op by op and without recomputation",
        columns=("strategy", "mesh", "a device", "fits"),
        rows=tuple(
            (name, mesh, format_bytes(size), "yes" if size <= usable else "no")
            for name, mesh, size in estimated
        ),
        notes=(
            f"Estimated {ESTIMATE} but the loss's; the count is of the fullest moment, with all "
            "workspace.",
        ),
    )
    memory = Section(title="memory of a device under the plan, counted", rows=memory_rows(found))
    sections = (memory, others) if len(estimated) > 1 else (memory,)
    _print_page(chosen, Page(headline=headline(found), sections=sections))


def show(chosen: argparse.Namespace) -> None:
    found = _read(chosen.plan)
    if chosen.full:
        print(format_plan(found, _width()))
    else:
        _print_page(chosen, summary_page(found))


def explain(chosen: argparse.Namespace) -> None:
    _print_page(chosen, _read(chosen.plan).explain(chosen.name))


def diff(chosen: argparse.Namespace) -> None:
    first, second = (_read(path) for path in (chosen.plan, chosen.other))
    _print_page(chosen, difference(first, second, (chosen.plan, chosen.other)))


def report(chosen: argparse.Namespace) -> None:
    _read(chosen.plan).save_report(chosen.output)


def trace(chosen: argparse.Namespace) -> None:
    _read(chosen.plan).save_trace(chosen.output)


def figure(chosen: argparse.Namespace) -> None:
    drawn, _ = _read(chosen.plan).figure(chosen.figure)
    suffix = Path(chosen.output).suffix.removeprefix(".")
    if suffix not in drawn.canvas.get_supported_filetypes():
        raise InputError(
            f"{shown(chosen.output)} is not a picture file; write -o {chosen.figure}.svg"
        )
    drawn.savefig(chosen.output, dpi=150)


def profile(chosen: argparse.Namespace) -> None:
    import torch
    from torch import Tensor

    from autopar.api import compile as compile_model
    from autopar.frontend.factory import factory_of

    made = factory_of(chosen.factory, on_meta=False)
    inputs = (made.inputs,) if isinstance(made.inputs, Tensor) else made.inputs
    positional = () if isinstance(inputs, Mapping) else inputs
    named = inputs if isinstance(inputs, Mapping) else {}
    read = None if chosen.plan is None else _read(chosen.plan)
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-4)
    with compile_model(
        made.model, chosen.devices, inputs, optimizer=optimizer, plan=read
    ) as compiled:
        found = compiled.profile(*positional, num_steps=chosen.num_steps, **named)
    if chosen.trace:
        found.save_trace(chosen.trace)
    if chosen.output:
        found.to_json(chosen.output)
    print(found.report(_width()))


def clusters(chosen: argparse.Namespace) -> None:
    rows = []
    for name in PRESET_NAMES:
        preset = Cluster.preset(name)
        device = preset.device
        peak = max(device.peak_flops_per_s.bfloat16, device.peak_flops_per_s.float16)
        rows.append(
            (
                name,
                device.name,
                format_bytes(device.memory_bytes),
                f"{(peak or device.peak_flops_per_s.float32) / 1e12:,.4g} TFLOP/s",
                f"{device.memory_bandwidth_bytes_per_s / 1e9:,.0f} GB/s",
                ", ".join(level.name for level in preset.levels[: preset.num_node_levels]),
            )
        )
    table = Section(
        title="",
        columns=("preset", "device", "memory", "16-bit peak", "bandwidth", "links in a node"),
        rows=tuple(rows),
        notes=("Use one as PRESET:NODESxDEVICES, such as h100-sxm:8x8.",),
        wraps=True,
    )
    _print_page(chosen, Page(headline=f"{len(rows)} presets of clusters", sections=(table,)))


def cluster(chosen: argparse.Namespace) -> None:
    print(cluster_of(chosen.cluster).to_json(), end="")


def schema(_: argparse.Namespace) -> None:
    print(msgspec.json.format(msgspec.json.encode(msgspec.json.schema(Plan)), indent=2).decode())


def _read(path: str) -> Plan:
    """The plan in a file; raises PlanError that names the file."""
    try:
        return Plan.from_json(Path(path))
    except PlanError as error:
        named = "" if shown(path) in str(error) else f"{shown(path)}: "
        raise PlanError(f"{named}{error}") from error


def _width() -> int:
    """Columns to print: ``COLUMNS``, those of the terminal, or without both the width of reports,
    which is also the most."""
    return max(LEAST_WIDTH, min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))


def _print_page(chosen: argparse.Namespace, page: Page) -> None:
    """Print a page in the words of the command line; where it is narrow, no cell is shortened."""
    page = page_in_commands(page, vars(chosen), plan_file(chosen))
    if _width() < WIDTH:
        page = replace(page, sections=tuple(replace(each, wraps=True) for each in page.sections))
    print(page.to_text(_width()))


def plan_file(chosen: argparse.Namespace) -> str:
    """The file of the plan that a command reads or writes; ``PLAN`` without one."""
    given = vars(chosen)
    return given.get("plan") or (given.get("output") if chosen.run is plan else None) or "PLAN"


@collector_paused()
def _searched(chosen: argparse.Namespace) -> Plan:
    """The plan that the arguments of a search ask for."""
    from autopar.api import plan as make_plan
    from autopar.frontend.factory import factory_of

    devices = cluster_of(chosen.cluster)
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
    return make_plan(made.model, devices, made.inputs, progress=not chosen.quiet, **options)
