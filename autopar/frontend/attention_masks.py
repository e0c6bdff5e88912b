"""Attention masks of ``transformers`` in a capture: left out where eager mode leaves them out.

In eager mode ``transformers`` passes ``is_causal=True`` and no mask where nothing is padded, so
that flash kernels visit half of the scores. Under ``torch.export`` it passes a mask of all scores
instead, as a graph that has ``is_causal=True`` is wrong for one query. A capture holds for its own
shapes only.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

_MODULE = "transformers.masking_utils"
_ASKED = "is_torchdynamo_exporting"  # of transformers 4.56 to 5.x, asked only for this


@contextlib.contextmanager
def masks_of_eager_mode() -> Iterator[None]:
    """Have models of ``transformers`` choose between a mask and ``is_causal`` as in eager mode.

    A mask that depends on an input (``attention_mask``) stays: a graph cannot look at its values.
    """
    module = sys.modules.get(_MODULE)
    if module is None or not hasattr(module, _ASKED):
        yield
        return
    before = getattr(module, _ASKED)
    setattr(module, _ASKED, lambda: False)
    try:
        yield
    finally:
        setattr(module, _ASKED, before)
