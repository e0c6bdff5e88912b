"""Where a captured graph deviates from its model: the first operator that differs.

Both are run once more, and every value is recorded with its gradient: the model's as torch
functions return them, the graph's op by op. Values that are equal on both sides are matched. In the
forward pass, the first op after which nothing matches is named; in the backward pass, the first op
that returns another gradient although the gradient that it receives is right.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.base.torch_private import pytree
from autopar.frontend.checking.trial import Trial, off_by
from autopar.frontend.untraced import users_line
from autopar.ir.graph import Graph, Op, ValueKind


class _Noted:
    """A tensor as it was when it was made, the user's line that made it, and its gradient."""

    def __init__(self, made: Tensor, line: str) -> None:
        self.content = made.detach().clone()
        self.line = line
        self.gradient: Tensor | None = None
        # A view made under no_grad raises once its base is written to: it has no gradient.
        with contextlib.suppress(RuntimeError):
            if made.requires_grad:
                made.register_hook(self._note)

    def _note(self, gradient: Tensor | None) -> None:
        if gradient is not None:  # None for one of several results that gets no gradient
            self.gradient = gradient.detach().clone()


class _Notes(TorchFunctionMode):
    """A mode that records what torch functions return."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[Any, list[_Noted]] = collections.defaultdict(list)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and _is_number(tensor) and not _is_leaf(tensor):
                self.made[_kind(tensor)].append(_Noted(tensor, users_line()))
        return result


def _is_leaf(x: Tensor) -> bool:
    try:
        return x.is_leaf
    except RuntimeError:  # a view made under no_grad whose base was written to since
        return False


def _is_number(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def first_difference(trial: Trial) -> str:
    """A text that names the first op that differs, with the user's file and line where known."""
    notes = _Notes()
    trial.eager(recording=notes)
    ours = _noted_graph(trial)
    same = {
        index: equal
        for index, value in ours.items()
        if (equal := [n for n in notes.made[_kind(value.content)] if _equal(value, n)])
    }
    op = _first_forward(trial.graph, set(ours), set(same))
    if op is not None:
        return _describe(op, "its result is another than in eager mode", _line_of(op, same))
    backward = _first_backward(trial, ours, same)
    if backward is None:
        return "No single operator was found that it begins with"
    op, what = backward
    return _describe(op, what, _line_of(op, same))


def _describe(op: Op, what: str, line: str) -> str:
    module = f" in module {op.module_path!r}" if op.module_path else ""
    at = f" at {line}" if line else ""
    return f"The first operator that differs is {op.target_name}{at}{module}: {what}"


def _line_of(op: Op, same: dict[int, list[_Noted]]) -> str:
    """The line that made the op's result in eager mode, else the one recorded at capture."""
    found = [n for o in op.outputs if o is not None for n in same.get(o, ())]
    lines = [n.line for n in found if n.line]
    return lines[0] if lines else op.location


def _kind(value: Tensor) -> tuple[torch.Size, torch.dtype]:
    return value.shape, value.dtype


def _equal(left: _Noted, right: _Noted) -> bool:
    return _alike(left.content, right.content)


def _noted_graph(trial: Trial) -> dict[int, _Noted]:
    """The floating-point values of the graph, recorded by value index."""
    made: dict[int, _Noted] = {}

    def watch(op: Op, results: Sequence[Any]) -> None:
        for index, result in zip(op.outputs, results):
            if index is not None and _is_number(result):
                made[index] = _Noted(result, op.location)

    trial.of_graph(watch)
    return made


def _first_forward(graph: Graph, ours: set[int], same: set[int]) -> Op | None:
    """The first op after which no value matches, though its inputs may."""
    leads_on = set(same)
    for op in reversed(graph.ops):
        if any(o in leads_on for o in op.outputs):
            leads_on.update(op.inputs)
    loss = graph.loss
    if loss is None or loss in same or loss not in ours:
        return None
    reach = {loss}
    for op in reversed(graph.ops):
        if any(o in reach for o in op.outputs):
            reach.update(op.inputs)
    for op in graph.ops:
        outputs = [o for o in op.outputs if o in ours]
        matters = [o for o in outputs if o in reach and graph.values[o].differentiable]
        if matters and not any(o in leads_on for o in matters):
            return op
    return None


def _first_backward(
    trial: Trial, ours: dict[int, _Noted], same: dict[int, list[_Noted]]
) -> tuple[Op, str] | None:
    graph = trial.graph
    of_parameters = dict(_wrong_parameters(trial))

    def is_wrong(index: int) -> bool:
        value = graph.values[index]
        if value.kind is ValueKind.PARAMETER:
            return bool(of_parameters.get(value.target))
        found = same.get(index, [])
        return bool(found) and not any(_alike(ours[index].gradient, n.gradient) for n in found)

    for op in reversed(graph.ops):
        if any(is_wrong(o) for o in op.outputs if o is not None and o in ours):
            continue
        for index in dict.fromkeys(op.inputs):
            value = graph.values[index]
            if not is_wrong(index):
                continue
            maker = next((o for o in graph.ops if index in o.outputs), None)
            if maker is not None and not value.differentiable:
                return maker, "no gradient comes back through its result, as it does in eager mode"
            name = value.target or value.name
            return op, f"the gradient that it hands back to {name!r} is another than in eager mode"
    return None


def _alike(ours: Tensor | None, theirs: Tensor | None) -> bool:
    off, size = off_by(ours, theirs)
    given = ours if ours is not None else theirs
    return given is None or off <= torch.finfo(given.dtype).eps ** 0.5 * size


def _wrong_parameters(trial: Trial) -> Iterator[tuple[str | None, bool]]:
    ours, theirs = trial.of_graph().gradients, trial.eager().gradients
    for name in trial.checked:
        yield name, not _alike(ours[name], theirs[name])
