"""All details of a plan as text; `autopar.plans.summary` has the one-screen report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter

from autopar.base.units import format_bytes, format_seconds
from autopar.cost_models.allocator import device_bytes
from autopar.plans.blocks import constant_ops
from autopar.plans.layout import WIDTH, Section, text_lines
from autopar.plans.parts import KernelPlan, OffloadPlan, PlanFields, UpdatePlan
from autopar.plans.predicted import Prediction
from autopar.plans.schedule_plan import SchedulePlan
from autopar.plans.strategy_names import (
    ALONG_DATA,
    ALONG_TENSORS,
    MARKOV_CHAIN,
    ONE_WEIRD_TRICK,
    name_of,
)
from autopar.schedules.runnable import uses_side_stream

MAX_ROWS = 14
NEARLY_ALL = 0.995
_UNITS = {"tensor_float32": "TF32"}
CONSTANT = "constant (computed once)"
"""The ops that depend on neither inputs nor parameters, which have no price."""
_GRAPHS = {
    "F": "in the forward pass of",
    "I": "in the backward pass of",
    "W": "at the gradients of the weights of",
    "G": "at the reduction of the gradients of",
}
_PLACES = {"update": "at the update", "G": "at the last reduction of gradients"}


Rows = list[tuple[str, str]]


def plan_sections(plan: PlanFields) -> tuple[Section, ...]:
    """The sections of a plan's report, without layout."""
    is_split = plan.cluster.num_devices > 1  # on one device all known strategies are the same
    sections = [
        Section(title=title, rows=tuple(rows), wraps=True) for title, rows in _titled_rows(plan)
    ]
    return (*sections, *([_baselines(plan)] if is_split else []))


def _titled_rows(plan: PlanFields) -> list[tuple[str, Rows]]:
    return [
        ("plan", _summary(plan)),
        ("predicted time of a step", _times(plan)),
        (
            "predicted memory a device (counted; the peak is "
            f"{place_text(plan.prediction.memory_peak_at)})",
            _memory(plan),
        ),
        ("parameters by stored placement", _placements(plan)),
        ("ops by choice, per mesh axis", _choices(plan)),
        ("operators without a cost model, priced by memory traffic", _unpriced(plan)),
        ("operators without a rule, computed redundantly", _redundant(plan)),
        ("meshes considered", _meshes(plan)),
        *([("recomputation", _recomputation(plan))] if plan.recomputation else []),
        *([("compiled blocks", _kernels(plan))] if plan.kernels else []),
        *([("offloading", _offload(plan.offload))] if plan.offload is not None else []),
        *([("pipelines considered", _pipelines(plan))] if plan.search.pipelines else []),
    ]


def place_text(place: str) -> str:
    """A place of a step's memory in words: ``I lm_head`` is ``in the backward pass of lm_head``."""
    graph, _, block = place.partition(" ")
    if block and graph in _GRAPHS:
        return f"{_GRAPHS[graph]} {block}"
    return _PLACES.get(place, f"at {place}")


def _summary(plan: PlanFields) -> Rows:
    graph, search = plan.graph, plan.search
    where = " on each pipeline rank" if plan.schedule.num_devices > 1 else ""
    return [
        ("mesh", f"{plan.device_mesh}{where}"),
        ("devices", plan.cluster.devices_text),
        ("model", f"{graph.num_parameters:,} parameters, {graph.num_ops} ops"),
        ("inputs", inputs_text(plan)),
        ("inputs stored", ", ".join(f"{input_text(n)}: {text}" for n, text in plan.inputs.items())),
        *([("batch norm", "statistics of each shard")] if graph.batch_norm == "local" else []),
        *([] if graph.precision is None else [("precision", str(graph.precision))]),
        *_schedule(plan),
        *_update(plan),
        (
            "search",
            f"{search.status.lower()}, gap {search.gap:.2%}"
            + (" (sharding, by the sum of all stages)" if plan.is_pipeline else " (sharding)"),
        ),
    ]


