"""Slices written into a tensor: the models are a dimension in front of it."""

from __future__ import annotations

from autopar.fusion.forms.base import Call, Results, form
from autopar.fusion.lanes import Operand


@form("slices of all models", "aten.select_scatter.default", "aten.slice_scatter.default")
def scatter_form(call: Call) -> Results | None:
    """The same operator, one dimension further.

    ``torch.vmap`` scatters as many copies of a selected slice as there are places along its
    dimension, each with a gradient of its own.
    """
    names = [a.name for a in call.op.target._schema.arguments]
    given = {name: call.argument(name) for name in names}
    dim = given["dim"]
    given |= {"self": call.at(0, 0), "src": call.at(1, 0), "dim": dim + 1 if dim >= 0 else dim}
    return (Operand(call.emit(call.op.target, *given.values()), 0),)
