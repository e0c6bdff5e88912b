"""What every price is made of: a time in seconds and where that time comes from.

The planner adds up thousands of these. A sum is only as trustworthy as its weakest part, so adding
two estimates keeps the weaker of their two sources.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from autopar.base.errors import AutoparError


class CostError(AutoparError, ValueError):
    """An operation or a collective that cannot be priced, and why."""


class NotNowError(CostError):
    """A call that cannot be measured while so much memory is taken, or allowed; later it may."""


class Source(StrEnum):
    """Where a number comes from, strongest first."""

    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    ANALYTICAL = "analytical"


_STRENGTH = {source: rank for rank, source in enumerate(Source)}


def weakest(sources: Iterable[Source]) -> Source:
    """The least trustworthy of ``sources``; MEASURED for none, as then nothing was guessed."""
    return max(sources, key=_STRENGTH.__getitem__, default=Source.MEASURED)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A time in seconds with its source; ``is_noisy``: a measurement in it spread too far."""

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
    """The times in seconds of one operation on one device.

    ``forward_s`` computes the outputs. ``input_grad_s`` computes the gradients of the tensors that
    require one and are not parameters, ``weight_grad_s`` those of the parameters; each is zero when
    no such tensor exists. ``is_noisy``: a measurement in it had too large a spread.
    """

    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    source: Source
    is_noisy: bool = False

    @property
    def backward_s(self) -> float:
        """Both gradients together, in seconds."""
        return self.input_grad_s + self.weight_grad_s

    @property
    def total_s(self) -> float:
        """Forward and both gradients, in seconds."""
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
