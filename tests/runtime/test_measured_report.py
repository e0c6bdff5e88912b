"""What a compiled model shows: its plan, and what was measured since, in text, page and figures."""

from __future__ import annotations

import functools
import html
import re
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.base.errors import InputError
from autopar.base.units import format_seconds
from autopar.plans.figures import FIGURES
from autopar.plans.figures.catalog import figures_of
from autopar.plans.layout import text_lines
from autopar.runtime.profile import FIGURE_NAMES, Profile

SGD = functools.partial(torch.optim.SGD, lr=0.1)
BATCH = torch.ones(8, 6), torch.ones(8, 6)


def drawn(found: tuple[Any, Any]) -> tuple[str, list[tuple[float, ...]]]:
    """The title of a figure, and the places of its bars."""
    figure, axes = found
    return figure.get_suptitle(), [patch.get_bbox().bounds for patch in axes.patches]


def words(page: str) -> str:
    """The text of a page, tag by tag."""
    shown = re.sub(r"<(style|svg).*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", shown)).split())


def test_figures_are_those_of_the_plan_and_of_the_profile(profiled: tuple[Any, Profile]) -> None:
    compiled, profile = profiled
    assert set(FIGURE_NAMES).isdisjoint(FIGURES)
    for name in figures_of(compiled.plan):
        assert drawn(compiled.figure(name)) == drawn(compiled.plan.figure(name))
    for name in FIGURE_NAMES:
        assert drawn(compiled.figure(name)) == drawn(profile.figure(name))
    for name in set(FIGURES) - set(figures_of(compiled.plan)):
        with pytest.raises(InputError, match=f"the plan has no figure '{name}'"):
            compiled.figure(name)
    with pytest.raises(InputError, match=r"write .*step \| .*peak_memory; did you mean 'phases'"):
        compiled.figure("phase")


def test_a_page_and_the_text_have_the_tables_of_plan_and_profile(
    profiled: tuple[Any, Profile],
) -> None:
    compiled, profile = profiled
    page = compiled._repr_html_()
    text, full = compiled.report(), compiled.report("full")
    plan_page = compiled.plan._repr_html_()
    assert page.count("<svg") == plan_page.count("<svg") + 2
    said = f"measured: {format_seconds(compiled.step_time_s)} a step"
    assert said in words(page)
    assert text.startswith(str(compiled.plan))
    for section in (*profile.summary(), *profile.details()):
        for row in section.rows:
            assert " ".join(" ".join(row).split()) in words(page)
    for section in profile.summary():
        assert "\n".join(text_lines(section)) in text
    for section in profile.details():
        lines = "\n".join(text_lines(section))
        assert lines in full
        assert lines not in text
    for line in re.findall(r"<t[hd][^>]*>.*?</t[hd]>", plan_page):
        assert line in page


def test_before_a_measurement_the_page_is_that_of_the_plan() -> None:
    with autopar.compile(
        nn.Linear(6, 6), 1, BATCH, loss_fn=nn.functional.mse_loss, optimizer=SGD, profile_limit_s=0
    ) as compiled:
        assert words(compiled._repr_html_()) == words(compiled.plan._repr_html_())
        for name in FIGURE_NAMES:
            with pytest.raises(InputError, match=r"nothing was measured; call compiled\.profile"):
                compiled.figure(name)
        compiled.train_step(*BATCH)
        assert "measured: " in words(compiled._repr_html_())
    assert "measured: " in words(compiled._repr_html_())  # also once it is closed


def test_a_model_that_its_first_call_compiles_has_no_page_before() -> None:
    with autopar.compile(
        nn.Linear(6, 6), 1, loss_fn=nn.functional.mse_loss, optimizer=SGD, profile_limit_s=0
    ) as compiled:
        assert compiled._repr_html_() is None
        compiled.train_step(*BATCH)
        assert "measured: " in words(compiled._repr_html_())
