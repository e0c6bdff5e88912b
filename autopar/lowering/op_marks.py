"""Marks on traced nodes that name the op they belong to: its forward pass, or its gradient.

In: an op's place in its block, and the tensors that it reads and makes while it is traced. Out: the
custom data of the nodes, which `op_place` and `gradient_of` read back. Redistributions belong to no
op, nor do sums of the gradients of a value with several readers.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from typing import Any

from torch import Tensor, fx
from torch.autograd.graph import Node
from torch.fx.traceback import annotate

_PLACE, _GRADIENT = "op_place", "gradient_of"
_open: list[AbstractContextManager[None]] = []
"""The marks of the gradients that are being traced, the innermost last."""


class Gradient(StrEnum):
    """The operands whose gradient a node computes: parameters alone, or others too."""

    INPUT = "input"
    WEIGHT = "weight"


def op_place(node: fx.Node) -> int | None:
    """The place in its block of the op that a node was traced from, in its forward pass or in its
    gradient; None for redistributions and sums of gradients."""
    place: int | None = (node.meta.get("custom") or {}).get(_PLACE)
    return place


def gradient_of(node: fx.Node) -> Gradient | None:
    """Which gradient of its op a node computes; None in the forward pass, also where it is
    recomputed."""
    kind = (node.meta.get("custom") or {}).get(_GRADIENT)
    return None if kind is None else Gradient(kind)


def marking(place: int, **others: Any) -> AbstractContextManager[None]:
    """Within: nodes are traced that belong to the forward pass of an op."""
    return annotate({_PLACE: place, **others})


def mark_gradient(place: int, results: Sequence[Tensor], operands: Sequence[Tensor]) -> None:
    """Let the nodes that will be traced for the gradient of an op from ``operands`` to ``results``
    carry its place."""

    def enter(*_: object) -> None:
        _open.append(annotate({_PLACE: place, _GRADIENT: Gradient.INPUT.value}))
        _open[-1].__enter__()

    for made in _between(results, operands):
        made.register_prehook(enter)
        made.register_hook(_leave)


def _leave(*_: object) -> None:
    _open.pop().__exit__(None, None, None)


@contextmanager
def closing_marks() -> Iterator[None]:
    """Within: marked gradients are traced; marks that a failure leaves open are closed at the end,
    before any other trace begins."""
    num_open = len(_open)
    try:
        yield
    finally:
        while len(_open) > num_open:
            _leave()


def _between(results: Sequence[Tensor], operands: Sequence[Tensor]) -> Iterator[Node]:
    """The nodes of autograd's graph that lead from results back to operands."""
    known = {x.grad_fn for x in operands}
    waiting = [x.grad_fn for x in results]
    while waiting:
        made = waiting.pop()
        # A leaf's accumulation has no place among the traced calls.
        if made is None or made in known or not made.next_functions:
            continue
        known.add(made)
        yield made
        waiting += [source for source, _ in made.next_functions]


def mark_weight_gradients(nodes: Sequence[fx.Node], input_grads: Collection[fx.Node]) -> None:
    """Mark those of the ``nodes``, in order, that compute gradients of parameters: no other op's
    gradient depends on them, nor one of ``input_grads``."""
    read_by: dict[fx.Node, set[int | None]] = {}
    for node in reversed(nodes):
        own, readers = op_place(node), set[int | None]()
        if node in input_grads:
            readers.add(None)
        for reader in node.users:
            place = op_place(reader)
            readers |= read_by.get(reader, set()) if place in (None, own) else {place}
        read_by[node] = readers
        is_result = node.target is operator.getitem  # it belongs to the call that computes it
        if is_result or gradient_of(node) is None or not readers <= {own}:
            continue
        for each in (node, *(n for n in node.users if n.target is operator.getitem)):
            custom = {**each.meta["custom"], _GRADIENT: Gradient.WEIGHT.value}
            each.meta = {**each.meta, "custom": custom}
