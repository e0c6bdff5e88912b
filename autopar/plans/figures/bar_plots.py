"""How bar charts are drawn.

In: the numbers of a chart. Out: a figure whose bars have exactly these, in a unit that suits the
largest of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.transforms import Transform, offset_copy

from autopar.plans.bars import Bars, Line, Series
from autopar.plans.figures.drawing import (
    COLORS,
    GRAY,
    INK,
    FigureAndAxes,
    add_legend,
    name_axis,
    name_rows,
    new_figure,
    write,
)

CHARACTER = 0.0125
"""Width of a character of a text beside a bar, as a fraction of the chart's."""


def plot_bars(bars: Bars) -> FigureAndAxes:
    """Draw the bars, the first row at the top; a line is dashed, and left out if far beyond."""
    lines = [line for line in bars.lines if bars.is_shown(line)]
    largest = max([bars.longest, *(line.value for line in lines)])
    name, scale = bars.unit.scale(largest)
    high = 1 if bars.stacked else len(bars.series)
    figure, axes = new_figure(bars.title, len(bars.rows) * (0.4 + 0.6 * high))
    name_rows(axes, bars.rows)
    widest = max((len(text) for each in bars.series for text in each.texts), default=0)
    axes.set_xlim(0, (largest / scale or 1.0) / (0.97 - min(0.7, CHARACTER * widest)))
    beside = offset_copy(axes.transData, figure, x=4, units="points")
    for number, series in enumerate(bars.series):
        _draw(axes, bars, number, series, scale, beside)
    for line in lines:
        axes.axvline(line.value / scale, color=INK, linewidth=1.2, linestyle="--", zorder=0.5)
    name_axis(axes, name)
    add_legend(figure, _legend(bars), [_named(bars, line) for line in bars.lines])
    return figure, axes


def _draw(
    axes: Axes, bars: Bars, number: int, series: Series, scale: float, beside: Transform
) -> None:
    """One series; rows without a number have no bar, and no line crosses a row's text."""
    before = bars.series[:number]
    height = 0.7 if bars.stacked else 0.8 / len(bars.series)
    for row, value in enumerate(series.values):
        if value is None:
            continue
        left = sum(each.values[row] or 0.0 for each in before) if bars.stacked else 0.0
        at = row if bars.stacked else row - 0.4 + (number + 0.5) * height
        color = GRAY if row in bars.marked else COLORS[number % len(COLORS)]
        axes.barh(at, value / scale, left=left / scale, height=0.95 * height, color=color)
        if series.texts:
            text, end = series.texts[row], left + value
            width = CHARACTER * len(text) * scale * axes.get_xlim()[1]
            for line in sorted(each.value for each in bars.lines if bars.is_shown(each)):
                end = line if end <= line <= end + width else end
            write(axes, end / scale, at, text, transform=beside)


def _legend(bars: Bars) -> Sequence[tuple[str, str]]:
    """Colors of the series, if there are several, and of marked rows."""
    items = [(each.name, COLORS[i % len(COLORS)]) for i, each in enumerate(bars.series)]
    items = items if len(items) > 1 or bars.marked else []
    return [*items, *([(bars.mark, GRAY)] * bool(bars.marked))]


def _named(bars: Bars, line: Line) -> str:
    return line.name if bars.is_shown(line) else f"{line.name}: beyond the chart"
