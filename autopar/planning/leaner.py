"""The leaner forms that a space allows an option: they do more in every pass and hold less."""

from __future__ import annotations

from typing import TypedDict

from autopar.planning.option import Option
from autopar.planning.recompute_request import Request
from autopar.planning.space import Space


class LeanerForm(TypedDict, total=False):
    """Keywords of `autopar.planning.option.with_form` that make a candidate hold less."""

    released: bool
    scattered: bool


class LeanerForms:
    """The leaner forms of the options of one space."""

    def __init__(self, space: Space) -> None:
        self.space = space

    def may_recompute(self, option: Option) -> bool:
        """Whether an option may also be tried with recomputation."""
        return self.space.recompute.request is Request.SEARCH and not option.recomputes

    def may_release(self, option: Option) -> bool:
        """Whether the gathered parameters of an option may also be released after each pass."""
        return self.space.reshard_after_forward is None and not option.best.released

    def may_scatter(self, option: Option) -> bool:
        """Whether gradients of an option may also be reduce-scattered in every micro-batch."""
        is_asked = self.space.reduce_every_microbatch is None and not option.best.scattered
        return is_asked and option.choice is None and option.combination.num_microbatches > 1

    def of(self, option: Option) -> list[LeanerForm]:
        """The forms that keep less of what is gathered or summed, largest first."""
        forms: list[LeanerForm] = [{"released": True}] if self.may_release(option) else []
        if self.may_scatter(option):
            both: list[LeanerForm] = [{"released": True, "scattered": True}] if forms else []
            forms += [{"scattered": True}, *both]
        return forms

    @property
    def has_all(self) -> bool:
        """Whether there is a leaner form of every pipeline that keeps all."""
        space = self.space
        return space.recompute.request is Request.SEARCH or space.reshard_after_forward is None
