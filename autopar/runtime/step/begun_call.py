"""What the ranks compare of a call before they choose a program for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunCall:
    """A call on one rank.

    All ranks pass batches, or each its shard if it is ``local``, of the same ``shapes``, or all
    raise InputError; the masks of all are full, or none counts as full. Under ``torchrun`` that is
    collective: in each call if ``in_each``, else in the first one of these shapes.
    """

    shapes: str
    local: bool
    in_each: bool
    has_full_masks: bool
