"""Figures: what is drawn are the numbers of the plan, which reports and JSON have too."""

from __future__ import annotations

import functools
import json
import warnings
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text

import autopar
from autopar import Force, Plan
from autopar.base.errors import InputError
from autopar.base.units import format_bytes, format_seconds
from autopar.movement.plan import MovementPlan, parse_plan
from autopar.plans.alternatives import alternatives
from autopar.plans.figures import (
    FIGURES,
    Bars,
    Line,
    Series,
    Unit,
    figure_data,
    k_curve_data,
    plot_bars,
    plot_k_curve,
    plot_memory_over_time,
    plot_strategy,
    strategy_data,
)
from autopar.plans.figures.offload import absences
from autopar.plans.summary import needed_bytes
from autopar.plans.timeline import predicted_timeline
from autopar.schedules import Durations, reverse_first_k_gain
from tests.models.zoo import build
from tests.test_reports import Read, offloaded, planned

UNITS = (
    ("s", 1.0), ("ms", 1e-3), ("us", 1e-6),
    ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0),
)  # fmt: skip


@functools.cache
def compiled_blocks() -> Plan:
    """A plan with measured compiled blocks, and names that mathematics could be read from."""
    document = json.loads(planned("PP").to_json().replace("transformer.h.", "$h^2$."))
    document["kernels"] = [
        {
            "blocks": ["$h^2$.0", "$h^2$.1"], "compiled": ["F"], "eager_s": {"F": 3e-3, "I": 4e-3},
            "compiled_s": {"F": 2e-3, "I": 5e-3}, "failures": {"W": "no"},
        }
    ]  # fmt: skip
    return Plan.from_json(json.dumps(document))


@functools.cache
def many_microbatches() -> Plan:
    """A plan with so many micro-batches that the curve of its memory leaves some out."""
    model, make_batch = build("gpt2")
    found = autopar.plan(
        model, planned("FSDP").cluster, make_batch(0, batch=32), num_microbatches=8,
        constraints=[Force("data_parallel")], mesh={"x": 4},
    )  # fmt: skip
    assert found.memory_curve is not None
    assert found.memory_curve.num_left_out > 0
    return found


def bars_of(plan: Plan, name: str) -> tuple[Bars, list[list[float]]]:
    """A chart's data, and the lengths of the drawn bars by series, in its unit's base."""
    data = figure_data(plan, name)
    _, axes = plan.figure(name)
    scale = dict(UNITS)[axes.get_xlabel()]
    drawn = iter([patch.get_width() * scale for patch in axes.patches])
    found = [[next(drawn) for v in series.values if v is not None] for series in data.series]
    assert next(drawn, None) is None
    return data, found


def texts(plan: Plan, name: str) -> list[str]:
    return [each.get_text() for each in plan.figure(name)[0].findobj(Text)]


@pytest.mark.parametrize("case", ["FSDP", "PP"])
def test_the_bar_of_a_step_ends_at_its_time(case: str) -> None:
    plan = planned(case)
    p = plan.prediction
    data, drawn = bars_of(plan, "step")
    named = [p.forward_s, p.backward_s, p.communication_s, p.copies_s, p.update_s]
    parts = [each for each in named if each]
    assert [each[0] for each in drawn[: len(parts)]] == pytest.approx(parts)
    assert data.longest == pytest.approx(p.step_time_s, rel=6e-3)
    written = texts(plan, "step")
    assert any(text.startswith(f"A step of {format_seconds(p.step_time_s)}") for text in written)
    assert f"forward {format_seconds(p.forward_s)}" in written


def test_memory_is_that_of_the_report_by_category() -> None:
    plan = planned("FSDP")
    memory = plan.prediction.memory_bytes
    data, drawn = bars_of(plan, "memory")
    named = {series.name: each[0] for series, each in zip(data.series, drawn)}
    for name, size in memory.items():
        label = f"{name.replace('_', ' ')} {format_bytes(size)}"
        assert named[label] == pytest.approx(size)
        assert label in " ".join(str(plan).split())
    assert format_bytes(data.longest) in plan.report("full")
    (line,) = data.lines
    assert line.value == plan.cluster.usable_memory_bytes
    assert line.name.endswith(format_bytes(line.value))


