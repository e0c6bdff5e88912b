"""Notebooks as they are committed: run from top to bottom, with what they showed.

`make test` executes them again.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
PATH = re.compile(r"(?<![\w:/.])/(?:root|home|tmp|work|usr|Users|opt)/")


def code_cells(path: Path) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_there_is_one_for_each_subject() -> None:
    assert len(NOTEBOOKS) == 7


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_was_run_from_top_to_bottom_without_an_error(path: Path) -> None:
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not any(output["output_type"] == "error" for output in outputs)
    assert not any(output.get("name") == "stderr" for output in outputs)
    shown = [output for output in outputs if output["output_type"] != "stream"]
    assert any({"text/html", "image/png"} & set(output["data"]) for output in shown)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_cell_that_ends_in_a_figure_shows_it(path: Path) -> None:
    for cell in code_cells(path):
        last = "".join(cell["source"]).rstrip().splitlines()[-1]
        if re.search(r"\)\[0\]$", last):
            (output,) = cell["outputs"]
            assert "<svg" in "".join(output["data"]["text/html"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_has_no_path_of_a_machine(path: Path) -> None:
    assert not PATH.search(path.read_text(encoding="utf-8"))