def inputs_text(plan: PlanFields) -> str:
    """The model's inputs with their dtypes and shapes, and which masks are full."""
    full = plan.graph.full_masks
    return ", ".join(
        f"{input_text(name)} {text}" + (" of ones" if name in full else "")
        for name, text in plan.graph.inputs.items()
    )


def input_text(name: str) -> str:
    """The name of an input; those that are passed by position have numbers."""
    return f"input {name}" if name.isdecimal() else name


def _schedule(plan: PlanFields) -> Rows:
    schedule = plan.schedule
    text = schedule.name
    streams = streams_text(plan)
    streams_row = [("streams", streams)] if streams else []
    if schedule.num_microbatches > 1:
        text += f", {schedule.num_microbatches} micro-batches"
    if not plan.is_pipeline:
        return [("schedule", text), *streams_row]
    found = schedule.pipeline()
    if found is not None and found[1].shape.recomputed:
        recomputed = found[1].shape.recomputed
        every = len(recomputed) == schedule.num_stages
        text += ", all stages" if every else f", stages {', '.join(map(str, recomputed))}"
        text += " recomputed"
    return [
        ("schedule", f"{text}, {_devices(schedule)}"),
        *streams_row,
        ("stages begin at", ", ".join(schedule.first_blocks)),
        *([] if schedule.gap is None else [("order of actions", order_text(schedule.gap))]),
    ]


def order_text(gap: float) -> str:
    """How far the order of a schedule's actions is from a lower bound, as text."""
    if gap == 0:
        return "proved optimal for these stages in this memory"
    return f"at most {gap:.1%} slower than the best for these stages in this memory"


def streams_text(plan: PlanFields) -> str:
    """The second stream of a device, of weight gradients or of early updates, as text; empty if the
    plan has none."""
    found, is_cpu = plan.schedule.pipeline(), plan.cluster.device.kind == "cpu"
    if plan.update.when == "early" and plan.offload is None and not is_cpu:
        return "updates on a second one; no gain from co-running is predicted"
    if found is None or not uses_side_stream(found[1]):
        return ""
    if is_cpu:
        return "one, as on every CPU: weight gradients run in their order of issue"
    return "weight gradients on a second one; no gain from co-running is predicted"


def _update(plan: PlanFields) -> Rows:
    """The peak of gradients under an early update, and its limits."""
    update = plan.update
    if update.when == "at_end":
        return []
    text = early_text(update)
    found = "a non-finite gradient is found after other weights have changed"
    if update.update.num_passes > 1:
        found = "clipped by the norm of a first pass, which doubles forward and backward"
    elif update.clipping is not None:
        found = f"clipped by the norm of the step before; {found}"
    if not update.keep_gradients and plan.schedule.num_microbatches > 1:
        text += "; gradients are accumulated, so only the last micro-batch can save"
    return [("update", f"{text}; {found}")]


def early_text(update: UpdatePlan) -> str:
    """The gradient memory of an early update, as text."""
    if update.keep_gradients:
        return "early, gradients kept: saves no memory"
    now, before = update.gradient_bytes, update.gradient_bytes_at_end
    return f"early: at most {format_bytes(now)} of gradients at once, of {format_bytes(before)}"


def _devices(schedule: SchedulePlan) -> str:
    if schedule.num_devices == 1:
        return f"{schedule.num_stages} stages on every device"
    return f"{schedule.num_devices} pipeline ranks"


def _times(plan: PlanFields) -> Rows:
    p = plan.prediction
    sources = ", ".join(f"{count} {name}" for name, count in p.sources.items())
    constant = len(constant_ops(plan))
    if constant:
        sources += f", {constant} {CONSTANT}"
    if p.num_noisy:
        sources += f"; {p.num_noisy} noisy"
    return [
        ("step", format_seconds(p.step_time_s)),
        ("throughput", throughput_text(plan)),
        (
            "model FLOPs",
            f"{p.model_flops:.3g} a step: {p.model_flops_utilisation:.1%} MFU{peak_text(plan)}",
        ),
        *([("parts of", plan.busiest_rank)] if plan.busiest_rank else []),
        ("forward", format_seconds(p.forward_s)),
        ("backward", format_seconds(p.backward_s)),
        ("exposed communication", _communication(p)),
        *([("casts and copies", format_seconds(p.copies_s))] if p.copies_s else []),
        ("update", f"{format_seconds(p.update_s)}  ({p.update_source})"),
        *([("bubbles", f"{p.bubble_share:.1%} of all devices")] if plan.is_pipeline else []),
        ("op prices", sources),
        *_roofline(p.analytical_factor),
    ]


