"""Prices: times in seconds with their sources.

The planner sums thousands of these. A sum is only as reliable as its weakest term, so the sum of
two estimates has the weaker of their sources.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from autopar.base.errors import AutoparError


class CostError(AutoparError, ValueError):
    """An operation or a collective cannot be priced; the message says why."""


class NotNowError(CostError):
    """A call cannot be measured with the memory that is free now, but may be later."""


class Source(StrEnum):
    """Sources of a price, strongest first."""

    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    ANALYTICAL = "analytical"


_STRENGTH = {source: rank for rank, source in enumerate(Source)}


def weakest(sources: Iterable[Source]) -> Source:
    """The weakest of ``sources``; MEASURED if there are none."""
    return max(sources, key=_STRENGTH.__getitem__, default=Source.MEASURED)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A time in seconds with its source; ``is_noisy``: it includes a noisy measurement."""

    time_s: float
    source: Source
    is_noisy: bool = False

    def __add__(self, other: "Estimate") -> "Estimate":
        return Estimate(
            self.time_s + other.time_s,
            weakest((self.source, other.source)),
            self.is_noisy or other.is_noisy,
        )


@dataclass(frozen=True, slots=True)
class OpEstimate:
    """The times in seconds of an operation on a device.

    ``forward_s`` is for the outputs, ``input_grad_s`` for the gradients of tensors that require one
    and are not parameters, ``weight_grad_s`` for those of parameters; each is zero if there is no
    such tensor. ``is_noisy``: it includes a noisy measurement.
    """

    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    source: Source
    is_noisy: bool = False

    @property
    def backward_s(self) -> float:
        """Seconds of both gradients."""
        return self.input_grad_s + self.weight_grad_s

    @property
    def total_s(self) -> float:
        """Seconds of forward and both gradients."""
        return self.forward_s + self.backward_s

    def __add__(self, other: "OpEstimate") -> "OpEstimate":
        return OpEstimate(
            self.forward_s + other.forward_s,
            self.input_grad_s + other.input_grad_s,
            self.weight_grad_s + other.weight_grad_s,
            weakest((self.source, other.source)),
            self.is_noisy or other.is_noisy,
        )

    def times(self, count: int) -> "OpEstimate":
        """The operation ``count`` times."""
        return replace(
            self,
            forward_s=count * self.forward_s,
            input_grad_s=count * self.input_grad_s,
            weight_grad_s=count * self.weight_grad_s,
        )
