"""Reports: one screen whatever the plan, the same numbers as text and as HTML, names escaped."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar import Cluster, Force, MemoryBudget, Pin, Plan
from autopar.base.errors import InputError, PlanError
from autopar.base.units import format_bytes, format_seconds
from autopar.cli import main
from autopar.plans.alternatives import ON_MESH, alternatives, alternatives_section
from autopar.plans.blocks import folded, parameters_of_blocks
from autopar.plans.explanation import _changes
from autopar.plans.figures import figure_data
from autopar.plans.layout import Section, text_lines
from autopar.plans.parallelism import kinds_of
from autopar.plans.parts import MODULE_TIMES
from autopar.plans.strategy_names import DATA, MEGATRON, TENSOR, ZERO1, ZERO2, ZERO3, name_of
from autopar.plans.summary import LINES, WIDTH, headline, needed_bytes, summary_sections
from autopar.plans.text import plan_sections
from autopar.plans.timeline import predicted_timeline
from tests.models.zoo import build

CLUSTER = Cluster.preset("a100-80", devices_per_node=4)
CASES: dict[str, dict[str, Any]] = {
    "free": {},
    "DDP": {"constraints": [Force("data_parallel")]},
    "FSDP": {"constraints": [Force("zero3")], "reshard_after_forward": True, "mesh": {"x": 4}},
    "ZeRO-1/2": {"constraints": [Force("zero3")], "reshard_after_forward": False},
    "ZeRO-1": {
        "constraints": [Force("zero3")], "reshard_after_forward": False,
        "num_microbatches": 2, "reduce_every_microbatch": False, "mesh": {"x": 4},
    },
    "ZeRO-2": {
        "constraints": [Force("zero3")], "reshard_after_forward": False,
        "num_microbatches": 2, "reduce_every_microbatch": True, "mesh": {"x": 4},
    },
    "TP": {"constraints": [Force("tensor_parallel")], "mesh": {"x": 4}},
    "HSDP": {
        "constraints": [Force("data_parallel", "a"), Force("zero3", "b")],
        "mesh": {"a": 2, "b": 2}, "reshard_after_forward": True,
    },
    "PP": {"schedule": "1f1b", "num_stages": 2, "num_microbatches": 2},
    "PP alone": {"schedule": "1f1b", "num_stages": 4, "num_microbatches": 4},
    "recomputed": {"recompute": "full", "constraints": [Force("data_parallel")]},
    "early": {"update": "early"},
}  # fmt: skip
OTHERS = ("mlp", "resnet")


@functools.cache
def planned(case: str) -> Plan:
    model, make_batch = build(case if case in OTHERS else "gpt2")
    batch = make_batch(0) if case in OTHERS else make_batch(0, batch=8)
    return autopar.plan(model, CLUSTER, batch, **CASES.get(case, {}))


@functools.cache
def offloaded() -> Plan:
    model, make_batch = build("gpt2")
    held = sum(planned("DDP").prediction.memory_bytes.values())
    budget = MemoryBudget(int(0.9 * held))
    return autopar.plan(
        model, CLUSTER, make_batch(0, batch=8), offload=True, recompute="none",
        num_microbatches=1, constraints=[Force("data_parallel"), budget],
    )  # fmt: skip


def large() -> Plan:
    """A plan of many kinds of blocks, long names and many alternatives, made by hand."""
    document = json.loads(planned("free").to_json())
    name = "a_module_with_a_very_long_name_that_fills_a_line" * 3
    first = document["modules"][0]
    document["modules"] += [
        {**first, "block": f"{name}.{'x' * n}", "forward_s": 1.0, "splits": " ".join(["d"])}
        for n in range(60)
    ]
    axes = len(document["mesh"]["axis_names"])
    for module in document["modules"]:
        module["splits"] = " ".join(["batch"] * axes)
    document["graph"]["inputs"] |= {f"input_{n}": "float32[1, 2, 3, 4]" for n in range(60)}
    document["search"]["pipelines"] = {f"way {n} {name}": 1.0 + n for n in range(99)}
    document["prediction"]["sources"] = {f"source {n}": n for n in range(60)}
    return Plan.from_json(json.dumps(document))


ALL = [*CASES, *OTHERS]


@pytest.mark.parametrize("case", [*ALL, "large", "offloaded"])
def test_a_report_fits_one_screen(case: str) -> None:
    plan = {"large": large, "offloaded": offloaded}.get(case, lambda: planned(case))()
    lines = str(plan).splitlines()
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= WIDTH
    assert all(line.isprintable() and line == line.rstrip() for line in lines)
    assert format_seconds(plan.prediction.step_time_s) + " a step" in lines[0]
    assert len(repr(plan).splitlines()) == 1
    for title in ("step", "memory of a device, counted"):
        assert title in lines
    assert any(line.startswith("strategy by block") for line in lines)


@pytest.mark.parametrize("case", ["DDP", "FSDP", "ZeRO-1/2", "ZeRO-1", "ZeRO-2", "TP", "HSDP"])
def test_a_strategy_has_the_name_that_users_know(case: str) -> None:
    plan = planned(case)
    over = "2 x 2" if case == "HSDP" else "4"
    assert str(plan).startswith(f"{case} over {over}, ")
    if case not in ("HSDP", "FSDP"):
        assert f"{case}: " in str(plan)  # the legend


def test_words_of_each_kind_of_plan() -> None:
    assert str(planned("PP")).startswith("PP over 2 (1f1b) x ")
    for case, words in {
        "PP": ("bubble", "2 micro-batches, 2 stages on 2 pipeline ranks"),
        "recomputed": ("recomputation in", "kept a micro-batch"),
        "early": ("early: at most",),
        "free": ("of casts and copies", "best alternatives", "to plan"),
    }.items():
        for word in words:
            assert word in str(planned(case)), (case, word)
    assert "computation waits" in str(offloaded())


@pytest.mark.parametrize("case", ["FSDP", "ZeRO-1", "ZeRO-2", "TP", "DDP", "recomputed", "resnet"])
def test_times_of_modules_add_up_to_the_step(case: str) -> None:
    plan = planned(case)
    p, modules = plan.prediction, plan.modules
    again_s = sum(len(group.blocks) * group.time_s for group in plan.recomputation)
    assert sum(m.forward_s for m in modules) == pytest.approx(p.forward_s, rel=1e-6)
    backward_s = sum(m.backward_s for m in modules) + again_s * plan.schedule.num_microbatches
    assert backward_s == pytest.approx(p.backward_s, rel=1e-6)
    assert sum(m.update_s for m in modules) == pytest.approx(p.update_s, rel=1e-6)
    moved_s = sum(m.communication_s for m in modules)
    slowdown = plan.cluster.overlap_slowdown
    least_s = p.communication_s + p.copies_s
    most_s = least_s + slowdown * p.hidden_s
    assert least_s * (1 - 1e-6) <= moved_s <= most_s * (1 + 1e-6)


def test_every_op_is_in_one_module_and_parts_of_parameters_are_counted() -> None:
    plan = planned("FSDP")
    ops = [op for module in plan.modules for op in module.ops]
    assert len(ops) == len(set(ops)) == plan.graph.num_ops
    for name, use in plan.uses.items():
        if plan.parameters[name] == "S0":
            assert use.size_bytes <= 4 * use.local_bytes <= 2 * use.size_bytes
        else:
            assert use.local_bytes == use.size_bytes
    assert sum(use.local_bytes for use in plan.uses.values()) == pytest.approx(
        plan.prediction.memory_bytes["parameters"], rel=0.3
    )


def test_a_mesh_of_one_device_splits_nothing_and_has_no_other_choice() -> None:
    plan = planned("PP alone")
    text = str(plan)
    assert text.startswith("PP over 4 (1f1b), ")
    assert "4 x NVIDIA A100-SXM4-80GB, one on each pipeline rank" in text
    assert plan.runner_ups == ()
    page = str(plan.explain("transformer.h.1.mlp"))
    assert "its mesh is one device" in page
    for word in ("replicated", "computes the same", "split", "Pin"):
        assert word not in text + page
    with pytest.raises(InputError, match="its mesh is one device"):
        figure_data(plan, "strategy")


def test_one_device_is_compared_with_no_strategy_for_several() -> None:
    model, make_batch = build("gpt2")
    cluster = Cluster.preset("a100-80", devices_per_node=1)
    plan = autopar.plan(model, cluster, make_batch(0, batch=8))
    assert str(plan).startswith("one device, ")
    assert alternatives(plan) == []
    for word in ("as fast as", "DDP", "ZeRO", "replicated", "best alternative"):
        assert word not in f"{plan} {plan.explain('transformer.h.1.mlp')}"
    assert "known strategies" not in plan.report("full")


def searched_pipeline() -> Plan:
    """A pipeline with many alternatives, as a search over schedules leaves them."""
    document = json.loads(planned("PP alone").to_json())
    step_s = document["prediction"]["step_time_s"]
    document["search"]["pipelines"] = {
        "1f1b, 4 stages on 4, 4 micro-batches": step_s,
        **{
            f"zb_v, {n} stages on 4, 4 micro-batches": (1 + 0.01 * n) * step_s for n in range(1, 20)
        },
        "no pipeline, 2 micro-batches": 1.5 * step_s,
        "no pipeline": 1.6 * step_s,
    }
    document["search"]["baselines"]["PipeDream-2BW"]["time_s"] = 0.9 * step_s
    return Plan.from_json(json.dumps(document))


def test_the_alternatives_of_a_pipeline_train_as_eager_and_are_named_whole() -> None:
    text = str(searched_pipeline())
    table = text[text.index("best alternatives") :]
    rows, _, notes = table.partition("on old weights, which is not eager's result: ")
    assert "PipeDream" not in rows
    assert "PipeDream-2BW " in notes
    assert "(0.90x)" in notes
    assert "..." not in rows
    assert "no pipeline, 2 micro-batches" in rows  # that of the headline
    assert "1.50x as fast as no pipeline" in " ".join(text.split())
    assert "more: plan.report('full')" in notes


# --- HTML ------------------------------------------------------------------------------------
VOID = {"meta", "br"}


class Read(HTMLParser):
    """The texts and tags of a page; raises where tags are not balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.parametrize("case", ["free", "PP", "recomputed", "resnet"])
