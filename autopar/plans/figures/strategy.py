"""The strategy over the network: what each mesh axis splits in every module.

In: a plan. Out: a heat map whose rows are modules in graph order, repeated ones folded, and whose
columns are mesh axes. A cell says the split of the module's computation and the kind of parallelism
of its parameters; its color is the split.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
from matplotlib.colors import ListedColormap

from autopar.ir.block_names import FIXED, TOTALS
from autopar.plans.blocks import label_of, pattern_of, stages_of_blocks
from autopar.plans.figures.drawing import (
    COLORS,
    GRAY,
    FigureAndAxes,
    add_legend,
    name_rows,
    new_figure,
    write,
)
from autopar.plans.parallelism import name_along, shares_of, strategy_name
from autopar.plans.parts import ModulePlan, PlanFields

MOST_ROWS = 40
SPLITS = {
    "batch": COLORS[0],
    "sequence": COLORS[4],
    "another dimension": COLORS[1],
    "nothing: every device computes the same": GRAY,
}
"""The kinds of splits, as the legend names them, and their colors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyRow:
    """Modules that are split alike: a word for each mesh axis, and the kind of parallelism.

    ``splits`` are as in `autopar.plans.parts.ModulePlan`. ``kinds`` are empty without parameters.
    ``compute_s``: seconds of their forward and backward passes on one device.
    """

    label: str
    splits: tuple[str, ...]
    kinds: tuple[str, ...]
    compute_s: float

    def cell(self, axis: int) -> str:
        """The text of a cell: ``batch, FSDP``."""
        words = ("whole" if self.splits[axis] == "-" else self.splits[axis], self.kinds[axis])
        return ", ".join(word for word in words if word)

    def color(self, axis: int) -> int:
        """The number of the cell's split in `SPLITS`."""
        known = ("batch", "sequence", None, "-")
        word = self.splits[axis]
        return known.index(word) if word in known else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyMap:
    """The rows in graph order; the title says how many of least time are left out."""

    title: str
    axes: tuple[str, ...]
    rows: tuple[StrategyRow, ...]


def strategy_data(plan: PlanFields) -> StrategyMap | None:
    """The strategy of a plan's modules; None for a mesh of one device."""
    if not plan.may_split or not plan.modules:
        return None
    rows = _rows(plan)
    kept = sorted(range(len(rows)), key=lambda i: -rows[i].compute_s)[:MOST_ROWS]
    title = f"Strategy by module: {strategy_name(plan, short=True)}"
    rest = len(rows) - len(kept)
    return StrategyMap(
        title=f"{title}; {rest} more kinds of modules take less time" if rest else title,
        axes=tuple(f"{n}={s}" for n, s in zip(plan.mesh.axis_names, plan.mesh.axis_sizes)),
        rows=tuple(rows[i] for i in sorted(kept)),
    )


def _rows(plan: PlanFields) -> list[StrategyRow]:
    owned: defaultdict[str, list[str]] = defaultdict(list)
    for name in plan.parameters:
        owned[name.rpartition(".")[0]].append(name)
    stages = stages_of_blocks(plan) if plan.is_pipeline else {}
    groups: defaultdict[tuple[object, ...], list[ModulePlan]] = defaultdict(list)
    for module in plan.modules:
        is_constant = module.block in (FIXED, TOTALS) or not owned[module.name]
        if is_constant and not (module.forward_s or module.backward_s):
            continue
        kinds = tuple(name_along(each, short=True) for each in shares_of(plan, owned[module.name]))
        stage, name = stages.get(module.block), label_of([module], with_blocks=False)
        groups[stage, pattern_of(name), tuple(module.splits.split()), kinds].append(module)
    labels = [label_of(inside, with_blocks=False) for inside in groups.values()]
    counts = Counter((stage, label) for (stage, *_), label in zip(groups, labels))
    return [
        StrategyRow(
            label=label_of(inside, with_blocks=counts[stage, label] > 1)
            + ("" if stage is None else f", stage {stage}"),
            splits=splits,  # type: ignore[arg-type]
            kinds=kinds,  # type: ignore[arg-type]
            compute_s=sum(m.forward_s + m.backward_s for m in inside),
        )
        for ((stage, _, splits, kinds), inside), label in zip(groups.items(), labels)
    ]


def plot_strategy(data: StrategyMap) -> FigureAndAxes:
    """Draw a colored cell with its text for each row and mesh axis."""
    figure, axes = new_figure(data.title, 1 + len(data.rows))
    colors = np.array([[r.color(a) for a in range(len(data.axes))] for r in data.rows])
    edges = [np.arange(size + 1) - 0.5 for size in colors.shape]
    axes.pcolormesh(
        edges[1], edges[0], colors, cmap=ListedColormap(list(SPLITS.values())),
        vmin=-0.5, vmax=len(SPLITS) - 0.5, edgecolors="white", linewidth=1,
    )  # fmt: skip
    name_rows(axes, [row.label for row in data.rows])
    axes.xaxis.tick_top()
    axes.set_xticks(range(len(data.axes)), data.axes, parse_math=False)
    axes.tick_params(axis="x", length=0)
    axes.spines[:].set_visible(False)
    for place, row in enumerate(data.rows):
        for axis in range(len(data.axes)):
            write(axes, axis, place, row.cell(axis), color="white", ha="center")
    used = sorted(set(colors.ravel().tolist()))
    add_legend(figure, [list(SPLITS.items())[i] for i in used])
    return figure, axes
