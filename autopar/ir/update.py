"""When parameters are updated: within the backward pass, or after it.

An early update (also known as optimizer in backward) updates a parameter as soon as its gradient is
complete and reduced and nothing in the step reads the parameter any more, and releases the gradient
at once. There is no second copy of the parameters, and gradients do not pile up. Their global norm
is known when the first of them are gone, so gradients are clipped by a norm that is known before.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from autopar.base.errors import InputError
from autopar.base.spelling import did_you_mean

EARLY, AT_END = "early", "at_end"
_FIX = "write update='early', update='at_end' or update=None, which lets the planner choose"


class Clipping(StrEnum):
    """The norm by which an early update clips gradients.

    * ``SECOND_PASS``: that of the step's own gradients, for which the step is computed twice: once
      for the norm, once for the updates. The result is that of clipping after the backward pass.
    * ``LAST_NORM``: that of the gradients of the step before. The first step is computed twice.
    """

    SECOND_PASS = "second_pass"
    LAST_NORM = "last_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """When parameters are updated.

    * ``when``: ``"early"``, within the backward pass, or ``"at_end"``, after it.
    * ``keep_gradients``: an early update keeps the gradients, so that ``compiled.gradients()`` can
      return them; it saves no memory then.
    * ``clipping``: by which norm an early update clips gradients to ``max_grad_norm``:
      ``"second_pass"`` or ``"last_norm"``, see `Clipping`. None without ``max_grad_norm``.

    Raises InputError for any other value.
    """

    when: str = EARLY
    keep_gradients: bool = False
    clipping: str | None = None

    def __post_init__(self) -> None:
        if self.when not in (EARLY, AT_END):
            raise InputError(
                f"update is {self.when!r}; it is 'early' or 'at_end': {_FIX}"
                + did_you_mean(str(self.when), ("early", "at_end"))
            )
        if not isinstance(self.keep_gradients, bool):
            raise InputError(
                f"the update's keep_gradients is {self.keep_gradients!r}; it is True or False"
            )
        if self.clipping not in (None, *Clipping):
            raise InputError(
                f"the update's clipping is {self.clipping!r}; it is 'second_pass', 'last_norm' or "
                "None"
            )
        if self.clipping is not None and not self.is_early:
            raise InputError(
                f"the update's clipping is {self.clipping!r} with when={self.when!r}: after the "
                "backward pass gradients are clipped by their own norm. Leave clipping= out"
            )

    @property
    def is_early(self) -> bool:
        """Whether parameters are updated within the backward pass."""
        return self.when == EARLY

    @property
    def num_passes(self) -> int:
        """How often a step is computed."""
        return 2 if self.clipping == Clipping.SECOND_PASS else 1


def check_update(update: Any) -> Update | None:
    """The update that ``update=`` names; raises InputError for any other value."""
    if update is None or isinstance(update, Update):
        return update
    if isinstance(update, str):
        return Update(when=update)
    raise InputError(
        f"update is {update!r}; it is 'early', 'at_end', an autopar.Update or None: {_FIX}"
    )
