"""Figures of a report as inline SVG: memory by category, the step by part, a pipeline's timeline.

In: a plan. Out: SVG elements without scripts or outside references. Text has the color of the page
around it, so that they can be read on light and on dark ones.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

from autopar.base.units import format_bytes, format_seconds
from autopar.plans.layout import shortened
from autopar.plans.page import escaped
from autopar.plans.parts import PlanFields
from autopar.plans.timeline import predicted_timeline
from autopar.schedules import Interval
from autopar.schedules.action import COMPUTE_KINDS, Kind

WIDTH, ROW, GAP = 760, 26, 6
CHARACTER = 7.0  # width of a character of a label
COLORS = (
    "#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b79a20", "#b279a2", "#9d755d",
)  # fmt: skip
KIND_COLORS = {Kind.F: 0, Kind.B: 1, Kind.I: 1, Kind.W: 2, Kind.R: 6}
KIND_NAMES = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradients",
    Kind.W: "weight gradients",
    Kind.R: "recomputation",
}
MAX_BARS = 4000

Part = tuple[str, float, str]
"""Label, size and text of a part of a bar."""


def memory_figure(plan: PlanFields) -> str:
    """The tensors of a device at the peak by category, against the memory that a plan may use."""
    memory = sorted(plan.prediction.memory_bytes.items(), key=lambda item: -item[1])
    parts = [(name.replace("_", " "), float(size), format_bytes(size)) for name, size in memory]
    usable = float(plan.cluster.usable_memory_bytes)
    return _bar(parts, usable, f"memory of a device, of {format_bytes(usable)} usable")


def step_figure(plan: PlanFields) -> str:
    """The parts of a step."""
    p = plan.prediction
    named = {
        "forward": p.forward_s,
        "backward": p.backward_s,
        "exposed communication": p.communication_s,
        "update": p.update_s,
    }
    rest_s = p.step_time_s - sum(named.values())
    if rest_s > 0.005 * p.step_time_s:
        named["waiting"] = rest_s
    parts = [(name, time_s, format_seconds(time_s)) for name, time_s in named.items()]
    return _bar(parts, p.step_time_s, f"a step of {format_seconds(p.step_time_s)}")


def timeline_figure(plan: PlanFields) -> str:
    """Computation by pipeline rank; empty without a pipeline, or if it is too long to be drawn."""
    found = plan.schedule.pipeline()
    if found is None or sum(len(steps) for steps in found[1].devices) > MAX_BARS:
        return ""
    timeline = predicted_timeline(plan)
    if timeline is None:
        return ""
    bars = [each for each in timeline.intervals if each.action.kind in COMPUTE_KINDS]
    return _rows(bars, timeline.shape.num_devices) if bars else ""


def _bar(parts: Sequence[Part], capacity: float, title: str) -> str:
    """One bar of parts within the frame of a capacity, and its legend."""
    scale = WIDTH / max(capacity, sum(size for _, size, _ in parts), 1e-12)
    items, labels, at = [], [], 0.0
    for (name, size, text), color in zip(parts, itertools.cycle(COLORS)):
        items.append(_rect(at, 0, size * scale, ROW, color, f"{name}: {text}"))
        labels.append((f"{name} {text}", color))
        at += size * scale
    frame = (
        f'<rect x="0.5" y="0.5" width="{capacity * scale - 1:.1f}" height="{ROW - 1}" fill="none" '
        'stroke="currentColor"/>'
    )
    legend, height = _legend(labels, ROW + GAP)
    return _svg([*items, frame, *legend], height, title)


def _rows(bars: Sequence[Interval], num_devices: int) -> str:
    """One row of bars for each device."""
    left = 60.0
    end_s = max(each.end_s for each in bars)
    scale = (WIDTH - left) / max(end_s, 1e-12)
    items = [_text(0, (d + 0.7) * (ROW + 2), f"rank {d}") for d in range(num_devices)]
    kinds: defaultdict[str, str] = defaultdict(str)
    for each in bars:
        kind, color = each.action.kind, COLORS[KIND_COLORS[each.action.kind]]
        kinds[KIND_NAMES[kind]] = color
        width = (each.end_s - each.start_s) * scale
        x, y, label = left + each.start_s * scale, each.device * (ROW + 2), str(each.action)
        items.append(_rect(x, y, max(0.5, width - 0.5), ROW, color, label))
        if width > CHARACTER * len(label) + 2:
            items.append(_text(x + 2, y + 0.7 * ROW, label, fill="#fff"))
    legend, height = _legend(list(kinds.items()), num_devices * (ROW + 2) + GAP)
    return _svg([*items, *legend], height, "computation by pipeline rank, without messages")


def _legend(labels: Sequence[tuple[str, str]], top: float) -> tuple[list[str], float]:
    """Colored labels in as many lines as they need, and the height of all."""
    items, x, y = [], 0.0, top
    for text, color in labels:
        width = 18 + CHARACTER * len(text) + 14
        if x and x + width > WIDTH:
            x, y = 0.0, y + 20
        items += [_rect(x, y + 2, 12, 12, color, text), _text(x + 18, y + 13, text)]
        x += width
    return items, y + 20


def _svg(items: Sequence[str], height: float, title: str) -> str:
    name = escaped(title)
    return (
        f'<figure><figcaption>{name}</figcaption><svg viewBox="0 0 {WIDTH} {height:.0f}" '
        f'role="img" aria-label="{name}" width="{WIDTH}">{"".join(items)}</svg></figure>'
    )


def _rect(x: float, y: float, width: float, height: float, color: str, title: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}">'
        f"<title>{escaped(title)}</title></rect>"
    )


def _text(x: float, y: float, text: str, fill: str = "currentColor") -> str:
    shown = escaped(shortened(text, 60))
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" font-size="12">{shown}</text>'
