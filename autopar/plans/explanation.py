"""The strategy of one module explained, and two plans compared.

In: one or two plans. Out: a page. A module's runner-up is its best other choice while all else
stays as it is; the best alternative is another strategy for the whole model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.base.documents import shown
from autopar.base.errors import InputError
from autopar.base.spelling import did_you_mean
from autopar.base.units import format_bytes, format_seconds
from autopar.ir.block_names import FIXED, lies_in
from autopar.ir.shared_names import SharedNames
from autopar.plans.alternatives import NO_FIT, alternatives
from autopar.plans.blocks import (
    constant_ops,
    folded,
    module_labels,
    numbers_in,
    pattern_of,
    runs_of,
    stages_of_blocks,
)
from autopar.plans.layout import Section
from autopar.plans.page import Page
from autopar.plans.parallelism import UNUSED, joined, kinds_of, kinds_of_choice, strategy_name
from autopar.plans.parts import MODULE_TIMES, ModuleChoice, ModulePlan, PlanFields, RunnerUp
from autopar.plans.summary import (
    LEAST_S,
    REDISTRIBUTION,
    counted,
    headline,
    needed_bytes,
    time_text,
)
from autopar.plans.text import inputs_text

MAX_ROWS = 40
MOST_NAMES = 3
LEAST_SHARE = 1e-4
"""A smaller share of a device's memory is not shown."""
TIE = 1e-4
"""A difference below this share of a step is called a tie."""
A_TIE = "a tie"
TIES = f"{A_TIE}: the step changes by at most {TIE:.2%}, so either choice is as good."
BY_ITSELF = (
    "Each module by itself: all outside of it stays as it is. The search's prices and its estimate "
    "of memory."
)
NO_RUNNER_UP = (
    "The plan keeps no other choice for it: none is possible, it computes nothing, or it is too "
    "large."
)
ALL_OF_IT = "all of it"
ON_CONSTANTS = "which depend on neither inputs nor parameters"
ON_ONE_DEVICE = "There is no other choice for it: its mesh is one device."
TO_PRICE = (
    "To price another choice: autopar.plan(..., constraints=[autopar.Pin(...)]), then "
    "plan.diff(other)."
)


def explanation(plan: PlanFields, name: str) -> Page:
    """Explain the strategy of a module, block, parameter or op, which must be in the plan.

    Raises InputError for another name.
    """
    names = SharedNames(plan.graph.shared)
    modules, parameters, ops = _named(plan, name, names)
    others = _runner_ups(plan, name, names, modules, parameters, ops)
    tables = (others, _parameters(plan, parameters), _ops(plan, ops), _times(plan, modules))
    notes = (TO_PRICE,) if others.rows else (NO_RUNNER_UP, TO_PRICE)
    if not plan.may_split:
        notes = (ON_ONE_DEVICE,)
    rows = (*_other_names(name, names, modules), *_facts(plan, modules, parameters, ops))
    facts = Section(title="", rows=rows, notes=notes)
    step = format_seconds(plan.prediction.step_time_s)
    return Page(
        headline=f"{name} in {strategy_name(plan)}, {step} a step",
        sections=(*(table for table in tables if table.rows), facts),
    )


def _named(
    plan: PlanFields, name: str, names: SharedNames
) -> tuple[list[ModulePlan], list[str], list[str]]:
    """The modules, parameters and ops that a name stands for."""
    if not isinstance(name, str):
        raise InputError(f"name is {shown(name)}; write the name of a module: 'layers.3.mlp'")
    modules = [m for m in plan.modules if name == m.block or (name and names.is_in(m.name, name))]
    if modules:
        paths = {names.kept(module.name) for module in modules}
        parameters = [p for p in plan.parameters if not paths.isdisjoint(names.owners(p))]
        return modules, parameters, [op for module in modules for op in module.ops]
    kept = names.kept(name)
    if kept in plan.parameters:
        owners = names.owners(kept)
        return (
            [],
            [kept],
            [op for m in plan.modules if names.kept(m.name) in owners for op in m.ops],
        )
    inside = [module for module in plan.modules if name in module.ops]
    if inside:
        return [], [], [name]
    known = {
        *(module.name for module in plan.modules),
        *(module.block for module in plan.modules),
        *plan.parameters,
        *names.known(),
        *(op for module in plan.modules for op in module.ops),
    }
    raise InputError(
        f"the plan has no module, block, parameter or op {shown(name)}; plan.report() lists blocks"
        + did_you_mean(name, sorted(known - {""}))
    )


