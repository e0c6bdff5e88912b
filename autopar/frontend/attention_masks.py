"""Attention masks of ``transformers`` in a capture: left out where eager mode leaves them out.

In eager mode ``transformers`` passes ``is_causal=True`` and no mask where nothing is padded or
packed, so that flash kernels visit half of the scores. Under ``torch.export`` it passes a mask of
all scores instead: a graph that has ``is_causal=True`` is wrong for one query, and no graph can
look at values. A capture holds for its own shapes only, and may look at values that depend on
constants only, such as the positions of a batch that gives none, and on masks that are full, where
it holds for full masks only.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from autopar.base.torch_private import outside_of_tracing, pytree
from autopar.frontend.full_masks import FullMasks

_MODULE = "transformers.masking_utils"
_DECISIONS = (
    "find_packed_sequence_indices",
    "_ignore_causal_mask_sdpa",
    "_ignore_bidirectional_mask_sdpa",
)
"""Its functions that look at values, of ``transformers`` 4.53 to 5.x."""


@contextlib.contextmanager
def masks_of_eager_mode(full: FullMasks) -> Iterator[None]:
    """Have models of ``transformers`` choose between a mask and ``is_causal`` as in eager mode.

    A mask that depends on an input (``attention_mask``, ``position_ids``) stays, unless that is
    ``full``.
    """
    module = sys.modules.get(_MODULE)
    if module is None:
        yield
        return
    instead: dict[str, Any] = {
        "is_torchdynamo_exporting": lambda: False,
        "is_tracing": lambda tensor=None: type(tensor) not in (Tensor, nn.Parameter),
    }
    instead |= {name: _decided(getattr(module, name, None), full) for name in _DECISIONS}
    before = {name: getattr(module, name) for name in instead if hasattr(module, name)}
    for name in before:
        setattr(module, name, instead[name])
    try:
        yield
    finally:
        for name, original in before.items():
            setattr(module, name, original)


def _decided(function: Any, full: FullMasks) -> Callable[..., Any]:
    """The function, which decides by the values of its tensors where these are known."""

    def decide(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        values = [full.value_of(x) if isinstance(x, Tensor) else x for x in leaves]
        if all(v is not None or x is None for v, x in zip(values, leaves)):
            own_args, own_kwargs = pytree.tree_unflatten(values, spec)
            with outside_of_tracing():
                decision = function(*own_args, **own_kwargs)
            if not isinstance(decision, Tensor):
                if decision is not False:  # else it is that of a mask whose values are not known
                    full.note_use(x for x in leaves if isinstance(x, Tensor))
                return decision
        return function(*args, **kwargs)

    return decide
