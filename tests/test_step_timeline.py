"""The timeline of a step without a pipeline: its spans are the prices that the step sums."""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import nn

import autopar
from autopar import Force, Plan
from autopar.base.errors import PlanError
from autopar.cost_models import Cluster
from autopar.plans.figures import figure_data, plot_timeline
from autopar.plans.timeline import predicted_spans, predicted_timeline, predicted_trace
from autopar.pricing.step_costs import BlockCosts, Part, StepCosts
from autopar.pricing.step_timeline import Span, Track, step_spans
from tests.models import families
from tests.models.zoo import build
from tests.test_reports import offloaded

KINDS: dict[str, dict[str, Any]] = {
    "one": {"num": 1},
    "one, bf16": {"num": 1, "precision": "bf16"},
    "DDP": {"constraints": [Force("data_parallel")]},
    "FSDP": {
        "constraints": [Force("zero3")], "reshard_after_forward": True, "mesh": {"x": 4},
        "num_microbatches": 2, "reduce_every_microbatch": True,
    },
    "TP": {"constraints": [Force("tensor_parallel")], "mesh": {"x": 4}},
    "recomputed": {"constraints": [Force("data_parallel")], "recompute": "full"},
    "two passes": {
        "constraints": [Force("data_parallel")],
        "update": autopar.Update(when="early", clipping="second_pass"),
    },
}  # fmt: skip
CASES = [
    *(f"gpt2 {kind}" for kind in KINDS),
    "mlp one", "mlp DDP", "mlp FSDP", "mlp TP",
    "llama one, bf16", "llama DDP", "llama FSDP", "llama TP",
]  # fmt: skip
WORK = (Part.FORWARD, Part.RECOMPUTATION, Part.INPUT_GRADIENTS, Part.WEIGHT_GRADIENTS)


@functools.cache
def planned(case: str) -> Plan:
    """A plan, read from JSON, on devices whose computation is slower beside communication."""
    name, _, kind = case.partition(" ")
    options = dict(KINDS[kind])
    cluster = Cluster.preset("a100-80", devices_per_node=options.pop("num", 4))
    model, batch = _model(name)
    cluster = structs.replace(cluster, overlap_slowdown=1.5)
    return Plan.from_json(autopar.plan(model, cluster, batch, **options).to_json())


def _model(name: str) -> tuple[nn.Module, Any]:
    if name == "llama":
        tokens = torch.zeros(8, 16, dtype=torch.int64)
        return families.llama(2), {"input_ids": tokens, "labels": tokens}
    model, make_batch = build(name)
    return model, make_batch(0, batch=8)


def spans_of(plan: Plan) -> tuple[Span, ...]:
    found = predicted_spans(plan)
    assert found is not None
    return found


class Busy:
    """Which parts run in each piece of a step between two ends of spans."""

    def __init__(self, spans: tuple[Span, ...]) -> None:
        times = sorted({0.0, *(t for span in spans for t in (span.start_s, span.end_s))})
        self.pieces: list[tuple[float, float, set[Part]]] = []
        for start_s, end_s in itertools.pairwise(times):
            middle_s = (start_s + end_s) / 2
            parts = {span.part for span in spans if span.start_s < middle_s < span.end_s}
            self.pieces.append((start_s, end_s, parts))

    def seconds(self, *, of: tuple[Part, ...]) -> float:
        return sum(end_s - start_s for start_s, end_s, parts in self.pieces if parts & set(of))

    def done_s(self, span: Span, slowdown: float) -> float:
        """The work that is done in a span, at a slower rate beside communication."""
        return sum(
            (end_s - start_s) / (slowdown if parts & {Part.GATHER, Part.REDUCTION} else 1.0)
            for start_s, end_s, parts in self.pieces
            if span.start_s <= start_s and end_s <= span.end_s
        )


