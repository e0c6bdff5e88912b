"""The calls that a device makes for an op whose rule lowers it to kernels of other ops.

They are used for prices only: `autopar.pricing.local_calls` lists them and `autopar.pricing.tables`
adds them up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from autopar.cost_models.calls import OpCall


class Phase(Enum):
    """The pass in which a kernel of an op runs; BOTH if its derivative is priced as autograd's."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BOTH = "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class InternalCollective:
    """Communication inside a lowered op, for its price.

    ``kind``: the collective, such as ``"all_reduce"``. ``axes``: the mesh axes of its group.
    ``size_bytes``: bytes per device.
    """

    kind: str
    axes: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCall:
    """One call that a device makes for an op, for its price, and the pass in which it runs."""

    call: OpCall
    phase: Phase


def kernel_calls(forward: Iterable[OpCall], backward: Iterable[OpCall]) -> tuple[LocalCall, ...]:
    """The calls of a forward and a backward pass, each marked with its phase."""
    return (
        *(LocalCall(call=call, phase=Phase.FORWARD) for call in forward),
        *(LocalCall(call=call, phase=Phase.BACKWARD) for call in backward),
    )