def _communication(p: Prediction) -> str:
    hidden = f", {format_seconds(p.hidden_s)} overlapped" if p.hidden_s else ""
    source = p.communication_source + ", noisy" * p.communication_is_noisy
    return f"{format_seconds(p.communication_s)}  ({source}){hidden}"


def _roofline(factor: float | None) -> Rows:
    if factor is None:
        return []
    return [("", f"roofline prices may be off by a factor of {factor:g} (median by time)")]


def throughput_text(plan: PlanFields) -> str:
    """Tokens and samples per second."""
    p = plan.prediction
    digits = ",.0f" if p.samples_per_s >= 1000 else ".4g"
    texts = [f"{p.samples_per_s:{digits}} samples/s"]
    if p.tokens_per_s is not None:
        texts.insert(0, f"{p.tokens_per_s:,.0f} tokens/s")
    return ", ".join(texts)


def peak_text(plan: PlanFields) -> str:
    """`` of 989.4 TFLOP/s (bfloat16)``: the peak of a device that an MFU is a share of, and the
    precisions of the model's products; empty where they are not known."""
    p = plan.prediction
    if not (p.flops_shares and p.model_flops and p.model_flops_utilisation):
        return ""
    devices_s = p.step_time_s * plan.cluster.num_devices
    peak = p.model_flops / (p.model_flops_utilisation * devices_s)
    number, unit = (peak / 1e12, "TFLOP/s") if peak >= 1e12 else (peak / 1e9, "GFLOP/s")
    precisions = _precisions({_UNITS.get(name, name): x for name, x in p.flops_shares.items()})
    mean = " on average" * bool(plan.cluster.islands)
    return f" of {number:,.4g} {unit}{mean} ({precisions})"


def _precisions(shares: Mapping[str, float]) -> str:
    name, most = max(shares.items(), key=itemgetter(1))
    if len(shares) == 1 or most >= NEARLY_ALL:
        return "nearly all " * (len(shares) > 1) + name
    return ", ".join(f"{share:.0%} {name}" for name, share in shares.items())


def _memory(plan: PlanFields) -> Rows:
    memory = plan.prediction.memory_bytes
    rows = [(name.replace("_", " "), format_bytes(size)) for name, size in memory.items()]
    resident = plan.prediction.resident_bytes
    name = "with fragmentation" if resident is None else "process grows by"
    needed = device_bytes(memory, plan.cluster.device) if resident is None else resident
    usable = format_bytes(plan.cluster.usable_memory_bytes)
    rows.append((name, f"{format_bytes(needed)} of {usable}"))
    return [("total", format_bytes(sum(memory.values()))), *rows]


def _recomputation(plan: PlanFields) -> Rows:
    """The total of all blocks, then bytes kept and time of each group of equal blocks."""
    rows = []
    for group in plan.recomputation:
        rows.append(
            (
                _named(group.blocks),
                f"keeps {format_bytes(group.kept_bytes)} of {format_bytes(group.default_bytes)} a "
                f"micro-batch ({len(group.kept)} values and its inputs), "
                f"+{format_seconds(group.time_s)}",
            )
        )
    num = plan.schedule.num_microbatches * plan.update.update.num_passes
    time_s = num * sum(len(g.blocks) * g.time_s for g in plan.recomputation)
    saved = sum(len(g.blocks) * (g.default_bytes - g.kept_bytes) for g in plan.recomputation)
    share = time_s / plan.prediction.step_time_s
    kept = f"{format_bytes(abs(saved))} {'less' if saved >= 0 else 'more'} kept a micro-batch"
    total = f"{kept}, +{format_seconds(time_s)} a step"
    return [("all", total if plan.is_pipeline else f"{total} ({share:.1%})"), *rows]