def _cut(rows: Sequence[tuple[str, ...]]) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """At most `MAX_ROWS` rows, and a note of how many there are more."""
    rest = len(rows) - MAX_ROWS
    return tuple(rows[:MAX_ROWS]), (f"and {rest} more; name a smaller module",) * (rest > 0)


def _alike(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Too many rows folded: those whose names differ in a number only, and all else is equal."""
    if len(rows) <= MAX_ROWS:
        return list(rows)
    groups: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, *others in rows:
        groups[pattern_of(name), *others].append(name)
    return [(folded(names), *others) for (_, *others), names in groups.items()]


def _parameters(plan: PlanFields, names: list[str]) -> Section:
    """Stored and needed placements, one word for each mesh axis."""
    rows = [
        (
            name,
            joined(kinds_of(plan, name)),
            plan.parameters[name],
            plan.uses[name].needs,
            format_bytes(plan.uses[name].size_bytes),
            format_bytes(plan.uses[name].local_bytes),
        )
        for name in names
    ]
    shown_rows, notes = _cut(_alike(rows))
    return Section(
        title=f"parameters, placements on {plan.device_mesh}",
        columns=("parameter", "strategy", "stored", "needed", "whole", "a device"),
        rows=shown_rows,
        notes=notes,
        wraps=True,
    ).used_columns()


def _ops(plan: PlanFields, names: list[str]) -> Section:
    """The dimension of its iteration space that each mesh axis splits; no rows on one device."""
    whole, constant = " ".join("-" * len(plan.mesh.axis_names)), constant_ops(plan)
    same = "every device computes the same"
    rows = [
        (
            name,
            plan.ops.get(name, whole),
            same + ", once" * (name in constant) if name not in plan.ops else "",
            plan.relays.get(name, ""),
        )
        for name in names
        if plan.may_split
    ]
    shown_rows, notes = _cut(_alike(rows))
    return Section(
        title="ops, the dimension that each mesh axis splits",
        columns=("op", "split", "", "result redistributed to"),
        rows=shown_rows,
        notes=notes,
        wraps=True,
    ).used_columns()


def _times(plan: PlanFields, modules: list[ModulePlan]) -> Section:
    timed = [m for m in modules if any(getattr(m, part) for part in MODULE_TIMES)]
    rows = [
        (
            label,
            m.splits * plan.may_split,
            *(time_text(getattr(m, part)) for part in MODULE_TIMES),
        )
        for label, m in zip(module_labels(timed), timed)
    ]
    alike = _alike(rows)
    shown_rows, notes = _cut(alike)
    if len(rows) > 1:
        sums = (sum(getattr(m, part) for m in modules) for part in MODULE_TIMES)
        shown_rows += (("sum", "", *map(time_text, sums)),)
    return Section(
        title="predicted time of a step on one device" + ", each" * (len(alike) < len(rows)),
        columns=(
            "module",
            "split",
            "forward",
            "input grad.",
            "weight grad.",
            REDISTRIBUTION,
            "update",
        ),
        rows=shown_rows,
        notes=notes,
        wraps=True,
    ).used_columns()


def _runner_ups(
    plan: PlanFields,
    name: str,
    names: SharedNames,
    modules: list[ModulePlan],
    parameters: list[str],
    ops: list[str],
) -> Section:
    """The best other choice of each module, the difference in a step, and why it was not taken."""
    users = [module for module in plan.modules if not set(module.ops).isdisjoint(ops)]
    owners = {module.name for module in users if module.block != FIXED}
    if not modules:
        owners |= {parameter.rpartition(".")[0] for parameter in parameters}
    inside_of = "" if names.others(name) else name  # of a shared module all names are whole
    least_bytes = LEAST_SHARE * plan.cluster.usable_memory_bytes
    found: defaultdict[tuple[Any, ...], list[str]] = defaultdict(list)
    for each in plan.runner_ups:
        inside = [path for path in each.modules if names.is_in(path, name)] if modules else []
        inside = inside or [path for path in each.modules if path in owners]
        if not inside:
            continue
        depth = min(path.count(".") for path in inside), inside != [name]
        row = (
            choice_text(plan, each.chosen),
            choice_text(plan, each.other, each.chosen),
            signed(each.difference_s, format_seconds),
            _change(each.compute_s, LEAST_S, format_seconds),
            _change(each.communication_s, LEAST_S, format_seconds),
            _change(each.memory_bytes, least_bytes, format_bytes),
            why(plan, each),
        )
        found[depth, frozenset(map(pattern_of, inside)), row] += inside
    rows = [
        (_within(inside_of, sorted(paths, key=numbers_in)), *row)
        for (_, _, row), paths in sorted(found.items(), key=lambda each: each[0][0])
    ]
    shown_rows, notes = _cut(rows)
    ties = (TIES,) * any(row[-1] == A_TIE for row in shown_rows)
    return Section(
        title="the best other choice, and the difference of a step with it",
        columns=(
            "module", "chosen", "runner-up", "step", "compute", REDISTRIBUTION, "memory", "why not"
        ),
        rows=shown_rows,
        notes=(*notes, *ties, BY_ITSELF),
        wraps=True,
    ).used_columns()  # fmt: skip


def _within(name: str, paths: Sequence[str]) -> str:
    """One label for modules in the module ``name``, if any, without its name: ``.mlp.c_fc``."""
    if list(paths) == [name]:
        return ALL_OF_IT
    if name and all(lies_in(path, name) and path != name for path in paths):
        return "." + folded([path.removeprefix(f"{name}.") for path in paths])
    return folded(paths)


def choice_text(plan: PlanFields, choice: ModuleChoice, before: ModuleChoice | None = None) -> str:
    """``batch, FSDP``: how the longest op is split, and the kind of the largest parameter of its
    module, which is left out where it is that of the choice ``before``."""
    splits = " x ".join("whole" if word == "-" else word for word in choice.splits.split())
    kinds = joined(kinds_of_choice(plan, choice))
    if before is not None and kinds == joined(kinds_of_choice(plan, before)):
        kinds = ""
    return f"{splits}, {kinds}" if kinds else splits


def signed(number: float, text: Callable[[float], str]) -> str:
    """``+1.20 ms``: a difference."""
    return f"{'-' if number < 0 else '+'}{text(abs(number))}"


def _change(number: float, least: float, text: Callable[[float], str]) -> str:
    """A difference, or nothing for one that is too small to matter."""
    return signed(number, text) if abs(number) >= least else ""


def why(plan: PlanFields, each: RunnerUp) -> str:
    """Why a runner-up was not chosen: ``slower``, ``does not fit``, or both as good."""
    if needed_bytes(plan) + each.memory_bytes > plan.cluster.usable_memory_bytes:
        return "does not fit"
    if abs(each.difference_s) <= TIE * plan.prediction.step_time_s:
        return A_TIE
    return "slower" if each.difference_s > 0 else "faster by itself"


def _other_names(name: str, names: SharedNames, modules: list[ModulePlan]) -> list[tuple[str, str]]:
    """The other names of a shared module or parameter."""
    others = names.others(name)
    if not others:
        return []
    what = "module" if modules else "parameter"
    listed = others if len(others) <= MOST_NAMES else runs_of(others)
    return [("shared", f"one {what}, also named {', '.join(listed)}")]


def _facts(
    plan: PlanFields, modules: list[ModulePlan], parameters: list[str], ops: list[str]
) -> tuple[tuple[str, str], ...]:
    """Blocks, stage, recomputation, compiled graphs and memory."""
    rows = []
    used = modules or [m for m in plan.modules if not set(m.ops).isdisjoint(ops)]
    blocks = list(dict.fromkeys(module.block for module in used if module.block != FIXED))
    if blocks:
        rows.append(("block", folded(blocks)))
    constant = constant_ops(plan).intersection(ops)
    if constant:
        rows.append(("computed once", f"{counted(len(constant), 'op')}, {ON_CONSTANTS}"))
    if plan.is_pipeline and blocks:
        stage_of = stages_of_blocks(plan)
        stages = sorted({stage_of[block] for block in blocks})
        rows.append(("stage", ", ".join(map(str, stages))))
    for group in plan.recomputation:
        inside = [block for block in group.blocks if block in blocks]
        if inside:
            kept, default = format_bytes(group.kept_bytes), format_bytes(group.default_bytes)
            text = f"{folded(inside)} keeps {kept} of {default} a micro-batch"
            rows.append(("recomputed", f"{text}, +{format_seconds(group.time_s)}"))
    for kernel in plan.kernels:
        inside = [block for block in kernel.blocks if block in blocks]
        if inside and kernel.compiled:
            rows.append(("compiled", f"{folded(inside)}: {', '.join(kernel.compiled)}"))
    if parameters:
        local = sum(plan.uses[name].local_bytes for name in parameters)
        states = plan.prediction.num_optimizer_states
        text = f"{format_bytes(local)} of parameters a device"
        if states:
            text += f", and {format_bytes(states * local)} of optimizer state"
        rows.append(("memory", text))
    unused = set(parameters).intersection(plan.graph.unused)
    if unused:
        text = f"{counted(len(unused), 'parameter')}, which nothing reads"
        rows.append((UNUSED, text))
    return (*rows, *_best_alternative(plan))


def _best_alternative(plan: PlanFields) -> tuple[tuple[str, str], ...]:
    """The fastest other strategy for the whole plan that fits and trains as eager, and how much
    slower it is."""
    listed = [each for each in alternatives(plan) if not each.is_same]
    fitting = [each for each in listed if NO_FIT not in each.note and not each.is_stale]
    if not fitting:
        return ()
    first, step_s = fitting[0], plan.prediction.step_time_s
    on = f" on {first.mesh}" if first.mesh and not plan.is_pipeline else ""
    more_s, note = first.time_s - step_s, f", {first.note}" if first.note else ""
    by = f"{'+' if more_s >= 0 else '-'}{format_seconds(abs(more_s))}"
    text = f"{first.name}{on}{note}: {format_seconds(first.time_s)} a step, {by}"
    return (("best alternative", f"{text}, {first.time_s / step_s:.2f}x, for the whole model"),)


# --- two plans ---------------------------------------------------------------------------------
def difference(
    plan: PlanFields, other: PlanFields, names: tuple[str, str] = ("this plan", "other plan")
) -> Page:
    """Compare two plans by their ``names``: first their figures, then placements and splits,
    repeated ones folded."""
    if not isinstance(other, PlanFields):
        raise InputError(f"other is {shown(other)}; pass the plan to compare with")
    if plan == other:
        return Page(headline="the plans are equal", sections=())
    mine, theirs = _figures(plan), _figures(other)
    rows = [
        (name, mine.get(name, ""), theirs.get(name, ""))
        for name in {**mine, **theirs}
        if mine.get(name, "") != theirs.get(name, "")
    ]
    sections = [
        Section(title="what differs", columns=("", *names), rows=tuple(rows), wraps=True),
        _changes("parameters, as they are stored", names, plan.parameters, other.parameters),
        _splits_that_differ(names, plan, other),
    ]
    notes: tuple[str, ...] = ()
    if plan.graph.fingerprint != other.graph.fingerprint:
        causes = "another model, batch or precision, or micro-batches in one of them alone"
        notes = (f"The plans are for different graphs: {causes}.",)
    ratio = plan.prediction.step_time_s / other.prediction.step_time_s
    return Page(
        headline=f"{names[0]}: {headline(plan)}",
        sections=(
            Section(title="", notes=(f"{names[1]}: {headline(other)}", *notes)),
            *(section for section in sections if section.rows),
            Section(
                title="",
                notes=(f"A step of {names[0]} takes {ratio:.3f}x the time of {names[1]}.",),
            ),
        ),
    )


def _splits_that_differ(names: tuple[str, str], plan: PlanFields, other: PlanFields) -> Section:
    """By op; by module where the plans are for different graphs, whose ops have other names."""
    if plan.graph.fingerprint == other.graph.fingerprint:
        title = "ops, the dimension that each mesh axis splits"
        return _changes(title, names, plan.ops, other.ops, absent="whole")
    mine, theirs = _first_splits(plan), _first_splits(other)
    title = "modules, the dimension that each mesh axis splits"
    return _changes(title, names, mine, theirs)


def _first_splits(plan: PlanFields) -> dict[str, str]:
    """The split of each module in the first block that has it."""
    found: dict[str, str] = {}
    for each in plan.modules:
        if each.name:
            found.setdefault(each.name, each.splits)
    return found


def _figures(plan: PlanFields) -> dict[str, str]:
    p, schedule = plan.prediction, plan.schedule
    memory = {
        f"memory: {name.replace('_', ' ')}": format_bytes(size)
        for name, size in p.memory_bytes.items()
    }
    return {
        "strategy": strategy_name(plan),
        "devices": plan.cluster.devices_text,
        "mesh": str(plan.device_mesh),
        "schedule": f"{schedule.name}, {counted(schedule.num_stages, 'stage')}",
        "micro-batches": str(schedule.num_microbatches),
        "parameters": f"{plan.graph.num_parameters:,}",
        "inputs": inputs_text(plan),
        "precision": "" if plan.graph.precision is None else str(plan.graph.precision),
        "update": plan.update.when.replace("_", " "),
        "step": format_seconds(p.step_time_s),
        "MFU": f"{p.model_flops_utilisation:.1%}",
        "forward": format_seconds(p.forward_s),
        "backward": format_seconds(p.backward_s),
        "exposed communication": format_seconds(p.communication_s),
        "overlapped communication": format_seconds(p.hidden_s),
        "casts and copies": format_seconds(p.copies_s),
        "weight update": format_seconds(p.update_s),
        "bubble": f"{p.bubble_share:.1%}",
        "memory of a device": format_bytes(needed_bytes(plan)),
        **memory,
        "blocks that recompute": str(sum(len(g.blocks) for g in plan.recomputation)),
        "moved to the host and back": _moved(plan),
    }


def _moved(plan: PlanFields) -> str:
    return "" if plan.offload is None else f"{format_bytes(plan.offload.moved_bytes)} a step"


def _changes(
    title: str,
    plans: tuple[str, str],
    mine: Mapping[str, str],
    theirs: Mapping[str, str],
    *,
    absent: str = "not there",
) -> Section:
    """The names whose texts differ; those that change alike and differ in a number are one row."""
    groups: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
    for name in {**mine, **theirs}:
        pair = (mine.get(name, absent), theirs.get(name, absent))
        if pair[0] != pair[1]:
            groups[(pattern_of(name), *pair)].append(name)
    rows: list[tuple[str, ...]] = [
        (folded(names), first, second) for (_, first, second), names in groups.items()
    ]
    shown_rows, _ = _cut(rows)
    rest = len(rows) - len(shown_rows)
    return Section(
        title=title,
        columns=("name", *plans),
        rows=shown_rows,
        notes=(f"and {rest} more",) * (rest > 0),
        wraps=True,
    )
