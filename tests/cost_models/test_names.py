"""Names of ``autopar.cost_models`` are imported on first use, and are those of its stub."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from autopar import cost_models


def test_names_are_those_of_the_stub() -> None:
    shown = set()
    for node in ast.parse(Path(str(cost_models.__file__)).with_suffix(".pyi").read_text()).body:
        assert isinstance(node, ast.ImportFrom)
        module = importlib.import_module(str(node.module))
        for alias in node.names:
            assert getattr(cost_models, alias.name) is getattr(module, alias.name)
            shown.add(alias.name)
    assert shown == set(vars(cost_models)["__all__"])


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Clustr'"):
        _ = cost_models.Clustr  # type: ignore[attr-defined]