def _kernels(plan: PlanFields) -> Rows:
    """For each group of equal blocks, what is compiled, and the prices of both ways."""
    saved_s = plan.schedule.num_microbatches * sum(
        len(group.blocks) * (group.eager_s[graph] - group.compiled_s[graph])
        for group in plan.kernels
        for graph in group.compiled
        if graph in group.eager_s
    )
    rows = [("all", "the predicted step is that of execution op by op")]
    if saved_s:
        text = f"saves {format_seconds(saved_s)} a step of the one predicted for op by op"
        rows = [("all", f"{text} (sum of all stages)" if plan.is_pipeline else text)]
    for group in plan.kernels:
        graphs = [*dict.fromkeys([*group.compiled, *group.eager_s, *group.failures])]
        texts = [_kernel(group, graph) for graph in graphs]
        rows.append((_named(group.blocks), "; ".join(texts) or "op by op"))
    return rows


def _kernel(group: KernelPlan, graph: str) -> str:
    how = "compiled" if graph in group.compiled else "op by op"
    if graph in group.failures:
        return f"{graph} {how}: {group.failures[graph]}"
    if graph not in group.eager_s:
        return f"{graph} {how} as requested"
    eager, compiled = group.eager_s[graph], group.compiled_s[graph]
    prices = f"{format_seconds(eager)} op by op, {format_seconds(compiled)} compiled, measured"
    return f"{graph} {how} ({prices})"


def _named(blocks: Sequence[str]) -> str:
    first, *others = blocks
    if not others:
        return first
    return f"{first} and {len(others)} equal one{'s' * (len(others) > 1)}"


def _offload(offload: OffloadPlan) -> Rows:
    """Bytes and tensors that move to the host, and the time that computation waits for them."""
    plans = offload.plans()
    tensors = [{t.tensor for t in plan.transfers} for plan in plans]
    resident = max(len(plan.starts_on_host) for plan in plans)
    return [
        ("moved a step", f"{format_bytes(offload.moved_bytes)}, both ways"),
        ("tensors", f"{max(map(len, tensors))}, {resident} of them on the host between steps"),
        ("computation waits", f"{format_seconds(offload.stall_s)} a step"),
    ]


def _counted(texts: Sequence[str]) -> Rows:
    counts = Counter(texts).most_common()
    rows = [(text, str(count)) for text, count in counts[:MAX_ROWS]]
    rest = sum(count for _, count in counts[MAX_ROWS:])
    return [*rows, ("others", str(rest))] if rest else rows


def _placements(plan: PlanFields) -> Rows:
    rows = _counted(list(plan.parameters.values()))
    if plan.released:
        text = f"{len(plan.released)}, gathered for each forward and each backward pass"
        rows.append(("released after forward", text))
    if plan.scattered:
        text = f"{len(plan.scattered)}, whose gradients accumulate as shards"
        rows.append(("reduced every micro-batch", text))
    return rows


def _choices(plan: PlanFields) -> Rows:
    constant = len(constant_ops(plan))
    redundant = plan.graph.num_ops - len(plan.ops) - constant
    rows = _counted(list(plan.ops.values()))
    rows += [(CONSTANT, str(constant))] if constant else []
    return [*rows, *([("computed on every device", str(redundant))] if redundant else [])]


def _redundant(plan: PlanFields) -> Rows:
    return [(name, str(count)) for name, count in plan.redundant_ops.items()] or [("none", "")]


def _unpriced(plan: PlanFields) -> Rows:
    return [(name, why) for name, why in plan.prediction.unpriced.items()] or [("none", "")]


def _meshes(plan: PlanFields) -> Rows:
    considered = sorted(plan.search.considered.items(), key=lambda item: item[1])
    return [(mesh, format_seconds(time_s)) for mesh, time_s in considered[:MAX_ROWS]]


