"""Full masks: inputs of a call that mask nothing, such as the ``attention_mask`` of a batch in
which no sequence is padded.

A model may look at the values of a mask, and compute without it where it is full. In: a call, and
the names of its masks that are full. Out: what the trace of that call may know of their values, and
whether a later call has full masks too, so that what was captured is right for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from autopar.base.torch_private import keyed_leaves, outside_of_tracing, pytree
from autopar.frontend.call_groups import nodes_before
from autopar.frontend.signature import Arguments
from autopar.frontend.traced_constants import constant_of, node_of


def full_masks_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of a call's full masks, among its boolean inputs and those named as masks.

    Tensors without data have none.
    """
    named = _named(args, kwargs)
    return tuple(name for name, x in named if _is_mask(name, x) and _is_full(x))


def has_full_masks(
    names: Collection[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Whether all inputs with these names, where a call has them, are full. The host waits for
    those on a GPU, as in eager mode."""
    return not names or all(_is_full(x) for name, x in _named(args, kwargs) if name in names)


def with_full_masks(call: Arguments, names: Collection[str]) -> Arguments:
    """The call with ones for the inputs of these names."""
    if not names:
        return call
    tree = tuple(call.args), dict(call.kwargs)
    leaves, spec = pytree.tree_flatten(tree)
    full = [torch.ones_like(x) if n in names else x for n, x in zip(keyed_leaves(tree), leaves)]
    return Arguments(*pytree.tree_unflatten(full, spec))


class FullMasks:
    """The inputs of a trace that are known to be full, by ``names``.

    ``used`` are those that a decision of the model depended on.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.names = frozenset(names)
        self.used: set[str] = set()
        self._names: dict[fx.Node, str] = {}
        self._values: dict[fx.Node, Tensor] = {}

    def trace(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note which nodes of the present trace the inputs are."""
        for name, x in _named(args, kwargs) if self.names else ():
            node = node_of(x)
            if name in self.names and node is not None:
                self._names[node] = name
                with outside_of_tracing():
                    self._values[node] = torch.ones(x.shape, dtype=x.dtype)

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """The value of a traced tensor that depends on constants and full masks only."""
        return constant_of(tensor, self._values)

    def note_use(self, tensors: Iterable[Tensor]) -> None:
        """A decision depended on the values of these tensors."""
        before = nodes_before([node_of(tensor) for tensor in tensors])
        self.used |= {name for node, name in self._names.items() if node in before}


def _named(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    tree = tuple(args), dict(kwargs)
    pairs = zip(keyed_leaves(tree), pytree.tree_leaves(tree))
    return [(name, x) for name, x in pairs if isinstance(x, Tensor)]


def _is_mask(name: str, x: Tensor) -> bool:
    return x.dtype == torch.bool or "mask" in name.lower()


def _is_full(x: Tensor) -> bool:
    has_data = type(x) is Tensor and x.layout is torch.strided and not (x.is_meta or x.is_nested)
    return has_data and x.numel() > 0 and bool((x == 1).all())
