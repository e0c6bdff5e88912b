"""Profiles: measured steps beside predictions, as numbers, tables and traces."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.base.errors import InputError
from autopar.base.units import format_bytes, format_seconds
from autopar.runtime.op_tables import REST
from autopar.runtime.profile import Profile
from autopar.runtime.profile_trace import EXPOSED
from autopar.runtime.step.executor import ActionTime
from autopar.runtime.step.timing import RankTimes
from autopar.schedules import Action, Kind, Resource
from tests.models.zoo import build

ADAM = functools.partial(torch.optim.Adam, lr=1e-3)


def test_a_batch_of_other_sizes_is_not_compared_with_the_plan() -> None:
    model, x, y = torch.nn.Linear(8, 4), torch.randn(8, 8), torch.arange(8) % 4
    loss_fn = torch.nn.functional.cross_entropy
    with autopar.compile(
        model, 1, (x, y), loss_fn=loss_fn, optimizer=ADAM, profile_limit_s=0.0
    ) as compiled:
        with pytest.raises(InputError, match=r"the plan predicts .* float32\[8, 8\].*such a batch"):
            compiled.profile(x[:5], y[:5], num_steps=1)
        assert compiled.profile(x, y, num_steps=1).ops


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "autopar.training"]


def test_only_steps_of_training_on_the_planned_batch_are_reported_and_logged(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Not steps of other batches, for which nothing is predicted, nor those that are measured."""
    model, x, y = torch.nn.Linear(8, 4), torch.randn(8, 8), torch.arange(8) % 4
    loss_fn = torch.nn.functional.cross_entropy
    with autopar.compile(
        model, 1, (x, y), loss_fn=loss_fn, optimizer=ADAM, profile_limit_s=0.0
    ) as compiled:
        compiled.train_step(x[:5], y[:5])
        assert compiled.step_time_s is None
        with pytest.raises(InputError, match="needs a batch, because no step was on one"):
            compiled.profile(num_steps=1)  # no such batch was trained on
        assert "measured" not in compiled.report().rpartition("all details")[2]
        compiled.log_every(1)
        with caplog.at_level("INFO", logger="autopar.training"):
            profile = compiled.profile(x, y, num_steps=2)
            compiled.peak_tensor_bytes(x, y)
            assert not logged(caplog)
            compiled.train_step(x, y)
        assert len(compiled.profile(num_steps=1).step_times_s) == 1
        (line,) = logged(caplog)
        assert line.startswith("step 1, loss ")
        assert compiled.step_time_s in compiled._step_times.seconds
        compiled.save_report(tmp_path / "report.html")
        page = (tmp_path / "report.html").read_text()
        assert "median of the last 4 steps" in page
        assert "<script" not in page
    with pytest.raises(InputError, match=r"width is 'full'; a profile has one report"):
        profile.report("full")  # type: ignore[arg-type]


def test_a_page_has_one_time_of_the_same_steps(profiled: tuple[Any, Profile]) -> None:
    compiled, profile = profiled
    even = dataclasses.replace(profile, step_times_s=(0.004, 0.002), times=profile.times)
    report = dataclasses.replace(compiled.measured(), profile=even, step_times_s=even.step_times_s)
    text = report.text("full")
    assert f"measured: {format_seconds(even.step_time_s)} a step" in text
    assert f"{even.ratio:.2f}x the predicted" in text


def test_phases_of_a_rank_make_up_its_step(profiled: tuple[Any, Profile]) -> None:
    compiled, profile = profiled
    assert len(profile.step_times_s) == 3
    assert sorted(profile.step_times_s)[1] == profile.step_time_s
    assert profile.ratio == profile.step_time_s / compiled.plan.prediction.step_time_s
    assert [rank.rank for rank in profile.ranks] == [0, 1]
    for rank in profile.ranks:
        parts = (
            rank.forward_s, rank.backward_s, rank.communication_s, rank.messages_s,
            rank.waiting_s, rank.rest_s,
        )  # fmt: skip
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(profile.step_time_s)
        assert (rank.messages_s > 0) == compiled.plan.is_pipeline


