"""The common look of all figures: a figure with axes, colors, units, and its SVG for a page.

In: sizes and texts. Out: a ``matplotlib.figure.Figure``, which no ``pyplot`` knows and nothing
shows. Names in a plan may hold anything, so no text is read as mathematics.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from autopar.plans.layout import printable, shortened
from autopar.plans.page import escaped

GRAY = "#6f7378"
COLORS = (
    "#3b6ea5", "#b8560a", "#3f8140", "#c23b3f", "#3a7f7b", "#857011", "#925b84", "#80604c", GRAY,
)  # fmt: skip
"""Colors that can be told apart on light and dark pages, and on which white text can be read."""
INK = "#15181c"
"""Of text and lines outside of bars; on a page they have the color of the page's text."""
FONTS = "'DejaVu Sans', Verdana, sans-serif"
WIDTH_INCHES, ROW_INCHES, LEGEND_INCHES = 8.5, 0.3, 0.25
MOST_CHARACTERS, TITLE_CHARACTERS = 44, 88

FigureAndAxes = tuple[Figure, Axes]


class NotebookFigure(Figure):
    """A figure that a notebook shows without ``pyplot``, in the colors of its page.

    Characters that matplotlib's font lacks, as in names of modules, are drawn as boxes, but stay
    what they are on a page, whose reader has other fonts; neither is a reason to warn.
    """

    def draw(self, renderer: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"Glyph \d+ .*missing from", UserWarning)
            super().draw(renderer)

    def _repr_html_(self) -> str:
        return svg_of(self, self.get_suptitle())


def new_figure(title: str, num_rows: float) -> FigureAndAxes:
    """A figure as high as a chart of so many rows, with one pair of axes."""
    figure = NotebookFigure(
        figsize=(WIDTH_INCHES, 1.15 + ROW_INCHES * num_rows), layout="constrained"
    )
    text = shortened(title, TITLE_CHARACTERS)
    figure.suptitle(text, x=0.01, ha="left", fontsize=11, color=INK, parse_math=False)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(INK)
    axes.tick_params(colors=INK, labelsize=9)
    return figure, axes


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Label the rows of a chart, the first one at the top."""
    labels = [shortened(name, MOST_CHARACTERS) for name in names]
    axes.set_yticks(range(len(labels)), labels, parse_math=False)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


def write(axes: Axes, x: float, y: float, text: str, **look: Any) -> None:
    """Write a text at a place of the chart."""
    given = {"fontsize": 9, "va": "center", "color": INK, "parse_math": False, **look}
    axes.text(x, y, printable(text), **given)


def name_axis(axes: Axes, text: str) -> None:
    """Say what the horizontal axis is."""
    axes.set_xlabel(text, fontsize=9, color=INK)


def add_legend(
    figure: Figure, items: Iterable[tuple[str, str]], dashed: Iterable[str] = ()
) -> None:
    """A legend under the chart: names and their colors, then those of dashed lines."""
    handles: list[Artist] = [
        Patch(color=color, label=shortened(name, MOST_CHARACTERS)) for name, color in items
    ]
    look = {"color": INK, "linewidth": 1.2, "linestyle": "--"}
    handles += [Line2D([], [], label=shortened(n, MOST_CHARACTERS), **look) for n in dashed]  # type: ignore[arg-type]
    if not handles:
        return
    widest = max(len(str(each.get_label())) for each in handles)
    columns = max(1, min(len(handles), 100 // (widest + 6)))
    legend = figure.legend(
        handles=handles, loc="outside lower left", frameon=False, ncols=columns, fontsize=9,
        labelcolor=INK,
    )  # fmt: skip
    rows = -(-len(handles) // columns)
    figure.set_figheight(figure.get_figheight() + LEGEND_INCHES * rows)
    for text in legend.get_texts():
        text.set_parse_math(False)


def svg_of(figure: Figure, title: str) -> str:
    """The figure as an SVG element for a page, without scripts, styles or outside references.

    Its background is the page's, and what has the color `INK` has that of the page's text. Text
    stays text, in the widest of the common fonts when it is laid out.
    """
    target = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "autopar"}):
        figure.savefig(target, format="svg", transparent=True, metadata={"Date": None})
    text = target.getvalue()
    text = text[text.index("<svg") :]
    for pattern in (r"<!--.*?-->", r"<metadata>.*?</metadata>", r"<style.*?</style>"):
        text = re.sub(pattern, "", text, flags=re.S)
    used = set(re.findall(r"#([\w-]+)[\")]", text))
    text = re.sub(r' id="([\w.-]+)"', lambda m: m[0] if m[1] in used else "", text)
    text = text.replace(INK, "currentColor")
    text = re.sub(r"font-family:[^;\"]*; ?", "", text)
    text = re.sub(r">\s+<", "><", text).strip()
    style = f"stroke-linejoin: round; font-family: {FONTS}"
    head = f'<svg role="img" aria-label="{escaped(title)}" style="{style}" '
    return f"{head}{text[len('<svg ') :]}"