def test_a_page_has_the_numbers_of_the_text(case: str, tmp_path: Path) -> None:
    plan = planned(case)
    path = tmp_path / "report.html"
    plan.save_report(path)
    for page in (Read(path.read_text()), Read(plan._repr_html_())):
        assert str(plan).splitlines()[0] in " ".join(page.texts)
        for section in summary_sections(plan):
            for cell in (cell for row in (section.columns, *section.rows) for cell in row):
                assert not cell or cell in page.texts
        assert {"table", "svg", "th", "td"} <= set(page.tags)
        assert not {"script", "link", "img", "iframe"} & set(page.tags)
        assert not any(
            name.startswith("on") or name in ("src", "href") for name, _ in page.attributes
        )
    assert "color-scheme" in path.read_text()
    drawn = ["step", "memory", *(["timeline"] if plan.is_pipeline else [])]
    assert Read(plan._repr_html_()).tags.count("svg") == len(drawn)
    assert Read(path.read_text()).tags.count("svg") > len(drawn)
    assert "currentColor" in path.read_text()
    assert f"A step of {format_seconds(plan.prediction.step_time_s)}" in path.read_text()
    p, document = plan.prediction, json.loads(plan.to_json())["prediction"]
    assert format_seconds(document["step_time_s"]) in str(plan)
    assert format_seconds(document["communication_s"]) in str(plan)
    assert format_bytes(sum(document["memory_bytes"].values())) in str(plan)
    assert format_seconds(p.step_time_s) in plan.report("full")
    for section in plan_sections(plan):
        for cell in (cell for row in (section.columns, *section.rows) for cell in row):
            assert not cell or cell in Read(path.read_text()).texts


