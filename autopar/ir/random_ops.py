"""Which calls draw random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

_PROBABILITIES = ("p", "dropout_p", "dropout")
DRAWN_AS = "drawn_as"
"""Key of a traced node's custom data: a node of a backward graph that draws what a node of the
forward graph drew has the latter's place among the random nodes there."""


def draws(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws random numbers; dropout with p = 0, or not in training, does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    schema = target._schema.arguments
    given = {a.name: a.default_value for a in schema if a.has_default_value()}
    given |= {**dict(zip((a.name for a in schema), args)), **kwargs}
    dropped = [given[name] for name in _PROBABILITIES if name in given]
    return given.get("train") is not False and (not dropped or any(p != 0 for p in dropped))


def is_random(node: fx.Node) -> bool:
    """Whether a node of a traced graph draws random numbers."""
    return node.op == "call_function" and draws(node.target, node.args, node.kwargs)
