"""Names of ``autopar`` are imported on first use, and are those that type checkers see."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import autopar

STUB = Path(autopar.__file__).with_suffix(".pyi")


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.strip()


def test_they_are_those_of_the_stub() -> None:
    shown = {"__version__"}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                name = alias.asname or alias.name
                assert getattr(autopar, name) is getattr(module, alias.name)
                shown.add(name)
    assert shown == set(autopar.__all__) <= set(dir(autopar))


def test_a_subpackage_is_imported_on_first_use() -> None:
    assert run("import autopar; print(autopar.fusion.sweep.__name__)") == "sweep"


def test_an_unknown_name_is_an_attribute_error() -> None:
    code = "import autopar\ntry: autopar.compil\nexcept AttributeError as error: print(error)"
    assert run(code) == "module 'autopar' has no attribute 'compil'"


def test_a_worker_imports_neither_frontend_nor_search() -> None:
    code = (
        "import sys, autopar.runtime.workers.main, autopar.runtime.runners.local\n"
        "heavy = ('autopar.frontend', 'autopar.search', 'ortools', 'torch.distributed.tensor', "
        "'sympy')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    assert run(code) == "[]"
