"""Bar charts as data: rows, series of numbers, and lines such as a capacity.

`autopar.plans.figures.bar_plots` draws them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from autopar.base.units import format_bytes, format_seconds

FAR = 10.0


class Unit(StrEnum):
    """The unit of a chart's numbers."""

    SECONDS = "seconds"
    BYTES = "bytes"

    def text(self, value: float) -> str:
        """The number as reports write it."""
        return format_seconds(value) if self is Unit.SECONDS else format_bytes(value)

    def scale(self, largest: float) -> tuple[str, float]:
        """A unit for an axis up to this number, and its size."""
        scales: tuple[tuple[str, float], ...] = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
        if self is Unit.BYTES:
            scales = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0))
        return next((each for each in scales if largest >= each[1]), scales[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One number for each row, None where a row has none; ``texts`` are written at the bars."""

    name: str
    values: tuple[float | None, ...]
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A number that all rows are compared with, such as the memory of a device."""

    name: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Rows with one bar for each series, next to each other or ``stacked`` to one bar.

    ``marked`` are the rows that are drawn gray, for the reason ``mark``.
    """

    title: str
    unit: Unit
    rows: tuple[str, ...]
    series: tuple[Series, ...]
    stacked: bool = False
    lines: tuple[Line, ...] = ()
    marked: frozenset[int] = frozenset()
    mark: str = ""

    @property
    def longest(self) -> float:
        """The end of the longest bar."""
        rows = [[each.values[row] or 0.0 for each in self.series] for row in range(len(self.rows))]
        return max((sum(row) if self.stacked else max(row) for row in rows), default=0.0)

    def is_shown(self, line: Line) -> bool:
        """Whether a line is on the chart; one far beyond all bars would leave nothing of them."""
        return line.value <= FAR * self.longest