@pytest.mark.parametrize("case", [*ALL, "large"])
def test_all_details_fit_100_columns_and_cut_no_name(case: str) -> None:
    plan = large() if case == "large" else planned(case)
    text = plan.report("full")
    assert max(map(len, text.splitlines())) <= WIDTH
    written = "".join(text.split())
    for section in plan_sections(plan):
        for cell in (cell for row in section.rows for cell in row if not section.columns):
            assert "".join(cell.split()) in written


def many_layers() -> Plan:
    """A plan of 60 equal layers, made by hand."""
    document = json.loads(planned("ZeRO-1/2").to_json())
    last = [m for m in document["modules"] if ".h.1" in m["name"]]
    for number in range(2, 60):
        for module in last:
            block, name = (module[f].replace(".h.1", f".h.{number}") for f in ("block", "name"))
            ops = [f"{op}_of_{number}" for op in module["ops"]]
            document["modules"].append({**module, "block": block, "name": name, "ops": ops})
        for field in ("parameters", "uses"):
            names = [name for name in document[field] if ".h.1." in name]
            for name in names:
                other = name.replace(".h.1.", f".h.{number}.")
                document[field][other] = document[field][name]
    return Plan.from_json(json.dumps(document))


def test_a_whole_model_is_explained_with_whole_names() -> None:
    plan = many_layers()
    page = plan.explain("transformer")
    text = str(page)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "..." not in text.partition("To price another choice")[0]
    assert "transformer.h.0-59.mlp.c_fc.weight (60x)" in text
    by_title = {section.title: section for section in page.sections}
    parameters = next(s for title, s in by_title.items() if title.startswith("parameters"))
    times = next(s for title, s in by_title.items() if title.startswith("predicted time"))
    assert times.title.endswith(", each")
    for section in (parameters, times):
        counts = [re.search(r"\((\d+)x\)$", row[0]) for row in section.rows]
        shown = sum(int(found[1]) if found else 1 for found in counts)
        listed = [p for p in plan.parameters if p.startswith("transformer.")]
        assert shown == len(listed) or section is times
        assert not section.notes