@pytest.mark.parametrize("case", ["free", "FSDP", "PP", "ZeRO-2", "recomputed", "early", "large m"])
def test_memory_over_time_peaks_where_the_report_says(case: str) -> None:
    plan = many_microbatches() if case == "large m" else planned(case)
    data = figure_data(plan, "memory_over_time")
    by_category = {
        name.replace(" ", "_"): row[data.peak] for name, row in zip(data.categories, data.sizes)
    }
    extra = by_category.pop("fragmentation")
    counted = plan.prediction.memory_bytes
    assert {name: size for name, size in by_category.items() if size} == counted
    assert data.places[data.peak] == plan.prediction.memory_peak_at
    assert sum(counted.values()) + extra == needed_bytes(plan)
    assert format_bytes(needed_bytes(plan)) in data.title
    figure, axes = plot_memory_over_time(data)
    size, edges = dict(UNITS)[axes.get_ylabel()], [0.0]
    for area, row in zip(axes.collections, data.sizes):
        edges.append(edges[-1] + row[data.peak] / size)
        corners = {round(float(y), 9) for y in area.get_paths()[0].vertices[:, 1]}
        assert {round(each, 9) for each in edges[-2:]} <= corners
    assert axes.get_xlim()[1] == pytest.approx(
        data.end_s / dict(UNITS)[axes.get_xlabel()[:2].strip()]
    )
    assert f"usable, {format_bytes(plan.cluster.usable_memory_bytes)}" in data.usable.name
    assert [t.get_text() for t in figure.legends[0].get_texts()][: len(data.categories)] == list(
        data.categories
    )


@pytest.mark.parametrize("case", ["recomputed", "PP alone"])
def test_the_time_of_the_memory_curve_is_that_of_the_step(case: str) -> None:
    """In a pipeline it is the computation of the rank that needs most."""
    plan = planned(case)
    p, data = plan.prediction, figure_data(plan, "memory_over_time")
    if not plan.is_pipeline:
        assert data.end_s == pytest.approx(p.step_time_s)
        assert data.of == ""
    else:
        assert 0 < data.end_s < p.step_time_s
        assert data.of == "computation"
    assert list(data.starts_s) == sorted(data.starts_s)
    assert data.starts_s[0] == 0


def test_memory_over_time_with_offloading_is_within_the_budget() -> None:
    plan = offloaded()
    data = figure_data(plan, "memory_over_time")
    assert max(map(data.total, range(len(data.places)))) == data.total(data.peak)
    held = data.total(data.peak) - data.sizes[-1][data.peak]
    assert held == sum(plan.prediction.memory_bytes.values())


def test_a_capacity_is_a_line_unless_it_is_far_beyond_the_bars() -> None:
    for value, name in ((30.0, "limit"), (300.0, "limit: beyond the chart")):
        bars = Bars(
            title="b", unit=Unit.BYTES, rows=("a", "b"), stacked=True,
            series=(
                Series(name="x", values=(10.0, None)),
                Series(name="y", values=(2.0, 5.0), texts=("", "5")),
            ),
            lines=(Line(name="limit", value=value),),
        )  # fmt: skip
        figure, axes = plot_bars(bars)
        assert [(p.get_x(), p.get_width()) for p in axes.patches] == [(0, 10), (10, 2), (0, 5)]
        assert [list(line.get_xdata()) for line in axes.lines] == ([[30, 30]] if value < 99 else [])
        assert [t.get_text() for t in figure.legends[0].get_texts()] == ["x", "y", name]
        assert [t.get_text() for t in axes.get_yticklabels()] == ["a", "b"]


def test_alternatives_are_those_of_the_report() -> None:
    plan = planned("free")
    data, drawn = bars_of(plan, "alternatives")
    listed = alternatives(plan)
    times = [plan.prediction.step_time_s, *(each.time_s for each in listed)]
    assert drawn[0] == pytest.approx(times[: len(drawn[0])])
    assert data.rows[0].startswith("this plan: ")
    assert data.series[0].texts[1].startswith(format_seconds(listed[0].time_s))
    assert data.lines[0].value == plan.search.bound_s <= times[0] * (1 + 1e-9)


