"""The plan: everything that the search decided, as one readable JSON document.

A plan belongs to one graph (by fingerprint) and one mesh. The same inputs give a byte-identical
plan: it has no time stamps, and its keys are in graph order. Loading refuses, before anything is
allocated, an unknown version or field, a contradiction, and a plan for another graph or mesh, and
names the first difference and its JSON path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from autopar.base.documents import DocumentError, convert, load, path_of, shown, text_of
from autopar.base.errors import InputError, PlanError
from autopar.ir.choice import parse_choice
from autopar.ir.mesh import MICROBATCH, PIPELINE, Mesh
from autopar.ir.placement import parse_placement
from autopar.plans.explanation import difference, explanation
from autopar.plans.page import Page
from autopar.plans.parts import (
    MODULE_TIMES,
    OffloadPlan,
    PlanFields,
)
from autopar.plans.refusals import at, refused
from autopar.plans.schedule_plan import MAX_DEVICES
from autopar.plans.summary import format_summary, headline, summary_page
from autopar.plans.text import format_plan
from autopar.plans.timeline import predicted_trace
from autopar.pricing.step_costs import BLOCK_TIMES, StepCosts

SCHEMA_VERSION = 9
MAX_AXES = 16


class Plan(PlanFields, frozen=True):
    """A plan: its fields, read from JSON and written as JSON, as text and as a notebook page."""

    def to_json(self, path: str | Path | None = None) -> str:
        """The plan as JSON text, also written to ``path`` if given."""
        text = msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n"
        if path is not None:
            Path(path).write_text(text)
        return text

    @staticmethod
    def from_json(source: str | bytes | Path) -> Plan:
        """Read a plan from JSON text, its UTF-8 bytes, or a file; raises PlanError.

        The source need not be trusted: its size is limited, nothing in it is executed, and whatever
        can be checked without a graph (mesh, schedule, placements, choices) is checked here.
        """
        try:
            document = load(text_of(source))
            _check_version(document)
            plan = convert(document, Plan)
        except DocumentError as error:
            raise refused(error.why, error.place) from error
        _check_plan(plan)
        return plan

    def report(self, detail: str = "screen") -> str:
        """The report as text: one ``"screen"`` of at most 100 columns and 40 lines, or ``"full"``.

        Raises InputError for another detail.
        """
        if detail == "screen":
            return format_summary(self)
        if detail == "full":
            return format_plan(self)
        raise InputError(
            f"detail is {detail!r}; write plan.report() for one screen, or plan.report('full')"
        )

    def __str__(self) -> str:
        return format_summary(self)

    def __repr__(self) -> str:
        return f"<Plan {headline(self)}>"

    def _repr_html_(self) -> str:
        return self.page()._repr_html_()

    def page(self) -> Page:
        """The report as a notebook shows it: the screen's tables, some figures, and all details."""
        from autopar.plans.figures.catalog import notebook_figures  # imports matplotlib

        return summary_page(self, notebook_figures(self))

    def figure(self, name: str) -> tuple[Any, Any]:
        """A figure and its axes, of matplotlib, neither shown nor known to ``pyplot``.

        ``name``: strategy, step, memory, memory_over_time, search, alternatives, timeline,
        activations, recomputation, kernels, offload or k_curve (of reverse_first_k);
        `autopar.plans.figures` has their numbers.
        The search is that of this process, which a plan read from JSON does not have. Raises
        InputError for another, and where the plan has nothing of it.
        """
        from autopar.plans.figures.catalog import plan_figure  # imports matplotlib

        return plan_figure(self, name)

    def save_report(self, path: str | Path) -> None:
        """Write the report as one HTML file: the screen's numbers, figures, and all details.

        It needs no other file, no network and no JavaScript.
        """
        from autopar.plans.figures.catalog import page_figures  # imports matplotlib

        text = summary_page(self, page_figures(self)).to_html()
        Path(path).write_text(text, encoding="utf-8")

    def save_trace(self, path: str | Path) -> None:
        """Write the predicted timeline as JSON, to be opened in ui.perfetto.dev."""
        Path(path).write_text(predicted_trace(self), encoding="utf-8")

    def explain(self, name: str) -> Page:
        """Explain the strategy of a module, block, parameter or op, such as ``"layers.3.mlp"``.

        Returns a page with placements, split dimensions, predicted times by direction,
        communication and memory; ``str`` of it is its text. Raises InputError for a name that the
        plan does not have.
        """
        return explanation(self, name)

    def diff(self, other: Plan) -> Page:
        """Compare this plan with another: a page of tables of all differences."""
        return difference(self, other)


