"""Pages: a headline with sections, as text and as HTML with real tables and no scripts.

In: sections of `autopar.plans.layout`. Out: text for a terminal, an element for a notebook, or a
document that needs no other file. Colors follow the reader's light or dark setting.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.plans.layout import WIDTH, Section, is_number, printable, text_lines, wrapped

STYLE = """
.autopar { font: 14px/1.45 system-ui, sans-serif; max-width: 62rem; }
.autopar h2 { font-size: 1.2em; } .autopar h3 { font-size: 1em; margin: 1.1em 0 .2em; }
.autopar table { border-collapse: collapse; margin: 0; }
.autopar td, .autopar th { text-align: left; vertical-align: top; padding: .15em .8em .15em 0;
  border-bottom: 1px solid rgb(128 128 128 / 35%); background: none; }
.autopar th { font-weight: 600; } .autopar .long { overflow-wrap: anywhere; }
.autopar .number { text-align: right; white-space: nowrap; }
.autopar p { margin: .3em 0; } .autopar figure { margin: .8em 0; }
.autopar figcaption { font-weight: 600; } .autopar svg { max-width: 100%; height: auto; }
.autopar details { margin-top: 1em; }
""".strip()

LONG_WORD = 24
"""A cell with a word of more characters may break words, so that a table fits the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A headline and sections; ``str`` is its text, and a notebook shows it as tables.

    ``figures`` are SVG elements, ``details`` sections that a page folds and a text leaves out.
    """

    headline: str
    sections: tuple[Section, ...]
    figures: tuple[str, ...] = ()
    details: tuple[Section, ...] = ()

    def to_text(self, width: int = WIDTH) -> str:
        """The page as lines of at most ``width`` columns."""
        lines = wrapped(self.headline, width, "", "  ")
        for section in self.sections:
            lines += text_lines(section, width)
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        body = [f"<h2>{escaped(self.headline)}</h2>", *map(_section, self.sections)]
        body[2:2] = self.figures
        if self.details:
            inside = "".join(map(_section, self.details))
            body.append(f"<details><summary>All details</summary>{inside}</details>")
        return f'<style>{STYLE}</style><div class="autopar">{"".join(body)}</div>'

    def to_html(self) -> str:
        """The page as a document of its own."""
        return (
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            '<meta name="color-scheme" content="light dark">'
            f"<title>{escaped(self.headline)}</title>"
            "<style>:root { color-scheme: light dark; } body { margin: 2rem; }</style></head>"
            f"<body>{self._repr_html_()}</body></html>\n"
        )


def _section(section: Section) -> str:
    parts = [f"<h3>{escaped(section.title)}</h3>"] if section.title else []
    if section.rows:
        kinds = [is_number(section, i) for i in range(len(section.rows[0]))]
        head = ""
        if section.columns:
            head = f"<thead>{_row(section.columns, kinds, 'th')}</thead>"
        else:
            kinds = [False, False]
        rows = "".join(_row(row, kinds, "td") for row in section.rows)
        parts.append(f"<table>{head}<tbody>{rows}</tbody></table>")
    parts += [f"<p>{escaped(note)}</p>" for note in section.notes]
    return "".join(parts)


def _row(cells: Sequence[str], are_numbers: Sequence[bool], tag: str) -> str:
    texts = []
    for cell, right in zip(cells, are_numbers):
        is_long = max(map(len, cell.split()), default=0) > LONG_WORD
        kind = ' class="number"' if right else ' class="long"' * is_long
        texts.append(f"<{tag}{kind}>{escaped(cell)}</{tag}>")
    return f"<tr>{''.join(texts)}</tr>"


def escaped(text: str) -> str:
    """The text for HTML and SVG, without characters that cannot be printed."""
    return html.escape(printable(text))