def test_streams_that_overlap_are_counted_once_and_drawn_apart(
    profiled: tuple[Any, Profile],
) -> None:
    spans = (
        (Action(0, Kind.I, 0), Resource.MAIN, 0.0, 2.0),
        (Action(0, Kind.W, 0), Resource.SIDE, 1.0, 3.0),
        (Action(0, Kind.F, 1), Resource.MAIN, 4.0, 5.0),
    )
    times = tuple(
        ActionTime(action=action, resource=resource, start_s=start_s, end_s=end_s)
        for action, resource, start_s, end_s in spans
    )
    found = RankTimes(actions=times)
    profile = dataclasses.replace(profiled[1], times=(found, found), step_times_s=(6.0,))
    for rank in profile.ranks:
        assert (rank.forward_s, rank.backward_s) == (1.0, 4.0)
        assert (rank.waiting_s, rank.rest_s) == (1.0, 1.0)
    slices = [event for event in profile.trace_events() if event["ph"] == "X"]
    slices.sort(key=lambda event: (event["pid"], event["tid"], event["ts"]))
    for one, other in itertools.pairwise(slices):
        if (one["pid"], one["tid"]) == (other["pid"], other["tid"]):
            assert other["ts"] >= one["ts"] + one["dur"] - 1e-6


def test_predictions_are_those_of_the_plan(profiled: tuple[Any, Profile]) -> None:
    """The plan's prediction has the passes of the pipeline rank that is busy longest."""
    compiled, profile = profiled
    num, prediction = compiled.plan.schedule.num_microbatches, compiled.plan.prediction
    predicted = [
        (num * stage.predicted_forward_s, num * stage.predicted_backward_s)  # type: ignore[operator]
        for stage in profile.stages
    ]
    assert len(predicted) == compiled.plan.schedule.num_stages
    busiest = pytest.approx((prediction.forward_s, prediction.backward_s), rel=1e-6)
    assert any(found == busiest for found in predicted)
    for stage in profile.stages:
        assert 0 < stage.forward_s < profile.step_time_s
        assert 0 < stage.backward_s < profile.step_time_s


def test_reports_have_the_numbers_and_fit_a_screen(profiled: tuple[Any, Profile]) -> None:
    compiled, profile = profiled
    text = str(profile)
    assert f"{profile.ratio:.2f}x the predicted" in text
    for stage in profile.stages:
        assert f"{stage.forward_s / stage.predicted_forward_s:.2f}" in text  # type: ignore[operator]
    assert ("messages between stages" in text) == compiled.plan.is_pipeline
    assert max(map(len, text.splitlines())) <= 100
    assert max(map(len, profile.report(60).splitlines())) <= 60
    assert len(repr(profile)) < 80


def test_traces_have_every_action_measured_and_predicted(
    profiled: tuple[Any, Profile], tmp_path: Path
) -> None:
    compiled, profile = profiled
    profile.save_trace(tmp_path / "trace.json")
    compiled.plan.save_trace(tmp_path / "plan.json")
    both, plan = (
        json.loads((tmp_path / name).read_text())["traceEvents"]
        for name in ("trace.json", "plan.json")
    )
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in both if e["name"] == "thread_name"}
    slices: dict[str, Counter[Any]] = {"measured": Counter(), "predicted": Counter()}
    ends: dict[tuple[int, int], float] = {}
    for event in sorted((e for e in both if e["ph"] == "X"), key=lambda e: e["ts"]):
        track = event["pid"], event["tid"]
        assert event["ts"] >= ends.get(track, 0.0) - 1e-3
        ends[track] = event["ts"] + event["dur"]
        kind = tracks[track].split()[0]
        slices[kind][event["pid"], event["name"]] += 1
    ran = Counter(
        (rank, str(each.action))
        for rank, found in enumerate(profile.times)
        for each in found.actions
    )
    waits = Counter({(rank, EXPOSED): len(found.waits) for rank, found in enumerate(profile.times)})
    assert slices["measured"] == ran + waits + Counter({(rank, REST): 1 for rank in range(2)})
    computed = Counter({key: n for key, n in ran.items() if "_" not in key[1]})
    passes = {k: n for k, n in slices["predicted"].items() if not re.search("_|[GU]$", k[1])}
    assert Counter(passes) == computed
    names = {e["name"] for e in plan if e["ph"] == "X"}
    assert {name for name in names if not re.search("_|[GU]$", name)} == {n for _, n in computed}