def _pipelines(plan: PlanFields) -> Rows:
    """The fastest combinations, then the impossible ones, one row per reason."""
    found = sorted(plan.search.pipelines.items(), key=lambda item: item[1])
    step_s = plan.prediction.step_time_s
    rows = [
        (name, f"{format_seconds(time_s)} {time_s / step_s:.2f}x")
        for name, time_s in found[:MAX_ROWS]
    ]
    if len(found) > MAX_ROWS:
        rows.append(("slower", str(len(found) - MAX_ROWS)))
    reasons: dict[str, list[str]] = {}
    for name, reason in plan.search.not_pipelines.items():
        reasons.setdefault(reason.split("; ")[0], []).append(name)
    return [*rows, *(("excluded: " + names[0], reason) for reason, names in reasons.items())]


def _baselines(plan: PlanFields) -> Section:
    """One row per kind of data parallelism, one column per kind of tensor parallelism; for a
    pipeline one row per schedule of another system."""
    known = plan.search.baselines
    title = "known strategies at the same prices: step time, and relative to the plan"
    if plan.is_pipeline:
        columns: tuple[str, ...] = ("schedule", "step", "note")
        prices = ((name, _price(plan, name), each.note) for name, each in known.items())
        rows: list[tuple[str, ...]] = list(prices)
        notes = _missing(plan)
    else:
        columns, rows = _by_two_kinds(plan)
        notes = [*_fastest(plan), *_missing(plan)]
    return Section(
        title=title, columns=columns, rows=tuple(rows), notes=tuple(notes), wraps=True
    ).used_columns()


def _by_two_kinds(plan: PlanFields) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows of the known strategies, by their data and their tensor parallelism."""
    known = plan.search.baselines
    columns = [
        tensor
        for tensor in ("", *ALONG_TENSORS)
        if any(name_of(data, tensor) in known for data in (*ALONG_DATA, "") if data or tensor)
    ]
    header = ("", *(f"x {tensor}" if tensor else "alone" for tensor in columns))
    rows: list[tuple[str, ...]] = []
    for data in (*ALONG_DATA, ""):
        names = [name_of(data, tensor) for tensor in columns]
        if any(name in known for name in names):
            prices = tuple(_price(plan, name) for name in names)
            rows.append((data or "no data parallelism", *prices))
    empty = ("",) * (len(columns) - 1)
    rows += [
        (name, _price(plan, name), *empty)
        for name in (ONE_WEIRD_TRICK, MARKOV_CHAIN)
        if name in known
    ]
    return header, rows


def _price(plan: PlanFields, name: str) -> str:
    known = plan.search.baselines.get(name)
    if known is None:
        return "-"
    ratio = known.time_s / plan.prediction.step_time_s
    return f"{format_seconds(known.time_s)} {ratio:.2f}x"


def _fastest(plan: PlanFields) -> list[str]:
    """The fastest known strategy, and its memory compared with the plan's."""
    known = plan.search.baselines
    names = [name for name in known if name != MARKOV_CHAIN]
    if not names:
        return []
    name = min(names, key=lambda name: known[name].time_s)
    mine = format_bytes(plan.search.estimated_bytes)
    theirs = format_bytes(known[name].memory_bytes)
    where = f"{name} on {known[name].mesh}"
    found = [f"fastest: {where}; estimated memory {theirs}, the plan's {mine}"]
    if plan.search.fitting_bytes is not None:
        most = format_bytes(plan.search.fitting_bytes)
        found.append(
            f"those of more than {most} are not expected to fit: one that was counted needs more "
            "than is estimated"
        )
    return found


def _missing(plan: PlanFields) -> list[str]:
    """Strategies that do not apply, one row per reason; combinations are implied by their parts."""
    grouped: dict[str, list[str]] = {}
    for name, reason in sorted(plan.search.missing.items(), key=lambda item: len(item[0])):
        names = grouped.setdefault(reason, [])
        if not any(name.startswith(f"{each} x ") or name.endswith(f" x {each}") for each in names):
            names.append(name)
    return [f"not applicable: {', '.join(names)}: {reason}" for reason, names in grouped.items()]


def format_plan(plan: PlanFields, width: int = WIDTH) -> str:
    """All details of the plan as text of at most ``width`` columns."""
    return "\n".join(line for each in plan_sections(plan) for line in text_lines(each, width))