@pytest.mark.parametrize("case", CASES)
def test_the_timeline_ends_with_the_predicted_step(case: str) -> None:
    plan = planned(case)
    step_s = plan.prediction.step_time_s
    assert max(span.end_s for span in spans_of(plan)) == pytest.approx(step_s, rel=1e-6)
    timeline = predicted_timeline(plan)
    assert timeline is not None
    assert timeline.makespan_s == pytest.approx(step_s, rel=1e-6)
    assert figure_data(plan, "timeline").makespan_s == pytest.approx(step_s, rel=1e-6)
    assert figure_data(plan, "memory_over_time").end_s == pytest.approx(step_s, rel=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_the_sums_of_its_parts_are_those_of_the_report(case: str) -> None:
    plan = planned(case)
    p, spans, slowdown = plan.prediction, spans_of(plan), plan.cluster.overlap_slowdown
    alone_s: Counter[Part] = Counter()
    for span in spans:
        alone_s[span.part] += span.alone_s  # type: ignore[assignment]
    assert alone_s[Part.FORWARD] == pytest.approx(p.forward_s, rel=1e-6)
    assert sum(alone_s[part] for part in WORK[1:]) == pytest.approx(p.backward_s, rel=1e-6)
    assert alone_s[Part.UPDATE] == pytest.approx(p.update_s, rel=1e-6)
    again_s = sum(len(group.blocks) * group.time_s for group in plan.recomputation)
    again_s *= plan.schedule.num_microbatches * plan.update.update.num_passes
    assert alone_s[Part.RECOMPUTATION] == pytest.approx(again_s, rel=1e-6)
    busy = Busy(spans)
    slowed_s = sum(span.duration_s - span.alone_s for span in spans if span.part in WORK)
    exposed_s = p.step_time_s - busy.seconds(of=(*WORK, Part.UPDATE)) + slowed_s
    least_s = 1e-8 * p.step_time_s
    assert exposed_s == pytest.approx(p.communication_s + p.copies_s, rel=1e-5, abs=least_s)
    moved = (Part.REDISTRIBUTION, Part.GATHER, Part.REDUCTION)
    hidden_s = sum(alone_s[part] for part in moved) - exposed_s
    if p.communication_s:  # so all casts and copies are taken to be exposed
        assert hidden_s == pytest.approx(p.hidden_s, rel=1e-5, abs=least_s)
    for span in spans:
        if span.track is not Track.COLLECTIVE:
            assert busy.done_s(span, slowdown) == pytest.approx(span.alone_s, rel=1e-6)
        else:
            assert span.duration_s == pytest.approx(span.alone_s)


@pytest.mark.parametrize("case", CASES)
def test_a_track_does_one_thing_at_a_time_in_an_order_that_can_run(case: str) -> None:
    """A block starts when its parameters are there, is reduced after its gradients, and updated
    at the end."""
    spans = spans_of(planned(case))
    least_s = 1e-9 * max(span.end_s for span in spans)
    for track in Track:
        own = sorted((s.start_s, s.end_s) for s in spans if s.track is track)
        assert all(a[1] <= b[0] + least_s for a, b in itertools.pairwise(own))
    streams = sorted((s.start_s, s.end_s) for s in spans if s.track is not Track.COLLECTIVE)
    assert all(a[1] <= b[0] + least_s for a, b in itertools.pairwise(streams))
    starts: defaultdict[tuple[str, int, str], list[float]] = defaultdict(list)
    ends: defaultdict[tuple[str, int, str], list[float]] = defaultdict(list)
    for span in spans:
        if span.part is not Part.GATHER:
            starts[span.block, span.microbatch, span.graph].append(span.start_s)
            ends[span.block, span.microbatch, span.graph].append(span.end_s)
    for span in spans:
        if span.part is Part.GATHER:
            work = starts[span.block, span.microbatch, span.graph]
            assert any(span.end_s <= start_s + least_s for start_s in work)
        if span.part is Part.REDUCTION and span.block:
            assert min(ends[span.block, span.microbatch, "I"], default=0.0) <= span.start_s


def test_each_plan_communicates_as_its_kind_does() -> None:
    parts = {
        case: {(span.part, span.block, span.microbatch) for span in spans_of(planned(case))}
        for case in ("gpt2 one", "gpt2 DDP", "gpt2 FSDP", "gpt2 TP")
    }
    block = "transformer.h.1"
    for found in parts.values():
        assert {(Part.FORWARD, block, 0), (Part.WEIGHT_GRADIENTS, block, 0)} <= found
        assert (Part.UPDATE, block, -1) in found
    kinds = {case: {part for part, *_ in found} for case, found in parts.items()}
    assert not kinds["gpt2 one"] & {Part.GATHER, Part.REDUCTION}
    assert (Part.REDUCTION, block, 0) in parts["gpt2 DDP"]
    assert (Part.GATHER, block, 0) not in parts["gpt2 DDP"]
    both = {(part, block, number) for part in (Part.GATHER, Part.REDUCTION) for number in (0, 1)}
    assert both <= parts["gpt2 FSDP"]
    assert (Part.REDISTRIBUTION, block, 0) in parts["gpt2 TP"]
    assert (Part.REDUCTION, block, 0) not in parts["gpt2 TP"]


def test_a_step_that_is_played_by_hand() -> None:
    """At half the speed beside communication: the second block's gather covers 4 of 6 seconds of
    the first block's work, which takes 8; its reduction covers 2 of the 5 of what follows."""
    first = BlockCosts(
        name="a", forward_moves_s=1.0, forward_s=5.0, input_grad_s=4.0, weight_grad_s=1.0,
        first_gather_s=3.0, reduce_s=2.0, update_s=1.0,
    )  # fmt: skip
    second = BlockCosts(
        name="b", forward_s=2.0, weight_grad_s=2.0, first_gather_s=4.0, reduce_s=2.0
    )
    spans = step_spans(StepCosts(blocks=(first, second)), num_microbatches=1, slowdown=2.0)
    assert [(str(s.part), s.block, s.start_s, s.end_s) for s in spans] == [
        ("parameter gather", "a", 0, 3),
        ("parameter gather", "b", 3, 7),
        ("redistribution", "a", 3, 5),
        ("forward", "a", 5, 11),
        ("forward", "b", 11, 13),
        ("weight gradients", "b", 13, 15),
        ("gradient reduction", "b", 15, 17),
        ("input gradients", "a", 15, 20),
        ("weight gradients", "a", 20, 21),
        ("gradient reduction", "a", 21, 23),
        ("update", "a", 23, 24),
    ]


@pytest.mark.parametrize("case", ["llama FSDP", "gpt2 recomputed", "mlp one"])
def test_the_trace_has_the_parts_inside_the_actions(case: str) -> None:
    plan = planned(case)
    events = json.loads(predicted_trace(plan))["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks[0] == "main"
    timed = [e for e in events if e["ph"] in "XBE"]
    assert timed == sorted(timed, key=lambda each: each["ts"])
    open_until: defaultdict[int, list[float]] = defaultdict(list)
    begun: dict[int, dict[str, Any]] = {}
    sums: Counter[str] = Counter()
    for event in timed:
        track = event["tid"]
        if event["ph"] == "X":
            open_until[track].append(event["ts"] + event["dur"])
        elif event["ph"] == "B":
            assert track not in begun
            begun[track] = event
        else:
            started = begun.pop(track)
            assert started["name"] == event["name"]
            assert event["ts"] <= max(open_until[track], default=event["ts"]) + 1e-3
            sums[started["args"]["part"]] += event["ts"] - started["ts"]  # type: ignore[assignment]
    assert not begun
    expected: Counter[str] = Counter()
    for span in spans_of(plan):
        expected[span.part] += 1e6 * span.duration_s  # type: ignore[assignment]
    for part in Part:
        assert sums[part] == pytest.approx(expected[part], abs=1e-3 * len(timed))
    held = [e["args"]["bytes"] for e in events if e["ph"] == "C"]
    assert max(held) == sum(plan.prediction.memory_bytes.values())
    ends = [e["ts"] + e.get("dur", 0.0) for e in timed]
    assert max(ends) == pytest.approx(1e6 * plan.prediction.step_time_s, abs=1e-2)


@pytest.mark.parametrize("case", ["llama FSDP", "gpt2 DDP", "mlp TP"])
def test_the_figure_draws_every_span_on_its_row(case: str) -> None:
    plan = planned(case)
    chart, spans = figure_data(plan, "timeline"), spans_of(plan)
    _, axes = plot_timeline(chart)
    scale = {"s": 1.0, "ms": 1e-3, "us": 1e-6}[axes.get_xlabel()]
    rows = [label.get_text() for label in axes.get_yticklabels()]
    drawn = sorted((p.get_x() * scale, p.get_width() * scale) for p in axes.patches)
    for found, span in zip(drawn, sorted((s.start_s, s.duration_s) for s in spans), strict=True):
        assert found == pytest.approx(span, abs=1e-12)
    names = {Track.MAIN: "computation", Track.REDISTRIBUTION: "redistributions"}
    for bar, span in zip(chart.bars, spans, strict=True):
        assert rows[bar.row] == names.get(span.track, "gathers, reductions")
        assert bar.label == span.block
    step = f"{plan.prediction.step_time_s / scale:.2f} {axes.get_xlabel()}"
    assert chart.title.startswith(f"A step of {step}") or scale == 1e-6


@pytest.mark.parametrize("case", ["gpt2 FSDP", "llama DDP", "gpt2 recomputed", "mlp one"])
def test_memory_is_that_of_what_runs_at_that_time(case: str) -> None:
    """A place of the curve lasts as long as the graph of a block, and names one that is played or
    that parameters are gathered for."""
    plan = planned(case)
    curve = plan.memory_curve
    assert curve is not None
    points, spans, least_s = curve.read(), spans_of(plan), 1e-7 * curve.end_s
    starts = [span.start_s for span in spans if span.track is not Track.COLLECTIVE]
    ends_s = [*(point.start_s for point in points[1:]), curve.end_s]
    for point, end_s in zip(points, ends_s):
        if point.place == "update" or end_s - point.start_s < 2 * least_s:
            continue
        assert any(point.start_s == pytest.approx(start_s, abs=least_s) for start_s in starts)
        graph, _, block = point.place.partition(" ")
        running = {
            (span.graph, span.block) for span in spans
            if span.start_s < end_s - least_s and span.end_s >= point.start_s - least_s
        }  # fmt: skip
        assert any(of == graph.replace("G", "W") and block in ("", name) for of, name in running)
    peak = max(sum(point.size_bytes) for point in points)
    assert peak == sum(plan.prediction.memory_bytes.values())


def test_a_step_that_waits_for_the_host_ends_with_it() -> None:
    plan = offloaded()
    assert plan.offload is not None
    spans, curve = spans_of(plan), plan.memory_curve
    step_s = plan.prediction.step_time_s
    assert max(span.end_s for span in spans) == pytest.approx(step_s, rel=1e-6)
    (waits,) = (span for span in spans if span.track is Track.HOST)
    assert waits.duration_s == pytest.approx(plan.offload.stall_s)
    assert curve is not None
    assert curve.end_s == pytest.approx(step_s, rel=1e-6)
    assert "copies to the host" in figure_data(plan, "timeline").rows


def test_the_curve_covers_micro_batches_that_are_equal() -> None:
    """They are one point, from the third micro-batch to the last but one."""
    model, make_batch = build("gpt2")
    plan = autopar.plan(
        model, Cluster.preset("a100-80", devices_per_node=4), make_batch(0, batch=32),
        num_microbatches=8, constraints=[Force("data_parallel")], mesh={"x": 4},
    )  # fmt: skip
    curve, chart = plan.memory_curve, figure_data(plan, "memory_over_time")
    assert curve is not None
    assert curve.num_left_out == 4
    assert curve.end_s == pytest.approx(plan.prediction.step_time_s, rel=1e-6)
    starts = [
        min(s.start_s for s in spans_of(plan) if s.microbatch == n and s.graph == "F")
        for n in range(8)
    ]
    times = [point.start_s for point in curve.read()]
    longest = max(range(len(times) - 1), key=lambda n: times[n + 1] - times[n])
    assert times[longest] == pytest.approx(starts[2])
    assert times[longest + 1] == pytest.approx(starts[6])
    assert chart.title.endswith("4 equal micro-batches as one")


def test_costs_that_no_step_has_are_refused_by_their_path() -> None:
    plan = json.loads(planned("mlp DDP").to_json())
    plan["step_costs"]["blocks"][0]["forward_s"] = -1.0
    with pytest.raises(PlanError, match=r"\$\.step_costs\.blocks\[0\]\.forward_s"):
        Plan.from_json(json.dumps(plan))
    plan["step_costs"]["blocks"][0] = {"name": "a", "sideways_s": 1.0}
    with pytest.raises(PlanError, match=r"\$\.step_costs.*unknown field"):
        Plan.from_json(json.dumps(plan))
    plan["step_costs"] = None
    with pytest.raises(autopar.InputError, match="no prices"):
        Plan.from_json(json.dumps(plan)).figure("timeline")
