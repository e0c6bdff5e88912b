"""What is known of operators as they stand in traced graphs, those of derivatives among them.

A rule is registered for an operator that models call; a trace has what autograd and PyTorch's
dispatcher make of it. What the compiler needs to know of these is said beside the rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autopar.base.errors import PlanError

ScratchFn = Callable[[Any, tuple[Any, ...], int], int]
"""Of result, arguments and number of threads: bytes. Tensors are fake ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """``cpu_scratch``: what the kernel takes on a CPU besides its operands and its result.

    ``gradient_mask``: the position of the argument that says which gradients are wanted, where the
    first, the input's, is a computation of its own in every backend.
    """

    cpu_scratch: ScratchFn | None = None
    gradient_mask: int | None = None


_TRACED: dict[str, Traced] = {}
_UNKNOWN = Traced()


def register_traced(
    *targets: str, cpu_scratch: ScratchFn | None = None, gradient_mask: int | None = None
) -> None:
    """Register what is known of operators, named as in ``str(node.target)``."""
    for target in targets:
        if target in _TRACED:
            raise PlanError(f"traced operator {target} is registered already")
        _TRACED[target] = Traced(cpu_scratch=cpu_scratch, gradient_mask=gradient_mask)


def traced_of(target: Any) -> Traced:
    """What is known of the target of a node."""
    return _TRACED.get(str(target), _UNKNOWN)
