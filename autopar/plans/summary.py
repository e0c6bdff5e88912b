"""The one-screen report of a plan: at most 100 columns and 40 lines, whatever the model.

In: a plan. Out: a headline in the field's words and sections of rows, without layout; the screen
is their text. `autopar.plans.text` has all details.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.base.units import format_bytes, format_seconds
from autopar.cost_models.allocator import device_bytes
from autopar.plans.alternatives import (
    NO_FIT,
    alternatives,
    alternatives_section,
    fastest_known,
)
from autopar.plans.blocks import BlockGroup, block_groups, constant_ops, runs_of
from autopar.plans.layout import WIDTH, Section, shortened, text_lines
from autopar.plans.page import Page
from autopar.plans.parallelism import MEANING, strategy_name
from autopar.plans.parts import PlanFields
from autopar.plans.text import (
    CONSTANT,
    early_text,
    inputs_text,
    order_text,
    peak_text,
    place_text,
    plan_sections,
    streams_text,
    throughput_text,
)

LINES = 40
DETAIL_LINES = 2
BLOCK_ROWS, LEAST_ALTERNATIVES, MOST_ALTERNATIVES = 7, 3, 9
_NONE_FITS = "; no known strategy fits"
PLAIN_SPLITS = {"batch", "sequence", "whole", "-", ""}
SPLITS = (
    "split: batch, sequence, or a dimension of an op, such as n (columns) or k (inner) of a "
    "product, h (width) of an embedding, d1 of a tensor"
)
LEAST_S = 5e-8  # shorter times are not shown
REDISTRIBUTION = "redistribution"
"""The column of the times of all redistributions: communication, and casts and copies."""
DETAILS = "all details: plan.report('full'); one module: plan.explain('NAME')"


def headline(plan: PlanFields) -> str:
    """One line: strategy, step time, MFU and memory, beside the fastest known strategy.

    Such as ``FSDP over 8, 492 ms a step, 41% MFU, 61.00 of 79.00 GiB; 1.02x as fast as DDP``, or
    ``; the best known strategy`` for a plan that is it.
    """
    return next(text for text in _headlines(plan) if len(text) <= WIDTH)


def _headlines(plan: PlanFields) -> Iterator[str]:
    """The headline, then ever shorter ones; the last is no longer than a line."""
    p = plan.prediction
    step, memory = f"{format_seconds(p.step_time_s)} a step", _memory_of_all(plan)
    facts = [step, *([_mfu(plan)] if p.model_flops_utilisation else []), memory]
    short = strategy_name(plan, short=True)
    for name in (strategy_name(plan), short):
        yield ", ".join((name, *facts)) + _beside_known(plan, name)
    beside = _beside_known(plan, short).removesuffix(_NONE_FITS)
    yield ", ".join((short, *facts)) + beside
    yield ", ".join((short, step, memory)) + beside
    rest = ", ".join(("", step, memory))
    yield short + rest
    yield shortened(short, WIDTH - len(rest)) + rest


def _beside_known(plan: PlanFields, name: str) -> str:
    """``; 1.02x as fast as DDP``: a plan of this name beside the fastest known strategy."""
    known = fastest_known(plan)
    if known is None:
        none_fits = any(NO_FIT in each.note for each in alternatives(plan))
        return _NONE_FITS * (none_fits and not plan.is_pipeline)
    other = re.sub(r" \([^)]*\)", "", known.name.split(", ")[0])
    ratio = f"{known.time_s / plan.prediction.step_time_s:.2f}x"
    if name.startswith(f"{other} over ") and (known.is_same or ratio == "1.00x"):
        return "; the best known strategy"
    if known.is_same:
        return f"; the same as {other}"
    plain = "plain " * name.startswith(f"{other} over ")
    return f"; {ratio} as fast as {plain}{other}"


def _mfu(plan: PlanFields) -> str:
    used = plan.prediction.model_flops_utilisation
    return f"{used:.{0 if used > 0.1 else 1}%} MFU"


def _memory_of_all(plan: PlanFields) -> str:
    """``61.00 of 79.00 GiB``: what a step takes of what a plan may use."""
    needed = format_bytes(needed_bytes(plan))
    usable = format_bytes(plan.cluster.usable_memory_bytes)
    number, unit = needed.split(" ")
    return f"{number if usable.endswith(unit) else needed} of {usable}"


def needed_bytes(plan: PlanFields) -> int:
    """The memory of a device that a step takes, with what the allocator or the process adds."""
    found = plan.prediction.resident_bytes
    if found is not None:
        return found
    return device_bytes(plan.prediction.memory_bytes, plan.cluster.device)


def beyond_tensors(plan: PlanFields) -> str:
    """The name of the memory that a step takes beside its tensors."""
    on_gpu = plan.prediction.resident_bytes is None
    return "fragmentation" if on_gpu else "allocator and libraries"


def summary_sections(plan: PlanFields) -> list[Section]:
    """The sections of the screen under the headline."""
    groups = block_groups(plan)
    blocks = _blocks(plan, groups)
    first = [
        Section(title="", rows=_facts(plan)),
        Section(title="step", rows=_step(plan)),
        blocks,
        Section(title="memory of a device, counted", rows=memory_rows(plan)),
    ]
    whole = replace(blocks, wraps=True)
    more = len(text_lines(whole)) - len(text_lines(blocks))
    if _rows_left(first) - more >= LEAST_ALTERNATIVES + DETAIL_LINES:
        first[2] = whole
    last, rows = Section(title="", notes=(DETAILS,)), _rows_left(first)
    for num in range(min(rows, MOST_ALTERNATIVES), LEAST_ALTERNATIVES, -1):
        table = alternatives_section(plan, num)
        if len(text_lines(table)) <= rows + 2:
            break
    else:
        table = alternatives_section(plan, LEAST_ALTERNATIVES)
    return [*first, *([table] if len(table.rows) > 1 else []), last]


def _rows_left(sections: Sequence[Section]) -> int:
    """The lines of the screen for rows of the alternatives, behind the headline and these."""
    used = 2 + sum(len(text_lines(section)) for section in sections)
    return LINES - used - DETAIL_LINES - 2  # the table's title and header


def summary_page(plan: PlanFields, figures: tuple[str, ...] = ()) -> Page:
    """The screen as text; as a page also with these SVG elements and all details."""
    return Page(
        headline=headline(plan),
        sections=tuple(summary_sections(plan)),
        figures=figures,
        details=plan_sections(plan),
    )


def format_summary(plan: PlanFields, width: int = WIDTH) -> str:
    """The screen as text of at most ``width`` columns."""
    page = Page(headline=headline(plan), sections=tuple(summary_sections(plan)))
    return page.to_text(width)


def _cut(text: str, num_lines: int = 1) -> str:
    """The text, shortened to about this many lines of a row."""
    return shortened(text, num_lines * (WIDTH - 24))


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _facts(plan: PlanFields) -> tuple[tuple[str, str], ...]:
    graph, schedule = plan.graph, plan.schedule
    model = f"{graph.num_parameters:,} parameters, {graph.num_ops} ops"
    if graph.precision is not None:
        model += f", {graph.precision}"
    if graph.batch_norm == "local":
        model += ", batch norm over each shard"
    devices = plan.cluster.devices_text
    has_ranks = schedule.num_devices > 1
    if plan.may_split:
        devices += f", mesh {plan.device_mesh}" + " on each pipeline rank" * has_ranks
    elif has_ranks:
        devices += ", one on each pipeline rank"
    rows = [
        ("model", _cut(f"{model}; {inputs_text(plan)}", 2)),
        ("devices", _cut(devices, 1 + bool(plan.cluster.islands))),
    ]
    if plan.is_pipeline or schedule.num_microbatches > 1:
        text = schedule.name if plan.is_pipeline else "no pipeline"
        text += f", {schedule.num_microbatches} micro-batch"
        text += "es" * (schedule.num_microbatches > 1)
        if plan.is_pipeline:
            text += f", {counted(schedule.num_stages, 'stage')} on "
            text += counted(schedule.num_devices, "pipeline rank")
            text += f", first blocks {', '.join(runs_of(schedule.first_blocks))}"
        rows.append(("schedule", _cut(text, 2)))
    if schedule.gap is not None:
        rows.append(("order", order_text(schedule.gap)))
    return (*rows, *_extras(plan))


def _extras(plan: PlanFields) -> list[tuple[str, str]]:
    """One row for each of a second stream, early update, recomputation, compiled blocks and
    offloading."""
    streams = streams_text(plan)
    rows = [("streams", streams)] if streams else []
    update, schedule = plan.update, plan.schedule
    if update.when == "early":
        rows.append(("update", early_text(update)))
    if plan.recomputation:
        blocks = sum(len(group.blocks) for group in plan.recomputation)
        saved = sum(len(g.blocks) * (g.default_bytes - g.kept_bytes) for g in plan.recomputation)
        time_s = sum(len(group.blocks) * group.time_s for group in plan.recomputation)
        time_s *= schedule.num_microbatches * update.update.num_passes
        text = f"recomputation in {blocks} block{'s' * (blocks > 1)}: "
        text += f"{format_bytes(abs(saved))} {'less' if saved >= 0 else 'more'} kept a micro-batch"
        rows.append(("recomputed", f"{text}, +{format_seconds(time_s)} a step"))
    compiled = sum(len(group.blocks) * len(group.compiled) for group in plan.kernels)
    if plan.kernels:
        failed = sum(len(group.failures) for group in plan.kernels)
        text = f"{compiled} graphs of blocks by Inductor"
        rows.append(("compiled", text + f", {failed} kinds could not be" * (failed > 0)))
    if plan.offload is not None:
        moved = format_bytes(plan.offload.moved_bytes)
        wait = format_seconds(plan.offload.stall_s)
        rows.append(("offloaded", f"{moved} a step, both ways; computation waits {wait}"))
    return rows


def _step(plan: PlanFields) -> tuple[tuple[str, str], ...]:
    p = plan.prediction
    times = {"forward": p.forward_s, "backward": p.backward_s, "update": p.update_s}
    compute = ", ".join(f"{name} {format_seconds(time_s)}" for name, time_s in times.items())
    if plan.busiest_rank:
        compute += f" on {plan.busiest_rank}"
    moved = {
        "exposed": p.communication_s,
        "overlapped": p.hidden_s,
        "of casts and copies": p.copies_s,
    }
    moves = [f"{format_seconds(time_s)} {kind}" for kind, time_s in moved.items() if time_s]
    bubble = [("bubble", f"{p.bubble_share:.1%} of all devices")] if plan.is_pipeline else []
    total = f"{format_seconds(p.step_time_s)}, {throughput_text(plan)}"
    if p.model_flops_utilisation:
        total += f", {_mfu(plan)}{peak_text(plan)}"
    return (
        ("total", total),
        ("computation", compute),
        ("communication", ", ".join(moves) or "none"),
        *bubble,
        ("prices", _cut(_sources(plan), 3)),
    )


def _sources(plan: PlanFields) -> str:
    p = plan.prediction
    text = "ops " + ", ".join(f"{count} {name}" for name, count in p.sources.items())
    if p.num_noisy:
        text += f" ({p.num_noisy} noisy)"
    if p.analytical_factor is not None:
        text += f", which may be off by {p.analytical_factor:.3g}x"
    constant = len(constant_ops(plan))
    if constant:
        text += f", and {constant} {CONSTANT}"
    text += f"; communication {p.communication_source}" + " (noisy)" * p.communication_is_noisy
    if p.unpriced:
        text += f"; {counted(len(p.unpriced), 'operator')} without a cost model"
    if plan.redundant_ops:
        text += f"; {counted(len(plan.redundant_ops), 'operator')} without a rule"
    gap = f", gap {plan.search.gap:.2%}" if plan.search.gap else ""
    return f"{text}; sharding {plan.search.status.lower()}{gap}"


def _blocks(plan: PlanFields, groups: list[BlockGroup]) -> Section:
    rows = [
        (
            group.label,
            format_bytes(group.size_bytes(plan)) if group.parameters else "",
            group.strategy(plan.mesh.axis_names),
            " x ".join(group.splits) * plan.may_split,
            time_text(group.seconds("forward_s")),
            time_text(group.backward_s),
            time_text(group.seconds("communication_s")),
        )
        for group in groups
    ]
    used = " ".join((strategy_name(plan), *(row[2] for row in rows)))
    notes = [_legend(used)] if plan.parameters and plan.may_split else []
    splits = {word for g in groups for words in g.splits for word in words.split("/")}
    if plan.may_split and not splits <= PLAIN_SPLITS:
        notes.append(SPLITS)
    if len(rows) > BLOCK_ROWS:
        half = BLOCK_ROWS // 2
        left = rows[half : len(rows) - (BLOCK_ROWS - 1 - half)]
        empty = ("",) * 6
        rows[half : half + len(left)] = [(f"{len(left)} other kinds of block", *empty)]
    return Section(
        title="strategy by block" + ", of all pipeline ranks" * plan.is_pipeline,
        columns=("block", "parameters", "strategy", "split", "forward", "backward", REDISTRIBUTION),
        rows=tuple(rows),
        notes=tuple(notes),
    ).used_columns()


def time_text(seconds: float) -> str:
    """The time, or nothing for one that is too short to matter."""
    return format_seconds(seconds) if seconds >= LEAST_S else ""


def _legend(used: str) -> str:
    """The kinds of parallelism that a text names, explained."""
    words = set(re.findall(r"[^\s,()%]+", used))
    return "; ".join(f"{kind}: {text}" for kind, text in MEANING.items() if kind in words)


def memory_rows(plan: PlanFields) -> tuple[tuple[str, str], ...]:
    memory = plan.prediction.memory_bytes
    by_size = sorted(memory.items(), key=lambda item: -item[1])
    texts = [f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in by_size if size]
    is_gpu = plan.prediction.resident_bytes is None
    name = "with fragmentation" if is_gpu else "process grows by"
    return (
        ("tensors", f"{format_bytes(sum(memory.values()))}: {', '.join(texts)}"),
        (name, _memory_of_all(plan)),
        ("peak", _cut(place_text(plan.prediction.memory_peak_at))),
    )
