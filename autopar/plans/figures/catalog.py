"""The figures of a plan by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from autopar.base.documents import shown
from autopar.base.errors import InputError
from autopar.base.spelling import did_you_mean
from autopar.base.units import format_seconds
from autopar.plans.figures.bar_plots import plot_bars
from autopar.plans.figures.drawing import FigureAndAxes, svg_of
from autopar.plans.figures.k_curve import plan_k_curve, plot_k_curve
from autopar.plans.figures.memory_over_time import memory_over_time_data, plot_memory_over_time
from autopar.plans.figures.numbers import (
    alternatives_data,
    kernels_data,
    memory_data,
    recomputation_data,
    step_data,
)
from autopar.plans.figures.offload import offload_data, plot_offload
from autopar.plans.figures.search_progress import plot_search, search_data
from autopar.plans.figures.strategy import plot_strategy, strategy_data
from autopar.plans.figures.timeline import (
    HeldChart,
    TimelineChart,
    held_data,
    plot_held,
    plot_timeline,
    step_chart,
    timeline_data,
)
from autopar.plans.parts import PlanFields
from autopar.plans.timeline import predicted_spans, predicted_timeline

MOST_BARS = 2000
"""A timeline of more bars is not part of a page."""


class Recipe(NamedTuple):
    """How a figure is made; ``data`` is None for a plan that has nothing to show, ``why``."""

    data: Callable[[PlanFields], Any]
    plot: Callable[[Any], FigureAndAxes]
    why: str = ""


def _timeline(plan: PlanFields) -> TimelineChart | None:
    spans = predicted_spans(plan)
    if spans is not None:
        step = f"A step of {format_seconds(plan.prediction.step_time_s)}"
        each = " on each device" * plan.may_split
        return step_chart(spans, f"{step}{each}: {plan.schedule.name}")
    found = predicted_timeline(plan)
    if found is None:
        return None
    return replace(timeline_data(found), title=f"A step by pipeline rank: {plan.schedule.name}")


def _activations(plan: PlanFields) -> HeldChart | None:
    found = predicted_timeline(plan) if plan.is_pipeline else None
    return None if found is None else held_data(found, is_bytes=False)


FIGURES: Mapping[str, Recipe] = {
    "strategy": Recipe(strategy_data, plot_strategy, "its mesh is one device"),
    "step": Recipe(step_data, plot_bars),
    "memory": Recipe(memory_data, plot_bars),
    "memory_over_time": Recipe(
        memory_over_time_data, plot_memory_over_time, "it has no prices for its blocks"
    ),
    "search": Recipe(
        search_data, plot_search, "it was read from JSON, which has no times of its search"
    ),
    "alternatives": Recipe(alternatives_data, plot_bars, "nothing else was considered"),
    "timeline": Recipe(_timeline, plot_timeline, "it has no prices for the blocks of its stages"),
    "activations": Recipe(_activations, plot_held, "it is no pipeline"),
    "recomputation": Recipe(recomputation_data, plot_bars, "nothing is recomputed"),
    "kernels": Recipe(kernels_data, plot_bars, "no compiled blocks were measured"),
    "offload": Recipe(offload_data, plot_offload, "nothing moves to the host"),
    "k_curve": Recipe(
        plan_k_curve, plot_k_curve, "its schedule is not reverse_first_k or conventional by stages"
    ),
}


def figure_data(plan: PlanFields, name: str) -> Any:
    """The numbers of a figure; raises InputError for one that there is not, or not for the plan."""
    if name not in FIGURES:
        raise no_figure(name, figures_of(plan), FIGURES)
    found = FIGURES[name].data(plan)
    if found is None:
        have = ", ".join(figures_of(plan))
        raise InputError(f"the plan has no figure {name!r}: {FIGURES[name].why}; it has {have}")
    return found


def figures_of(plan: PlanFields) -> tuple[str, ...]:
    """The names of the figures that the plan has."""
    return tuple(name for name, recipe in FIGURES.items() if recipe.data(plan) is not None)


def no_figure(name: object, have: Iterable[str], known: Iterable[str] = ()) -> InputError:
    """The error for a name of no figure, with those that there are and one that is similar."""
    names = tuple(have)
    near = did_you_mean(name, (*names, *known)) if isinstance(name, str) else ""
    return InputError(f"there is no figure {shown(name)}; write {' | '.join(names)}{near}")


def plan_figure(plan: PlanFields, name: str) -> FigureAndAxes:
    """Draw a figure of the plan; raises InputError as `figure_data` does."""
    data = figure_data(plan, name)
    return FIGURES[name].plot(data)


def notebook_figures(plan: PlanFields) -> tuple[str, ...]:
    """The figures that a notebook shows below a plan: a timeline only where ranks differ."""
    names = ("step", "memory", *(["timeline"] if plan.is_pipeline else []))
    return page_figures(plan, names)


def page_figures(plan: PlanFields, names: tuple[str, ...] = tuple(FIGURES)) -> tuple[str, ...]:
    """Figures as elements of a page: those that the plan has, and no timeline of too many bars."""
    found = []
    for name in names:
        data = FIGURES[name].data(plan)
        if data is None or (isinstance(data, TimelineChart) and len(data.bars) > MOST_BARS):
            continue
        found.append(figure_element(FIGURES[name].plot(data)[0], data.title))
    return tuple(found)


def figure_element(figure: Figure, title: str) -> str:
    """A figure as an element of a page."""
    return f"<figure>{svg_of(figure, title)}</figure>"
