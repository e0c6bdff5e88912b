"""Checks of tensor values in a model's code, which a graph cannot make: they are taken to pass.

``assert torch.isfinite(x).all()`` and ``if (ids < 0).any(): raise ValueError(...)`` read a value to
decide whether to raise, and so do the distributions of ``torch.distributions``. While the model is
traced there are no values: the answer is the one with which nothing is raised, and a warning names
the line. Every other decision by a value is refused, also in a ``try`` that has handlers; handlers
in functions further up the stack are not looked for.
"""

from __future__ import annotations

import ast
import linecache
import logging
import opcode
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

_TRUTHS = frozenset(
    {
        Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero, Tensor.equal, torch.equal,
        Tensor.allclose, torch.allclose,
    }
)  # fmt: skip
"""Functions that return whether something is true of values."""

_UNIT = 2
"""Bytes of an instruction."""

End = tuple[int | None, int | None]
"""Line and column behind an expression. Its beginning is no key: for a method call on several lines
Python reports that of the method's name."""


def is_truth(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call of torch returns a Python bool that depends on values."""
    if function == Tensor.item:
        return bool(args) and args[0].dtype == torch.bool
    return function in _TRUTHS


def passing_answer(frame: FrameType) -> bool | None:
    """The truth value with which the assertion or conditional ``raise`` that a frame is evaluating
    raises nothing; None outside of such a check."""
    code, place = frame.f_code, frame.f_lasti // _UNIT
    name = opcode.opname[code.co_code[frame.f_lasti]]
    if name.startswith("POP_JUMP"):
        place -= 1  # a jump has the position of its statement, the instruction before it x's own
    _, end_line, _, end_column = next(islice(code.co_positions(), place, None))
    answers = _answers("".join(linecache.getlines(code.co_filename, frame.f_globals)))
    node, answer = answers.get((end_line, end_column), (None, None))
    # `flag is bool(x)` ends where bool(x) does, whose answer is then not that of the check
    return None if "CALL" in name and not isinstance(node, ast.Call) else answer


@lru_cache(maxsize=1024)  # one warning for each line
def warn_of(line: str) -> None:
    """Warn that the check at a line is taken to pass."""
    _log.warning(
        "the check of tensor values at %s is made in eager mode only: a compiled model takes it to "
        "pass",
        line,
    )


@lru_cache(maxsize=64)
def _answers(source: str) -> dict[End, tuple[ast.expr, bool]]:
    """The parts of the checks in a source text, by their ends, with their passing answers."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return {}
    found: dict[End, tuple[ast.expr, bool]] = {}
    for node in _not_caught(tree):
        if isinstance(node, ast.Assert):
            _note(node.test, True, found)
        elif isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
            _note(node.test, False, found)
    return found


def _not_caught(node: ast.AST) -> Iterator[ast.AST]:
    """A syntax tree's nodes without the bodies of ``try`` with handlers, where to raise is to
    choose a branch."""
    yield node
    for name, part in ast.iter_fields(node):
        if name == "body" and isinstance(node, ast.Try) and node.handlers:
            continue
        for each in part if isinstance(part, list) else [part]:
            if isinstance(each, ast.AST):
                yield from _not_caught(each)


def _note(node: ast.expr, answer: bool, found: dict[End, tuple[ast.expr, bool]]) -> None:
    """Note an expression that must be ``answer``, and its operands.

    Where several end alike, the innermost counts: Python tests no other.
    """
    is_without = isinstance(node, ast.Compare) and isinstance(node.ops[-1], ast.NotIn)
    found[node.end_lineno, node.end_col_offset] = node, answer is not is_without
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        _note(node.operand, not answer, found)
    elif isinstance(node, ast.BoolOp):
        for part in node.values:
            _note(part, answer, found)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 1:
        (argument,) = node.args
        if node.func.id == "bool":
            _note(argument, answer, found)
        elif node.func.id in ("any", "all") and isinstance(argument, ast.GeneratorExp):
            _note(argument.elt, answer, found)
