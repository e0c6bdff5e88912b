"""Training programs of a compiled model: one per shapes of the batch, lowered on demand.

In: calls of ``train_step`` with tensors of other sizes than the example's, such as the last batch
of a loader or sequences of another length. Out: the slot of a program for them. The model is
captured again, planned on the same mesh with parameters as they are stored, and lowered; optimizer
state, buffers and random numbers belong to the runtime, which no program changes by being made.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from autopar.base.errors import AutoparError, InputError
from autopar.frontend.capture import Captured, capture
from autopar.frontend.checking.attributes import attributes_after
from autopar.frontend.full_masks import has_full_masks
from autopar.frontend.signature import Signature
from autopar.lowering.types import RankProgram
from autopar.plans.text import input_text
from autopar.runtime.step.begun_call import BegunCall
from autopar.runtime.step.local_calls import (
    LocalCall,
    local_call,
    local_signature,
)
from autopar.runtime.step.program_cache import ProgramCache

MAX_PROGRAMS = 16
"""How many programs are kept besides the example's; a new one replaces the least recently used."""


class LowerTraining(Protocol):
    """Plans and lowers a training step over parameters as they are stored already; with ``local``
    over inputs that are split as the example's, too."""

    def __call__(self, captured: Captured, *, local: bool = False) -> RankProgram: ...


_MANY = 4
"""Micro-batches of another batch for each of the example's, of which a warning tells."""

_DROP_LAST = "Pad it, or leave the last one of an epoch out: DataLoader(..., drop_last=True)"
_MASKED_EXAMPLE = (
    "If most batches have such masks, compile with one of them as example_inputs: the plan is then "
    "for all masks"
)

_log = logging.getLogger(__name__)


class TrainingRunner(Protocol):
    """Runs training programs, each in a slot, where it replaces an earlier one."""

    def watched(self, name: str) -> AbstractContextManager[None]: ...

    def set_training_program(self, slot: int, program: RankProgram) -> None: ...

    def begin_call(self, begun: BegunCall) -> bool: ...


class TrainingCall(NamedTuple):
    """The tensors of a training step, and the slot of the program that runs it.

    ``has_sizes_of_example``: a program in another slot applies masks that the example's leaves out.
    """

    slot: int
    tensors: list[Tensor]
    has_sizes_of_example: bool


