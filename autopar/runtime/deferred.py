"""A compiled model without example inputs: its first call provides them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from autopar.base.closing import closed_error
from autopar.base.errors import InputError, MissingError
from autopar.base.exclusive import in_turn
from autopar.base.torch_private import runs_uncompiled
from autopar.frontend.signature import Arguments
from autopar.runtime.compiled import Compiled
from autopar.runtime.habits import is_never_there
from autopar.runtime.loop import check_has_optimizer


class Deferred(Compiled):
    """A `Compiled` that is compiled by its first call, as with ``torch.compile``.

    Until then ``training`` is the only attribute of a `Compiled` that it has.
    """

    def __init__(
        self, make: Callable[[Arguments], Compiled], *, training: bool, has_optimizer: bool
    ) -> None:
        self._make = make
        self._has_optimizer = has_optimizer
        self._was_closed = False
        self.training = training

    @property
    def _is_made(self) -> bool:
        return "_runner" in vars(self)

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any], local: bool) -> None:
        if self._is_made:
            return
        with in_turn():
            self._compile_once(args, kwargs, local)

    def _compile_once(self, args: tuple[Any, ...], kwargs: dict[str, Any], local: bool) -> None:
        if self._is_made:  # by another thread, while this one waited for the lock
            return
        if self._was_closed:
            raise closed_error("close() was called")
        if local:
            raise InputError(
                "the first call compiles, for which it needs the whole batch, not one rank's part "
                "(local=True); pass example_inputs=... to autopar.compile"
            )
        vars(self).update(vars(self._make(Arguments(args, kwargs)).train(self.training)))

    @runs_uncompiled
    def train_step(self, *args: Any, local: bool = False, **kwargs: Any) -> Tensor:
        """As `Compiled.train_step`; the first call compiles."""
        check_has_optimizer(self._has_optimizer)
        self._compile(args, kwargs, local)
        return super().train_step(*args, local=local, **kwargs)

    @runs_uncompiled
    def __call__(self, *args: Any, local: bool = False, **kwargs: Any) -> Any:
        self._compile(args, kwargs, local)
        return super().__call__(*args, local=local, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if self._is_made or is_never_there(name):
            return super().__getattr__(name)
        if not name.startswith("_") and name not in self._public_names():
            raise self._unknown(name)
        raise MissingError(
            "nothing is compiled yet: pass example_inputs=... to autopar.compile, or call "
            "train_step(...) first"
        )

    def __repr__(self) -> str:
        return super().__repr__() if self._is_made else "<Compiled, by its first call>"

    def _repr_html_(self) -> str | None:
        return super()._repr_html_() if self._is_made else None

    def close(self) -> None:
        self._was_closed = True
        if self._is_made:
            super().close()
