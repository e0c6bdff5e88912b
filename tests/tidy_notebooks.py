"""Executed notebooks as they are committed: without times, warnings and lists of lines.

``make notebooks`` executes all of them in place, then runs this on each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def joined(value: Any) -> Any:
    """Text that was split into lines as one string."""
    return "".join(value) if isinstance(value, list) else value


def tidy(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the sources and outputs alone that a reader sees, without standard error.

    Warnings there are of the machine: of missing widgets, of files that are looked up.
    """
    for cell in notebook["cells"]:
        cell["metadata"] = {}
        cell["source"] = joined(cell["source"])
        kept = [each for each in cell.get("outputs", ()) if each.get("name") != "stderr"]
        for output in kept:
            if "text" in output:
                output["text"] = joined(output["text"])
            if "data" in output:
                output["data"] = {kind: joined(text) for kind, text in output["data"].items()}
        if "outputs" in cell:
            cell["outputs"] = kept
    names = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook["metadata"] = {"kernelspec": names, "language_info": {"name": "python"}}
    return notebook


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        made = tidy(json.loads(path.read_text(encoding="utf-8")))
        text = json.dumps(made, indent=1, ensure_ascii=False, sort_keys=True)
        path.write_text(text + "\n", encoding="utf-8")
