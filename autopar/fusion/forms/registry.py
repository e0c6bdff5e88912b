"""The registry of forms, and the order in which a call tries them."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.fusion.forms import (  # noqa: F401 - they register themselves
    attention,
    convolution,
    dropout,
    embedding,
    losses,
    normalization,
    products,
    scatter,
)
from autopar.fusion.forms.base import FORMS, Call, Form
from autopar.fusion.forms.generic import vmap_form
from autopar.fusion.forms.pointwise import is_pointwise, pointwise_form


def forms_of(call: Call) -> Iterator[tuple[str, Form]]:
    """Forms by name: those of the op's family, then element-wise, then ``torch.vmap``."""
    yield from FORMS.get(call.op.target_name, ())
    if is_pointwise(call):
        yield "element by element", pointwise_form
    if not call.draws:
        yield "vmap", vmap_form
