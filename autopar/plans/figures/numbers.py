"""The bar charts of a plan: its step, memory, alternatives, compiled blocks, recomputation.

In: a plan. Out: the numbers of each chart, which are those of the report; None where the plan has
none. `autopar.plans.bars.plot_bars` draws them.
"""

from __future__ import annotations

from autopar.base.units import format_bytes, format_seconds
from autopar.plans.alternatives import ON_MESH, alternatives
from autopar.plans.bars import Bars, Line, Series, Unit
from autopar.plans.blocks import folded
from autopar.plans.parallelism import strategy_name
from autopar.plans.parts import PlanFields
from autopar.plans.summary import beyond_tensors, needed_bytes
from autopar.plans.text import place_text

MOST_ALTERNATIVES = 14
PHASES = {"F": "forward", "I": "input gradients", "W": "weight gradients"}


def step_data(plan: PlanFields) -> Bars:
    """The parts of a step: one stacked bar, whose end is the predicted time of a step."""
    p = plan.prediction
    parts = {
        "forward": p.forward_s,
        "backward": p.backward_s,
        "exposed communication": p.communication_s,
        "casts and copies": p.copies_s,
        "update": p.update_s,
    }
    rest_s = p.step_time_s - sum(parts.values())
    if rest_s > 0.005 * p.step_time_s:
        parts["waiting"] = rest_s
    return Bars(
        title=f"A step of {format_seconds(p.step_time_s)}"
        + f" on {plan.busiest_rank}" * bool(plan.busiest_rank),
        unit=Unit.SECONDS, rows=("step",), stacked=True,
        series=tuple(
            Series(name=f"{name} {format_seconds(time_s)}", values=(time_s,))
            for name, time_s in parts.items()
            if time_s
        ),
    )  # fmt: skip


def memory_data(plan: PlanFields) -> Bars:
    """The memory of a device at its peak by category, against what a plan may use.

    The last part is what the allocator loses or, on CPUs, the process takes beyond its tensors.
    """
    memory, usable = plan.prediction.memory_bytes, plan.cluster.usable_memory_bytes
    parts = {
        name.replace("_", " "): size
        for name, size in sorted(memory.items(), key=lambda item: -item[1])
    }
    extra = needed_bytes(plan) - sum(parts.values())
    if extra > 0:
        parts[beyond_tensors(plan)] = extra
    at = plan.prediction.memory_peak_at
    where = f", {place_text(at)}" if at else ""
    return Bars(
        title=f"Memory of a device at its peak: {format_bytes(needed_bytes(plan))}{where}",
        unit=Unit.BYTES, rows=("device",), stacked=True,
        series=tuple(
            Series(name=f"{name} {format_bytes(size)}", values=(float(size),))
            for name, size in parts.items()
        ),
        lines=(Line(name=f"usable, {format_bytes(usable)}", value=float(usable)),),
    )  # fmt: skip


def alternatives_data(plan: PlanFields) -> Bars | None:
    """The times of the plan and of the best alternatives, and the bound of the plan's search.

    None where nothing else was considered.
    """
    found = alternatives(plan)[:MOST_ALTERNATIVES]
    if not found:
        return None
    step_s, usable = plan.prediction.step_time_s, plan.cluster.usable_memory_bytes
    names, texts = [f"this plan: {strategy_name(plan, short=True)}"], [format_seconds(step_s)]
    for each in found:
        on = f" on {each.mesh}" if each.mesh and each.name == ON_MESH else ""
        names.append(f"{each.name}{on}")
        old = ", on old weights" * each.is_stale
        texts.append(f"{format_seconds(each.time_s)}, {each.time_s / step_s:.2f}x{old}")
    sizes = [each.memory_bytes or 0 for each in found]
    bound = plan.search.bound_s
    is_bound = not plan.is_pipeline and bound > 0
    line = Line(name=f"bound of the plan's search, {format_seconds(bound)}", value=bound)
    return Bars(
        title="The plan and the best alternatives: time of a step",
        unit=Unit.SECONDS, rows=tuple(names),
        series=(
            Series(
                name="step", values=(step_s, *(each.time_s for each in found)), texts=tuple(texts)
            ),
        ),
        lines=(line,) * is_bound,
        marked=frozenset(i for i, size in enumerate(sizes, start=1) if size > usable),
        mark="does not fit the memory",
    )  # fmt: skip


def kernels_data(plan: PlanFields) -> Bars | None:
    """Graphs of blocks that one compiled kernel or more run: seconds op by op and compiled.

    None where no graph was measured both ways.
    """
    rows, eager, compiled = [], [], []
    for group in plan.kernels:
        for phase, eager_s in group.eager_s.items():
            chosen = "compiled" if phase in group.compiled else "op by op"
            rows.append(f"{folded(group.blocks)}, {PHASES.get(phase, phase)}: {chosen}")
            eager.append(eager_s)
            compiled.append(group.compiled_s.get(phase))
    if not rows:
        return None
    return Bars(
        title="Compiled blocks, measured: one block and one micro-batch on one device",
        unit=Unit.SECONDS, rows=tuple(rows),
        series=(
            Series(name="op by op", values=tuple(eager), texts=tuple(map(format_seconds, eager))),
            Series(
                name="compiled", values=tuple(compiled),
                texts=tuple("" if each is None else format_seconds(each) for each in compiled),
            ),
        ),
    )  # fmt: skip


def recomputation_data(plan: PlanFields) -> Bars | None:
    """The activations that each block keeps for its backward pass, and those it recomputes.

    Bytes of one block and one micro-batch on one device. None where nothing is recomputed.
    """
    groups = plan.recomputation
    if not groups:
        return None
    again = tuple(float(max(g.default_bytes - g.kept_bytes, 0)) for g in groups)
    return Bars(
        title="What blocks keep for a micro-batch's backward pass, each, on one device",
        unit=Unit.BYTES, stacked=True,
        rows=tuple(folded(group.blocks) for group in groups),
        series=(
            Series(name="kept", values=tuple(float(group.kept_bytes) for group in groups)),
            Series(
                name="recomputed", values=again,
                texts=tuple(
                    f"{format_bytes(g.kept_bytes)} of {format_bytes(g.default_bytes)}, "
                    f"+{format_seconds(g.time_s)}"
                    for g in groups
                ),
            ),
        ),
    )  # fmt: skip
