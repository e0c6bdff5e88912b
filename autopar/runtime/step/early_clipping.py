"""Clipping under an early update, by a norm that is known before the first gradient of a step.

In: gradients as they arrive, in stored placement. Out: the factor that scales them. It is from the
norm of the step's own gradients, which a `NormPass` has computed before, or from that of the step
before, which is added up while gradients arrive. Where no such norm exists (the first step, a
checkpoint that has none, a norm that was not finite), the step has a pass of its own too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ir.update import Clipping
from autopar.runtime.step.clipping import Clipper
from autopar.runtime.step.reductions import Arrived, Gradients


class NormPass:
    """The updater of a pass over a step that updates nothing: it adds up the norm of the gradients,
    which are released as they arrive."""

    agrees = False

    def __init__(self, clipper: Clipper, names: Mapping[int, str], loss_scale: float) -> None:
        self.loss_scale = loss_scale
        self._clipper = clipper
        self._names = names
        self._squares = clipper.no_squares()

    def inspect(self, gradients: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> None:
        pass

    def total_loss(self, part: Tensor | None) -> Tensor:
        raise AssertionError("its norm says whether a step is finite")

    def may_update(self, arrived: Arrived[Tensor], loss: Tensor | None) -> bool:
        for value, gradient in _parts(arrived):
            self._add(value, gradient)
        return False

    def update_early(self, arrived: Arrived[Tensor]) -> None:
        raise AssertionError("it updates nothing")

    def update(self, values: Any, gradients: Gradients[Tensor]) -> None:
        pass

    def update_last(self, values: Any) -> None:
        raise AssertionError("a program that updates early has no update in the next step")

    def norm(self, reductions: Gradients[Tensor], *, is_void: bool) -> Tensor:
        """The 2-norm of all gradients, NaN if any rank's pass is void. Collective."""
        for arrived in reductions.arrivals():
            for value, gradient in arrived.items():
                self._add(value, gradient)
        return self._clipper.norm_of(self._squares, is_void=is_void)

    def _add(self, value: int, gradient: Tensor) -> None:
        name = self._names[value]
        self._clipper.add_square(self._squares, name, gradient, scaled_by=self.loss_scale)


class EarlyClipping:
    """The clipping of one rank's early updates, by values of parameters with their ``names``.

    ``factor`` scales the gradients of the present step; None until its own pass has measured them.
    """

    def __init__(self, clipper: Clipper, names: Mapping[int, str], by: Clipping) -> None:
        self.clipper = clipper
        self.names = names
        self.by = by
        self.last_norm: Tensor | None = None
        self.factor: Tensor | None = None
        self._squares: Tensor | None = None

    def begin_step(self) -> None:
        self.factor = self._squares = None
        if self.by is Clipping.LAST_NORM and self.last_norm is not None:
            self.factor, self._squares = (
                self.clipper.factor(self.last_norm), self.clipper.no_squares()
            )  # fmt: skip

    @property
    def needs_pass(self) -> bool:
        return self.factor is None

    def measured(self, norm: Tensor) -> None:
        """Take the norm that the step's own pass found."""
        self.factor = self.clipper.factor(norm)

    def add(self, arrived: Arrived[Tensor]) -> None:
        """Note gradients before they are clipped."""
        if self._squares is not None:
            for value, gradient in _parts(arrived):
                self.clipper.add_square(self._squares, self.names[value], gradient)

    def end_step(self, norm: Tensor | None) -> Tensor:
        """The norm of the step's gradients, ``norm`` if its own pass found it. Collective."""
        if self._squares is not None:
            norm = self.clipper.norm_of(self._squares)
        assert norm is not None
        if self.by is Clipping.LAST_NORM:
            self.last_norm = norm if bool(norm.isfinite()) else None
        return norm

    def load(self, norm: float | None) -> None:
        """Go on after a step whose gradients had this norm; None if it is not known."""
        if self.by is Clipping.LAST_NORM:
            self.last_norm = None if norm is None else self.clipper.number(norm)


def _parts(arrived: Arrived[Tensor]) -> list[tuple[int, Tensor]]:
    return [*arrived.gradients.items(), *((rows.value, rows.gradient) for rows in arrived.rows)]
