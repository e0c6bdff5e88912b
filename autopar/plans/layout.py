"""Sections of a report as data, and their text.

In: titled tables of texts. Out: lines of at most a given width. `autopar.plans.page` makes a page
of the same sections, so both have the same numbers.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

WIDTH = 100
GAP = "  "
LEAST_CELL = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A titled table. Without ``columns`` it has two: a name and a text, which may be wrapped.

    With ``columns``, those in which no row has a value are left out by `used_columns`. ``notes``
    are sentences under the table.
    """

    title: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()

    def used_columns(self) -> Section:
        """The section without empty columns."""
        kept = [i for i in range(len(self.columns)) if any(row[i] for row in self.rows)]
        return Section(
            title=self.title,
            columns=tuple(self.columns[i] for i in kept),
            rows=tuple(tuple(row[i] for i in kept) for row in self.rows),
            notes=self.notes,
        )


def text_lines(section: Section, width: int = WIDTH) -> list[str]:
    """The section as lines of at most ``width`` columns."""
    lines = [shortened(section.title, width)] if section.title else []
    if section.columns:
        lines += _table(section, width)
    else:
        name_width = max((len(name) for name, _ in section.rows), default=0)
        for name, text in section.rows:
            head = f"{GAP}{name:<{name_width}}{GAP}"
            lines += wrapped(text, width, head, " " * len(head))
    for note in section.notes:
        lines += wrapped(note, width, GAP, GAP)
    return [line.rstrip() for line in lines]


def wrapped(text: str, width: int, first: str = "", following: str = "") -> list[str]:
    """A text in lines of at most ``width``; the lines begin with ``first``, then ``following``."""
    found = textwrap.wrap(
        printable(text), width, initial_indent=first, subsequent_indent=following,
        break_on_hyphens=False,
    )  # fmt: skip
    return found or [first]


def printable(text: str) -> str:
    """The text with everything that is no printable character as a question mark.

    Names in a plan may come from anyone; none may move the cursor of a terminal.
    """
    return "".join(each if each.isprintable() else "?" for each in text)


def shortened(text: str, width: int) -> str:
    """The text, its middle left out where it is longer than ``width``."""
    text = printable(text)
    if len(text) <= width:
        return text
    tail = (width - 3) // 2
    return f"{text[: width - 3 - tail]}...{text[len(text) - tail :]}"


def _table(section: Section, width: int) -> list[str]:
    rows = [section.columns, *section.rows]
    sizes = [max(len(row[i]) for row in rows) for i in range(len(section.columns))]
    room = width - len(GAP) * len(sizes)
    while sum(sizes) > room and max(sizes) > LEAST_CELL:
        widest = sizes.index(max(sizes))
        others = sorted(sizes)[-2] if len(sizes) > 1 else 0
        sizes[widest] -= max(1, min(sum(sizes) - room, sizes[widest] - others))
    right = [is_number(section, i) for i in range(len(sizes))]
    return [
        "".join(
            GAP + f"{shortened(cell, size):{'>' if to_right else '<'}{size}}"
            for cell, size, to_right in zip(row, sizes, right)
        ).rstrip()[:width]
        for row in rows
    ]


def is_number(section: Section, column: int) -> bool:
    """Whether the texts of a column start with digits, so that they are aligned at the right."""
    cells = [row[column] for row in section.rows if row[column]]
    return column > 0 and bool(cells) and all(each[0].isdigit() for each in cells)
