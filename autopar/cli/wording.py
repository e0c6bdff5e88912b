"""Advice in the words of the command line, where the same text for Python names calls.

In: a text or a page, and the name of the plan's file. Out: the same with commands and options in
place of the calls and arguments of Python.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Container, Mapping
from dataclasses import replace

from autopar.plans.page import Page

_COMMANDS: Mapping[str, str] = {
    "plan.report('full')": "autopar show {plan} --full",
    "plan.explain('NAME')": "autopar explain {plan} NAME",
    "plan.report()": "autopar show {plan}",
    "plan.diff(other)": "autopar diff {plan} OTHER",
    "To price another choice: autopar": "To price another choice: in Python, autopar",
    "autopar.plan(...)": "autopar plan",
    "Pass loss_fn=..., for example loss_fn=torch.nn.functional.cross_entropy with "
    "example_inputs=(inputs, targets), or labels": "Return a model whose forward returns its loss, "
    "or inputs with labels",
    "it must be None (searched), 'none', 'full', a list of module names, or what": "write none, "
    "full, or what",
    "or leave some out as None": "or leave some out",
    ", or None for a size to be searched": ", sizes left out are searched",
    "Cluster.preset('h100-sxm').to_json('cluster.json')": "autopar cluster h100-sxm > cluster.json",
}
_OPTIONS = (
    "devices", "mesh", "num_microbatches", "num_stages", "num_steps", "offload", "plan",
    "precision", "recompute", "schedule", "time_limit_s",
)  # fmt: skip
_ARGUMENT = re.compile(
    rf"(?<![\w.-])({'|'.join(_OPTIONS)})\b(=?)"
    r"((?<==)(?:\{[^}]*\}|'[^']*'|True|False|[0-9][0-9.]*))?"
)
"""An argument with a value, without one, or without ``=``, where its underscores tell that."""
_SUBJECT = re.compile(rf"({'|'.join(_OPTIONS)})(?= is | {{)(?:(?: is)? (\{{[^}}]*\}}))?")
"""An argument that a sentence begins with: ``mesh is ...``, ``mesh {'dp': 3} ...``."""
_CALL = "constraints="
"""An argument that only Python has; those beside it stay as they are."""


def in_commands(text: str, options: Container[str], plan: str = "PLAN") -> str:
    """The text with commands for calls, and options for arguments where the command has them.

    ``options`` are the names of the command's arguments, ``plan`` is the plan's file.
    """
    for call, command in _COMMANDS.items():
        text = text.replace(call, command.format(plan=shlex.quote(plan)))
    if _CALL in text:
        return text

    subject = _SUBJECT.match(text)
    if subject is not None and subject[1] in options:
        text = _option(subject[1], subject[2] or "") + text[subject.end() :]

    def option(found: re.Match[str]) -> str:
        name, equals, value = found.groups()
        is_argument = name in options and (equals or "_" in name)
        return _option(name, value or "") if is_argument else found[0]

    return _ARGUMENT.sub(option, text)


def page_in_commands(page: Page, options: Container[str], plan: str = "PLAN") -> Page:
    """The page with its notes as `in_commands` has them."""
    sections = (
        replace(each, notes=tuple(in_commands(note, options, plan) for note in each.notes))
        for each in page.sections
    )
    return replace(page, sections=tuple(sections))


def _option(name: str, value: str) -> str:
    """``--num-stages 2`` of ``num_stages=2``."""
    option = "--" + name.removesuffix("_s").replace("_", "-")
    if value == "False":
        return option.replace("--", "--no-", 1)
    if value in ("", "True"):
        return option
    read = ast.literal_eval(value)
    if isinstance(read, dict):
        axes = (f"{axis}={size}" if size is not None else f"{axis}" for axis, size in read.items())
        return f"{option} {','.join(axes)}"
    return f"{option} {read}"
