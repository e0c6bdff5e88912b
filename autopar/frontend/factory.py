"""A model and its example inputs from a user's function, named on a command line.

In: ``MODULE:FACTORY``. Out: what the function returned, checked, with inputs that have data.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autopar.base.documents import shown
from autopar.base.errors import InputError
from autopar.base.source_files import is_users
from autopar.base.spelling import did_you_mean
from autopar.base.torch_private import pytree


class Factory(NamedTuple):
    """A model and the example inputs that its factory returned."""

    model: nn.Module
    inputs: Any


def factory_of(text: str, *, on_meta: bool = True) -> Factory:
    """The model and inputs of ``MODULE:FACTORY``; raises InputError where it cannot be called."""
    name, _, attribute = text.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise InputError(_no_module(text, name, str(error.name))) from error
        raise InputError(f"cannot import {name}: {_reason(error)}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise InputError(f"module {name} has no {shown(attribute)}; define it there")
        found = getattr(found, part)
    if not callable(found):
        raise InputError(f"{text} is {shown(found)}; write a function that returns the model")
    return _checked(text, _called(text, found, on_meta))


def _no_module(text: str, name: str, missing: str) -> str:
    """Why a module cannot be imported that neither the current folder nor the environment has."""
    files = sorted(path.stem for path in Path.cwd().glob("*.py"))
    return (
        f"{shown(text)}: there is no module {missing} in the current folder or the environment; "
        f"write MODULE:FACTORY, such as models:llama for llama() in models.py"
        + did_you_mean(name, files)
    )


def _called(text: str, factory: Callable[[], Any], on_meta: bool) -> Any:
    """The factory's result, ``on_meta`` under the meta device where it allows that."""
    if on_meta:
        with suppress(Exception), torch.device("meta"):
            return factory()
    try:  # it needs values, and the error that counts is that of a plain call
        return factory()
    except Exception as error:
        raise InputError(f"{text} raised {_reason(error)}") from error


def _checked(text: str, made: Any) -> Factory:
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise InputError(
            f"{text} returned {shown(made)}; return a model and its example inputs: "
            "return model, (x, y)"
        )
    model, inputs = made
    return Factory(model, pytree.tree_map(_with_data, inputs))


def _with_data(leaf: Any) -> Any:
    """Inputs made under the meta device, as zeros: a plan depends on shapes and dtypes only."""
    if isinstance(leaf, Tensor) and leaf.is_meta:
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device="cpu")
    return leaf


def _reason(error: Exception) -> str:
    """The error in one line, with the user's own line that raised it."""
    lines = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    where = f" ({lines[-1].filename}:{lines[-1].lineno})" if lines else ""
    return f"{type(error).__name__}: {error}{where}"