def test_a_parameter_belongs_to_the_block_that_computes_with_it() -> None:
    document = json.loads(planned("free").to_json())
    (module,) = [m for m in document["modules"] if m["name"] == "transformer.wte"][:1]
    no_time = dict.fromkeys(MODULE_TIMES, 0.0)
    document["modules"].insert(0, {**module, "block": "fixed", "ops": [], **no_time})
    plan = Plan.from_json(json.dumps(document))
    assert "fixed" not in parameters_of_blocks(plan)


def test_names_are_escaped_and_move_no_cursor() -> None:
    text = planned("free").to_json()
    named = Plan.from_json(
        text.replace("transformer.h.", "<b>&\\u202e.h.").replace('"batch sums', '"<i>')
    )
    page = Read(named._repr_html_())
    assert "b" not in page.tags
    assert any("<b>&" in text for text in page.texts)
    assert "\u202e" not in named._repr_html_() + str(named) + str(named.explain("<b>&\u202e.h.0"))


def test_what_reports_read_is_checked() -> None:
    document = json.loads(planned("DDP").to_json())
    for path, value, message in (
        (("modules", 0, "forward_s"), -1.0, r"modules\[0\].forward_s: it cannot be negative"),
        (("modules", 0, "splits"), "a b c", r"modules\[0\].splits"),
        (("uses", "lm_head.weight"), {"needs": "R", "size_bytes": 1, "local_bytes": 1}, "missing"),
    ):
        changed = json.loads(json.dumps(document))
        place = changed
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        with pytest.raises(PlanError, match=message):
            Plan.from_json(json.dumps(changed))


def numbers(plan: Plan) -> list[str]:
    """Times and sizes that every report of a plan says, formatted from its JSON."""
    found = json.loads(plan.to_json())["prediction"]
    times = ("step_time_s", "forward_s", "backward_s", "update_s")
    sizes = [size for size in found["memory_bytes"].values() if size]
    return [*(format_seconds(found[name]) for name in times), *map(format_bytes, sizes)]