def test_traces_have_the_exposed_communication_and_end_with_the_step(
    profiled: tuple[Any, Profile],
) -> None:
    """On each rank as much as the report has, and the rest of the step comes behind it."""
    _, profile = profiled
    events = profile.trace_events()
    for rank, phases in enumerate(profile.ranks):
        own = [e for e in events if e["pid"] == rank and e["ph"] == "X"]
        tracks = {e["tid"] for e in own if e["name"] == EXPOSED}
        waited_us = sum(e["dur"] for e in own if e["name"] == EXPOSED)
        assert waited_us == pytest.approx(1e6 * phases.communication_s, abs=0.1)
        assert waited_us > 0
        assert {e["name"] for e in own if e["tid"] in tracks} == {EXPOSED}
        (rest,) = [e for e in own if e["name"] == REST]
        measured = [e for e in own if e["tid"] <= max(tracks) and e is not rest]
        last_us = max(e["ts"] + e["dur"] for e in measured)
        assert rest["ts"] >= last_us - 1e-2


def test_traces_have_the_parts_of_a_predicted_step_on_every_rank(
    profiled: tuple[Any, Profile],
) -> None:
    """Without a pipeline each block's computation and communication are inside the passes."""
    compiled, profile = profiled
    events = profile.trace_events()
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    begun = [event for event in events if event["ph"] == "B"]
    assert bool(begun) == (not compiled.plan.is_pipeline)
    by_rank = [
        [(e["name"], e["ts"], tracks[0, e["tid"]]) for e in begun if e["pid"] == rank]
        for rank in range(2)
    ]
    assert by_rank[0] == by_rank[1]
    for event in begun:
        assert tracks[event["pid"], event["tid"]].startswith("predicted ")
    blocks = {event["args"]["block"] for event in begun if event["name"].startswith("forward")}
    if not compiled.plan.is_pipeline:
        assert {m.block for m in compiled.plan.modules if m.forward_s > 1e-9} == blocks


def test_a_number_of_steps_that_is_none_is_refused(profiled: tuple[Any, Profile]) -> None:
    for wrong in (0, -1, 2.5, True, "3"):
        with pytest.raises(autopar.InputError, match=r"num_steps is .* whole number"):
            profiled[0].profile(num_steps=wrong)


def test_figures_draw_predicted_and_measured_times(profiled: tuple[Any, Profile]) -> None:
    _, profile = profiled
    for name, data in (("phases", profile.phases_data()), ("stages", profile.stages_data())):
        figure, axes = profile.figure(name)
        scale = {"s": 1.0, "ms": 1e-3, "us": 1e-6}[axes.get_xlabel()]
        values = [v for series in data.series for v in series.values if v is not None]
        assert [patch.get_width() * scale for patch in axes.patches] == pytest.approx(values)
        legend = [text.get_text() for text in figure.legends[0].get_texts()]
        assert legend == [series.name for series in data.series]
    forward = {series.name: series.values[0] for series in profile.phases_data().series}
    assert forward["predicted"] == profile.plan.prediction.forward_s
    assert forward["measured on rank 1"] == profile.ranks[1].forward_s
    assert profile.stages_data().series[1].values[:2] == (
        profile.stages[0].forward_s,
        profile.stages[0].backward_s,
    )
    with pytest.raises(
        InputError, match=r"'stage'; write phases \| stages \| ops \| peak_memory; did"
    ):
        profile.figure("stage")


