"""The packages' layers: imports obey the drawing in the README, which is read from there."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "autopar"
FLAT = {"__init__", "_version", "api", "options", "demo", "__main__"}


def drawn_layers(readme: str) -> list[tuple[str, ...]]:
    """Rows of the drawing from the top; the packages of one row are siblings."""
    block = re.search(r"<!-- layers -->\n```\n(.*?)```", readme, re.S)
    assert block is not None, "README.md has no code block behind <!-- layers -->"
    rows = [re.split(r"\s{2,}", line.strip(), maxsplit=1)[0] for line in block[1].splitlines()]
    return [tuple(name.strip() for name in row.split("|")) for row in rows if row]


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name; search/ and cost_models/ are linked in."""
    found = {}
    for folder, _, names in os.walk(PACKAGE, followlinks=True):
        for name in names:
            path = Path(folder, name)
            if path.suffix == ".py":
                parts = path.relative_to(ROOT).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(source: str, known: dict[str, Path]) -> Iterator[tuple[int, str]]:
    """Line and module of every import of the package's own modules, at any depth of the code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield node.lineno, inner if inner in known else str(node.module)


def package_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def violations(
    layers: list[tuple[str, ...]], sources: dict[str, str], known: dict[str, Path]
) -> list[str]:
    """Imports that go up, or from one sibling to another."""
    rank = {name: i for i, row in enumerate(layers) for name in row}
    found = []
    for module, source in sources.items():
        own = package_of(module)
        if own in ("", "_version"):  # the package's own __init__ re-exports
            continue
        for line, target in imported(source, known):
            other = package_of(target)
            if other in (own, "", "_version"):
                continue
            if rank[own] >= rank[other]:
                found.append(f"{module}:{line} imports {target}")
    return found


def test_the_drawing_names_every_package() -> None:
    drawn = {name for row in drawn_layers((ROOT / "README.md").read_text()) for name in row}
    there = {package_of(m) for m in modules()} - {"", "_version"}
    assert drawn == there


def test_imports_go_down_only() -> None:
    layers = drawn_layers((ROOT / "README.md").read_text())
    sources = {module: path.read_text() for module, path in modules().items()}
    assert violations(layers, sources, modules()) == []


def test_no_file_is_in_a_circle() -> None:
    known = modules()
    graph: nx.DiGraph = nx.DiGraph()
    for module, path in known.items():
        if path.name == "__init__.py":  # re-exports: who imports a package imports its files
            continue
        for _, target in imported(path.read_text(), known):
            if known[target].name != "__init__.py":
                graph.add_edge(module, target)
    circles = [sorted(c) for c in nx.strongly_connected_components(graph) if len(c) > 1]
    assert circles == []


def test_nothing_hides_an_import_from_the_contract() -> None:
    hidden = [m for m, path in modules().items() if "TYPE_CHECKING" in path.read_text()]
    assert hidden == []


def test_files_lie_in_packages() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} <= FLAT


def test_search_knows_numbers_only() -> None:
    for path in sorted((ROOT / "search").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert not re.match(r"torch\b", name), f"{path}:{node.lineno} imports {name}"
                assert not re.match(r"autopar(?!\.search\b)", name), f"{path}:{node.lineno}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from autopar.low.b import x", []),
        ("from autopar.high import c", ["autopar.mid.a:1 imports autopar.high.c"]),
        ("def f():\n    import autopar.high.c", ["autopar.mid.a:2 imports autopar.high.c"]),
        ("from autopar.side.d import x", ["autopar.mid.a:1 imports autopar.side.d"]),
    ],
)
def test_the_contract_sees(source: str, expected: list[str]) -> None:
    names = ["mid.a", "low.b", "high.c", "high", "side.d"]
    known = {f"autopar.{name}": Path() for name in names}
    layers = [("high",), ("mid", "side"), ("low",)]
    assert violations(layers, {"autopar.mid.a": source}, known) == expected
