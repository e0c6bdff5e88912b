"""A layer of experts as one op: products with the weights of each row's expert, and an activation.

``routed_layers(x[t, k], [first[e, k, h * m], ...], second[e, m, n], expert[t * r], between)`` is
``[t * r, n]``: `autopar.ir.routed_product` of ``x`` with each of the first weights, the activation
`Between`, and its product with the second weights. As one op, a layer sends its rows to the devices
of their experts and back once, not once for each product.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ir.routed_product import ROUTED_PRODUCT

Call = tuple[str, tuple[Any, ...], Mapping[str, Any]]
PART = "part"
"""The target of a call ``(value, num, index)``: one of ``num`` equal parts of its columns."""


@dataclass(frozen=True, slots=True)
class Operand:
    """The use of a value in a call: one of the operands, or behind them the result of a call."""

    number: int


@dataclass(frozen=True, slots=True)
class Between:
    """A function of matrices, the same for every row and for every column of a part.

    ``calls``: element-wise ATen operators and parts of columns; the last one has the result. Only
    `Operand` and plain numbers are their arguments, so it holds for shards of rows and columns.
    ``num_columns``: the columns of all matrices inside, the operands among them.
    """

    calls: tuple[Call, ...]
    num_columns: int

    def to_text(self) -> str:
        return json.dumps([self.num_columns, self.calls], default=lambda operand: [operand.number])

    @staticmethod
    @functools.cache
    def of_text(text: str) -> Between:
        num_columns, calls = json.loads(text)
        return Between(
            num_columns=num_columns,
            calls=tuple(
                (name, tuple(Operand(a[0]) if isinstance(a, list) else a for a in args), kwargs)
                for name, args, kwargs in calls
            ),
        )

    def __call__(self, operands: Sequence[Any], call: Callable[..., Any] | None = None) -> Any:
        """The result for matrices, or for what ``call(name, *args, **kwargs)`` computes with.

        All parts of a matrix come from one call. The gradient of a single part would be padded with
        zeros for as many rows as the trace had, and that number varies from step to step.
        """
        values, parts, call = list(operands), dict[tuple[int, int], Any](), call or _called
        for name, args, kwargs in self.calls:
            if name == PART:
                source, num, index = args
                if (source.number, num) not in parts:
                    parts[source.number, num] = call(name, values[source.number], num)
                values.append(parts[source.number, num][index])
            else:
                given = [values[a.number] if isinstance(a, Operand) else a for a in args]
                values.append(call(name, *given, **kwargs))
        return values[-1]

    def uses_all_parts(self) -> bool:
        """Whether no part of a matrix is left out."""
        found: dict[tuple[int, int], set[int]] = {}
        for name, args, _ in self.calls:
            if name == PART:
                source, num, index = args
                found.setdefault((source.number, num), set()).add(index)
        return all(len(used) == num for (_, num), used in found.items())


def _called(name: str, *args: Any, **kwargs: Any) -> Any:
    if name == PART:
        matrix, num = args
        return matrix.chunk(num, -1)
    target: Any = functools.reduce(getattr, name.split("."), torch.ops)
    return target(*args, **kwargs)


def routed_layers(
    x: Tensor, first: Sequence[Tensor], second: Tensor, expert: Tensor, between: str
) -> Tensor:
    """``[t * r, n]``; the module's docstring has the shapes."""
    hidden = Between.of_text(between)([ROUTED_PRODUCT(x, weight, expert) for weight in first])
    found: Tensor = ROUTED_PRODUCT(hidden, second, expert)
    return found


torch.library.define(
    "autopar::routed_layers",
    "(Tensor x, Tensor[] first, Tensor second, Tensor expert, str between) -> Tensor",
)
torch.library.impl("autopar::routed_layers", "CompositeImplicitAutograd", routed_layers)
ROUTED_LAYERS = torch.ops.autopar.routed_layers.default
