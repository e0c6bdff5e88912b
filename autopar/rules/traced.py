"""Properties of operators as they appear in traced graphs, including those of derivatives.

A rule is registered for an operator that models call; a trace contains what autograd and PyTorch's
dispatcher make of it. What the compiler needs to know about those operators is registered next to
the rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autopar.base.errors import PlanError

ScratchFn = Callable[[Any, tuple[Any, ...], int], int]
"""Maps result, arguments (with fake tensors) and number of threads to bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """Properties of an operator in a traced graph.

    ``cpu_scratch``: bytes that its kernel allocates on a CPU besides operands and result.
    ``gradient_mask``: position of the argument that states which gradients are wanted, where the
    first, that of the input, is a separate computation in every backend.
    """

    cpu_scratch: ScratchFn | None = None
    gradient_mask: int | None = None


_TRACED: dict[str, Traced] = {}
_UNKNOWN = Traced()


def register_traced(
    *targets: str, cpu_scratch: ScratchFn | None = None, gradient_mask: int | None = None
) -> None:
    """Register the properties of operators, named as in ``str(node.target)``.

    Raises PlanError for an operator that is registered already.
    """
    for target in targets:
        if target in _TRACED:
            raise PlanError(f"traced operator {target} is registered already")
        _TRACED[target] = Traced(cpu_scratch=cpu_scratch, gradient_mask=gradient_mask)


def traced_of(target: Any) -> Traced:
    """The properties of a node's target; defaults where none are registered."""
    return _TRACED.get(str(target), _UNKNOWN)
