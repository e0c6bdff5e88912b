"""What a user asks of recomputation: the keyword ``recompute`` as a validated value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from autopar.base.errors import ConstraintError, InputError
from autopar.base.spelling import did_you_mean
from autopar.planning.constraints import parse_bytes

RecomputeOption = str | Sequence[str] | int | float
"""``"none"``, ``"full"``, names of modules, bytes (or text such as ``"8GiB"``), or a fraction."""


class Request(StrEnum):
    """Who decides what is recomputed: the search, or the user in one of four ways."""

    SEARCH = "search"
    NONE = "none"
    FULL = "full"
    MODULES = "modules"
    BUDGET = "budget"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """A request. ``modules`` are recomputed; a budget is ``size_bytes``, or a ``fraction`` of what
    is kept without recomputation."""

    request: Request = Request.SEARCH
    modules: tuple[str, ...] = ()
    size_bytes: int | None = None
    fraction: float | None = None

    @property
    def is_fixed(self) -> bool:
        """Whether something is recomputed whatever the memory."""
        return self.request not in (Request.SEARCH, Request.NONE)

    @staticmethod
    def of(given: RecomputeOption | None) -> Recompute:
        """The request of a keyword; raises InputError."""
        if given is None:
            return Recompute()
        if isinstance(given, bool):
            raise InputError(
                f"recompute is {given}; write recompute={'full' if given else 'none'!r}"
            )
        if isinstance(given, str) and given in (Request.NONE, Request.FULL):
            return Recompute(request=Request(given))
        if isinstance(given, float):
            if not 0.0 <= given <= 1.0:
                raise InputError(
                    f"recompute is {given}; a fraction of the activations is from 0.0 (keep as "
                    "little as possible) to 1.0 (recompute nothing)"
                )
            return Recompute(request=Request.BUDGET, fraction=given)
        if isinstance(given, str | int):
            try:
                return Recompute(request=Request.BUDGET, size_bytes=parse_bytes(given))
            except ConstraintError as error:
                raise InputError(_expected(given)) from error
        if isinstance(given, Sequence) and given and all(isinstance(n, str) for n in given):
            return Recompute(request=Request.MODULES, modules=tuple(given))
        raise InputError(_expected(given))


def _expected(given: object) -> str:
    return (
        f"recompute is {given!r}; it must be None (searched), 'none', 'full', a list of module "
        "names, or what activations may take: bytes, text such as '8GiB', or a fraction such as 0.5"
        + did_you_mean(str(given), ("none", "full"))
    )
