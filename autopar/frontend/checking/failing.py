"""The operator and line at which a model fails in eager mode.

A model that cannot run is not a failure of its capture, and gets an error of its own.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from autopar.base.errors import InputError
from autopar.base.source_files import is_users
from autopar.base.torch_private import without_logs_of_missing_data
from autopar.frontend.untraced import users_line

_OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


class _LastCall(TorchFunctionMode):
    """A mode that keeps the running torch function's name and the user's line of its call."""

    def __init__(self) -> None:
        super().__init__()
        self.name = self.line = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.name = (resolve_name(func) or getattr(func, "__name__", "")).removesuffix(".__get__")
        self.line = users_line()
        result = func(*args, **(kwargs or {}))
        self.name = ""
        return result


def failure_of(
    run: Callable[[Any], object],
    what: str = "the model itself fails in eager mode, on these inputs",
    fix: str = "",
) -> InputError | None:
    """The error of a model that fails in eager mode; None where it runs or memory runs out.

    ``run`` runs the model in eager mode, with the mode it is given around its forward pass. The
    error begins with ``what``, and ends with a ``fix`` if there is one.
    """
    last = _LastCall()
    with warnings.catch_warnings(record=True) as said, without_logs_of_missing_data():
        warnings.simplefilter("always")
        try:
            with torch.autograd.set_detect_anomaly(True, check_nan=False):
                run(last)
        except _OUT_OF_MEMORY:
            return None
        except Exception as error:
            failed = InputError(
                f"{what}{_place(error, last, [str(w.message) for w in said])}: "
                f"{type(error).__name__}: {first_line(error)}{fix}"
            )
            failed.__cause__ = error
            return failed
    return None


def _place(error: Exception, last: _LastCall, said: list[str]) -> str:
    """`` in torch.add at file:line``; in the backward pass, of the forward call in anomaly mode."""
    for text in said:
        if "Traceback of forward call" in text:
            lines = [f"{file}:{line}" for file, line in _FRAME.findall(text) if is_users(file)]
            operator = re.search(r"Error detected in (\w+?)(Backward\d*)?\.", text)
            name = f", in the gradient of {operator[1]}" if operator else ", in its backward pass"
            return name + (f" at {lines[-1]}" if lines else "")
    name = f", in {last.name}" if last.name else ""
    line = last.line if last.name else _raised_at(error)
    return name + (f" at {line}" if line else "")


def _raised_at(error: Exception) -> str:
    """The innermost of the user's lines in the traceback."""
    found, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_users(code.co_filename):
            found = f"{code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "(no message)"
