"""Sections of a report as data, and their text.

In: titled tables of texts. Out: lines of at most a given width. `autopar.plans.page` makes a page
of the same sections, so both have the same numbers.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

_NO_BREAK = "\xa0"
_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]iB|B|[mu]?s|[GT]FLOP/s|GB/s|TB/s)\b)")
_SHAPE = re.compile(r"\[[\d, ]{1,24}\]")
WIDTH = 100
GAP = "  "
LEAST_CELL = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A titled table. Without ``columns`` it has two: a name and a text, which may be wrapped.

    With ``columns``, those in which no row has a value are left out by `used_columns`. ``notes``
    are sentences under the table. A cell that is too wide is wrapped if it ``wraps``, and otherwise
    shortened, so that a row is one line.
    """

    title: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()
    wraps: bool = False

    def used_columns(self) -> Section:
        """The section without empty columns."""
        kept = [i for i in range(len(self.columns)) if any(row[i] for row in self.rows)]
        return Section(
            title=self.title,
            columns=tuple(self.columns[i] for i in kept),
            rows=tuple(tuple(row[i] for i in kept) for row in self.rows),
            notes=self.notes,
            wraps=self.wraps,
        )


def text_lines(section: Section, width: int = WIDTH) -> list[str]:
    """The section as lines of at most ``width`` columns."""
    lines = []
    if section.title:
        title = section.title
        lines = wrapped(title, width) if section.wraps else [shortened(title, width)]
    if section.columns:
        lines += _table(section, width)
    else:
        name_width = max((len(name) for name, _ in section.rows), default=0)
        for name, text in section.rows:
            head = f"{GAP}{name:<{name_width}}{GAP}"
            if section.wraps and len(head) > width // 2:
                lines += [*wrapped(name, width, GAP, GAP), *wrapped(text, width, 2 * GAP, 2 * GAP)]
            else:
                lines += wrapped(text, width, head, " " * len(head))
    for note in section.notes:
        lines += wrapped(note, width, GAP, GAP)
    return [line.rstrip() for line in lines]


def wrapped(text: str, width: int, first: str = "", following: str = "") -> list[str]:
    """A text in lines of at most ``width``; the lines begin with ``first``, then ``following``.

    A number stays on the line of its unit, and a shape on one line.
    """
    glued = _UNIT.sub(_NO_BREAK, printable(text))
    glued = _SHAPE.sub(lambda found: found[0].replace(" ", _NO_BREAK), glued)
    found = textwrap.wrap(
        glued, width, initial_indent=first, subsequent_indent=following, break_on_hyphens=False
    )
    return [line.replace(_NO_BREAK, " ") for line in found] or [first]


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
    least = _least(section, room) if section.wraps else [LEAST_CELL] * len(sizes)
    while sum(sizes) > room and (wide := [i for i, size in enumerate(sizes) if size > least[i]]):
        sizes[max(wide, key=sizes.__getitem__)] -= 1
    right = [is_number(section, i) for i in range(len(sizes))]
    cut = broken if section.wraps else lambda cell, size: [shortened(cell, size)]
    return [
        "".join(
            GAP + f"{cell:{'>' if to_right else '<'}{size}}"
            for cell, size, to_right in zip(line, sizes, right)
        ).rstrip()[:width]
        for row in rows
        for line in itertools.zip_longest(*map(cut, row, sizes), fillvalue="")
    ]


def _least(section: Section, room: int) -> list[int]:
    """How narrow the columns of a table that wraps may be: as the longest words of their names, and
    as those of their cells where there is room, the first column's before all others."""
    least, cells = [_longest([name]) for name in section.columns], zip(*section.rows)
    if sum(least) > room:
        return [1] * len(least)
    whole = [max(size, _longest(each)) for size, each in zip(least, cells)]
    for i in sorted(range(len(whole)), key=lambda i: (i > 0, whole[i])):
        if sum(least) - least[i] + whole[i] <= room:
            least[i] = whole[i]
    return least


def _longest(texts: Sequence[str]) -> int:
    """The length of the longest part of a word that is not broken."""
    sizes = [
        end - start
        for text in texts
        for word in text.split()
        for start, end in itertools.pairwise((0, *_breaks(word), len(word)))
    ]
    return max(sizes, default=1)


def _breaks(word: str) -> list[int]:
    """Where a long word is broken: in front of dots, and behind underscores."""
    return [
        i
        for i in range(1, len(word))
        if (word[i] == "." != word[i - 1]) or (word[i - 1] == "_" != word[i])
    ]


def broken(text: str, width: int) -> list[str]:
    """The text in lines of at most ``width``: between words, or inside long ones; see `_breaks`."""
    lines = [""]
    for word in printable(text).split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
            continue
        lines.append(word)
        while len(lines[-1]) > width:
            found = [i for i in _breaks(lines[-1]) if max(width // 3, 1) <= i <= width]
            at = found[-1] if found else width
            lines[-1:] = lines[-1][:at], lines[-1][at:]
    return lines[1:] or [""]


def is_number(section: Section, column: int) -> bool:
    """Whether the texts of a column start with digits, so that they are aligned at the right."""
    cells = [row[column] for row in section.rows if row[column]]
    return column > 0 and bool(cells) and all(each[0].isdigit() for each in cells)