def test_peak_memory_is_that_of_the_same_steps_beside_the_prediction(
    profiled: tuple[Any, Profile],
) -> None:
    """Counted once more, and at least the weights and Adam's two moments of each."""
    compiled, profile = profiled
    memory, prediction = profile.memory, compiled.plan.prediction
    assert memory is not None
    model, make_batch = build("gpt2")
    held = 3 * sum(p.nbytes for p in model.parameters())
    assert sum(memory.tensor_bytes) > held
    again = compiled.peak_tensor_bytes(**make_batch(1))
    assert memory.tensor_bytes == pytest.approx(again, rel=0.02)
    assert all(grown > 0 for grown in memory.growth_bytes)
    tensors, process = memory.rows(compiled.plan)
    assert tensors.predicted_bytes == sum(prediction.memory_bytes.values())
    assert process.predicted_bytes == prediction.resident_bytes
    assert tensors.ratio == max(memory.tensor_bytes) / tensors.predicted_bytes
    text = str(profile)
    for row in (tensors, process):
        cells = [row.name, *map(format_bytes, (row.predicted_bytes, *row.measured_bytes))]
        assert re.search(r"\s+".join([*map(re.escape, cells), f"{row.ratio:.2f}"]), text)
    _, axes = profile.figure("peak_memory")
    scale = {"GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10}[axes.get_xlabel()]
    drawn = [patch.get_width() * scale for patch in axes.patches]
    by_row = [(row.predicted_bytes, *row.measured_bytes) for row in (tensors, process)]
    assert drawn == pytest.approx([size for sizes in zip(*by_row) for size in sizes])


def test_steps_that_only_measure_are_not_among_those_of_training(
    profiled: tuple[Any, Profile],
) -> None:
    compiled, _ = profiled
    _, make_batch = build("gpt2")
    before = tuple(compiled._step_times.seconds)
    compiled.peak_tensor_bytes(**make_batch(1))
    assert tuple(compiled._step_times.seconds) == before
    found = compiled.profile(num_steps=1, **make_batch(1))
    assert tuple(compiled._step_times.seconds) == (*before, *found.step_times_s)


def test_json_has_the_numbers_of_all_tables(profiled: tuple[Any, Profile], tmp_path: Path) -> None:
    compiled, profile = profiled
    text = profile.to_json(tmp_path / "profile.json")
    assert (tmp_path / "profile.json").read_text() == text
    found = json.loads(text)
    assert found["step_times_s"] == list(profile.step_times_s)
    assert found["predicted_step_time_s"] == compiled.plan.prediction.step_time_s
    phases = {each["name"]: each for each in found["phases"]}
    waited = [sum(b - a for a, b in rank.waits) for rank in profile.times]
    assert phases["exposed communication"]["measured_s"] == waited
    assert (
        phases["exposed communication"]["predicted_s"] == compiled.plan.prediction.communication_s
    )
    by_rank = [each["measured_s"] for each in found["phases"] if each["measured_s"]]
    assert [sum(times) for times in zip(*by_rank, strict=True)] == pytest.approx(
        [profile.step_time_s] * 2
    )
    assert profile.memory is not None
    tensors, process = found["memory"]
    assert tensors["measured_bytes"] == list(profile.memory.tensor_bytes)
    assert process["measured_bytes"] == list(profile.memory.growth_bytes)
    assert [op["measured_s"] for op in found["ops"]] == [op.measured_s for op in profile.timed]
    assert [each["stage"] for each in found["stages"]] == list(range(len(profile.stages)))
    for each, passed in zip(found["passes"], profile.passes, strict=True):
        assert each["measured_s"] == passed.measured_s
        assert each["direction"] == passed.direction


def test_measured_ops_are_the_prices_of_later_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
    x, y = torch.randn(64, 64), torch.arange(64) % 4
    options = {"loss_fn": torch.nn.functional.cross_entropy, "optimizer": ADAM}
    with autopar.compile(model, 1, (x, y), profile_limit_s=0.0, **options) as compiled:
        assert "measured" not in compiled.plan.prediction.sources
        profile = compiled.profile(x, y, num_steps=1)
    num = profile.keep_prices()
    assert num == len({str(op.call) for op in profile.ops if op.measured_call is not None}) > 2
    # Too little time to measure anything: what is known is read.
    with autopar.compile(model, 1, (x, y), profile_limit_s=1e-9, **options) as compiled:
        assert compiled.plan.prediction.sources["measured"] >= num
    elsewhere = autopar.plan(
        model, autopar.Cluster.preset("a100-80"), (x, y), loss_fn=options["loss_fn"]
    )
    other = dataclasses.replace(profile, plan=elsewhere)
    with pytest.raises(InputError, match=r"the plan is for .*NVIDIA A100.*these times are of "):
        other.keep_prices()