def test_the_strategy_has_a_cell_for_every_module_and_axis() -> None:
    plan = planned("HSDP")
    data = strategy_data(plan)
    assert data is not None
    assert data.axes == ("a=2", "b=2")
    shown_s = sum(row.compute_s for row in data.rows)
    assert shown_s == pytest.approx(sum(m.forward_s + m.backward_s for m in plan.modules))
    figure, axes = plot_strategy(data)
    (mesh,) = axes.collections
    assert np.shape(mesh.get_array()) == (len(data.rows), 2)
    labels = [text.get_text() for text in axes.get_yticklabels()]
    row = labels.index("transformer.h.0-1.mlp.c_fc (2x)")
    fc = next(m for m in plan.modules if m.name == "transformer.h.1.mlp.c_fc")
    assert data.rows[row].splits == tuple(fc.splits.split())
    cells = {text.get_position(): text.get_text() for text in axes.texts}
    assert (cells[0, row], cells[1, row]) == ("batch, DDP", "batch, FSDP")
    figure.draw_without_rendering()
    colors = mesh.get_facecolors().reshape(len(data.rows), 2, 4)
    legend = dict(zip(("batch",), figure.legends[0].get_patches()))
    assert to_hex(colors[row, 0]) == to_hex(legend["batch"].get_facecolor())


def test_stages_are_told_and_ranks_are_called_pipeline_ranks() -> None:
    plan = planned("PP")
    assert any(text.endswith(", stage 1") for text in texts(plan, "strategy"))
    for name in ("timeline", "activations"):
        written = texts(plan, name)
        assert {"pipeline rank 0", "pipeline rank 1"} <= set(written)
        assert not any("device" in text for text in written)


def test_a_timeline_and_what_ranks_hold_are_those_of_the_simulation() -> None:
    plan = planned("PP")
    timeline = predicted_timeline(plan)
    assert timeline is not None
    _, axes = plan.figure("timeline")
    assert axes.get_xlabel() == "ms"
    spans = sorted((p.get_x() / 1e3, p.get_width() / 1e3) for p in axes.patches)
    assert spans == [
        pytest.approx(each)
        for each in sorted((i.start_s, i.duration_s) for i in timeline.intervals if i.peer < 0)
    ]
    _, axes = plan.figure("activations")
    peaks = [max(line.get_ydata()) for line in axes.lines]
    assert peaks == list(timeline.peak_activations) == [2, 1]


def test_what_is_kept_and_recomputed() -> None:
    plan = planned("recomputed")
    _, (kept, again) = bars_of(plan, "recomputation")
    assert kept == pytest.approx([group.kept_bytes for group in plan.recomputation])
    assert again == pytest.approx([g.default_bytes - g.kept_bytes for g in plan.recomputation])
    for group in plan.recomputation:
        assert any(format_bytes(group.kept_bytes) in text for text in texts(plan, "recomputation"))


def test_what_moves_is_away_between_its_transfers() -> None:
    plan = offloaded()
    assert plan.offload is not None
    _, axes = plan.figure("offload")
    expected = absences(plan.offload.plans()[0])
    assert sorted((p.get_x(), p.get_width()) for p in axes.patches) == sorted(
        (each.after, each.before - each.after) for each in expected
    )
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert len(names) == len({each.tensor for each in expected})
    moved = format_bytes(plan.offload.moved_bytes)
    assert any(f"{moved} moved a step" in text for text in texts(plan, "offload"))


def test_absences_of_a_movement_plan() -> None:
    text = """num_ops: 9
starts_on_host: state
from_host state after start before 3
drop state after 4
to_host value after 1 before 2
from_host value after 5 before 7
"""
    movement: MovementPlan = parse_plan(text)
    found = [(each.tensor, each.after, each.before) for each in absences(movement)]
    assert found == [("state", -1, 3), ("value", 1, 7), ("state", 4, 9)]


def test_compiled_blocks_and_names_with_dollars() -> None:
    plan = compiled_blocks()
    data, drawn = bars_of(plan, "kernels")
    assert drawn == [pytest.approx([3e-3, 4e-3]), pytest.approx([2e-3, 5e-3])]
    assert data.rows[0] == "$h^2$.0-1 (2x), forward: compiled"
    for name in ("kernels", "strategy"):
        figure, _ = plan.figure(name)
        named = [text for text in figure.findobj(Text) if "$" in text.get_text()]
        assert named
        assert not any(text.get_parse_math() for text in named)
    page = plan._repr_html_()
    assert "$h^2$" in page


