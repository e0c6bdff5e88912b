"""The calls that a device makes for an op, where its rule lowers it to kernels of other ops.

For the price alone: `autopar.pricing.local_calls` lists them, `autopar.pricing.tables` adds them
up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from autopar.cost_models.calls import OpCall


class Phase(Enum):
    """When a kernel of an op runs; an op of autograd's own runs in both."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BOTH = "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class InternalCollective:
    """Communication inside a lowered op, for the price: bytes on one device, over these axes."""

    kind: str
    axes: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCall:
    """A call that a device makes for an op, for the price."""

    call: OpCall
    phase: Phase


def kernel_calls(forward: Iterable[OpCall], backward: Iterable[OpCall]) -> tuple[LocalCall, ...]:
    """Kernels of one direction each."""
    return (
        *(LocalCall(call=call, phase=Phase.FORWARD) for call in forward),
        *(LocalCall(call=call, phase=Phase.BACKWARD) for call in backward),
    )
