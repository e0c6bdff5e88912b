"""Rows of reports: each has a name of its own, and counts of ops add up to those of the model."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

import autopar
from autopar import Cluster, Plan
from autopar.base.units import format_seconds
from autopar.frontend.capture import capture
from autopar.ir.block_names import lies_in
from autopar.ir.graph import Graph, ValueKind
from autopar.plans.figures import strategy_data
from autopar.plans.layout import WIDTH, Section, text_lines, wrapped
from autopar.plans.summary import headline
from autopar.plans.text import plan_sections
from tests.models.zoo import build

CLUSTER = Cluster.preset("a100-80", devices_per_node=2)


@functools.cache
def planned(name: str, **options: Any) -> Plan:
    model, make_batch = build(name)
    return autopar.plan(model, CLUSTER, make_batch(0), **options)


def constants_of(graph: Graph) -> set[str]:
    """The ops whose results follow from constants alone, found anew."""
    moving = {v.index for v in graph.values if v.kind in (ValueKind.PARAMETER, ValueKind.INPUT)}
    moving |= {buffer for buffer, _ in graph.mutations}
    found = set()
    for op in graph.ops:
        if moving.isdisjoint(op.inputs):
            found.add(op.name)
        else:
            moving |= {output for output in op.outputs if output is not None}
    return found


@pytest.mark.parametrize("name", ["mlp", "dcgan"])
def test_rows_of_modules_have_names_of_their_own(name: str) -> None:
    """In ``mlp`` the loss shares the block of the head; ``dcgan`` calls modules several times."""
    plan = planned(name)
    names = {module.block for module in plan.modules} | {module.name for module in plan.modules}
    for explained in names - {""}:
        for section in plan.explain(explained).sections:
            first = [row[0] for row in section.rows]
            assert len(set(first)) == len(first), (explained, section.title)
    data = strategy_data(plan)
    assert data is not None
    labels = [row.label for row in data.rows]
    assert len(set(labels)) == len(labels)


def test_ops_outside_of_all_modules_are_those_of_the_model_itself() -> None:
    model, _ = build("mlp")
    modules = {name for name, _ in model.named_modules()}
    plan = planned("mlp")
    times = next(s for s in plan.explain("head").sections if s.title.startswith("predicted time"))
    rows = [row[0] for row in times.rows]
    assert rows == ["head", "the model itself, in block head", "sum"]
    assert "head" in modules
    (itself,) = [each for each in plan.modules if each.block == "head" and not each.name]
    assert any(op.startswith("cross_entropy") for op in itself.ops)


@pytest.mark.parametrize(
    ("name", "options"),
    [("mlp", {}), ("gpt2", {}), ("gpt2", {"schedule": "1f1b", "num_microbatches": 2})],
)
def test_counts_of_ops_add_up(name: str, options: dict[str, Any]) -> None:
    plan = planned(name, **options)
    text, full = " ".join(str(plan).split()), plan.report("full")
    (all_ops,) = re.findall(r"parameters, (\d+) ops", text)
    (priced,) = re.findall(r"prices ops (\d+) analytical", text)
    constant = re.findall(r"and (\d+) constant \(computed once\)", text)
    assert int(all_ops) == int(priced) + sum(map(int, constant))
    assert re.findall(r"op prices.*, (\d+) constant \(computed once\)", full) == constant
    rows = next(s.rows for s in plan_sections(plan) if s.title.startswith("ops by choice"))
    assert sum(int(count) for _, count in rows) == int(all_ops)


def test_ops_on_constants_are_called_so() -> None:
    plan = planned("gpt2")
    model, make_batch = build("gpt2")
    constant = constants_of(capture(model, make_batch(0)).graph)
    assert f"and {len(constant)} constant" in " ".join(str(plan).split())
    explained = plan.explain("fixed")
    ops = next(section.rows for section in explained.sections if section.title.startswith("ops, "))
    assert {row[0] for row in ops} == constant
    assert all("once" in " ".join(row) for row in ops)
    rows = dict(row for row in explained.sections[-1].rows)
    assert rows["computed once"].startswith(f"{len(constant)} ops, which depend on neither")
    assert "block" not in rows
    assert not any(section.title.startswith("the best other") for section in explained.sections)
    assert "fixed" not in str(plan.explain("transformer"))


@pytest.mark.parametrize("name", ["gpt2", "llama", "dcgan"])
def test_the_placement_beside_a_split_is_that_of_the_same_module(name: str) -> None:
    """Not that of a larger parameter elsewhere in a module of several."""
    plan = planned(name)
    assert plan.runner_ups
    for each in plan.runner_ups:
        inside = [m for m in plan.modules if lies_in(m.name, each.modules[0])]
        homes = {
            m.name for m in inside if any(op.startswith(each.op.split(".")[1]) for op in m.ops)
        }
        placed = {p: text for p, text in plan.parameters.items() if p.rpartition(".")[0] in homes}
        assert each.chosen.stored in placed.values() or not (each.chosen.stored or placed)
        assert bool(each.chosen.stored) == bool(each.other.stored)


def test_a_headline_is_a_line_whatever_the_name() -> None:
    """The comparison goes before the time and the memory, and the name is shortened last."""
    plan = planned("gpt2", schedule="1f1b", num_stages=2, num_microbatches=2)
    text = plan.to_json()
    for length in range(1, 120, 7):
        line = headline(Plan.from_json(text.replace("1f1b", "s" * length)))
        assert len(line) <= WIDTH
        assert f" {format_seconds(plan.prediction.step_time_s)} a step, " in line
        assert line.startswith("PP over 2")
        assert length > 40 or "MFU" in line


def test_rows_of_explain_that_differ_in_numbers_alone_are_one() -> None:
    plan = planned("gpt2")
    for name in {module.name.rpartition(".")[0] for module in plan.modules} - {""}:
        for section in plan.explain(name).sections:
            if section.title.startswith("the best other"):
                keys = [
                    (re.sub(r"[\d,-]+|\(\d+x.*\)", "#", row[0]), *row[1:]) for row in section.rows
                ]
                assert len(set(keys)) == len(keys), name


def test_text_is_not_broken_inside_names_numbers_and_shapes_where_there_is_room() -> None:
    names = ("aten.scaled_dot_product_attention", "model.layers.0-31.mlp.down_proj", "layer_norm_3")
    section = Section(
        title="ops",
        columns=("op", "pass", "measured", "price"),
        rows=tuple((name, "recomputed", "12.34 ms", "interpolated") for name in names),
        wraps=True,
    )
    for width in (50, 60, 80):
        lines = text_lines(section, width)
        assert max(map(len, lines)) <= width
        assert sum("recomputed" in line and "interpolated" in line for line in lines) == len(names)
        cells = "".join(line[2:].split("  ")[0].strip() for line in lines[2:])
        assert cells == "".join(names)
    text = "parameters 75.06 KiB, float32[64, 16], 12.5 ms and 1,024 GB/s, " * 3
    for width in range(24, 60):
        for line in wrapped(text, width):
            assert len(line) <= width
            assert not re.search(r"\d$|\[[^\]]*$", line)