@pytest.mark.parametrize("case", ["FSDP", "PP", "recomputed"])
def test_text_page_json_figures_and_command_line_have_the_same_numbers(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(case)
    plan.to_json(tmp_path / "plan.json")
    assert main(["show", str(tmp_path / "plan.json")]) == 0
    command_line = capsys.readouterr().out
    assert main(["report", str(tmp_path / "plan.json"), "-o", str(tmp_path / "r.html")]) == 0
    page = " ".join(Read((tmp_path / "r.html").read_text()).texts)
    drawn = [figure_data(plan, name) for name in ("step", "memory")]
    figures = " ".join([data.title + " ".join(s.name for s in data.series) for data in drawn])
    for number in numbers(plan):
        for text in (str(plan), plan.report("full"), command_line, page, figures):
            assert number in " ".join(text.split())
    step = format_seconds(json.loads(plan.to_json())["prediction"]["step_time_s"])
    over_time, others = figure_data(plan, "memory_over_time"), figure_data(plan, "alternatives")
    assert figure_data(plan, "search").title.startswith(f"The search: {step} a step after ")
    assert figure_data(plan, "search").step_s == plan.prediction.step_time_s
    assert over_time.title.split(": at most ")[1].startswith(format_bytes(needed_bytes(plan)))
    assert others.series[0].values[0] == plan.prediction.step_time_s
    for each in alternatives(plan)[:3]:
        assert any(format_seconds(each.time_s) in text for text in others.series[0].texts)
        assert format_seconds(each.time_s) in str(plan) or each.is_stale
    if plan.is_pipeline or figure_data(plan, "timeline"):
        found = predicted_timeline(plan)
        assert found is not None
        assert figure_data(plan, "timeline").title.endswith(plan.schedule.name)
    by_name = {s.name.rsplit(" ", 2)[0]: s.values[0] for data in drawn for s in data.series}
    p = plan.prediction
    assert by_name["forward"] == p.forward_s
    assert by_name["activations"] == p.memory_bytes["activations"]


def test_the_best_alternative_is_named() -> None:
    plan = planned("free")
    first = next(each for each in alternatives(plan) if not each.is_same)
    text = " ".join(str(plan.explain("transformer.h.1")).split())
    assert f"best alternative {first.name} on {first.mesh}" in text
    assert f"{format_seconds(first.time_s)} a step" in text
    assert f"{first.time_s / plan.prediction.step_time_s:.2f}x, for the whole model" in text
    pipeline = " ".join(str(planned("PP").explain("transformer.h.1")).split())
    as_eager = next(
        each
        for each in alternatives(planned("PP"))
        if "PipeDream" not in each.name and not each.is_same
    )
    assert f"best alternative {as_eager.name}" in pipeline
    alone = " ".join(str(planned("PP alone").explain("transformer.h.1")).split())
    assert "best alternative" in alone
    assert " on x=1" not in alone.partition("best alternative")[2]


# --- explain and diff ------------------------------------------------------------------------
def test_a_module_is_explained() -> None:
    plan = planned("ZeRO-1/2")
    name = "transformer.h.1.mlp"
    text = str(plan.explain(name))
    inside = [m for m in plan.modules if m.name.startswith(f"{name}.")]
    for parameter in (p for p in plan.parameters if p.startswith(name)):
        assert parameter in text
        assert plan.parameters[parameter] in text
    for module in inside:
        assert format_seconds(module.forward_s) in text
        assert all(op in text for op in module.ops)
    assert "transformer.h.0" not in text
    local = sum(u.local_bytes for p, u in plan.uses.items() if p.startswith(name))
    assert f"{format_bytes(local)} of parameters a device" in text
    assert max(map(len, text.splitlines())) <= WIDTH
    Read(plan.explain(name)._repr_html_())


def test_blocks_parameters_and_ops_are_explained() -> None:
    plan = planned("PP")
    op = plan.modules[-1].ops[0]
    for name in ("transformer.h.1", "transformer.wte.weight", op):
        assert str(plan.explain(name)).startswith(f"{name} in PP over 2")
    assert "stage" in str(plan.explain("transformer.h.1"))
    with pytest.raises(InputError, match=r"did you mean 'transformer\.h\.1\.mlp"):
        plan.explain("transformer.h.1.mpl.c_fc")
    with pytest.raises(InputError, match="name of a module"):
        plan.explain(3)


def test_two_plans_are_compared() -> None:
    first, second = planned("DDP"), planned("FSDP")
    text = str(first.diff(second))
    for plan in (first, second):
        assert format_seconds(plan.prediction.step_time_s) in text
    assert "transformer.h.0-1.mlp.c_fc.weight (2x)" in text
    assert str(first.diff(first)) == "the plans are equal"
    assert "for different graphs" in str(first.diff(planned("mlp")))
    by_module = str(first.diff(planned("PP alone"))).partition("modules, the dimension")[2]
    assert "transformer.h.0-1.mlp.c_fc (2x)" in by_module
    assert "1..0" not in by_module
    with pytest.raises(InputError, match="pass the plan"):
        first.diff("plan.json")


def test_compared_plans_are_named_in_the_order_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = ["b.json", "a.json"]
    plans = [planned("DDP"), planned("FSDP")]
    for plan, path in zip(plans, paths):
        plan.to_json(path)
    assert main(["diff", *paths]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0].startswith(f"{paths[0]}: DDP over 4")
    assert re.search(f"^ *{re.escape(paths[1])}: FSDP over 4", text, re.M)
    ratio = plans[0].prediction.step_time_s / plans[1].prediction.step_time_s
    last = f"A step of {paths[0]} takes {ratio:.3f}x the time of {paths[1]}."
    assert last in " ".join(text.split())


def test_the_same_strategy_on_a_mesh_of_another_shape_is_no_alternative() -> None:
    document = json.loads(planned("free").to_json())
    own, step_s = str(planned("free").device_mesh), document["prediction"]["step_time_s"]
    document["search"]["considered"] = {own: step_s, "a=4": step_s, "b=4": 1.5 * step_s}
    plan = Plan.from_json(json.dumps(document))
    meshes = [each.mesh for each in alternatives(plan) if each.name == ON_MESH]
    assert meshes == ["b=4"]


def test_the_peak_of_memory_is_said_in_words() -> None:
    document = json.loads(planned("free").to_json())
    for place, words in (
        ("F lm_head", "in the forward pass of lm_head"),
        ("I h.0", "in the backward pass of h.0"),
        ("W h.0", "at the gradients of the weights of h.0"),
        ("G h.0", "at the reduction of the gradients of h.0"),
        ("G", "at the last reduction of gradients"),
        ("update", "at the update"),
    ):
        document["prediction"]["memory_peak_at"] = place
        plan = Plan.from_json(json.dumps(document))
        assert re.search(f"^  peak +{words}$", str(plan), re.M)
        assert f"the peak is {words})" in " ".join(plan.report("full").split())


@pytest.mark.parametrize("case", ["PP", "free"])
def test_an_estimate_of_memory_is_told_from_the_count(case: str) -> None:
    document = json.loads(planned(case).to_json())
    counted_bytes = sum(document["prediction"]["memory_bytes"].values())
    for share, is_other in ((0.5, True), (0.9, True), (1.0, False)):
        document["search"]["estimated_bytes"] = round(share * counted_bytes)
        text = " ".join(str(Plan.from_json(json.dumps(document))).split())
        assert (f"counted, this plan takes {format_bytes(counted_bytes)}" in text) == is_other
        how = "est. memory: as if all were kept at once, little workspace"
        assert (how in text) == is_other
        assert ("as if stages were equal" in text) == (is_other and case == "PP")


def test_an_estimate_above_the_count_is_explained() -> None:
    """It adds up what is never held at once: the maxima of all categories over a step."""
    plan = planned("DDP")
    counted_bytes = sum(plan.prediction.memory_bytes.values())
    assert plan.search.estimated_bytes > counted_bytes
    curve = plan.memory_curve
    assert curve is not None
    most = (max(sizes) for sizes in zip(*(point.size_bytes for point in curve.read())))
    kept = {name: size for name, size in zip(curve.categories, most) if name != "workspace"}
    assert sum(kept.values()) > counted_bytes
    assert plan.search.estimated_bytes == pytest.approx(sum(kept.values()), rel=0.1)
    assert "est. memory: as if all were kept at once" in str(plan)


@pytest.mark.parametrize("num", [0, 1, 2, 5])
def test_meshes_that_tie_with_the_plan_are_counted_and_named(num: int) -> None:
    document = json.loads(planned("free").to_json())
    plan = Plan.from_json(json.dumps(document))
    own, step_s = str(plan.device_mesh), plan.prediction.step_time_s
    tied = {f"t{n}=2 x u=2": step_s for n in range(num)}
    document["search"]["considered"] = {own: step_s, **tied, "slow=4": 1.001 * step_s}
    text = str(Plan.from_json(json.dumps(document)))
    assert len(text.splitlines()) <= LINES
    flat = " ".join(text.split())
    assert ("with " + own in flat) == (num > 0)
    if num:
        start = f"{num} other meshes tie" if num > 1 else "1 other mesh ties"
        names = ", ".join([*tied][:3]) + ", 2 more" * (num == 5)
        assert f"{start} with {own}: {names}" in flat
    assert "slow=4" in flat


def test_a_known_strategy_that_is_the_plan_is_no_alternative() -> None:
    """It is listed as the same; it ties with nothing, and the best alternative is another."""
    document = json.loads(planned("DDP").to_json())
    search, step_s = document["search"], document["prediction"]["step_time_s"]
    same = dict(search["baselines"][DATA], time_s=step_s, memory_bytes=search["estimated_bytes"])
    slower = dict(same, time_s=2 * step_s)
    search["baselines"], search["considered"] = {DATA: same, TENSOR: slower}, {}
    plan = Plan.from_json(json.dumps(document))
    assert [(e.name, e.is_same) for e in alternatives(plan)] == [("DDP", True), ("TP", False)]
    text = " ".join(str(plan).split())
    assert "the same as this plan" in text
    assert "ties: " not in text
    assert "best alternative TP" in " ".join(str(plan.explain("transformer.h.1")).split())
    search["baselines"][TENSOR] = dict(same, time_s=1.002 * step_s)
    tied = " ".join(str(Plan.from_json(json.dumps(document))).split())
    assert "ties: TP within 0.5% of the plan" in tied
    assert "; each is as good a choice." in tied
    assert "of each other" not in tied
    search["baselines"] |= {TENSOR: slower, ZERO3: dict(slower, memory_bytes=1)}
    tied = " ".join(str(Plan.from_json(json.dumps(document))).split())
    assert "alternatives within 0.5% of each other are ties: prices may be off by" in tied


@pytest.mark.parametrize(
    ("name", "factor", "beside"),
    [
        (DATA, 1.0, "; the best known strategy"),
        (DATA, 1.001, "; the best known strategy"),
        (DATA, 1.1, "; 1.10x as fast as plain DDP"),
        (TENSOR, 1.0, "; the same as TP"),
        (TENSOR, 1.001, "; 1.00x as fast as TP"),
    ],
)
def test_a_plan_is_not_compared_with_its_own_name(name: str, factor: float, beside: str) -> None:
    document = json.loads(planned("DDP").to_json())
    search, step_s = document["search"], document["prediction"]["step_time_s"]
    size = search["estimated_bytes"]
    known = dict(search["baselines"][DATA], time_s=factor * step_s, memory_bytes=size)
    search["baselines"], search["considered"] = {name: known}, {}
    assert headline(Plan.from_json(json.dumps(document))).endswith(beside)


def test_a_tie_of_a_module_is_explained() -> None:
    document = json.loads(planned("free").to_json())
    for each in document["runner_ups"]:
        each["compute_s"] = each["communication_s"] = 0.0
    name = document["runner_ups"][0]["modules"][0]
    tied = " ".join(str(Plan.from_json(json.dumps(document)).explain(name)).split())
    assert "a tie: the step changes by at most 0.01%" in tied
    slower = [each for each in planned("free").runner_ups if each.difference_s > 1e-5]
    assert "a tie:" not in str(planned("free").explain(slower[0].modules[0]))


def test_a_split_of_experts_is_expert_parallelism() -> None:
    model, make_batch = build("mixtral")
    cluster = Cluster.preset("a100-80", devices_per_node=2)
    pinned = Pin("*grouped_mm*", choice="experts")
    plan = autopar.plan(model, cluster, make_batch(0), mesh={"x": 2}, constraints=pinned)
    experts = next(name for name in plan.parameters if name.endswith("gate_up_proj"))
    assert plan.uses[experts].needs == "S0"
    assert kinds_of(plan, experts) == ("EP",)
    assert kinds_of(plan, experts.replace("gate_up", "down")) == ("EP",)
    assert kinds_of(plan, "model.layers.0.mlp.gate.weight") == ("replicated",)
    assert "EP: expert parallelism" in " ".join(str(plan).split())


def test_a_strategy_of_two_parts_is_named_whole() -> None:
    document = json.loads(planned("free").to_json())
    known = document["search"]["baselines"][DATA]
    document["search"]["baselines"] = {name_of(ZERO3, MEGATRON): known}
    document["search"]["considered"] = {}
    plan = Plan.from_json(json.dumps(document))
    assert alternatives(plan)[0].name == "FSDP x Megatron TP"
    assert "x as fast as FSDP x Megatron TP model" in " ".join(str(plan).split())


def test_equal_alternatives_are_named_whole() -> None:
    document = json.loads(planned("free").to_json())
    known = dict(
        document["search"]["baselines"][DATA], mesh="x=2 x y=2", note="a note as long as any is"
    )
    names = [name_of(data, tensor) for tensor in (TENSOR, MEGATRON) for data in (ZERO1, ZERO2)]
    document["search"]["baselines"] = dict.fromkeys(names, known)
    document["search"]["considered"] = {}
    plan = Plan.from_json(json.dumps(document))
    text = "\n".join(text_lines(alternatives_section(plan, 9)))
    assert "..." not in text
    assert [e.name for e in alternatives(plan)] == ["ZeRO-1/2 x TP, ZeRO-1/2 x Megatron TP"]
    assert max(map(len, text.splitlines())) <= WIDTH


def test_layers_of_one_and_of_two_digits_are_alike() -> None:
    names = {f"h.{n}.weight": "R" for n in range(12)}
    section = _changes("parameters", ("a", "b"), names, dict.fromkeys(names, "S0"))
    assert section.rows == (("h.0-11.weight (12x)", "R", "S0"),)


def test_an_unknown_detail_is_refused() -> None:
    with pytest.raises(InputError, match=r"plan\.report\('full'\)"):
        planned("DDP").report("long")


# --- layout ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("names", "label"),
    [
        (["h.0", "h.1", "h.2"], "h.0-2 (3x)"),
        (["h.0.a", "h.2.a"], "h.0,2.a (2x)"),
        (["h.0.a", "h.2.a", "h.4.a"], "h.0-4.a (3x, every 2nd)"),
        ([f"h.{n}" for n in range(1, 13, 3)], "h.1-10 (4x, every 3rd)"),
        (["h.0", "h.4", "h.5", "h.6"], "h.0,4-6 (4x)"),
        (["h.0", "h.2", "h.5", "h.6", "h.9"], "h.0..9 (5x)"),
        (["h.2", "h.1", "h.0"], "h.2..0 (3x)"),
        (["a.0.b.1", "a.1.b.0"], "a.0.b.1..a.1.b.0 (2x)"),
        (["head"], "head"),
    ],
)
def test_repeated_names_are_folded(names: list[str], label: str) -> None:
    assert folded(names) == label


