"""What is fused, as a figure: aligned ops by model, and in which form each is computed.

In: a fused graph. Out: a chart whose rows are runs of ops in graph order and whose columns are
models; cells of one row and color are one call.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.ticker import MaxNLocator

from autopar.fusion.fuse import LOOP, Fused, FusedOp
from autopar.plans.figures.drawing import (
    COLORS,
    GRAY,
    FigureAndAxes,
    add_legend,
    name_axis,
    name_rows,
    new_figure,
)

MOST_ROWS, MOST_NAMES = 60, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionRow:
    """Ops that follow each other and are computed alike: for which models, and in which form."""

    label: str
    num_ops: int
    models: tuple[int, ...]
    form: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionMap:
    """The rows in graph order; the title says how many ops there are and how many are left out."""

    title: str
    num_models: int
    rows: tuple[FusionRow, ...]

    @property
    def forms(self) -> tuple[str, ...]:
        """The forms of the rows, that of most ops first."""
        counts: Counter[str] = Counter()
        for row in self.rows:
            counts[row.form] += row.num_ops
        return tuple(form for form, _ in counts.most_common())


def fusion_data(fused: Fused) -> FusionMap:
    """The rows of a fused graph."""
    runs = [list(run) for _, run in groupby(fused.ops, key=lambda op: (op.models, op.form))]
    rest = len(runs) - MOST_ROWS
    left_out = f"; the first {MOST_ROWS} runs of {len(runs)}" if rest > 0 else ""
    groups = len(fused.groups())
    return FusionMap(
        title=f"{fused.num_models} models in {groups} group{'s' * (groups > 1)}, "
        f"{len(fused.ops)} aligned ops{left_out}",
        num_models=fused.num_models,
        rows=tuple(_row(run) for run in runs[:MOST_ROWS]),
    )


def _row(ops: list[FusedOp]) -> FusionRow:
    names = Counter(op.target.removesuffix(".default") for op in ops)
    texts = [f"{name} ({num}x)" if num > 1 else name for name, num in names.items()]
    more = [f"{len(texts) - MOST_NAMES} more"] * (len(texts) > MOST_NAMES)
    first = ops[0]
    return FusionRow(
        label=", ".join((*texts[:MOST_NAMES], *more)),
        num_ops=len(ops),
        models=first.models,
        form=first.form,
    )


def plot_fusion(data: FusionMap) -> FigureAndAxes:
    """Draw a cell for each model of a row, in the color of the row's form."""
    figure, axes = new_figure(data.title, 2 + len(data.rows))
    fused = [form for form in data.forms if form != LOOP]
    color = {form: COLORS[place % (len(COLORS) - 1)] for place, form in enumerate(fused)}
    color |= {LOOP: GRAY} if LOOP in data.forms else {}  # not fused
    number = {form: place for place, form in enumerate(color)}
    cells = np.full((len(data.rows), data.num_models), np.nan)
    for place, row in enumerate(data.rows):
        cells[place, list(row.models)] = number[row.form]
    axes.pcolormesh(
        np.arange(data.num_models + 1) - 0.5, np.arange(len(data.rows) + 1) - 0.5,
        np.ma.masked_invalid(cells), cmap=ListedColormap(list(color.values())),
        vmin=-0.5, vmax=len(color) - 0.5, edgecolors="white", linewidth=1,
    )  # fmt: skip
    name_rows(axes, [row.label for row in data.rows])
    axes.set_xlim(-0.5, data.num_models - 0.5)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    name_axis(axes, "model")
    add_legend(figure, list(color.items()))
    return figure, axes