class TrainingPrograms:
    """The training programs of one compiled model; that of the example is in slot 0.

    ``model`` and ``loss_fn`` are captured from, and need no data. Without ``lower``, only batches
    like the example's are trained on.
    """

    def __init__(
        self,
        *,
        captured: Captured,
        program: RankProgram,
        model: nn.Module,
        loss_fn: Any,
        lower: LowerTraining | None,
        runner: TrainingRunner,
    ) -> None:
        self._program = program
        self._signature = captured.signature
        self._precision = captured.precision
        self._model = model
        self._loss_fn = loss_fn
        self._lower = lower
        self._runner = runner
        self._cache: ProgramCache[int] = ProgramCache(MAX_PROGRAMS, first_slot=1)
        self._has_warned = False

    @property
    def takes_other_shapes(self) -> bool:
        return self._lower is not None

    def call(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, local: bool = False
    ) -> TrainingCall:
        """The tensors of a call and the slot of its program, which is made if there is none yet.

        With ``local`` they are one rank's shards, of the same sizes on all ranks. Raises InputError
        where the call differs from the example in more than sizes.
        """
        called, full_masks = self._called(args, kwargs, local), self._signature.full_masks
        begun = BegunCall(
            shapes=called.local.describe(),
            local=local,
            in_each=bool(full_masks) or (local and self.takes_other_shapes),
            has_full_masks=has_full_masks(full_masks, args, kwargs),
        )
        if not self._runner.begin_call(begun):
            called = called.with_masks()
        if called.whole is self._signature:
            return TrainingCall(0, called.tensors, has_sizes_of_example=True)
        if self._key(called.with_masks(), local) in self._cache:  # it serves full masks as well
            called = called.with_masks()
        key = self._key(called, local)
        if key not in self._cache:
            with self._runner.watched("compiling for a batch of another kind"):
                self._cache.add(key, lambda slot: self._make(slot, called, local))
        same = called.whole.input_shapes == self._signature.input_shapes
        return TrainingCall(self._cache[key], called.tensors, has_sizes_of_example=same)

    def _key(self, called: LocalCall, local: bool) -> tuple[Any, ...]:
        return local, called.whole.input_shapes, called.whole.full_masks

    def check(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, local: bool = False
    ) -> None:
        """Raise InputError unless `call` takes such a call."""
        self._called(args, kwargs, local)

    def _called(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], local: bool) -> LocalCall:
        own = self._signature
        if local:
            try:
                called = local_call(own, self._program, args, kwargs)
            except InputError as error:
                raise InputError(
                    f"with local=True each rank passes its own part of the batch: {error}. To pass "
                    "the global batch on every rank, leave local=True out"
                ) from error
        else:
            whole, tensors = own.flatten_any_shapes(args, kwargs)
            called = LocalCall(tensors, whole, whole)
        if called.whole is not own and self._lower is None:
            raise self._one_shape(args, kwargs, local)
        return called

    def _one_shape(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], local: bool
    ) -> InputError:
        """The error for a batch of other shapes where only the example's can be trained on."""
        own = local_signature(self._signature, self._program) if local else self._signature
        try:
            own.flatten(args, kwargs)
        except InputError as error:
            return InputError(
                f"{error}. With offloading, and in arrays, a model trains on batches of one shape: "
                "leave the last one of an epoch out by DataLoader(..., drop_last=True)"
            )
        raise AssertionError("the shapes are the example's")

    def _make(self, slot: int, called: LocalCall, local: bool) -> int:
        assert self._lower is not None
        self._warn_once()
        started_s, signature = time.perf_counter(), called.whole
        what, fix = "a batch of other shapes", _DROP_LAST
        if signature.input_shapes == self._signature.input_shapes:
            masks = ", ".join(map(input_text, self._signature.full_masks))
            what, fix = f"a batch with masks that are not all ones ({masks})", _MASKED_EXAMPLE
            _log.warning("%s runs a program of its own, made without measurements. %s", what, fix)
        try:
            self._refuse_changes(signature)
            captured = capture(
                self._model, signature.example(), loss_fn=self._loss_fn,
                precision=self._precision, full_masks=signature.full_masks,
            )  # fmt: skip
            program = self._lower(captured, local=local)
        except AutoparError as error:
            error.add_note(
                f"while compiling for {what}, {signature.describe()}; nothing has changed. {fix}"
            )
            raise
        self._runner.set_training_program(slot, program)
        num, own = program.num_microbatches, self._program.num_microbatches
        if num > _MANY * own:
            _log.warning(
                "a batch of these shapes divides into no fewer than %d micro-batches, where the "
                "example has %d, so its steps are slow: %s. Leave such a batch out "
                "(drop_last=True), or pad it", num, own, signature.describe(),
            )  # fmt: skip
        _log.info(
            "compiled for %s in %.1f s: %s",
            what, time.perf_counter() - started_s, signature.describe(),
        )  # fmt: skip
        return slot

    @cached_property
    def _own_attributes(self) -> dict[str, int | float]:
        return self._attributes(self._signature)

    def _attributes(self, signature: Signature) -> dict[str, int | float]:
        return attributes_after(self._model, signature.example(), self._loss_fn)

    def _refuse_changes(self, signature: Signature) -> None:
        """Raise InputError for a call that leaves other numbers in attributes than the example's.

        Later calls of the model itself would read them.
        """
        own = self._own_attributes
        for name, value in self._attributes(signature).items():
            if own.get(name, value) != value:
                raise InputError(
                    f"a batch of these shapes makes attribute {name!r} of the model {value!r}, the "
                    f"example's batch {own[name]!r}: later results may depend on it, and a "
                    "compiled model keeps such attributes as they were. Make it a buffer, or an "
                    "input of the model"
                )

    def _warn_once(self) -> None:
        shapes = {(local, shapes) for local, shapes, _ in self._cache.keys}
        if len(shapes) == MAX_PROGRAMS and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "batches have more than %d different shapes, so programs are compiled again and "
                "again; pad sequences to fewer lengths, such as multiples of 64", MAX_PROGRAMS,
            )  # fmt: skip