def test_cells_that_wrap_are_whole_and_break_in_front_of_dots() -> None:
    rows = (
        ("module.layers.0.input.projection", "n" * 90, "7 s"),
        ("a.0..b.1 (2x)", "two words", ""),
    )
    section = Section(title="t" * 150, columns=("name", "12", "c"), rows=rows, wraps=True)
    for width in (40, 60, 100):
        lines = text_lines(section, width)
        assert max(map(len, lines)) <= width
        found = "".join("".join(lines).split())
        assert found.count("n") >= 90
        assert found.count("t") >= 150
        assert "..." not in found
    firsts = [line[:13].strip() for line in text_lines(section, 30)]
    assert {".layers.0", ".input"} <= set(firsts)
    assert "a.0..b.1" in firsts


@pytest.mark.parametrize("width", [40, 60, 80])
def test_no_number_of_a_narrow_table_that_wraps_is_cut(width: int) -> None:
    numbers = tuple(f"{n}23.4 ms" for n in range(1, 8))
    columns = ("module", *(f"column {n}" for n in range(1, 8)))
    section = Section(title="", columns=columns, rows=(("layers.0", *numbers),), wraps=True)
    lines = text_lines(section, width)
    assert max(map(len, lines)) <= width
    digits = Counter(each for each in "".join(lines) if each.isdigit())
    wanted = Counter(each for each in "".join((*columns, "0", *numbers)) if each.isdigit())
    assert digits == wanted


@pytest.mark.parametrize("width", [40, 80, 100])
def test_wide_tables_are_cut(width: int) -> None:
    section = Section(
        title="t" * 150, columns=("name", "12", "c"), rows=(("n" * 90, "7 s", "c" * 90),) * 2
    )
    lines = text_lines(section, width)
    assert max(map(len, lines)) <= width
    assert all("..." in line for line in lines if "12" not in line)
    assert "7 s" in lines[-1]
    assert Section(title="", columns=("a", "b"), rows=(("", "x"),)).used_columns().columns == ("b",)
