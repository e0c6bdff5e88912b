"""When parameters are updated: within the backward pass, or after it.

An early update (also known as optimizer in backward) updates a parameter as soon as its gradient is
complete and reduced and nothing in the step reads the parameter any more, and releases the gradient
at once. There is no second copy of the parameters, and gradients do not pile up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.base.errors import InputError

EARLY, AT_END = "early", "at_end"
_FIX = "write update='early', update='at_end' or update=None, which lets the planner choose"


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """When parameters are updated.

    * ``when``: ``"early"``, within the backward pass, or ``"at_end"``, after it.
    * ``keep_gradients``: an early update keeps the gradients, so that ``compiled.gradients()`` can
      return them; it saves no memory then.

    Raises InputError for any other value.
    """

    when: str = EARLY
    keep_gradients: bool = False

    def __post_init__(self) -> None:
        if self.when not in (EARLY, AT_END):
            raise InputError(f"update is {self.when!r}; it is 'early' or 'at_end': {_FIX}")
        if not isinstance(self.keep_gradients, bool):
            raise InputError(
                f"the update's keep_gradients is {self.keep_gradients!r}; it is True or False"
            )

    @property
    def is_early(self) -> bool:
        return self.when == EARLY


def check_update(update: Any) -> Update | None:
    """The update that ``update=`` names; raises InputError for any other value."""
    if update is None or isinstance(update, Update):
        return update
    if isinstance(update, str):
        return Update(when=update)
    raise InputError(
        f"update is {update!r}; it is 'early', 'at_end', an autopar.Update or None: {_FIX}"
    )
