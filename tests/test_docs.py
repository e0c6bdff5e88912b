"""The documentation builds without a warning, leads nowhere wrong, and runs as it is written."""

from __future__ import annotations

import ast
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import autopar

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"(<!-- runnable -->\n)?^```python\n(.*?)^```$", re.M | re.S)
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}

pytestmark = pytest.mark.xdist_group("docs")  # they share one build


def blocks(page: Path, *, runnable: bool = False) -> list[str]:
    return [code for mark, code in BLOCK.findall(page.read_text()) if mark or not runnable]


class Page(HTMLParser):
    """The anchors of a page, where its links lead, and what a browser loads for it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in LOADED and LOADED[tag] in found and found.get("rel") != "canonical":
            self.loaded.append(found[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with every warning an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def test_every_page_is_built(site: Path) -> None:
    for page in PAGES:
        assert (site / page.with_suffix(".html").name).exists()


def test_links_lead_to_a_page_and_an_anchor(site: Path, pages: dict[Path, Page]) -> None:
    wrong = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            anchor = unquote(parts.fragment)
            is_known = target in pages and (not anchor or anchor in pages[target].anchors)
            if not is_known and not (target.exists() and not anchor):
                wrong.append(f"{path.relative_to(site)}: {link}")
    assert not wrong


def test_links_of_the_readme_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text())
    assert len(links) >= len(PAGES) - 2
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_nothing_is_loaded_from_the_network(site: Path, pages: dict[Path, Page]) -> None:
    loaded = [link for page in pages.values() for link in page.loaded]
    assert loaded
    assert not [link for link in loaded if urlsplit(link).netloc]
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", style.read_text()), style


def test_every_public_name_has_an_entry(pages: dict[Path, Page], site: Path) -> None:
    anchors = pages[site / "api.html"].anchors
    assert [name for name in autopar.__all__ if f"autopar.{name}" not in anchors] == []


def documented() -> Iterator[tuple[str, object]]:
    """Every entry of the API page, and the public methods of its classes."""
    for dotted in re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.M):
        found = pkgutil.resolve_name(dotted)
        if isinstance(found, str):
            continue
        yield dotted, found
        if inspect.isclass(found):
            for name, member in vars(found).items():
                if not name.startswith("_") and (inspect.isroutine(member) or is_property(member)):
                    yield f"{dotted}.{name}", member


def is_property(member: object) -> bool:
    return isinstance(member, property)


@pytest.mark.parametrize(("name", "value"), [pytest.param(*e, id=e[0]) for e in documented()])
def test_its_docstring_says_more_than_its_name(name: str, value: object) -> None:
    text = inspect.cleandoc(getattr(value, "__doc__", None) or "")
    assert not text.startswith(f"{name.rpartition('.')[2]}("), f"{name} has a generated docstring"
    first = text.split("\n\n")[0]
    own = set(re.findall(r"[a-z]+", re.sub(r"([A-Z])", r" \1", name).lower()))
    assert len(set(re.findall(r"[a-z]+", first.lower())) - own) >= 3, f"{name}: {first!r}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_its_code_is_python(page: Path) -> None:
    for code in blocks(page):
        ast.parse(code)


@pytest.mark.parametrize(
    ("page", "number"),
    [
        pytest.param(page, number, id=f"{page.stem}-{number}")
        for page in PAGES
        for number in range(len(blocks(page, runnable=True)))
    ],
)
def test_its_code_runs(page: Path, number: int, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(blocks(page, runnable=True)[number])
    done = subprocess.run(
        [sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True, timeout=240,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_quick_start_is_run() -> None:
    assert len(blocks(ROOT / "docs" / "index.md", runnable=True)) == 2


def test_the_page_of_published_figures_is_the_one_its_script_makes() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "published.py"), "--check"], timeout=60
    )
    assert done.returncode == 0, "run python benchmarks/published.py, and commit docs/published.md"


def written(root: Path) -> Iterator[str]:
    """Every string of the code, with a NUL where a value is put in."""
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "\0"
                    for part in node.values
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_messages_of_troubleshooting_are_those_of_the_code() -> None:
    """The text of each message, between its values, is in the code word for word."""
    source = "\n".join(written(ROOT / "autopar"))
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    messages = [
        m for line in re.findall(r"^\*\*`.*$", page, re.M) for m in re.findall(r"`(.+?)`", line)
    ]
    values = r"\.\.\.|'[^']*'|\bat \w+\.py:\d+|\[[^\]]*\]|\{[^}]*\}|\([^)]*\)|\b\d+\b|\b\w+Error: "
    parts = [part.strip(" :;,=") for message in messages for part in re.split(values, message)]
    parts = [part for part in parts if len(part.split()) >= 3]
    assert len(parts) > 40
    assert [part for part in parts if part not in source] == []