def _check_version(document: object) -> None:
    if not isinstance(document, dict) or "schema_version" not in document:
        raise DocumentError("this is not a plan: it has no schema_version", "$")
    version = document["schema_version"]
    if type(version) is not int or version != SCHEMA_VERSION:
        raise DocumentError(
            f"the plan has schema_version {shown(version)}; this version of autopar reads "
            f"{SCHEMA_VERSION}",
            "$.schema_version",
        )


def _check_plan(plan: Plan) -> None:
    """Raise PlanError for the first error that can be found without a graph."""
    plan.schedule.pipeline()
    if plan.graph.precision is not None:
        with at("graph", "precision"):
            _ = plan.graph.precision.precision
    _check_mesh(plan)
    if not plan.prediction.step_time_s > 0:
        raise refused("the time of a step must be positive", "$.prediction.step_time_s")
    with at("update"):
        _ = plan.update.update
    if plan.update.tile_bytes < 1:
        raise refused("it must be at least 1", "$.update.tile_bytes")
    if plan.scattered and (plan.is_pipeline or plan.schedule.num_microbatches == 1):
        raise refused(
            "gradients are scattered in every micro-batch where there are several, and no pipeline",
            "$.scattered",
        )
    if plan.graph.full_masks and plan.offload is not None:
        raise refused(
            "a plan that moves tensors is for one program, which has to apply all masks",
            "$.graph.full_masks",
        )
    num_axes = len(plan.mesh.axis_names)
    for field in ("inputs", "parameters", "relays"):
        for name, text in getattr(plan, field).items():
            with at(field, name):
                _check_words(text, num_axes)
                for word in text.split():
                    parse_placement(word)
    for name, text in plan.ops.items():
        with at("ops", name):
            _check_words(text, num_axes)
            parse_choice(text)
    _check_uses(plan)
    _check_recomputation(plan)
    _check_kernels(plan)
    _check_reports(plan)
    if plan.offload is not None:
        _check_offload(plan, plan.offload)


def _check_offload(plan: Plan, offload: OffloadPlan) -> None:
    found, wanted = len(offload.plans()), plan.schedule.num_devices
    if found != wanted:
        raise refused(
            f"{found} movement plans for {wanted} pipeline ranks; give each its own",
            "$.offload.ranks",
        )
    if not 0 <= offload.stall_s < math.inf:
        raise refused("it cannot be negative", "$.offload.stall_s")


def _check_uses(plan: Plan) -> None:
    """Raise PlanError unless reports can be made: uses of all parameters, valid module times."""
    num_axes = len(plan.mesh.axis_names)
    if plan.uses.keys() != plan.parameters.keys():
        name = min(plan.uses.keys() ^ plan.parameters.keys())
        lacks = "uses" if name in plan.parameters else "parameters"
        raise refused(f"{shown(name)} is missing from the plan's {lacks}", path_of((lacks, name)))
    for name, use in plan.uses.items():
        with at("uses", name):
            _check_words(use.needs, num_axes)
            for word in use.needs.split():
                parse_placement(word)
        for field in ("size_bytes", "local_bytes"):
            if getattr(use, field) < 0:
                raise refused("it cannot be negative", path_of(("uses", name, field)))
    for position, module in enumerate(plan.modules):
        with at("modules", position, "splits"):
            _check_words(module.splits, num_axes)
        for field in MODULE_TIMES:
            if not 0 <= getattr(module, field) < math.inf:
                raise refused("it cannot be negative", path_of(("modules", position, field)))


