"""Pages as a browser lays them out: nothing overlaps, nothing is cut, at two widths of a window.

They need Chromium, Debian's package ``chromium``; without one of its names on the path they skip.
"""

from __future__ import annotations

import html
import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from autopar import Plan
from autopar.plans.page import LONG_WORD
from tests.test_figures import compiled_blocks, many_microbatches
from tests.test_reports import large, offloaded, planned

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
pytestmark = pytest.mark.skipif(not BROWSER, reason="no chromium on the path")

PLANS = {
    "free": lambda: planned("free"),
    "HSDP": lambda: planned("HSDP"),
    "PP": lambda: planned("PP"),
    "recomputed": lambda: planned("recomputed"),
    "offloaded": offloaded,
    "compiled": compiled_blocks,
    "many micro-batches": many_microbatches,
    "large": large,
}
MEASURE = """
<script>
const box = e => {
  const r = e.getBoundingClientRect();
  return [r.left, r.top, r.right, r.bottom];
};
const svgs = [...document.querySelectorAll("svg")];
for (const each of document.querySelectorAll("details")) each.open = true;
const broken = e => {
  const walker = document.createTreeWalker(e, NodeFilter.SHOW_TEXT), found = [];
  while (walker.nextNode()) for (const word of walker.currentNode.data.matchAll(/\\S{1,25}/g)) {
    if (word[0].length === 25) continue;
    const range = document.createRange();
    range.setStart(walker.currentNode, word.index);
    range.setEnd(walker.currentNode, word.index + word[0].length);
    const tops = new Set([...range.getClientRects()].map(r => Math.round(r.top)));
    if (tops.size > 1 && !/[-\\/.]/.test(word[0])) found.push(word[0]);
  }
  return found;
};
const dashed = e => [...e.querySelectorAll("path")].filter(
  p => getComputedStyle(p).strokeDasharray !== "none").map(box).filter(b => b[2] - b[0] < 3);
const texts = e => [...e.querySelectorAll("text")].map(t => [t.textContent, ...box(t)]);
const found = {
  width: window.innerWidth, scroll: document.documentElement.scrollWidth,
  blocks: [...document.querySelector(".autopar").children].map(e => [e.tagName, ...box(e)]),
  cells: [...document.querySelectorAll("td, th, p, h2, h3, summary, figcaption")].map(
    e => [e.textContent, e.scrollWidth > e.clientWidth + 1, broken(e), ...box(e)]),
  figures: svgs.map(e => [e.getAttribute("aria-label"), box(e), texts(e), dashed(e)]),
};
const out = document.createElement("pre");
out.id = "measured"; out.textContent = JSON.stringify(found);
document.body.append(out);
</script>
"""

GATHER = """
<script>
window.onload = () => {
  for (const frame of document.querySelectorAll("iframe")) {
    const out = document.createElement("pre");
    out.className = "gathered";
    out.textContent = frame.contentDocument.getElementById("measured").textContent;
    document.body.append(out);
  }
};
</script>
"""
WIDTHS = (1280, 800)


def measured(page: str, folder: Path, widths: Sequence[int] = WIDTHS) -> list[dict[str, Any]]:
    """Where a browser puts all that is written on a page, in frames as wide as windows."""
    inner = html.escape(page.replace("</body>", f"{MEASURE}</body>"))
    frames = "".join(
        f'<iframe style="border:0;width:{width}px;height:1200px" srcdoc="{inner}"></iframe>'
        for width in widths
    )
    path = folder / "page.html"
    path.write_text(f"<!doctype html><html><body>{frames}{GATHER}</body></html>", "utf-8")
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--hide-scrollbars", "--window-size=1400,1200", f"--user-data-dir={folder}/profile",
        "--dump-dom", path.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    found = re.findall(r'<pre class="gathered">(.*?)</pre>', done.stdout, re.S)
    return [json.loads(html.unescape(each)) for each in found]


def overlap(first: list[float], second: list[float], least: float = 1.0) -> bool:
    """Whether two boxes share more than a pixel both ways."""
    across = min(first[2], second[2]) - max(first[0], second[0])
    down = min(first[3], second[3]) - max(first[1], second[1])
    return across > least and down > least


def crosses(line: list[float], box: list[float]) -> bool:
    """Whether an upright line goes through a box."""
    return box[0] < (line[0] + line[2]) / 2 < box[2] and line[1] < box[3] and box[1] < line[3]


@pytest.mark.parametrize("case", PLANS)
def test_nothing_overlaps_or_is_cut(case: str, tmp_path: Path) -> None:
    plan: Plan = PLANS[case]()
    plan.save_report(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for width, found in zip(WIDTHS, measured(page, tmp_path), strict=True):
        assert found["width"] == width
        assert found["scroll"] <= width
        check_cells(found["cells"], width)
        for (_, *above), (name, *below) in itertools.pairwise(found["blocks"]):
            assert above[3] <= below[1] + 1, name
        assert len(found["figures"]) > 3
        check_figures(found["figures"], width)


def check_cells(cells: list[Any], width: int) -> None:
    """Every text is on the page, whole, with its words in one piece."""
    for text, is_cut, broken, left, _, right, _ in cells:
        assert not is_cut, text
        assert not broken or max(map(len, text.split())) > LONG_WORD, (text, broken)
        assert 0 <= left <= right <= width, text


def check_figures(figures: list[Any], width: int) -> None:
    """Every text of a figure is inside of it, on no other, and no dashed line crosses it."""
    for title, whole, texts, dashed in figures:
        assert whole[2] <= width, title
        for place, (text, *box) in enumerate(texts):
            assert whole[0] - 1 <= box[0] <= box[2] <= whole[2] + 1, (title, text)
            assert whole[1] - 1 <= box[1] <= box[3] <= whole[3] + 1, (title, text)
            assert not any(crosses(line, box) for line in dashed), (title, text)
            for other, *near in texts[:place]:
                assert not overlap(box, near), (title, text, other)


def test_an_overlap_a_cut_and_a_broken_word_are_seen(tmp_path: Path) -> None:
    narrow = '<p style="width:2em;overflow-wrap:anywhere">recomputed</p>'
    wide = '<p style="white-space:nowrap">' + "wide " * 400 + "</p>"
    line = '<path d="M 9 0 L 9 30" stroke="red" stroke-dasharray="3,1"></path>'
    svg = f'<svg width="90" height="30"><text y="20">one</text><text y="22">two</text>{line}</svg>'
    page = f'<html><body><div class="autopar"><h2>x</h2>{narrow}{wide}{svg}</div></body></html>'
    (found,) = measured(page, tmp_path, [800])
    assert found["scroll"] > 800
    assert [is_cut for text, is_cut, *_ in found["cells"] if text.startswith("wide")] == [True]
    assert [words for text, _, words, *_ in found["cells"] if words] == [["recomputed"]]
    ((_, _, ((_, *one), (_, *two)), (line,)),) = found["figures"]
    assert overlap(one, two)
    assert crosses(line, one)
