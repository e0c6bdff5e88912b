"""The names of a model's tensors and modules, where one of them has several.

In: a model. Out: the name that is kept of each tensor, and the names of shared modules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import Tensor, nn


def canonical_names(model: nn.Module) -> tuple[dict[str, str], tuple[tuple[str, str], ...]]:
    """The first name of every tensor by each of its names, and the other names of tied ones."""
    first: dict[int, str] = {}
    canonical: dict[str, str] = {}
    named: Sequence[tuple[str, Tensor]] = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in named:
        canonical[name] = first.setdefault(id(tensor), name)
    aliases = tuple((name, kept) for name, kept in canonical.items() if name != kept)
    return canonical, aliases


def shared_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The names of each module and parameter that has several; the first is the one that is kept.

    Names that follow from those of the modules around are left out: where ``a`` is also ``b``,
    nothing is said of ``a.norm`` and ``b.norm``.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    names: defaultdict[int, dict[tuple[int, str], str]] = defaultdict(dict)
    for name, part in [*modules.items(), *model.named_parameters(remove_duplicate=False)]:
        owner, _, own = name.rpartition(".")
        if name:
            names[id(part)].setdefault((id(modules.get(owner)), own), name)
    return tuple(tuple(each.values()) for each in names.values() if len(each) > 1)