def _check_reports(plan: Plan) -> None:
    """Raise PlanError unless shared names, runner-ups and the curve of memory can be shown."""
    num_axes = len(plan.mesh.axis_names)
    for position, names in enumerate(plan.graph.shared):
        if len(names) < 2:
            raise refused(
                "what is shared has two names or more", path_of(("graph", "shared", position))
            )
    for position, each in enumerate(plan.runner_ups):
        for field, choice in (("chosen", each.chosen), ("other", each.other)):
            with at("runner_ups", position, field):
                _check_words(choice.splits, num_axes)
                for text in (choice.stored, choice.needs) if choice.stored else ():
                    _check_words(text, num_axes)
        for field in ("compute_s", "communication_s"):
            if not math.isfinite(getattr(each, field)):
                raise refused("it must be finite", path_of(("runner_ups", position, field)))
    if plan.memory_curve is not None:
        plan.memory_curve.read()
    if plan.stage_costs is not None:
        plan.stage_costs.check()
    if plan.step_costs is not None:
        _check_step_costs(plan.step_costs)


def _check_step_costs(costs: StepCosts) -> None:
    for field in ("reduce_after_s", "update_after_s"):
        if not 0 <= getattr(costs, field) < math.inf:
            raise refused("it cannot be negative", path_of(("step_costs", field)))
    for position, block in enumerate(costs.blocks):
        for field in BLOCK_TIMES:
            if not 0 <= getattr(block, field) < math.inf:
                place = path_of(("step_costs", "blocks", position, field))
                raise refused("it cannot be negative", place)


def _check_recomputation(plan: Plan) -> None:
    _check_groups("recomputation", [group.blocks for group in plan.recomputation])
    for position, group in enumerate(plan.recomputation):
        for field in ("kept_bytes", "default_bytes", "time_s"):
            if not 0 <= getattr(group, field) < math.inf:
                raise refused("it cannot be negative", path_of(("recomputation", position, field)))


def _check_kernels(plan: Plan) -> None:
    _check_groups("kernels", [group.blocks for group in plan.kernels])
    for position, group in enumerate(plan.kernels):
        if len(set(group.compiled)) < len(group.compiled):
            raise refused("a graph is listed twice", path_of(("kernels", position, "compiled")))
        for field in ("eager_s", "compiled_s"):
            for phase, time_s in getattr(group, field).items():
                if not 0 <= time_s < math.inf:
                    place = path_of(("kernels", position, field, phase))
                    raise refused("it cannot be negative", place)


def _check_groups(field: str, groups: Sequence[Sequence[str]]) -> None:
    """Each block is in one group at most, and no group is empty."""
    named: set[str] = set()
    for position, blocks in enumerate(groups):
        place = path_of((field, position, "blocks"))
        if not blocks:
            raise refused("a group has at least one block", place)
        for name in blocks:
            if name in named:
                raise refused(f"block {shown(name)} is listed twice; it must be listed once", place)
            named.add(name)


def _check_words(text: str, num_axes: int) -> None:
    found = text.count(" ") + 1 if text else 0
    if found != num_axes:
        raise PlanError(
            f"{text!r} has {found} words for a mesh of {num_axes} axes; give one for each axis"
        )


def _check_mesh(plan: Plan) -> None:
    names, sizes = plan.mesh.axis_names, plan.mesh.axis_sizes
    if len(names) > MAX_AXES:
        raise refused(f"{len(names)} axes; a mesh has at most {MAX_AXES}", "$.mesh.axis_names")
    for position, name in enumerate(names):
        if name in (MICROBATCH, PIPELINE):
            raise refused(
                f"{name!r} is reserved for an axis that autopar adds itself; choose another name",
                path_of(("mesh", "axis_names", position)),
            )
    for position, size in enumerate(sizes):
        if not 1 <= size <= MAX_DEVICES:
            raise refused(
                f"an axis has 1 to {MAX_DEVICES:,} devices, not {shown(size)}",
                path_of(("mesh", "axis_sizes", position)),
            )
    with at("mesh"):
        mesh = Mesh(names, sizes)
    planned, there = mesh.num_devices * plan.schedule.num_devices, plan.cluster.num_devices
    if planned != there:
        raise refused(
            f"{plan.schedule.num_devices} pipeline ranks with a mesh of {mesh.num_devices} "
            f"devices each are {planned} devices; the plan's cluster has {there}",
            "$.mesh.axis_sizes",
        )
