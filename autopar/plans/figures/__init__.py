"""Figures: for each, its numbers as a value, and a drawing of that value by matplotlib.

``plan.figure("memory")`` draws one by name; ``memory_data(plan)`` are its numbers.
"""

from autopar.plans.bars import Bars, Line, Series, Unit
from autopar.plans.figures.bar_plots import plot_bars
from autopar.plans.figures.catalog import FIGURES, figure_data, page_figures, plan_figure
from autopar.plans.figures.k_curve import KCurve, k_curve_data, plan_k_curve, plot_k_curve
from autopar.plans.figures.memory_over_time import (
    MemoryChart,
    memory_over_time_data,
    plot_memory_over_time,
)
from autopar.plans.figures.numbers import (
    alternatives_data,
    kernels_data,
    memory_data,
    recomputation_data,
    step_data,
)
from autopar.plans.figures.offload import OffloadChart, offload_data, plot_offload
from autopar.plans.figures.search_progress import SearchChart, plot_search, search_data
from autopar.plans.figures.strategy import StrategyMap, plot_strategy, strategy_data
from autopar.plans.figures.timeline import (
    HeldChart,
    TimelineChart,
    held_data,
    plot_held,
    plot_timeline,
    step_chart,
    timeline_data,
)

__all__ = [
    "FIGURES",
    "Bars",
    "HeldChart",
    "KCurve",
    "Line",
    "MemoryChart",
    "OffloadChart",
    "SearchChart",
    "Series",
    "StrategyMap",
    "TimelineChart",
    "Unit",
    "alternatives_data",
    "figure_data",
    "held_data",
    "k_curve_data",
    "kernels_data",
    "memory_data",
    "memory_over_time_data",
    "offload_data",
    "page_figures",
    "plan_figure",
    "plan_k_curve",
    "plot_bars",
    "plot_held",
    "plot_k_curve",
    "plot_memory_over_time",
    "plot_offload",
    "plot_search",
    "plot_strategy",
    "plot_timeline",
    "recomputation_data",
    "search_data",
    "step_chart",
    "step_data",
    "strategy_data",
    "timeline_data",
]