def test_the_curve_over_k() -> None:
    costs = Durations(F=1, I=1, W=1, G=[1 + 0.3 * layer for layer in range(6)])
    gain = reverse_first_k_gain(costs, num_layers=6)
    figure, axes = plot_k_curve(k_curve_data(gain))
    curve, best, conventional = axes.lines
    assert list(curve.get_xdata()) == list(range(7))
    assert list(curve.get_ydata()) == pytest.approx([point.iteration_s for point in gain.curve])
    assert (best.get_xdata()[0], best.get_ydata()[0]) == pytest.approx((gain.best_k, gain.best_s))
    assert conventional.get_ydata()[0] == pytest.approx(gain.conventional_s)
    assert f"k = {gain.best_k}" in figure.get_suptitle()
    assert all(float(tick).is_integer() for tick in axes.get_xticks())


@pytest.mark.parametrize("schedule", ["reverse_first_k", "conventional"])
def test_the_curve_over_k_of_a_plan_is_that_of_its_step(schedule: str) -> None:
    model, make_batch = build("gpt2")
    plan = autopar.plan(
        model, planned("DDP").cluster, make_batch(0, batch=8), schedule=schedule, num_stages=3,
        num_microbatches=2, constraints=[Force("data_parallel")],
    )  # fmt: skip
    curve = figure_data(plan, "k_curve")
    assert curve.ks == (0, 1, 2, 3)
    assert curve.conventional_s == curve.iteration_s[0]
    expected_s = curve.best_s if schedule == "reverse_first_k" else curve.conventional_s
    assert expected_s == pytest.approx(plan.prediction.step_time_s, rel=1e-6)
    figure, _ = plan.figure("k_curve")
    assert f"k = {curve.best_k}" in figure.get_suptitle()


@pytest.mark.parametrize("suffix", ["svg", "pdf", "png"])
def test_letters_that_the_font_lacks_are_no_warning_and_others_stay(
    suffix: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    plan = Plan.from_json(planned("FSDP").to_json().replace("transformer.h.", "\u5c42\u6b21."))
    figure, axes = plan.figure("strategy")
    figure.savefig(tmp_path / f"f.{suffix}")
    assert "\u5c42\u6b21.0" in plan._repr_html_()
    plan.save_report(tmp_path / "report.html")
    assert [str(each.message) for each in recwarn] == []
    axes.draw = lambda renderer: warnings.warn("another", UserWarning, stacklevel=1)
    with pytest.warns(UserWarning, match="another"):
        figure.draw_without_rendering()


def test_other_names_and_figures_that_a_plan_lacks_are_refused() -> None:
    plan = planned("FSDP")
    with pytest.raises(InputError, match=r"'memry'; write strategy \| .*did you mean 'memory'"):
        plan.figure("memry")
    with pytest.raises(InputError, match=r"no figure 'memry'; (?!.*offload)"):
        plan.figure("memry")
    with pytest.raises(InputError, match=r"there is no figure 'offlod'.*did you mean 'offload'"):
        plan.figure("offlod")
    with pytest.raises(InputError, match="there is no figure 3"):
        plan.figure(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="'offload': nothing moves to the host; it has strategy"):
        plan.figure("offload")


def test_a_notebook_shows_a_figure_without_pyplot() -> None:
    figure, _ = planned("PP").figure("timeline")
    page = Read(figure._repr_html_())
    assert page.tags[0] == "svg"
    assert figure.get_suptitle() in page.texts


def test_figures_leave_no_global_state(tmp_path: Path) -> None:
    from matplotlib import pyplot

    before = dict(matplotlib.rcParams)
    for name in ("step", "timeline"):
        planned("PP").figure(name)[0].savefig(tmp_path / f"{name}.pdf")
    planned("PP").save_report(tmp_path / "report.html")
    assert pyplot.get_fignums() == []
    assert dict(matplotlib.rcParams) == before
    assert set(FIGURES) >= {"strategy", "memory"}
